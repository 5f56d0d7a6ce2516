"""The launcher: the job's supervisor, on its first host. It gathers events, asks `phases` what to do, and does it.

It runs in the batch script. It holds no decision of its own: each is made in `phases`, `hang`, `exclusion` or `causes`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.base.errors import LaunchError, SlurmError, SlurmUnreachable
from transom_hpc.monitors import verdict
from transom_hpc.monitors.heartbeat import read_heartbeats
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.hosts import expand_hosts, fold_hosts
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol import phases
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.causes import Cause, Restart
from transom_hpc.tol.exclusion import choose
from transom_hpc.tol.hang import HangWatch
from transom_hpc.tol.history import fold, restarts_of_job
from transom_hpc.tol.journal import Entry, Journal, claim_number
from transom_hpc.tol.requeueing import requeue_job
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import Submitted
from transom_hpc.tol.steps import Job, Step, Steps, ended_well, first_exit
from transom_hpc.tol.watcher import Watcher

_TICK_S = 0.2
_DEAF_S = 5.0  # without a word from the sidecar for so long, this host's heartbeats are read directly
_PROGRESS_EVERY_S = 10.0


class Launcher:
    """Runs a program on a job's hosts until it has ended, or the job is to be requeued.

    Args:
        run: the run directory.
        submitted: what was submitted.
        job: the Slurm job.
        site: the site config.
        slurm: Slurm's commands.
        environment: what the program inherits.
        clock: time.
    """

    def __init__(
        self,
        run: RunDir,
        submitted: Submitted,
        job: Job,
        site: SiteConfig,
        slurm: Slurm,
        environment: Mapping[str, str],
        clock: Clock | None = None,
    ) -> None:
        self._dir = run
        self._submitted = submitted
        self._job = job
        self._site = site
        self._slurm = slurm
        self._environment = environment
        self._clock = clock or SystemClock()
        self._steps = Steps(job, site, environment)
        self._signals: list[int] = []
        self._program: Step | None = None
        self._watcher = Watcher(self._steps, job, site, run, self._monitoring_problem, self._clock)
        self._deadline: float | None = None
        self._written_progress = float("-inf")
        self._heard = self._clock.now()
        self._hang = HangWatch(0.0, submitted.spec.start_deadline_s, None)
        self.finish = phases.Finish(phases.Ending.LEFT, "not started", 1)
        """How the work ended; set by run."""

    def run(self) -> int:
        """Supervise to the end.

        Returns:
            The exit status for the batch script.

        Raises:
            LaunchError: the run can't be started: another job holds the directory, or it was stopped for good.
        """
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        for name in {self._site.signal, "INT"}:
            signal.signal(getattr(signal, f"SIG{name}"), self._on_signal)
        try:
            return self._run()
        finally:
            self._end()
            signal.signal(signal.SIGTERM, previous)

    # Start

    def _run(self) -> int:
        entries = self._dir.entries()
        self._refuse_where_wrong(entries)
        number = claim_number(self._dir.journal)
        self._journal = Journal(self._dir.journal, number, self._job.home, self._clock)
        self._attempt = Attempt(number, 0)
        spec = self._submitted.spec
        needed = spec.nodes
        hosts = (self._job.home, *(host for host in self._job.hosts if host != self._job.home))
        settle_s = self._site.sample_period_s * self._site.silent_periods + 1.5
        self._state = phases.Run(
            phase=phases.Phase.STARTING,
            needed=needed,
            home=self._job.home,
            active=hosts[:needed],
            spares=hosts[needed:],
            restarts=restarts_of_job(entries, str(self._job.job_id)),
            committed=self._committed(),
            can_requeue=self._why_no_requeue(),
            limits=phases.Limits(settle_s=settle_s, stop_s=max(10.0, self._site.signal_lead_s / 2)),
        )
        self._record(
            "start",
            job_id=self._job.job_id,
            requeues=self._job.restarts,
            hosts=list(hosts),
            needed=needed,
            home=self._job.home,
            committed=self._state.committed,
            can_requeue=self._state.can_requeue,
        )
        self._say(
            f"attempt {number} of run {self._dir.path} on {fold_hosts(hosts)}, {len(hosts) - needed} of them spare"
        )
        if len(hosts) < needed:
            raise LaunchError(f"the job has {len(hosts)} nodes and the program needs {needed}", run=self._dir.path)
        finish = self._handle(phases.Placed(self._misplaced(entries)))
        while finish is None:
            finish = self._turn()
        return self._close(finish)

    def _refuse_where_wrong(self, entries: Sequence[Entry]) -> None:
        history = fold(entries)
        job_id = str(self._job.job_id)
        if history.ending and history.ending[0] == phases.Ending.BADLY and history.job_ids[-1] == job_id:
            raise LaunchError(f"this run was stopped for good: {history.ending[1]}", run=self._dir.path)
        other = history.job_ids[-1] if history.job_ids else job_id
        if other != job_id and history.ending is None:
            try:
                rows = self._slurm.queue([int(other)])
            except SlurmError:
                rows = []
            if any(row.state in ("running", "waiting", "held") for row in rows):
                raise LaunchError(
                    f"job {other} holds the run directory {self._dir.path} already: cancel it, or choose another",
                    run=self._dir.path,
                    job=other,
                )

    def _misplaced(self, entries: Sequence[Entry]) -> tuple[phases.Host, ...]:
        let_back: set[str] = set()
        for entry in entries:
            if entry.kind == "requeue":
                let_back = set(entry.facts.get("let_back", ()))
        choice = choose(fold(entries).incidents, self._clock.wall())
        return tuple(
            phases.Host(incident.host, incident.cause, incident.evidence)
            for incident in choice.avoid
            if incident.host in self._job.hosts and incident.host not in let_back
        )

    def _why_no_requeue(self) -> str:
        try:
            facts = self._slurm.show_job(self._job.job_id)
        except SlurmUnreachable:
            return ""  # unknown: try it when the time comes
        except SlurmError as error:
            return f"Slurm can't be asked to requeue ({error})"
        return "" if facts.requeue else "the job was submitted with --no-requeue"

    # The loop

    def _turn(self) -> phases.Finish | None:
        for event in self._events():
            finish = self._handle(event)
            if finish is not None:
                return finish
        return None

    def _events(self) -> list[phases.Event]:
        events: list[phases.Event] = []
        messages = self._watcher.messages(_TICK_S)
        if messages:
            self._heard = self._clock.now()
        elif self._program is not None and self._clock.now() - self._heard > _DEAF_S:
            self._heard = self._clock.now()
            messages = self._own_progress()
        for message in messages:
            events.extend(self._from_sidecar(message))
        while self._signals:
            number = self._signals.pop(0)
            own = number == getattr(signal, f"SIG{self._site.signal}")
            cause = Cause.TIME_LIMIT if own else Cause.TERMINATED
            self._record("stop asked", cause=cause, signal=signal.Signals(number).name)
            events.append(phases.StopAsked(cause))
        if self._program is not None:
            code = self._program.poll()
            if code is not None:
                self._program.end()
                self._program = None
                self._last_look()
                events.append(self._exited(code))
        now = self._clock.now()
        if self._deadline is not None and now >= self._deadline:
            self._deadline = None
            events.append(phases.Expired())
        return events

    def _handle(self, event: phases.Event) -> phases.Finish | None:
        """Decide about one event and act; what an action brings about is handled at once."""
        before = self._state.phase
        self._state, actions = phases.decide(self._state, event)
        if self._state.phase is not before:
            self._deadline = None
        for action in actions:
            match action:
                case phases.Launch():
                    self._launch(action)
                case phases.End():
                    self._end()
                case phases.AskStop(cause):
                    self._say(f"asking the program to save and leave ({cause})")
                    self._job.shm.mkdir(mode=0o700, exist_ok=True)
                    (self._job.shm / "stop").write_text(cause)
                case phases.Wait(seconds):
                    self._deadline = self._clock.now() + seconds
                case phases.Probe(hosts):
                    lost = self._steps.probe(hosts)
                    found = [phases.Host(host, Cause.HOST_LOST, evidence) for host, evidence in lost.items()]
                    return self._handle(phases.Probed(tuple(found)))
                case phases.Record(kind, restart):
                    self._record_restart(kind, restart)
                case phases.Requeue(cause):
                    return self._handle(self._requeue(cause))
                case phases.Finish():
                    return action
        return None

    def _from_sidecar(self, message: verdict.Message) -> list[phases.Event]:
        now = self._clock.now()
        match message:
            case verdict.Ready():
                self._record("monitoring", problem="", hosts=list(message.hosts))
            case verdict.Progress(step_min=int(step)) if step > 0:
                return self._progress(message, step, now)
            case verdict.Progress() if self._hang.hung(now):
                return [self._hung(now)]
            case verdict.Verdict(cause="isolated"):
                return [phases.Isolated(message.evidence)]
            case verdict.Verdict(cause="silent" | "missing"):
                self._watcher.drop(message.host)
                return [phases.HostBad(message.host, Cause.HOST_SILENT, message.evidence, self._committed())]
        return []

    def _progress(self, message: verdict.Progress, step: int, now: float) -> list[phases.Event]:
        committed = message.saved_step or 0
        first = self._hang.step == 0
        self._hang = self._hang.seen(step, now)
        if first:
            self._record("running", step=step, hosts=len(self._state.active))
        if now - self._written_progress >= _PROGRESS_EVERY_S or committed > self._state.committed:
            self._written_progress = now
            self._record("progress", step=step, step_s=message.step_s, loss=message.loss, committed=committed)
        events: list[phases.Event] = [phases.Progress(step, committed)]
        if self._hang.hung(now):
            events.append(self._hung(now))
        return events

    def _exited(self, code: int) -> phases.Exited:
        prefix = self._dir.logs / str(self._attempt)
        first = first_exit(prefix)
        if first is None and code == 0 and not ended_well(prefix):
            return phases.Exited(
                1, self._committed(), "srun, which did not start the program (its words are in the log)"
            )
        if first is None:
            return phases.Exited(code, self._committed())
        return phases.Exited(first.code, self._committed(), f"rank {first.rank} on {first.host}")

    def _own_progress(self) -> list[verdict.Message]:
        """How far the program is, from the heartbeats on this host alone."""
        beats = [beat for beat in read_heartbeats(self._job.shm, str(self._attempt)) if beat.step]
        if not beats:
            return []
        last = min(beats, key=lambda beat: beat.step or 0)
        seen = verdict.Progress(
            len(beats), step_min=last.step, step_s=last.step_s, loss=last.loss, saved_step=last.saved_step
        )
        return [seen]

    def _last_look(self) -> None:
        """Record how far the program came before it ended."""
        self._written_progress = float("-inf")
        for message in self._own_progress():
            for event in self._from_sidecar(message):
                if isinstance(event, phases.Progress):
                    self._state, _ = phases.decide(self._state, event)

    def _hung(self, now: float) -> phases.Hung:
        pause = now - self._hang.since
        where = f"after step {self._hang.step}" if self._hang.step else "before the first step"
        evidence = f"no step for {pause:.0f} s {where}; {self._hang.allowed_s():.0f} s are allowed"
        return phases.Hung(evidence, self._committed())

    # Actions

    def _launch(self, action: phases.Launch) -> None:
        self._attempt = replace(self._attempt, launch=action.launch)
        self._record("launch", hosts=list(action.hosts), spares=list(action.spares))
        self._say(f"launch {action.launch} on {fold_hosts(action.hosts)}")
        spec = self._submitted.spec
        self._job.shm.mkdir(mode=0o700, exist_ok=True)
        (self._job.shm / "stop").unlink(missing_ok=True)
        self._program = self._steps.program(
            self._submitted.program,
            action.hosts,
            tasks_per_node=spec.tasks_per_node,
            environment=self._program_environment(),
            prefix=self._dir.logs / str(self._attempt),
        )
        self._hang = HangWatch(self._clock.now(), spec.start_deadline_s, spec.hang_after_s or self._site.hang_after_s)
        self._watcher.start(self._attempt, (*action.hosts, *action.spares))

    def _program_environment(self) -> dict[str, str]:
        spec = self._submitted.spec
        return {
            **self._site.env,
            "TRANSOM_RUN_DIR": str(self._dir.path),
            "TRANSOM_ATTEMPT": str(self._attempt),
            "TRANSOM_SHM": str(self._job.shm),
            "TRANSOM_SAVE_EVERY": str(spec.save_every),
            "TRANSOM_KEEP": str(spec.keep),
            "TRANSOM_SIGNAL": self._site.signal,
        }

    def _end(self) -> None:
        program, self._program = self._program, None
        # Side by side: while a host is dead each may need its whole deadline.
        watching = threading.Thread(target=self._watcher.end)
        watching.start()
        if program is not None:
            program.end()
        watching.join()

    def _requeue(self, cause: Cause) -> phases.Requeued:
        self._clean()
        self._say(f"requeueing the job ({cause})")
        # Slurm answers a requeue by SIGTERM to us and to every process of ours.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return requeue_job(
            self._dir, self._submitted.spec, self._job.job_id, cause, self._slurm, self._record, self._clock
        )

    def _clean(self) -> None:
        out = {host.name for host in self._state.out}
        hosts = [host for host in self._job.hosts if host not in out]
        self._steps.clean(hosts)

    def _close(self, finish: phases.Finish) -> int:
        self.finish = finish
        self._end()
        if finish.ending is not phases.Ending.LEFT:
            self._clean()
        self._record("end", ending=finish.ending, why=finish.why, code=finish.code, committed=self._committed())
        self._say(f"{finish.ending}: {finish.why}")
        self._journal.close()
        return finish.code

    # Small things

    def _monitoring_problem(self, problem: str) -> None:
        self._record("monitoring", problem=problem)
        self._say(problem)

    def _committed(self) -> int:
        steps = self._dir.committed_steps()
        return steps[-1] if steps else 0

    def _record(self, kind: str, **facts: Any) -> None:
        self._journal.append(self._attempt, kind, **facts)

    def _record_restart(self, kind: str, restart: Restart) -> None:
        self._record(
            kind,
            cause=restart.cause,
            host_out=restart.host,
            evidence=restart.evidence,
            committed=restart.committed,
            step=self._state.step,
        )
        self._say(f"{kind}: {restart.cause}{' ' + restart.host if restart.host else ''}; {restart.evidence}")

    def _say(self, text: str) -> None:
        print(f"transom: {text}", flush=True)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)


def job_of(environment: Mapping[str, str]) -> Job:
    """The job that this process runs in.

    Raises:
        LaunchError: it runs in none.
    """
    try:
        job_id, text = environment["SLURM_JOB_ID"], environment["SLURM_JOB_NODELIST"]
    except KeyError:
        raise LaunchError(
            "transom launch runs inside a Slurm job: use transom submit, or sbatch with one of sbatch_templates/"
        ) from None
    hosts = tuple(expand_hosts(text))
    home = environment.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    if home not in hosts:
        raise LaunchError(f"this host, {home}, is not one of the job's ({text})", job=job_id)
    return Job(int(job_id), int(environment.get("SLURM_RESTART_COUNT", "0")), hosts, home)
