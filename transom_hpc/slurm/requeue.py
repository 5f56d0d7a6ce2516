"""Requeue a job from inside itself, onto other nodes than the bad ones.

Owns the order of the two commands and when to try again. Never chooses the nodes, and never runs a program itself.

The nodes that a job avoids can be changed only while it is pending, and whoever asks for the requeue is one of the
processes that Slurm ends because of it. So: requeue; Slurm sends SIGTERM at once and SIGKILL after KillWait (30 s by
default); in between the job becomes pending, and the list is written as soon as Slurm accepts it. The caller must
survive SIGTERM (its batch shell too: when that ends, Slurm kills the rest), and so must the programs it starts:
`SlurmCommands(timeout_s=5, ignore_term=True)`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SlurmRefused, SlurmUnreachable, TransomError
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.states import JobState

RETRY_S = 0.1
"""A completing job refuses the list for some tenths of a second."""


@dataclass(frozen=True, slots=True)
class RequeueOutcome:
    """What came of it."""

    requeued: bool
    """Whether this life of the job is over and the next one in the queue."""
    excluded: tuple[str, ...]
    """What the job avoids, as read back from Slurm. Nothing was proved of a host that is not here: the next start
    must look at its own nodes in any case."""
    dropped: tuple[str, ...]
    """Hosts that were to be avoided and are no nodes of this cluster."""
    answer: str
    """Slurm's last refusal or failure, in its own words; '' where all went well."""


def requeue_excluding(
    slurm: Slurm,
    job_id: int,
    hosts: Iterable[str],
    user_excludes: Iterable[str],
    clock: Clock,
    deadline_s: float,
    let_back: Collection[str] = (),
) -> RequeueOutcome:
    """Requeue a job and make it avoid some hosts.

    Args:
        slurm: whose programs survive SIGTERM when the job is our own.
        job_id: a batch job, running or completing.
        hosts: to be avoided from now on.
        user_excludes: hosts that the user asked to avoid; they stay, as do those that the job avoids already.
        clock: for the deadline.
        deadline_s: from now, less than KillWait. One question may outlast it, by the timeout of `slurm`.
        let_back: hosts that an earlier life of the job was made to avoid, and that it need not avoid any more.

    Returns:
        What came of it; nothing is raised for an answer of Slurm's, nor for its silence: the caller is dying.
    """
    deadline = clock.now() + deadline_s
    wanted = dict.fromkeys([*user_excludes, *hosts])
    restarts: int | None = None
    answer = ""
    try:
        before = slurm.show_job(job_id)
        restarts = before.restarts
        wanted = dict.fromkeys([*(host for host in before.exc_hosts if host not in let_back), *wanted])
    except TransomError as error:
        answer = _words(error)

    while True:
        try:
            slurm.requeue(job_id)
            break
        except SlurmRefused as refusal:
            answer = _words(refusal)
            # "Job is pending execution": it has been requeued, by us unheard or by somebody else.
            if "is pending" not in answer.lower() and not _is_requeued(slurm, job_id, restarts):
                return RequeueOutcome(False, (), (), answer)
            break
        except SlurmUnreachable as silence:
            # It may have been done all the same.
            answer = _words(silence)
            if _is_requeued(slurm, job_id, restarts):
                break
        except TransomError as error:
            return RequeueOutcome(False, (), (), _words(error))
        if clock.now() >= deadline:
            return RequeueOutcome(False, (), (), answer)
        clock.sleep(RETRY_S)

    while True:
        try:
            dropped = slurm.exclude(job_id, list(wanted))
            excluded = tuple(host for host in wanted if host not in dropped)
            return RequeueOutcome(True, excluded, tuple(dropped), "")
        except TransomError as error:
            answer = _words(error)
        if clock.now() >= deadline:
            return RequeueOutcome(True, (), (), answer)
        clock.sleep(RETRY_S)


def _is_requeued(slurm: Slurm, job_id: int, restarts: int | None) -> bool:
    """Whether the job is in the queue for another life. Slurm counts the restart in the moment of the requeue."""
    try:
        job = slurm.show_job(job_id)
    except TransomError:
        return False
    if job.state in (JobState.WAITING, JobState.HELD):
        return True
    return restarts is not None and job.restarts > restarts


def _words(error: TransomError) -> str:
    return str(error.facts.get("answer") or error)
