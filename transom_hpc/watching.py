"""Shortening the time for which Slurm holds a requeued job: from outside of it, since a job can't do that for itself.

It only asks Slurm to start now what would start two minutes later. Nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import RunDirError, SlurmError, SlurmMissing
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.states import JobState
from transom_hpc.slurm.text import JobFacts, QueueRow
from transom_hpc.tol.rundir import RunDir, registered

AGE_S = 5.0
"""A job is let go so long after it was seen in the queue, not at once: what ends its old life on the hosts would meet
the new one, which has the same id."""
LONGEST_HOLD = timedelta(minutes=10)
"""Slurm holds for two minutes or so; a job that waits longer was told to by a person."""
_LOOK_S = 10.0
_MOST_S = 120.0


@dataclass(frozen=True, slots=True)
class _Held:
    """A job that Slurm holds after a requeue: in which life, and when it was first seen."""

    submit_time: str
    since: float


class Watch:
    """Lets requeued jobs of runs go.

    Args:
        runs: whose; None: all of the user's.
        slurm: Slurm's commands.
        clock: time.
        say: is told what is done, a line each.
    """

    def __init__(self, runs: Sequence[RunDir] | None, slurm: Slurm, clock: Clock, say: Callable[[str], None]) -> None:
        self._runs = runs
        self._slurm = slurm
        self._clock = clock
        self._say = say
        self._held: dict[int, _Held] = {}
        self._done: set[tuple[int, str]] = set()  # the job, and the life: when it was requeued
        self._silent = False
        self._pause_s = _LOOK_S

    def look(self) -> float:
        """Look once, and let go what has waited for AGE_S.

        Returns:
            Seconds until it is worth looking again.

        Raises:
            SlurmMissing: no Slurm here.
        """
        try:
            self._look()
        except SlurmMissing:
            raise
        except SlurmError as error:
            if not self._silent:
                self._say(f"Slurm does not answer ({error}); asking again, less often")
            self._silent = True
            self._pause_s = min(_MOST_S, 2 * self._pause_s)
            return self._pause_s
        if self._silent:
            self._say("Slurm answers again")
        self._silent, self._pause_s = False, _LOOK_S
        return min([_LOOK_S, *(max(0.5, held.since + AGE_S - self._clock.now()) for held in self._held.values())])

    @property
    def waiting(self) -> bool:
        """Whether there are jobs that will be let go in a moment."""
        return bool(self._held)

    @property
    def silent(self) -> bool:
        """Whether Slurm did not answer the last look."""
        return self._silent

    def _look(self) -> None:
        rows = [row for row in self._slurm.queue() if row.state is JobState.WAITING and row.reason == "BeginTime"]
        runs = self._of_runs(rows) if rows else {}
        held: dict[int, _Held] = {}
        for row in rows:
            if row.job_id not in runs:
                continue
            facts = self._slurm.show_job(row.job_id)
            if not _is_hold(facts) or (row.job_id, facts.submit_time) in self._done:
                continue
            one = self._held.get(row.job_id)
            if one is None or one.submit_time != facts.submit_time:
                one = _Held(facts.submit_time, self._clock.now())
            if self._clock.now() - one.since >= AGE_S:
                self._let_go(facts, runs[row.job_id])
            else:
                held[row.job_id] = one
        self._held = held

    def _let_go(self, facts: JobFacts, run: RunDir) -> None:
        self._done.add((facts.job_id, facts.submit_time))
        what = f"job {facts.job_id} ({run.path})"
        try:
            self._slurm.release_now(facts.job_id)
        except SlurmError as error:
            self._say(f"{what} could not be started: {error}")
        else:
            self._say(f"{what} may start now; Slurm would have held it until {facts.eligible_time}")

    def _of_runs(self, rows: Sequence[QueueRow]) -> dict[int, RunDir]:
        """The runs that these jobs belong to, by job id."""
        found: dict[int, RunDir] = {}
        for run in registered() if self._runs is None else self._runs:
            try:
                submitted = run.submitted()
            except RunDirError:  # removed meanwhile, or another version's
                continue
            for row in rows:
                if row.comment == submitted.comment and str(row.job_id) == submitted.job_id:
                    found[row.job_id] = run
        return found


def _is_hold(job: JobFacts) -> bool:
    """Whether it is Slurm that holds it, after a requeue, and not a person."""
    if job.restarts == 0:
        return False
    try:
        hold = datetime.fromisoformat(job.eligible_time) - datetime.fromisoformat(job.submit_time)
    except ValueError:
        return False
    return hold <= LONGEST_HOLD
