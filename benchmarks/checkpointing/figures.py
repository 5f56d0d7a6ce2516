"""Figures: ratios of what was measured by turns, their spread, and how they are shown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_NAME = 50


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must reach."""

    value: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        """Whether a value reaches it."""
        return value >= self.value if self.at_least else value <= self.value


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    Args:
        part: of the benchmark.
        name: within the part.
        value: the middle of the pairs.
        unit: of value, bar and spread.
        bar: what it must reach; None where there is none.
        limit: what bounds it, as measured in this run.
        pairs: how many measurements are behind it.
        low, high: the spread: the extremes of the pairs.
    """

    part: str
    name: str
    value: float
    unit: str
    bar: Bar | None
    limit: str
    pairs: int
    low: float
    high: float

    def to_json(self) -> dict[str, Any]:
        """In the form of all benchmarks."""
        return {
            "name": f"{self.part}: {self.name}",
            "value": self.value,
            "unit": self.unit,
            "bar": None if self.bar is None else self.bar.value,
            "at_least": None if self.bar is None else self.bar.at_least,
            "met": self.bar is None or self.bar.met(self.value),
            "limit": self.limit,
            "pairs": self.pairs,
            "spread": [self.low, self.high],
        }


def from_json(held: dict[str, Any]) -> Figure:
    """What another process wrote."""
    bar = None if held["bar"] is None else Bar(held["bar"], held["at_least"])
    part, _, name = held["name"].partition(": ")
    low, high = held["spread"]
    return Figure(part, name, held["value"], held["unit"], bar, held["limit"], held["pairs"], low, high)


def figure(part: str, name: str, values: Sequence[float], unit: str, bar: Bar | None = None, limit: str = "") -> Figure:
    """The figure of some pairs: their median and their extremes."""
    return Figure(part, name, statistics.median(values), unit, bar, limit, len(values), min(values), max(values))


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Pair by pair; the two of a pair were measured one after the other."""
    return [a / b for a, b in zip(above, below, strict=True)]


def difference_ratio(
    part: str,
    name: str,
    above: Sequence[float],
    below: Sequence[float],
    floor: float,
    bar: Bar | None = None,
    limit: str = "",
) -> Figure:
    """The ratio of two small differences of long times, in which noise is large.

    The median of one over the median of the other, which counts as no less than the noise: what is lost in the noise
    never makes a ratio look good. The spread is that of the upper one, over the same.
    """
    below_that = max(statistics.median(below), floor)
    values = [a / below_that for a in above]
    return figure(part, name, values, "x", bar, limit)


def noise(differences: Sequence[float]) -> float:
    """What a difference of two equal things typically is: the median of the sizes."""
    return statistics.median(abs(d) for d in differences)


def growth(values: Sequence[float], stretches: int = 5) -> list[float]:
    """Growth from one value to the next, by least squares, in each of some stretches of the values.

    What grows steadily does so in all of them; what happens once, such as one more block for a heap, in one.
    """
    width = len(values) // stretches
    return [_slope(values[at * width : (at + 1) * width]) for at in range(stretches)]


def _slope(values: Sequence[float]) -> float:
    middle, mean = (len(values) - 1) / 2, statistics.fmean(values)
    width = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * (v - mean) for i, v in enumerate(values)) / width


def table(figures: Sequence[Figure]) -> str:
    """The figures for people, at most 100 columns wide; the limit stands once for those that it bounds."""
    lines = [f"{'':{_NAME}} {'value':>9}    {'bar':>8} {'':6}  spread"]
    above = ("", "")
    for f in figures:
        if (f.part, f.limit) != above:
            above = (f.part, f.limit)
            lines += ["", f"{f.part}{f' (limit: {f.limit})' if f.limit else ''}"]
        bar = "" if f.bar is None else f"{'>=' if f.bar.at_least else '<='} {f.bar.value:g}"
        met = "" if f.bar is None else "met" if f.bar.met(f.value) else "MISSED"
        spread = f"{short(f.low)} to {short(f.high)}" if f.pairs > 1 else ""
        lines.append(f"  {f.name:{_NAME - 2}} {short(f.value):>9} {f.unit:4}{bar:>7} {met:6}  {spread}")
    return "\n".join(line.rstrip() for line in lines)


def short(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
