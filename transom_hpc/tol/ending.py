"""The end of a job whose batch script is gone: nothing in Slurm ends it when its last step has ended."""

from __future__ import annotations

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SlurmError, UsageError
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.completion import complete_job
from transom_hpc.slurm.states import JobState
from transom_hpc.slurm.text import JobFacts
from transom_hpc.tol.diary import Diary
from transom_hpc.tol.job import Job

_PATIENCE_S = 300.0
"""For a Slurm that does not answer: the hosts would stay with us."""


def is_alive(facts: JobFacts, job: Job) -> bool:
    """Whether this life of the job goes on, as far as Slurm knows; SIGNALING and RESIZING pass."""
    ending = facts.state_text.startswith("COMPLETING")
    return facts.state is JobState.RUNNING and not ending and facts.restarts == job.restarts


def end_job(job: Job, code: int, slurm: Slurm, clock: Clock) -> None:
    """End a job that has no batch script any more, so that its hosts are free: completed, or failed with this status.

    Where Slurm's library can't be had it is cancelled, which frees the hosts too; Slurm then calls it CANCELLED.
    """
    until = clock.now() + _PATIENCE_S
    while True:
        try:
            complete_job(job.job_id, code)
        except (SlurmError, UsageError) as refusal:
            Diary().say(f"{refusal}; it is cancelled instead")
        else:
            return
        try:
            slurm.cancel(job.job_id)
        except (SlurmError, UsageError) as error:
            Diary().say(f"the job could not be ended: {error}")
        else:
            return
        if clock.now() >= until:
            return
        clock.sleep(5.0)
