"""The best interval, by hand and by properties."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as some

from transom_hpc.ckpt import interval
from transom_hpc.ckpt.interval import Intervals, daly_s, intervals, mtbf_s, young_s

DAY, HOUR = 86400.0, 3600.0
costs = some.floats(1e-4, 1e4)
durations = some.floats(1e-3, 1e5)
mtbfs = some.floats(60, 1e9)


def test_young_by_hand() -> None:
    assert young_s(5, 1000) == 100.0
    assert young_s(0.5, 3600) == 60.0


def test_daly_by_hand() -> None:
    """sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C."""
    assert daly_s(5, 1000) == pytest.approx(100 * (1 + 0.05 / 3 + 0.0025 / 9) - 5)
    assert daly_s(8, 16) == pytest.approx(16 * (1 + 0.5 / 3 + 0.25 / 9) - 8)
    assert daly_s(1e-4, 1e6) == pytest.approx(young_s(1e-4, 1e6), rel=1e-4)
    assert daly_s(1000, 100) == pytest.approx(100 * 8 / 9)
    assert daly_s(199.999999, 100) == pytest.approx(daly_s(200, 100), rel=1e-6), "no step"


@pytest.mark.parametrize(("cost", "mtbf"), [(1.0, 1000.0), (30.0, 3600.0), (300.0, 3600.0)])
def test_daly_loses_least(cost: float, mtbf: float) -> None:
    """Against Daly's own model of the time that a job takes, tried at every interval."""

    def lost(tau: float) -> float:
        return mtbf * math.expm1((tau + cost) / mtbf) / tau

    best = min((lost(tau), tau) for tau in (x * daly_s(cost, mtbf) / 100 for x in range(20, 400)))
    assert daly_s(cost, mtbf) == pytest.approx(best[1], rel=0.03)


def test_the_rate_of_failures() -> None:
    assert mtbf_s(1) == pytest.approx(264 * DAY), "nothing seen: as others have seen"
    assert 54 * DAY / mtbf_s(2048) == pytest.approx(419, rel=0.01)
    assert 1.5 < mtbf_s(1, 0, 264 * DAY) / (264 * DAY) < 4, (
        "as long without one: better than others, and not infinitely"
    )
    assert mtbf_s(1, 0, 1e12) < 264 * DAY * 20
    assert mtbf_s(1, 100, 100 * 10 * DAY) == pytest.approx(10 * DAY, rel=0.5), "in the end, what is seen"
    assert mtbf_s(1, 1000, 1000 * HOUR) == pytest.approx(HOUR, rel=0.7)
    once = mtbf_s(4, 1, 12 * HOUR)
    assert mtbf_s(4) / 100 < once < mtbf_s(4) / 3, "a failure after three hours of four nodes may be chance"
    assert HOUR / 3 < mtbf_s(4, 3, 12 * HOUR) < 3 * HOUR, "three in three hours are none"


def test_bayes_by_hand() -> None:
    """Two failures in five days of a node."""
    decades = [half / 2 for half in range(-2, 11)]
    prior = [30 ** -abs(decade) for decade in decades]
    middle = sum(p * 10**d for p, d in zip(prior, decades, strict=True)) / sum(prior)
    rates = [10**decade / middle / 264 for decade in decades]
    after = [p * rate**2 * math.exp(-rate * 5) for p, rate in zip(prior, rates, strict=True)]
    rate = sum(w * rate for w, rate in zip(after, rates, strict=True)) / sum(after)
    assert mtbf_s(3, 2, 5 * DAY) == pytest.approx(DAY / rate / 3)


