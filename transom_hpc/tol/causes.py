"""Why a program ended or was ended: the causes that are told apart, and how often each may come without progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a program ended, or was ended."""

    PROGRAM_ERROR = "program error"
    OUT_OF_MEMORY = "out of memory"
    PROGRAM_KILLED = "program killed"
    PROGRAM_HUNG = "program hung"
    DIVERGED = "diverged"  # the loss is NaN, infinite, or far above what it was
    HOST_SILENT = "host silent"
    HOST_LOST = "host lost"
    HOST_SICK = "host sick"
    STRAGGLER = "straggler"
    STORAGE = "storage fault"
    SLURM = "Slurm fault"  # Slurm could not start what it was told to
    LAUNCHER_LOST = "launcher lost"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    REQUEUED = "requeued by a person"
    STOPPED = "stopped by a person"
    TERMINATED = "terminated"  # SIGTERM from Slurm, and nothing more is known
    MISPLACED = "misplaced"  # the job was started on a host that it meant to avoid


@dataclass(frozen=True, slots=True)
class Budget:
    """How often a cause may come before another checkpoint is committed, and how long is waited in between.

    Args:
        restarts: after so many the run is stopped.
        pause_s: seconds before the second restart in a row; each further one waits twice as long. The first one never
            waits.
    """

    restarts: int
    pause_s: float = 0.0


# Faults of the program repeat themselves, so few tries tell; faults of hosts do not, and each takes a host out. Of the
# four restarts after an error two go on from the newest checkpoint, and two from the one before.
BUDGETS: dict[Cause, Budget] = {
    Cause.PROGRAM_ERROR: Budget(4, 1.0),
    Cause.OUT_OF_MEMORY: Budget(3, 1.0),
    Cause.PROGRAM_KILLED: Budget(5, 1.0),
    Cause.PROGRAM_HUNG: Budget(4),
    Cause.DIVERGED: Budget(3),
    Cause.HOST_SILENT: Budget(10),
    Cause.HOST_LOST: Budget(10),
    Cause.HOST_SICK: Budget(10),
    Cause.STRAGGLER: Budget(10),
    Cause.STORAGE: Budget(10, 15.0),
    Cause.SLURM: Budget(8, 5.0),
    Cause.LAUNCHER_LOST: Budget(5, 1.0),
    Cause.TIME_LIMIT: Budget(3),
    Cause.PREEMPTED: Budget(1000),
    Cause.REQUEUED: Budget(1000),
    Cause.STOPPED: Budget(1000),
    Cause.TERMINATED: Budget(1000),
    Cause.MISPLACED: Budget(5),
}
MOST_PAUSE_S = 600.0
"""No pause is longer: hosts are paid for meanwhile."""

OF_THE_PROGRAM = frozenset(
    {Cause.PROGRAM_ERROR, Cause.OUT_OF_MEMORY, Cause.PROGRAM_KILLED, Cause.PROGRAM_HUNG, Cause.DIVERGED}
)
"""Causes that the state which the program began from may be the reason of."""


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart.

    Args:
        cause: why.
        committed: the highest step ever committed at that moment, 0 for none.
        host: the host to blame, "" for none.
        evidence: one sentence.
        step: newest step of the program.
        restored: the step that the program had begun from, 0 for none.
    """

    cause: Cause
    committed: int
    host: str = ""
    evidence: str = ""
    step: int = 0
    restored: int = 0


def tries_left(past: Sequence[Restart], cause: Cause, committed: int) -> int:
    """How many restarts for this cause are allowed before another checkpoint is committed (0: none)."""
    return max(0, BUDGETS[cause].restarts - _used(past, cause, committed))


def pause_s(past: Sequence[Restart], cause: Cause, committed: int) -> float:
    """Seconds to wait before one more restart for this cause."""
    used = _used(past, cause, committed)
    return min(MOST_PAUSE_S, BUDGETS[cause].pause_s * 2.0 ** min(used - 1, 30)) if used else 0.0


def _used(past: Sequence[Restart], cause: Cause, committed: int) -> int:
    return sum(1 for restart in past if restart.cause is cause and restart.committed == committed)
