"""How a run goes on in another life of its job, or in another job, without its bad hosts; all of it in the journal.

The launcher uses it, and a survivor of the launcher's host.
The plan is written before Slurm is asked, since Slurm answers by ending the process that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SlurmError, SlurmUnreachable, TransomError
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.hosts import expand_hosts
from transom_hpc.slurm.requeue import requeue_excluding
from transom_hpc.slurm.text import AccountRow
from transom_hpc.tol.causes import Cause
from transom_hpc.tol.events import Requeued
from transom_hpc.tol.exclusion import choose
from transom_hpc.tol.followup import submit_followup
from transom_hpc.tol.history import fold
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Entry
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted

_DEADLINE_S = 25.0  # KillWait is 30 s by default; where it is shorter, we are ended earlier
PATIENCE_S = 3600.0
"""For a Slurm that does not answer. A controller is away for minutes, at times, and the hosts are ours meanwhile."""
_PAUSE_S = 10.0
_LOOK_BACK_S = 5.0
"""What the accounting may take at a start: hosts wait meanwhile, and the answer is worth little."""


def carry_on(
    run: RunDir,
    submitted: Submitted,
    job: Job,
    cause: Cause,
    slurm: Slurm,
    environment: Mapping[str, str],
    record: Callable[..., None],
    clock: Clock,
    *,
    may_requeue: bool,
) -> Requeued:
    """Requeue the job; where that is not allowed, submit another one that carries the run on.

    Args:
        run, job, cause, slurm, record, clock: as for requeue_job.
        submitted: what was submitted.
        environment: the launcher's, for the other job.
        may_requeue: False where it is known that Slurm would refuse.

    Returns:
        Slurm's answer, and which job goes on. Nothing is raised for what Slurm says.
    """
    refused = ""
    if may_requeue:
        answer = requeue_job(run, submitted.spec, job, cause, slurm, record, clock)
        if answer.ok or answer.cancelled or not _has_refused(job, slurm):
            return answer
        refused = f"{answer.answer}; "
    elif _is_cancelled(job, slurm):
        return _cancelled(record)
    plan = _plan(run, submitted.spec, job, slurm, clock)
    record("requeue", cause=cause, avoid=list(plan.avoid), let_back=list(plan.let_back))
    try:
        job_id = submit_followup(run, submitted, job, (*plan.users, *plan.avoid), slurm, environment, clock)
    except TransomError as error:
        answer = Requeued(False, f"{refused}nor could a job that carries the run on be submitted: {error}")
        record("requeued", ok=False, excluded=[], dropped=[], answer=answer.answer)
        return answer
    record("follow-up", job_id=job_id, excluded=[*plan.users, *plan.avoid])
    return Requeued(True, f"job {job_id} carries the run on")


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
            return _cancelled(record)
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
    plan = _plan(run, spec, job, slurm, clock)
    record("requeue", cause=cause, avoid=list(plan.avoid), let_back=list(plan.let_back))
    outcome = requeue_excluding(slurm, job.job_id, plan.avoid, plan.users, clock, _DEADLINE_S, plan.let_back)
    record(
        "requeued",
        ok=outcome.requeued,
        excluded=list(outcome.excluded),
        dropped=list(outcome.dropped),
        answer=outcome.answer,
    )
    return Requeued(outcome.requeued, outcome.answer)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Hosts.

    Args:
        avoid: for what they did to this run.
        users: that the user does not want.
        let_back: on record as bad, and yet not to be avoided any more.
    """

    avoid: tuple[str, ...]
    users: tuple[str, ...]
    let_back: tuple[str, ...]


def _plan(run: RunDir, spec: JobSpec, job: Job, slurm: Slurm, clock: Clock) -> _Plan:
    incidents = fold(run.entries()).incidents
    ours = {incident.host for incident in incidents}
    users = dict.fromkeys(expand_hosts(spec.exclude))
    usable = None
    try:
        facts = slurm.show_job(job.job_id)
        # What was given to sbatch on its command line is known to Slurm only. The rest of that list was written by us.
        users |= dict.fromkeys(host for host in facts.exc_hosts if host not in ours)
        usable = {row.host for row in slurm.nodes(partition=facts.partition) if row.facts.usable} - set(users)
    except SlurmError:
        pass
    choice = choose(incidents, clock.wall(), usable=usable, needed=spec.nodes + spec.spares)
    avoid = tuple(incident.host for incident in choice.avoid)
    return _Plan(avoid, tuple(users), tuple(item.host for item in choice.let_back if item.host not in users))


def _cancelled(record: Callable[..., None]) -> Requeued:
    answer = "Slurm has ended the job already, and not in order to start it again"
    record("requeued", ok=False, excluded=[], dropped=[], answer=answer)
    return Requeued(False, answer, cancelled=True)


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


def _has_refused(job: Job, slurm: Slurm) -> bool:
    """Whether this life of the job goes on: silence is no refusal, the requeue may have been done all the same."""
    try:
        return slurm.show_job(job.job_id).restarts <= job.restarts
    except SlurmUnreachable:
        return False
    except TransomError:
        return True


def _is_silent(job: Job, slurm: Slurm) -> bool:
    try:
        slurm.show_job(job.job_id)
    except SlurmUnreachable:
        return True
    except SlurmError:
        return False
    return False


def why_ended(entries: Sequence[Entry], job: Job, slurm: Slurm, patience_s: float = _LOOK_BACK_S) -> Cause | None:
    """What ended the life of this job before the one that begins now.

    Args:
        entries: the journal, without an entry of the life that begins.
        job: this job.
        slurm: its accounting is asked, where the job did not requeue itself.
        patience_s: how long.

    Returns:
        The cause of our own requeue, or for which this job was submitted to carry the run on; or PREEMPTED, REQUEUED or
        HOST_LOST; None for a first life, and where it can't be known in that time. Nothing is raised.
    """
    own = _own_cause(entries, str(job.job_id))
    if own is not None or not job.restarts:
        return own
    found: list[AccountRow] = []

    def ask() -> None:
        try:
            found.extend(slurm.accounting([job.job_id]))
        except TransomError:  # none here, or none now
            pass

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(patience_s)
    lives = [row for row in found if row.id.step is None and row.job_id == job.job_id and row.end_time]
    return _ENDS.get(lives[-1].state_text.split()[0]) if len(lives) >= job.restarts else None


# Slurm's word for a life of a job that it started again.
_ENDS = {"PREEMPTED": Cause.PREEMPTED, "REQUEUED": Cause.REQUEUED, "NODE_FAIL": Cause.HOST_LOST}


def _own_cause(entries: Sequence[Entry], job_id: str) -> Cause | None:
    """Why the launcher has requeued the job in its last life, or let it follow another; None where it has not."""
    cause: Cause | None = None
    current = ""
    for entry in entries:
        match entry.kind:
            case "start":
                cause, current = None, str(entry.facts.get("job_id"))
            case "requeue":
                with suppress(ValueError):
                    cause = Cause(entry.facts.get("cause", ""))
            case "requeued" if not entry.facts.get("ok"):
                cause = None
            case "follow-up":
                current = str(entry.facts.get("job_id"))
    return cause if current == job_id else None
