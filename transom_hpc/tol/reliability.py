"""How often a run was interrupted, and in how much time. Pure: the journal's entries in, figures out.

Times are those that were written for people. An estimate may use them; no order is taken from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from transom_hpc.tol.causes import Cause
from transom_hpc.tol.journal import Entry

_ANNOUNCED = frozenset(
    (Cause.TIME_LIMIT, Cause.PREEMPTED, Cause.REQUEUED, Cause.STOPPED, Cause.TERMINATED, Cause.MISPLACED)
)
"""The program saves first, or had not begun: nothing is lost."""


@dataclass(frozen=True, slots=True)
class Interruptions:
    """What a run has lived through.

    Args:
        failures: ends of the program that came without a warning.
        node_seconds: for which it ran, times the nodes that it had.
    """

    failures: int = 0
    node_seconds: float = 0.0

    def __str__(self) -> str:
        """As the environment of a program has it."""
        return f"{self.failures}/{self.node_seconds:.0f}"


def interruptions(entries: Sequence[Entry]) -> Interruptions:
    """Count what interrupted a run.

    Args:
        entries: of its journal, as read_journal gives them.
    """
    failures, seconds = 0, 0.0
    began: datetime | None = None
    hosts = 0
    for entry in entries:
        with suppress(KeyError, TypeError, ValueError):  # written by another version, or damaged
            when = datetime.fromisoformat(entry.time)
            if entry.kind == "start":
                # A life of the job whose launcher could say no more: its end is older than this, by hours at times.
                # Where another launcher takes over in the same job, it says itself what was lost.
                failures += began is not None and not entry.facts.get("succeeds")
                began = None
            if began is not None:
                seconds += max(0.0, (when - began).total_seconds()) * hosts
                began = when
            if entry.kind == "running":
                began = when
            elif entry.kind == "launch":
                began, hosts = None, len(entry.facts["hosts"])
            elif entry.kind in ("restart", "stopped", "standing by", "end", "gave up"):
                began = None
            if entry.kind == "restart" and Cause(entry.facts["cause"]) not in _ANNOUNCED:
                failures += 1
    return Interruptions(failures, seconds)
