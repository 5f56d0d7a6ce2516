"""What a person does to a run from outside: stop it, or send it back into the queue, with nothing lost."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import RunDirError, SlurmError, SlurmMissing, TransomError, UsageError
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.states import JobState
from transom_hpc.slurm.text import QueueRow
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.events import Ending
from transom_hpc.tol.history import History, fold
from transom_hpc.tol.journal import Entry, Journal, claim_number
from transom_hpc.tol.requests import Request, What, answered, ask, waits
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import Submitted

_JOURNAL_S = 0.5
_SLURM_S = 3.0
_SILENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request.

    Args:
        done: False: it was asked, and nobody waited for the rest.
        job_id: the job, or the one that carries the run on.
        message: one sentence.
    """

    done: bool
    job_id: str
    message: str


class Control:
    """One request to one run. It is built first, which refuses what can't be asked; then `send`, then `wait`.

    Args:
        run: the run directory.
        what: to stop it, or to requeue it.
        slurm: Slurm's commands. Where Slurm does not answer, the launcher is asked all the same.
        clock: time.

    Raises:
        UsageError: the run is over, local, somebody else's, or has no job.
        RunDirError: it is no run directory.
    """

    def __init__(self, run: RunDir, what: What, slurm: Slurm, clock: Clock) -> None:
        self._run = run
        self._what = what
        self._slurm = slurm
        self._clock = clock
        self._submitted = run.submitted()
        if self._submitted.spec.local:
            raise UsageError("a local run has no launcher to ask: end its process", run=run.path)
        owner = run.spec.stat().st_uid
        if os.getuid() not in (0, owner):
            raise UsageError(f"{run.path} is a run of user {_name(owner)}: only they can {what} it", run=run.path)
        before = run.entries()
        history = fold(before)
        self._refuse_over(history)
        self._job_id = _job_id(self._submitted, history)
        if not self._job_id.isdigit():
            raise UsageError(f"{run.path} has no job that could be asked to {what}", run=run.path)
        self._seen = {_place(entry) for entry in before}
        self._known_by_folder = False
        self._request: Request | None = None

    def send(self) -> Outcome:
        """Ask.

        Returns:
            done where nothing is to be waited for: a job that waits is cancelled at once, or is in the queue already.

        Raises:
            UsageError: the job is not in the queue any more, held, or another run's.
            SlurmError: a job that waits could not be cancelled.
        """
        row, known = None, True
        try:
            row = self._row()
        except (SlurmMissing, SlurmError):
            known = False
        if known and row is None:
            raise UsageError(
                f"job {self._job_id} is not in the queue any more, so there is nothing to {self._what}. "
                f"To see what became of it: transom status {self._run.path}",
                run=self._run.path,
                job=self._job_id,
            )
        if row is not None and row.state in (JobState.WAITING, JobState.HELD):
            return self._waiting(row)
        self._request = ask(self._run, self._what, self._job_id)
        silence = (
            "" if known else "; Slurm can't be asked here or does not answer, so whether the job runs is not known"
        )
        verb = "end" if self._what == "stop" else "go back into the queue"
        return Outcome(False, self._job_id, f"asked the launcher of job {self._job_id} to save and {verb}{silence}")

    def wait(self, timeout_s: float, tell: Callable[[str], None]) -> Outcome:
        """Wait until it is done.

        Args:
            timeout_s: how long.
            tell: is told now and then what is waited for.

        Raises:
            TransomError: it is not done in that time, or the run ended in another way.
        """
        assert self._request is not None
        now = self._clock.now()
        until, look_at, pause_s = now + timeout_s, now + _SLURM_S, _SLURM_S
        while True:
            found = self._by_the_journal(tell)
            if found is None and self._clock.now() >= look_at:
                try:
                    found = self._by_the_queue()
                    pause_s = _SLURM_S
                except (SlurmMissing, SlurmError):  # the journal tells in the end
                    pause_s = min(_SILENCE_S, 2 * pause_s)
                look_at = self._clock.now() + pause_s
            if found is not None:
                if waits(self._run, self._request):  # done without the launcher
                    answered(self._run)
                return found
            if self._clock.now() >= until:
                heard = "no launcher has taken it up" if waits(self._run, self._request) else "it has been heard"
                raise TransomError(
                    f"not done after {timeout_s:g} s; {heard}, and it stays asked. "
                    f"To see how it goes: transom status {self._run.path}",
                    run=self._run.path,
                )
            self._clock.sleep(_JOURNAL_S)

    # By the journal

    def _by_the_journal(self, tell: Callable[[str], None]) -> Outcome | None:
        try:
            entries = self._run.entries()
        except RunDirError:
            return None
        history = fold(entries)
        new = [entry for entry in entries if _place(entry) not in self._seen]
        over = history.ending is not None and history.phase == "over" and history.ending[0] != Ending.LEFT
        if self._what == "stop" and over:
            assert history.ending is not None
            ending, why = history.ending
            message = why if ending == Ending.STOPPED else f"{ending}: {why}"
            return Outcome(True, self._job_id, f"job {self._job_id}: {message}")
        if self._what == "requeue":
            for entry in new:
                if entry.kind == "follow-up":
                    other = str(entry.facts.get("job_id"))
                    return Outcome(True, other, f"job {self._job_id} may not be requeued: job {other} goes on")
                if entry.kind == "requeued" and entry.facts.get("ok"):
                    return Outcome(True, self._job_id, f"job {self._job_id} is requeued")
            if over:
                assert history.ending is not None
                raise TransomError(
                    f"not requeued: the run {history.ending[0]}: {history.ending[1]}", run=self._run.path
                )
        heard = any(entry.kind == "request" for entry in new)
        tell(f"{history.phase}, step {history.step}" if heard else "not heard by the launcher yet")
        return None

    # By Slurm

    def _by_the_queue(self) -> Outcome | None:
        now = self._run.submitted()
        if now.job_id and now.job_id != self._job_id:  # another job carries the run on: what was asked is for it too
            self._submitted, self._job_id = now, now.job_id
            self._request = ask(self._run, self._what, self._job_id)
        row = self._row()
        if row is None:
            # The last word of a launcher may come a little later through a shared file system.
            self._clock.sleep(2.0)
            found = self._by_the_journal(lambda _: None)
            if found is not None:
                return found
            if self._what == "stop":
                why = f"job {self._job_id} has ended, without a word of its launcher"
                return Outcome(True, self._job_id, why)
            raise TransomError(f"not requeued: job {self._job_id} has ended", run=self._run.path)
        if row.state in (JobState.WAITING, JobState.HELD):
            return self._waiting(row)
        return None

    def _waiting(self, row: QueueRow) -> Outcome:
        """The job is in the queue and does not run."""
        if self._what == "stop":
            return self._cancel()
        if row.state is JobState.HELD:
            raise UsageError(
                f"job {self._job_id} is held, not running. To let it go: scontrol release {self._job_id}",
                run=self._run.path,
                job=self._job_id,
            )
        message = f"job {self._job_id} is in the queue" if self._request else f"job {self._job_id} waits already"
        return Outcome(True, self._job_id, f"{message} ({row.reason or row.state_text})")

    def _cancel(self) -> Outcome:
        self._slurm.cancel(int(self._job_id))
        steps = self._run.committed_steps()
        saved = f"step {steps[-1]} is saved" if steps else "nothing is saved yet"
        why = f"stopped by a person while it waited in the queue; {saved}. To go on: transom submit with --run-dir"
        host = socket.gethostname().split(".")[0]
        number = claim_number(self._run.journal)
        journal, attempt = Journal(self._run.journal, number, host, self._clock), Attempt(number, 0)
        with suppress(OSError):  # the job is gone all the same
            by = self._request.by if self._request else f"{_name(os.getuid())}@{socket.gethostname()}"
            journal.append(attempt, "request", what="stop", by=by)
            journal.append(attempt, "end", ending=Ending.STOPPED, why=why, code=0, committed=max(steps, default=0))
        journal.close()
        self._run.request.unlink(missing_ok=True)
        return Outcome(True, self._job_id, f"job {self._job_id} is cancelled: {why}")

    def _row(self) -> QueueRow | None:
        """The job's row in the queue; None where it is not there any more.

        Raises:
            UsageError: there is a job with this id, and it is not this run's.
        """
        row = next((row for row in self._slurm.queue([int(self._job_id)])), None)
        mark = self._submitted.comment
        if row is None or (mark and not self._submitted.job_id):  # sbatch has not been answered yet
            return row
        if mark and row.comment != mark:
            raise UsageError(
                f"job {self._job_id} of this cluster is another one: {self._run.path} was submitted to another cluster",
                run=self._run.path,
                job=self._job_id,
            )
        if not mark and not self._known_by_folder:  # sbatch on a file: no mark
            if self._slurm.show_job(row.job_id).work_dir != self._submitted.cwd:
                raise UsageError(f"job {self._job_id} is another one: it works in another folder", run=self._run.path)
            self._known_by_folder = True
        return row

    def _refuse_over(self, history: History) -> None:
        if history.ending is not None and history.phase == "over" and history.ending[0] != Ending.LEFT:
            raise UsageError(
                f"nothing to {self._what}: the run is over ({history.ending[0]}: {history.ending[1]})",
                run=self._run.path,
            )


def _place(entry: Entry) -> tuple[int, str, int]:
    return entry.attempt.number, entry.host, entry.order


def _job_id(submitted: Submitted, history: History) -> str:
    return submitted.job_id or (history.job_ids[-1] if history.job_ids else "")


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
