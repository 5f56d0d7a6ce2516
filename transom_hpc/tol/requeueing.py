"""Requeueing this job without its bad hosts, with every step of it in the journal.

The launcher uses it, and a survivor of the launcher's host.
The plan is written before Slurm is asked, since Slurm answers by ending the process that asks.
"""

from __future__ import annotations

from collections.abc import Callable

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SlurmError
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.hosts import expand_hosts
from transom_hpc.slurm.requeue import requeue_excluding
from transom_hpc.tol.causes import Cause
from transom_hpc.tol.events import Requeued
from transom_hpc.tol.exclusion import choose
from transom_hpc.tol.history import fold
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec

_DEADLINE_S = 25.0  # KillWait is 30 s by default; where it is shorter, we are ended earlier


def requeue_job(
    run: RunDir,
    spec: JobSpec,
    job_id: int,
    cause: Cause,
    slurm: Slurm,
    record: Callable[..., None],
    clock: Clock,
) -> Requeued:
    """Requeue the job, away from all hosts on record as bad, as far as that leaves room for it.

    The caller survives SIGTERM, and so do the children of `slurm`; see slurm.requeue.

    Args:
        run: the run directory.
        spec: for the number of nodes and the user's own excludes.
        job_id: this job.
        cause: why.
        slurm: Slurm's commands.
        record: writes into the caller's journal: record(kind, **facts).
        clock: time.

    Returns:
        Slurm's answer. Nothing is raised for what Slurm says: the caller is about to be ended.
    """
    mine = expand_hosts(spec.exclude)
    try:
        usable = {row.host for row in slurm.nodes() if row.facts.usable} - set(mine)
    except SlurmError:
        usable = None
    choice = choose(fold(run.entries()).incidents, clock.wall(), usable=usable, needed=spec.nodes + spec.spares)
    avoid = [incident.host for incident in choice.avoid]
    record("requeue", cause=cause, avoid=avoid, let_back=[incident.host for incident in choice.let_back])
    outcome = requeue_excluding(slurm, job_id, avoid, mine, clock, _DEADLINE_S)
    record(
        "requeued",
        ok=outcome.requeued,
        excluded=list(outcome.excluded),
        dropped=list(outcome.dropped),
        answer=outcome.answer,
    )
    return Requeued(outcome.requeued, outcome.answer)
