"""What the launcher's decisions are made from. Pure: no clock, process, file or Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transom_hpc.tol.causes import Cause, Restart
from transom_hpc.tol.events import Action, Exited, Host


class Phase(StrEnum):
    """Where the launcher is."""

    STARTING = "starting"
    LAUNCHING = "launching"  # the program has been started, and has taken no step yet
    RUNNING = "running"
    SETTLING = "settling"  # the program has ended badly: is a host to blame?
    PAUSING = "pausing"  # before it is started again
    STOPPING = "stopping"  # the program was asked to save and leave
    REQUEUEING = "requeueing"
    ASIDE = "standing by"  # this host is cut off, or another launcher leads
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Limits:
    """Waits of the machine, in seconds.

    Args:
        settle_s: after a program's bad end, time for a verdict on a host to come.
        stop_s: from the request to the end of the program, before it is ended by force.
        aside_s: how long a launcher that is cut off waits for another to lead, before it asks Slurm for the job.
    """

    settle_s: float = 8.0
    stop_s: float = 60.0
    aside_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Run:
    """All that decisions are made from.

    Args:
        needed: hosts that the program runs on.
        least: the fewest hosts that it can run on; 0: all that are needed.
        home: the launcher's own host.
        active: hosts of the current launch, in order of rank.
        spares: healthy hosts that stand by.
        out: hosts taken out in this attempt.
        doubtful: hosts to be taken out when the next checkpoint is committed.
        restarts: all restarts since the run was submitted, attempts before this one included.
        committed: the highest step ever committed.
        restored: the step that this launch has begun from.
        early: a program that dies within so many steps after it was restored has died early.
        can_requeue: "" when the job may be requeued, else the reason why not.
    """

    phase: Phase
    needed: int
    home: str
    active: tuple[str, ...]
    spares: tuple[str, ...]
    least: int = 0
    out: tuple[Host, ...] = ()
    doubtful: tuple[Host, ...] = ()
    restarts: tuple[Restart, ...] = ()
    launch: int = 0
    step: int = 0
    committed: int = 0
    restored: int = 0
    early: int = 2
    stop_cause: Cause | None = None
    exit: Exited | None = None
    can_requeue: str = ""
    limits: Limits = Limits()

    @property
    def fewest(self) -> int:
        """With fewer hosts it can't be started."""
        return self.least or self.needed


Decision = tuple[Run, tuple[Action, ...]]