def test_by_hand() -> None:
    assert (
        intervals(1.0, 3.0, 8 * HOUR).disk == pytest.approx(1 + daly_s(1.0, 8 * HOUR)) == pytest.approx(240, rel=0.01)
    )
    assert intervals(1.0, 600.0, 8 * HOUR) == Intervals(1200.0, 1200.0), "the disk takes ten minutes: half the time"
    assert intervals(1e-3, 0.1, HOUR).disk == interval.LEAST_S
    assert intervals(1.0, 3.0, 264 * DAY).disk == interval.MOST_S
    assert intervals(60.0, 90.0, 264 * DAY).disk == 6000.0, "half an hour would cost three per cent of the time"
    tiers = intervals(1.0, 100.0, 8 * HOUR, copied_s=2.0)
    assert tiers.memory == pytest.approx(1 + daly_s(1.0, 8 * HOUR / 0.9)), "what memory heals comes more rarely"
    assert tiers.disk == pytest.approx(1 + daly_s(1.0, 80 * HOUR))
    assert intervals(1.0, 100.0, 8 * HOUR, copied_s=60.0).memory == 600.0, "a tenth of the time on the network"
    assert intervals(1e-3, 0.1, 8 * HOUR, copied_s=0.1).memory == interval.LEAST_S
    often = intervals(10.0, 20.0, HOUR, copied_s=12.0)
    assert often.memory == pytest.approx(10 + daly_s(10.0, HOUR / 0.9)), "a hundredth is too little here: 17 minutes"
    assert intervals(1.0, 3.0, 8 * HOUR, 2.0, neighbours=False).disk == intervals(1.0, 3.0, 8 * HOUR).disk
    own = intervals(1.0, 600.0, 8 * HOUR, 2.0, neighbours=False)
    assert own == Intervals(pytest.approx(1 + daly_s(1.0, 16 * HOUR)), 1200.0), (
        "own memory helps where the disk is slow"
    )


@given(costs, durations, durations, mtbfs, some.booleans())
def test_saves_in_memory_cost_little(cost: float, durable: float, copied: float, mtbf: float, neighbours: bool) -> None:
    """A hundredth of the time at most, or no more than is spent without them."""
    alone = intervals(cost, durable, mtbf).disk
    found = intervals(cost, durable, mtbf, copied, neighbours)
    assert cost / found.memory <= max(interval.MOST_OVERHEAD, cost / alone) * (1 + 1e-9)
    if found.memory < found.disk:
        assert copied / found.memory <= interval.COPYING_SHARE * (1 + 1e-9)


@given(costs, durations, mtbfs, some.none() | durations)
def test_bounds(cost: float, durable: float, mtbf: float, copied: float | None) -> None:
    found = intervals(cost, durable, mtbf, copied)
    assert found.disk >= max(interval.LEAST_S, durable / interval.WRITING_SHARE)
    assert found.memory >= max(interval.LEAST_S, (copied or 0) / interval.COPYING_SHARE)
    assert found.memory <= found.disk
    slowest = max(durable / interval.WRITING_SHARE, (copied or 0) / interval.COPYING_SHARE)
    assert found.disk <= max(slowest, interval.MOST_S, cost / interval.MOST_OVERHEAD)


@given(costs, costs, durations, durations, mtbfs, mtbfs, some.none() | durations)
def test_monotonic(a: float, b: float, c: float, d: float, e: float, f: float, copied: float | None) -> None:
    (cheap, dear), (fast, slow), (often, rarely) = sorted((a, b)), sorted((c, d)), sorted((e, f))
    base = intervals(cheap, fast, often, copied)
    for other in (
        intervals(dear, fast, often, copied),
        intervals(cheap, slow, often, copied),
        intervals(cheap, fast, rarely, copied),
    ):
        for one, two in ((base.disk, other.disk), (base.memory, other.memory)):
            assert two >= one * (1 - 1e-9)


@given(some.integers(1, 10**5), some.integers(0, 1000), some.floats(0, 1e10))
def test_the_rate_is_monotonic(nodes: int, failures: int, node_seconds: float) -> None:
    here = mtbf_s(nodes, failures, node_seconds)
    assert here > 0
    assert mtbf_s(nodes, failures + 1, node_seconds) <= here * (1 + 1e-9)
    assert mtbf_s(nodes + 1, failures, node_seconds) < here
    assert mtbf_s(nodes, failures, node_seconds + 1e6) >= here * (1 - 1e-9)
