"""Measuring by turns: in each round every job once, in an order that rotates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from checkpointing.ground import settle
from checkpointing.scale import say

Job = Callable[[], float]
"""Measures something, in seconds."""


class Rounds:
    """What was measured, by name: one value a round.

    Args:
        pause_s: before each job.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self.values: dict[str, list[float]] = {}

    def run(self, count: int, jobs: Mapping[str, Job], what: str) -> None:
        """So many rounds, after one that does not count."""
        for number in range(-1, count):
            say(f"{what}, round {number + 1} of {count}" if number >= 0 else f"{what}, warming up")
            for name in rotated(list(jobs), number):
                settle(self._pause_s)
                seconds = jobs[name]()
                if number >= 0:
                    self.values.setdefault(name, []).append(seconds)

    def middle(self, name: str) -> float:
        """The median of one."""
        return statistics.median(self.values[name])

    def best(self, names: Sequence[str]) -> str:
        """The one with the smallest median."""
        return min(names, key=self.middle)


def rotated(names: list[str], number: int) -> list[str]:
    """The names in the order of this round: over the rounds each comes early and late, next to others."""
    at = number * (len(names) // 2 + 1) % len(names)
    return names[at:] + names[:at]
