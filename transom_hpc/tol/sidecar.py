"""The sidecar step of a job: monitors' sidecar, told what to do when its host is cut off or the launcher is lost.

One MPI rank a host; the launcher starts it. Slurm gives us no other way to notice that the first host died: the job
stays RUNNING on the others, without a batch script, for ever.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import RunDirError, SlurmError
from transom_hpc.monitors.exchange import MpiExchange, leave
from transom_hpc.monitors.processes import end_program, end_server, program_pids
from transom_hpc.monitors.sidecar import EXIT_LEFT, Sidecar, SidecarConfig, SidecarHooks
from transom_hpc.slurm.commands import Slurm, SlurmCommands
from transom_hpc.slurm.text import JobFacts
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.causes import Cause, tries_left
from transom_hpc.tol.diary import Diary
from transom_hpc.tol.ending import end_job, is_alive
from transom_hpc.tol.events import Ending
from transom_hpc.tol.history import restarts_of_job
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Entry, Journal, begun_after, claim_exactly, newer_than
from transom_hpc.tol.leftovers import give_back, reclaim
from transom_hpc.tol.requeueing import requeue_job
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.succession import TakeOver, end_of_attempt
from transom_hpc.tol.takeover import start_launcher

EXIT_NO_MPI = 4
"""Exit status when the ranks of this step don't see each other: trying again would not help."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A host of a job whose launcher may be lost.

    Args:
        run: the run directory.
        attempt: the attempt under way.
        job: the Slurm job, as this host's step sees it.
        host: this host.
        home: the launcher's host.
        hosts: all hosts that are watched.
        shm: the job's folder in this host's shared memory.
        environment: of this process, as it was started.
    """

    run: RunDir
    attempt: Attempt
    job: Job
    host: str
    home: str
    hosts: tuple[str, ...]
    shm: Path
    environment: Mapping[str, str]

    def isolated(self) -> None:
        """This host hears nobody: end its program and its checkpoint server, so that two never write.

        With two hosts, ask Slurm who is right. The launcher can't reach us any more to clean up, so this host's shared
        memory is given back here.
        """
        end_program(str(self.attempt))
        end_server(self.shm)
        shutil.rmtree(self.shm, ignore_errors=True)
        if len(self.hosts) == 2 and self.host != self.home:
            self.orphaned((self.home,), f"{self.home} is not heard, and no third host can tell which of us is cut off")

    def orphaned(self, dead: tuple[str, ...], evidence: str) -> None:
        """The launcher is lost and this host speaks for the job: take over, or requeue the job without the dead hosts.

        Slurm is asked first: who can't reach it can start nothing either. Who then claims the next attempt leads. Where
        somebody has it already, that one leads, and nothing is done here.
        """
        slurm = SlurmCommands(timeout_s=5.0, ignore_term=True)
        if self._launcher_goes_on():
            return
        entries = self.run.entries()
        ended = end_of_attempt(entries, self.attempt.number)
        if ended is not None:
            if ended.ending is not Ending.LEFT:  # its host died when the work was done, and the job is still there
                end_job(self.job, ended.code, slurm, SystemClock())
            return
        try:
            facts = slurm.show_job(self.job.job_id)
            why = f"the job is {facts.state_text}"
            if is_alive(facts, self.job):
                if not claim_exactly(self.run.journal, self.attempt.number + 1):
                    return
                why = self._take_over(TakeOver(self.attempt.number, dead, evidence), entries, facts)
        except SlurmError as error:
            why = str(error)
        if why:
            print(f"transom: {self.host} could not take over: {why}", file=sys.stderr, flush=True)
            self._requeue(dead, evidence, slurm)

    def _launcher_goes_on(self) -> bool:
        """Whether the launcher has taken this host out and goes on without it: then this host is the one not heard.

        With two hosts each may take the other one out, and only who reaches Slurm can go on: a launcher that can is
        soon seen to have started steps, requeued the job, or ended.
        """
        until = time.monotonic() + _OUT_S
        while True:
            mine = [entry for entry in self.run.entries() if entry.attempt.number == self.attempt.number]
            out = [n for n, entry in enumerate(mine) if entry.facts.get("host_out") == self.host]
            if not out:
                return False
            if any(_proves_steps(entry) for entry in mine[out[0] :]):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK_S)

    def _take_over(self, taken: TakeOver, entries: Sequence[Entry], facts: JobFacts) -> str:
        """Start another launcher here: "" when it has begun, else why not."""
        start = next((e for e in entries if e.kind == "start" and e.attempt.number == taken.before), None)
        program = [str(word) for word in start.facts.get("program", ())] if start is not None else []
        if not program:
            return f"attempt {taken.before} has not begun"
        outputs = (facts.std_out or os.devnull, facts.std_err or facts.std_out or os.devnull)
        job = replace(self.job, home=self.host)
        return start_launcher(self.run, job, taken, program, outputs, self.environment)

    def _requeue(self, dead: tuple[str, ...], evidence: str, slurm: Slurm) -> None:
        diary = self._diary()

        def record(kind: str, **facts: Any) -> None:
            diary.record(self.attempt, kind, **facts)

        committed = max(self.run.committed_steps(), default=0)
        for host in [name for name in dead if name != self.home]:
            record("host out", cause=Cause.HOST_SILENT, host_out=host, evidence=evidence, committed=committed)
        home = self.home if self.home in dead else ""
        cause = Cause.HOST_SILENT if home else Cause.LAUNCHER_LOST
        past = restarts_of_job(self.run.entries(), str(self.job.job_id))
        facts = {"cause": cause, "host_out": home, "evidence": evidence, "committed": committed}
        if not tries_left(past, cause, committed):
            record("gave up", **facts)
            why = f"{cause} came again and again without a new checkpoint: {evidence}"
            record("end", ending=Ending.BADLY, why=why, code=1, committed=committed)
            end_job(self.job, 1, slurm, SystemClock())
            return
        record("restart", step=0, **facts)
        requeue_job(self.run, self.run.submitted().spec, self.job, cause, slurm, record, SystemClock())

    def _diary(self) -> Diary:
        try:
            return Diary(Journal(self.run.journal, self.attempt.number, self.host), output=2)
        except RunDirError as error:  # a full disk must not keep the job an orphan
            print(f"transom: {error}", file=sys.stderr, flush=True)
            return Diary(output=2)


def _proves_steps(entry: Entry) -> bool:
    """Whether a launcher that writes this reaches Slurm, or needs it no more."""
    watched = entry.kind == "monitoring" and entry.facts.get("problem") == ""
    requeued = entry.kind == "requeued" and bool(entry.facts.get("ok"))
    return watched or requeued or entry.kind in ("running", "end")


_OUT_S = 60.0
"""How long a host that was taken out waits for a sign that the launcher which did that reaches Slurm."""
_FORCE_S = 2.0
"""Longest time from a request to leave to SIGKILL where the launcher ends the step."""
_LOOK_S = 2.0


def _leave_when_replaced(survivor: Survivor) -> None:
    """As soon as another launcher has begun, end this one's program here and leave; this host's memory is the other's.

    It ends us first wherever it can start a step. In a thread of its own: the run directory may not answer.
    """
    number = survivor.attempt.number
    while not begun_after(survivor.run.journal, number):
        time.sleep(_LOOK_S)
    end_program(str(survivor.attempt))
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Watch until the launcher ends this step, Slurm ends the job, or this host is cut off."""
    parser = argparse.ArgumentParser(prog="python -m transom_hpc.tol.sidecar", description=__doc__)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--attempt", required=True, type=Attempt.parse)
    parser.add_argument("--hosts", required=True)
    parser.add_argument("--home", required=True)
    parser.add_argument("--supervisor", required=True, type=int)
    parser.add_argument("--period", required=True, type=float)
    parser.add_argument("--silent-periods", required=True, type=int)
    given = parser.parse_args()
    environment = dict(os.environ)  # before MPI changes it
    hosts = tuple(given.hosts.split(","))
    shm = Path(os.environ["TRANSOM_SHM"])
    host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = Job(int(os.environ["SLURM_JOB_ID"]), restarts, hosts, host)
    survivor = Survivor(RunDir(given.run_dir), given.attempt, job, host, given.home, hosts, shm, environment)
    config = SidecarConfig(
        attempt=str(given.attempt),
        shm=shm,
        run_dir=given.run_dir,
        hosts=hosts,
        supervisor_pid=given.supervisor if host == given.home else None,
        period_s=given.period,
        ping_s=given.period / 4,
        silent_after_s=given.period * given.silent_periods,
    )
    exchange = MpiExchange()
    if exchange.size != len(hosts):
        print(f"transom: MPI sees {exchange.size} of {len(hosts)} ranks", file=sys.stderr, flush=True)
        leave(EXIT_NO_MPI)
    reclaim(shm.parent, job.job_id, os.environ.get("TRANSOM_LIVE_JOBS", ""))
    threading.Thread(target=_leave_when_replaced, args=(survivor,), daemon=True).start()
    code = Sidecar(config, SidecarHooks(survivor.isolated, survivor.orphaned), exchange).run()
    if code == EXIT_LEFT and not newer_than(survivor.run.journal, given.attempt.number):
        # A request to leave comes from Slurm, which ends the job; or it is the first thing that a task hears of a step
        # that the launcher ends by force. SIGKILL follows at once then, and the next launch needs this memory.
        time.sleep(_FORCE_S)
        give_back(shm, lambda: program_pids(str(given.attempt)))
    leave(code)


if __name__ == "__main__":
    main()
