"""How large a run is, and what it says meanwhile."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """A size of the benchmark.

    Args:
        elements: of each parameter; a state has three times 50 such tensors of four bytes an element.
        rounds: in which everything is measured once.
        wall_rounds: the same for wall time, whose differences are small.
        saves: over which memory is watched.
        pause_s: before each measurement, so that what went before is over.
    """

    elements: int
    rounds: int
    wall_rounds: int
    saves: int
    pause_s: float


FULL = Scale(2_500_000, 5, 5, 50, 0.2)
QUICK = Scale(350_000, 2, 2, 20, 0.05)


def say(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)
