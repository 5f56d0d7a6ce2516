"""Why a program ended or was ended: the causes that are told apart, and how often each may come without progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a program ended, or was ended."""

    PROGRAM_ERROR = "program error"
    PROGRAM_KILLED = "program killed"
    PROGRAM_HUNG = "program hung"
    HOST_SILENT = "host silent"
    HOST_LOST = "host lost"
    LAUNCHER_LOST = "launcher lost"
    TIME_LIMIT = "time limit"
    TERMINATED = "terminated"  # SIGTERM from Slurm: preemption, or scancel or requeue by a person
    MISPLACED = "misplaced"  # the job was started on a host that it meant to avoid


# How often a cause may come again before another checkpoint is committed. Faults of the program repeat themselves, so
# few tries tell; faults of hosts do not, and each takes a host out.
LIMITS: dict[Cause, int] = {
    Cause.PROGRAM_ERROR: 3,
    Cause.PROGRAM_KILLED: 5,
    Cause.PROGRAM_HUNG: 3,
    Cause.HOST_SILENT: 10,
    Cause.HOST_LOST: 10,
    Cause.LAUNCHER_LOST: 5,
    Cause.TIME_LIMIT: 3,
    Cause.TERMINATED: 1000,
    Cause.MISPLACED: 5,
}


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart.

    Args:
        cause: why.
        committed: newest committed step at that moment, 0 for none.
        host: the host to blame, "" for none.
        evidence: one sentence.
    """

    cause: Cause
    committed: int
    host: str = ""
    evidence: str = ""


def tries_left(past: Sequence[Restart], cause: Cause, committed: int) -> int:
    """How many restarts for this cause are allowed before another checkpoint is committed (0: none)."""
    used = sum(1 for restart in past if restart.cause is cause and restart.committed == committed)
    return max(0, LIMITS[cause] - used)
