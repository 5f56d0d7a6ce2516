"""What a launcher finds out before it starts anything: may this job work on this run, and on which of its hosts not."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from transom_hpc.base.errors import LaunchError, SlurmError, SlurmUnreachable
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.states import JobState
from transom_hpc.tol.events import Ending, Host
from transom_hpc.tol.exclusion import choose
from transom_hpc.tol.history import fold
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Entry
from transom_hpc.tol.rundir import RunDir


def refuse_where_wrong(run: RunDir, entries: Sequence[Entry], job: Job, slurm: Slurm) -> None:
    """Refuse a run that was stopped for good under this job, or that another job works on or will.

    Raises:
        LaunchError: it is so.
    """
    history = fold(entries)
    ended = history.ending[0] if history.ending else ""
    other = history.job_ids[-1] if history.job_ids else str(job.job_id)
    if other == str(job.job_id):
        if history.ending and ended == Ending.BADLY:
            raise LaunchError(f"this run was stopped for good: {history.ending[1]}", run=run.path)
        return
    if ended in (Ending.WELL, Ending.BADLY):
        return
    try:
        rows = slurm.queue([int(other)])
    except SlurmError:
        return  # not known: checkpoints are fenced, so that the older of two can do no harm
    if any(row.state in (JobState.RUNNING, JobState.WAITING, JobState.HELD) for row in rows):
        raise LaunchError(
            f"job {other} holds the run directory {run.path} already: cancel it, or choose another",
            run=run.path,
            job=other,
        )


def misplaced(entries: Sequence[Entry], job: Job, now: datetime) -> tuple[Host, ...]:
    """The job's hosts that it was to avoid, each with the old evidence; those that were let back in are not."""
    let_back: set[str] = set()
    for entry in entries:
        if entry.kind == "requeue":
            let_back = set(entry.facts.get("let_back", ()))
    return tuple(
        Host(incident.host, incident.cause, incident.evidence)
        for incident in choose(fold(entries).incidents, now).avoid
        if incident.host in job.hosts and incident.host not in let_back
    )


def why_no_requeue(job: Job, slurm: Slurm) -> str:
    """Why the job can't be requeued, "" when it can, or when that is not known: then it is tried."""
    try:
        facts = slurm.show_job(job.job_id)
    except SlurmUnreachable:
        return ""
    except SlurmError as error:
        return f"Slurm can't be asked to requeue ({error})"
    return "" if facts.requeue else "the job was submitted with --no-requeue"
