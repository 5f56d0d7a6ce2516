"""What the benchmark makes of its measurements."""

from __future__ import annotations

import json
import statistics

import pytest
from checkpointing.figures import Bar, Figure, difference_ratio, figure, from_json, growth, noise, ratios, table


def test_a_figure_is_the_median_of_its_pairs() -> None:
    found = figure("part", "name", ratios([2.0, 9.0, 4.0], [1.0, 1.0, 1.0]), "x")
    assert (found.value, found.low, found.high, found.pairs) == (4.0, 2.0, 9.0, 3)


@pytest.mark.parametrize(
    ("bar", "value", "met"),
    [(Bar(20), 20.0, True), (Bar(20), 19.9, False), (Bar(1, False), 1.0, True), (Bar(1, False), 1.1, False)],
)
def test_bars(bar: Bar, value: float, met: bool) -> None:
    assert bar.met(value) is met
    assert figure("p", "n", [value], "", bar).to_json()["met"] is met


def test_what_is_lost_in_the_noise_makes_no_ratio_look_good() -> None:
    sunk = difference_ratio("p", "n", [0.5, 0.6, 0.7], [0.001, -0.002, 0.0], floor=0.1)
    assert sunk.value == pytest.approx(6)
    clear = difference_ratio("p", "n", [0.5, 0.6, 0.7], [0.3, 0.2, 0.4], floor=0.1)
    assert clear.value == pytest.approx(2)


def test_noise_has_no_sign() -> None:
    assert noise([-3.0, 1.0, 2.0]) == 2.0


def test_growth_is_steady() -> None:
    assert growth([100.0 + 4 * i for i in range(50)]) == pytest.approx([4] * 5)
    leak = growth([100.0 + 4096 * (i // 4) for i in range(50)])
    assert statistics.median(leak) > 500


def test_one_step_is_no_growth() -> None:
    assert statistics.median(growth([100.0 + 100_000 * (i > 23) for i in range(50)])) == 0


def test_json_goes_there_and_back() -> None:
    found = [
        figure("a part, of it", "n: 1", [1.0, 2.0], "x", Bar(3, False), "disk 3 GB/s"),
        figure("b", "n", [1.0], ""),
    ]
    held = json.loads(json.dumps([item.to_json() for item in found]))
    assert [from_json(item) for item in held] == found
    assert set(held[0]) >= {"name", "value", "unit", "bar", "at_least", "limit", "pairs", "spread"}


def test_the_table_says_what_was_missed_and_fits() -> None:
    long = "DCP async_save, thread stager, process (best) / ours"
    found = [
        figure("stall", "ours", [1234.5, 2345.6], "ms", None, "copy 11.2 GB/s"),
        figure("stall", long[:48], [0.0001234], "x", Bar(100), "copy 11.2 GB/s"),
        Figure("memory", "growth", -0.5, "kB", Bar(0, False), "", 1, -0.5, -0.5),
    ]
    shown = table(found)
    assert max(map(len, shown.splitlines())) <= 100
    assert "stall (limit: copy 11.2 GB/s)" in shown
    assert shown.count("MISSED") == 1
    assert "met" in next(line for line in shown.splitlines() if "growth" in line)
