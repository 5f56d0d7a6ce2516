"""When saves come, where nobody said how many steps apart."""

from __future__ import annotations

import json
import logging
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import Checkpointer, interval
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.pace import RECORD, Learned, Pace

HOUR = 3600.0


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now(self) -> float:
        return self.seconds

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc)

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock() -> Time:
    return Time()


def new(path: Path, clock: Time, mtbf: float = 8 * HOUR) -> Pace:
    return Pace(path, mtbf, Files(), clock)


def test_the_first_save_comes_early_and_the_others_as_was_measured(tmp_path: Path, clock: Time) -> None:
    pace = new(tmp_path, clock)
    assert not pace.due(False)
    clock.sleep(interval.LEAST_S)
    assert pace.due(False)
    assert not pace.due(True), "the one before is on its way"
    pace.begun()
    assert not pace.due(False)
    pace.ended(1.0, 3.0)
    expected = interval.intervals(1.0, 3.0, 8 * HOUR).disk
    clock.sleep(expected - 1)
    assert not pace.due(False)
    clock.sleep(1.1)
    assert pace.due(False)
    pace.rest(True)
    assert not pace.due(False), "restored: nothing could be lost"


def test_between_saves_that_are_written_come_some_that_are_not(tmp_path: Path, clock: Time) -> None:
    pace = new(tmp_path, clock)
    clock.sleep(interval.LEAST_S)
    assert not pace.due_in_memory(), "the first one is written"
    pace.begun()
    pace.ended(0.01, 30.0)
    assert not pace.due_in_memory()
    clock.sleep(interval.LEAST_S)
    assert pace.due_in_memory(), "early, to be measured"
    pace.begun_in_memory()
    assert not pace.due_in_memory()
    pace.copied(0.01, 0.5, True)
    expected = interval.intervals(0.01, 30.0, 8 * HOUR, 0.5, True)
    assert (pace.memory_s, pace.interval_s) == (expected.memory, expected.disk)
    assert expected.memory < expected.disk / 2
    times, until = [], clock.now() + 2 * expected.disk
    last = clock.now()
    while clock.now() < until:
        if pace.due(False):
            pace.begun()
            times.append(("written", clock.now() - last))
        elif pace.due_in_memory():
            pace.begun_in_memory()
            times.append(("kept", clock.now() - last))
        else:
            clock.sleep(0.5)
            continue
        last = clock.now()
    assert [kind for kind, _ in times].count("written") == 2
    assert [after for kind, after in times if kind == "kept"] == pytest.approx(
        [expected.memory] * (len(times) - 2), abs=1
    )
    assert len(times) >= 5
    pace.begun()
    clock.sleep(expected.disk - expected.memory / 2 - 1)
    assert pace.due_in_memory()
    clock.sleep(2)
    assert not pace.due_in_memory(), "one that is written is due soon"
    again = new(tmp_path, clock)
    assert (again.learned, again.memory_s) == (pace.learned, pace.memory_s)


def test_files_are_not_rarer_for_the_sake_of_memory_that_there_is_not(tmp_path: Path, clock: Time) -> None:
    """Another rank has no room, or there are no neighbours any more."""
    pace = new(tmp_path, clock)
    pace.ended(1.0, 3.0)
    alone = pace.interval_s
    pace.copied(1.0, 1.0, True)
    rarer = pace.interval_s
    assert rarer > 2 * alone
    pace.ended(1.0, 3.0)
    pace.ended(1.0, 3.0)
    assert pace.interval_s == rarer
    pace.ended(1.0, 3.0)
    assert pace.interval_s == alone
    pace.copied(1.0, 1.0, True)
    assert pace.interval_s == rarer
    pace.copied(1.0, 1.0, False)
    assert pace.interval_s == alone


def test_what_was_restored_from_memory_only_is_written_at_once(tmp_path: Path, clock: Time) -> None:
    """So that faults that come again and again are counted from where the run has come to."""
    pace = new(tmp_path, clock)
    pace.ended(0.01, 30.0)
    pace.rest(True)
    assert not pace.due(False)
    pace.rest(False)
    assert pace.due(False)
    assert not pace.due_in_memory()
    pace.begun()
    assert not pace.due(False)


