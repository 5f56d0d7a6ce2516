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
        who: that task, for a person, "" when it is not known.
    """

    code: int
    committed: int
    who: str = ""


@dataclass(frozen=True, slots=True)
class HostBad:
    """A host is silent, or Slurm calls it down.

    Args:
        others: those that were lost with it, as when a rack loses its power.
    """

    host: str
    cause: Cause
    evidence: str
    committed: int
    others: tuple[Host, ...] = ()


@dataclass(frozen=True, slots=True)
class Hung:
    """The program takes no steps."""

    evidence: str
    committed: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The job is about to end: save and leave."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Isolated:
    """This host hears nobody: it is the one that is cut off."""

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
        ok: whether the job is in the queue again.
        answer: Slurm's words.
        cancelled: it was not asked: a person, or Slurm, has ended the job for good.
    """

    ok: bool
    answer: str = ""
    cancelled: bool = False


def together(found: Sequence[Event]) -> list[Event]:
    """The same events, with all hosts that are bad in the first event that names one."""
    bad = [event for event in found if isinstance(event, HostBad)]
    if len(bad) < 2:
        return list(found)
    others = tuple(Host(event.host, event.cause, event.evidence) for event in bad[1:])
    return [*(event for event in found if not isinstance(event, HostBad)), replace(bad[0], others=others)]


Event = Placed | Progress | Exited | HostBad | Hung | StopAsked | Isolated | Expired | Unwatched | Probed | Requeued


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
class AskStop:
    """Ask the program's ranks to save and leave."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Wait:
    """Send Expired after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Try a step on each of these hosts, and send Probed."""

    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Requeue the job, away from the hosts that were taken out."""

    cause: Cause


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


Action = Launch | End | AskStop | Wait | Probe | Requeue | Record | Finish
