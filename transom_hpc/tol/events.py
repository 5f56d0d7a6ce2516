"""What can happen to a run, and what can be done about it: the words that the state machine is told and answers in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from transom_hpc.tol.causes import Cause, Restart

EXIT_STOPPED = 75
"""Exit status of a program that saved and left because it was asked to (EX_TEMPFAIL of sysexits.h)."""
EXIT_NOT_SHARED = 72
"""Exit status of a task that can't see the run directory (EX_OSFILE of sysexits.h)."""


class Ending(StrEnum):
    """How a launcher's work ended."""

    WELL = "ended well"
    BADLY = "ended badly"  # for good: nothing restarts it
    STOPPED = "stopped"  # by a person, after a checkpoint: it can go on by a new submission
    LEFT = "left"  # the run goes on in a later attempt, or Slurm has ended the job


@dataclass(frozen=True, slots=True)
class Host:
    """A host that was taken out, with the reason."""

    name: str
    cause: Cause
    evidence: str


# Events


@dataclass(frozen=True, slots=True)
class Placed:
    """The job's hosts were compared with those to avoid; misplaced ones are named with the old evidence."""

    misplaced: tuple[Host, ...] = ()


@dataclass(frozen=True, slots=True)
class Restored:
    """The program has begun from this step (0: from the start)."""

    step: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The program took a step."""

    step: int
    committed: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The program step ended.

    Args:
        code: exit status of the first task that ended badly, 0 when all ended well; above 128 it died of a signal.
        committed: newest committed step.
        cause: what that says of the program.
        evidence: one sentence, which names the task where it is known.
    """

    code: int
    committed: int
    cause: Cause = Cause.PROGRAM_ERROR
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class HostBad:
    """A host is silent, or not well.

    Args:
        others: those that were lost with it, as when a rack loses its power.
        can_wait: it still works: it is taken out when the next checkpoint is committed, and only for a spare.
    """

    host: str
    cause: Cause
    evidence: str
    committed: int
    others: tuple[Host, ...] = ()
    can_wait: bool = False


@dataclass(frozen=True, slots=True)
class Hung:
    """The program takes no steps."""

    evidence: str
    committed: int


@dataclass(frozen=True, slots=True)
class Diverged:
    """Training has gone astray.

    Args:
        before: the first step that is not to be trusted; 0: all are.
    """

    evidence: str
    committed: int
    before: int = 0


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The job is about to end, or a person wants it to: save and leave."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Isolated:
    """This host hears nobody, or another launcher leads: it is the one that is cut off."""

    evidence: str


@dataclass(frozen=True, slots=True)
class Expired:
    """The wait of this phase is over."""


@dataclass(frozen=True, slots=True)
class Unwatched:
    """The sidecar has not begun to watch, as when a host died while it was started."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A step was tried on each host: on these it could not be started."""

    lost: tuple[Host, ...] = ()


@dataclass(frozen=True, slots=True)
class Requeued:
    """Slurm answered the requeue.

    Args:
        ok: whether the job is in the queue again, or one that carries the run on.
        answer: Slurm's words.
        cancelled: it was not asked: a person, or Slurm, has ended the job for good.
    """

    ok: bool
    answer: str = ""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The launcher that took over from this one has ended its work."""

    ending: Ending
    why: str
    code: int


def together(found: Sequence[Event]) -> list[Event]:
    """The same events, with all hosts that are bad in the first event that names one; those that can wait apart."""
    bad = [event for event in found if isinstance(event, HostBad) and not event.can_wait]
    if len(bad) < 2:
        return list(found)
    others = tuple(Host(event.host, event.cause, event.evidence) for event in bad[1:])
    return [*(event for event in found if event not in bad), replace(bad[0], others=others)]


Event = (
    Placed
    | Restored
    | Progress
    | Exited
    | HostBad
    | Hung
    | Diverged
    | StopAsked
    | Isolated
    | Expired
    | Unwatched
    | Probed
    | Requeued
    | Ended
)


# Actions


@dataclass(frozen=True, slots=True)
class Launch:
    """Start the program on these hosts, and the sidecar on these and the spares."""

    launch: int
    hosts: tuple[str, ...]
    spares: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    """End the program step by force."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Have each rank on these hosts write down where it stands."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Distrust:
    """From now on restore no step from this one on that has been saved so far."""

    below: int
    evidence: str


@dataclass(frozen=True, slots=True)
class AskStop:
    """Ask the program's ranks to save and leave."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Wait:
    """Send Expired after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait before the program is started again, and say so; send Expired after so many seconds."""

    cause: Cause
    seconds: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Try a step on each of these hosts, and send Probed."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeue the job, away from the hosts that were taken out.

    Args:
        follow_up: it can't be requeued: submit another that carries the run on.
    """

    cause: Cause
    follow_up: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """Write a restart, or a host taken out without one, into the journal."""

    kind: str
    restart: Restart


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of the launcher's work."""

    ending: Ending
    why: str
    code: int


Action = Launch | End | Stacks | Distrust | AskStop | Wait | Pause | Probe | Requeue | Record | Finish