def test_it_adapts(tmp_path: Path, clock: Time) -> None:
    pace, fragile = new(tmp_path, clock), new(tmp_path, clock, HOUR)
    for one in (pace, fragile):
        one.ended(1.0, 3.0)
    assert fragile.interval_s < pace.interval_s, "frequent failures: shorter"
    before = pace.interval_s
    pace.ended(1.0, 2000.0)
    assert pace.interval_s == 4000.0, "a slow disk: longer, at once"
    intervals = [pace.interval_s]
    for _ in range(20):
        pace.ended(1.0, 3.0)
        intervals.append(pace.interval_s)
    assert intervals == sorted(intervals, reverse=True), "a fast one again: shorter, by and by"
    assert intervals[1] > before
    assert intervals[-1] == pytest.approx(before, rel=0.01)
    for _ in range(20):
        pace.ended(9.0, 10.0)
    assert pace.interval_s == pytest.approx(interval.intervals(9.0, 10.0, 8 * HOUR).disk, rel=0.01)


def test_what_was_learned_is_kept(tmp_path: Path, clock: Time) -> None:
    pace = new(tmp_path, clock)
    pace.ended(2.0, 30.0)
    facts = json.loads((tmp_path / RECORD).read_text())
    assert (facts["cost_s"], facts["durable_s"], facts["when"][:4]) == (2.0, 30.0, "2026")
    again = new(tmp_path, clock)
    assert again.learned == Learned(2.0, 30.0)
    assert again.interval_s == pace.interval_s
    clock.sleep(interval.LEAST_S)
    assert not again.due(False), "a restarted program does not begin with a guess"
    for broken in (
        "",
        "{}",
        '{"cost_s": -1, "durable_s": 2}',
        '{"cost_s": "x", "durable_s": 2}',
        "[]",
        '{"cost_s": 1, "durable_s": 2, "copied_s": -1}',
    ):
        (tmp_path / RECORD).write_text(broken)
        assert new(tmp_path, clock).learned is None


def test_a_record_that_cannot_be_written_costs_nothing(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "publish", full)
    pace = new(tmp_path, clock)
    with caplog.at_level(logging.INFO, "transom_hpc.ckpt"):
        pace.ended(1.0, 3.0)
        pace.ended(1.0, 3.0)
    assert pace.learned == Learned(1.0, 3.0)
    assert "could not be kept" in caplog.text
    assert caplog.text.count("saves are 240 s apart from now on") == 1


class Slow(Files):
    """A disk on which each save takes so long."""

    seconds = 0.0

    def fsync(self, fd: int) -> None:
        time.sleep(self.seconds)
        super().fsync(fd)


def test_a_slow_disk_is_left_in_peace(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of 5 ms, saves as often as possible, and a disk that gets slow."""
    monkeypatch.setattr(interval, "LEAST_S", 0.05)
    monkeypatch.setattr(interval, "MOST_S", 0.05)
    files = Slow()
    state = {"x": np.zeros(100)}
    with Checkpointer(directory, every="auto", keep=99, files=files) as checkpointer:
        step, over = 0, time.monotonic() + 20
        while (quick := len(list(directory.glob("step-*")))) < 3 and time.monotonic() < over:
            time.sleep(0.005)
            step += 1
            checkpointer.step(step, state)
        assert quick == 3
        files.seconds = 0.2
        over = time.monotonic() + 1.5
        while time.monotonic() < over:
            time.sleep(0.005)
            step += 1
            checkpointer.step(step, state)
        learned = checkpointer._pace
        assert learned is not None
        assert learned.learned is not None
        assert learned.learned.durable_s > 0.4, "it syncs at least twice"
        assert learned.interval_s > 0.8
        checkpointer.wait()
        assert len(list(directory.glob("step-*"))) - quick <= 4, "and not the thirty that there was time for"
    assert json.loads((directory / RECORD).read_text())["durable_s"] > 0.4


def test_the_cost_is_what_the_program_waits(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interval, "LEAST_S", 0.0)
    with Checkpointer(directory, every="auto") as checkpointer:
        took = []
        told: list[tuple[float, float]] = []
        assert checkpointer._pace is not None
        monkeypatch.setattr(checkpointer._pace, "ended", lambda *facts: told.append(facts))
        begin = checkpointer._saver.begin

        def slow(*facts: Any) -> Any:
            time.sleep(0.1)
            return begin(*facts)

        monkeypatch.setattr(checkpointer._saver, "begin", slow)
        for step in (1, 2):
            before = time.monotonic()
            checkpointer.step(step, {"x": np.zeros(100)})
            took.append(time.monotonic() - before)
            checkpointer.wait()
    (cost, durable), *_ = told
    assert 0.1 <= cost <= took[0]
    assert durable > 0


def test_arguments(directory: Path) -> None:
    for every in (0, "often", 1.5, None):
        with pytest.raises(UsageError, match="at least 1, or 'auto'"):
            Checkpointer(directory, every=every)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes ranks that agree"):
        Checkpointer(directory, 0, 2, every="auto", attempt="A1")
    with pytest.raises(UsageError, match="mtbf_s=0"):
        Checkpointer(directory, every="auto", mtbf_s=0)
