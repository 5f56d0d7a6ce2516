"""Requeueing this job without its bad hosts, with every step of it in the journal.

The launcher uses it, and a survivor of the launcher's host.
The plan is written before Slurm is asked, since Slurm answers by ending the process that asks.
"""

from __future__ import annotations

from collections.abc import Callable

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SlurmError, SlurmUnreachable
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.hosts import expand_hosts
from transom_hpc.slurm.requeue import requeue_excluding
from transom_hpc.tol.causes import Cause
from transom_hpc.tol.events import Requeued
from transom_hpc.tol.exclusion import choose
from transom_hpc.tol.history import fold
from transom_hpc.tol.job import Job
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec

_DEADLINE_S = 25.0  # KillWait is 30 s by default; where it is shorter, we are ended earlier
PATIENCE_S = 3600.0
"""For a Slurm that does not answer. A controller is away for minutes, at times, and the hosts are ours meanwhile."""
_PAUSE_S = 10.0


def requeue_job(
    run: RunDir,
    spec: JobSpec,
    job: Job,
    cause: Cause,
    slurm: Slurm,
    record: Callable[..., None],
    clock: Clock,
) -> Requeued:
    """Requeue the job, away from all hosts on record as bad, as far as that leaves room for it.

    The caller survives SIGTERM, and so do the children of `slurm`; see slurm.requeue. Slurm's silence is no answer: it
    is asked again, for as long as PATIENCE_S.

    Args:
        run: the run directory.
        spec: for the number of nodes and the user's own excludes.
        job: this job.
        cause: why.
        slurm: Slurm's commands.
        record: writes into the caller's journal: record(kind, **facts).
        clock: time.

    Returns:
        Slurm's answer. Nothing is raised for what Slurm says: the caller is about to be ended.
    """
    until, refusals = clock.now() + PATIENCE_S, 0
    while True:
        if _is_cancelled(job, slurm):
            answer = "Slurm has ended the job already, and not in order to start it again"
            record("requeued", ok=False, excluded=[], dropped=[], answer=answer)
            return Requeued(False, answer, cancelled=True)
        found = _ask(run, spec, job, cause, slurm, record, clock)
        # One refusal may be the last word of a silence: only the second in a row counts.
        silent = not found.ok and _is_silent(job, slurm)
        refusals = 0 if silent else refusals + 1
        if found.ok or refusals == 2 or clock.now() >= until:
            return found
        clock.sleep(_PAUSE_S if silent else 1.0)


def _ask(
    run: RunDir,
    spec: JobSpec,
    job: Job,
    cause: Cause,
    slurm: Slurm,
    record: Callable[..., None],
    clock: Clock,
) -> Requeued:
    mine = expand_hosts(spec.exclude)
    try:
        usable = {row.host for row in slurm.nodes() if row.facts.usable} - set(mine)
    except SlurmError:
        usable = None
    choice = choose(fold(run.entries()).incidents, clock.wall(), usable=usable, needed=spec.nodes + spec.spares)
    avoid = [incident.host for incident in choice.avoid]
    record("requeue", cause=cause, avoid=avoid, let_back=[incident.host for incident in choice.let_back])
    outcome = requeue_excluding(slurm, job.job_id, avoid, mine, clock, _DEADLINE_S)
    record(
        "requeued",
        ok=outcome.requeued,
        excluded=list(outcome.excluded),
        dropped=list(outcome.dropped),
        answer=outcome.answer,
    )
    return Requeued(outcome.requeued, outcome.answer)


def _is_cancelled(job: Job, slurm: Slurm) -> bool:
    """Whether a person, or Slurm, has ended this life of the job: a requeue would bring it back against their will.

    While the job completes, Slurm says COMPLETING whatever it will end as; of a job whose time was up it says why.
    """
    try:
        facts = slurm.show_job(job.job_id)
    except SlurmError:
        return False
    ending = facts.state_text.startswith(("COMPLETING", "CANCELLED"))
    return ending and facts.reason != "TimeLimit" and facts.restarts <= job.restarts


def _is_silent(job: Job, slurm: Slurm) -> bool:
    try:
        slurm.show_job(job.job_id)
    except SlurmUnreachable:
        return True
    except SlurmError:
        return False
    return False
