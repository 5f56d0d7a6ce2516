"""Every wait ends: with an answer, with a name, or with a deadline."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.meeting import Abandoned, FileMeeting, LeftOut, Overdue


class Standing:
    """A clock that only moves when someone sleeps, and lets something happen then."""

    def __init__(self) -> None:
        self.time = 0.0
        self.events: list[tuple[float, object]] = []

    def now(self) -> float:
        return self.time

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        while self.events and self.events[0][0] <= self.time:
            self.events.pop(0)[1]()  # type: ignore[operator]


def two(folder: Path, clock: Standing) -> tuple[FileMeeting, FileMeeting]:
    folder.mkdir()
    a, b = (
        FileMeeting(folder, rank, 2, Files(), clock, 10.0, "save of step 5", lambda: (folder.parent / "done").exists())
        for rank in (0, 1)
    )
    return a, b


def test_a_deadline_names_who_is_late(tmp_path: Path) -> None:
    clock = Standing()
    first, _ = two(tmp_path / "m", clock)
    first.tell("held", 1)
    with pytest.raises(Overdue, match="save of step 5: no 'held' from rank 1 within 10 s") as caught:
        first.hear_all("held")
    assert caught.value.ranks == [1]
    assert 10 <= clock.time < 11


def test_signs_of_life_put_the_deadline_off(tmp_path: Path) -> None:
    clock = Standing()
    first, second = two(tmp_path / "m", clock)
    first.tell("written", 1)
    clock.events = [(float(t), second.beat) for t in (8, 16, 24)] + [(30.0, lambda: second.tell("written", 2))]
    assert first.hear_all("written") == [1, 2]
    assert clock.time >= 30


def test_giving_up_is_heard_at_once(tmp_path: Path) -> None:
    clock = Standing()
    first, second = two(tmp_path / "m", clock)
    second.give_up("no space")
    with pytest.raises(Abandoned, match="rank 1 gave up: no space"):
        first.hear("held", 1)
    assert clock.time == 0


def test_left_out_is_no_failure(tmp_path: Path) -> None:
    first, second = two(tmp_path / "m", Standing())
    second.give_up("busy", left_out=True)
    with pytest.raises(LeftOut):
        first.hear("held", 1)


def test_the_end_of_the_meeting(tmp_path: Path) -> None:
    clock = Standing()
    _, second = two(tmp_path / "m", clock)
    clock.events = [(1.0, lambda: (tmp_path / "m").rename(tmp_path / "done"))]
    assert second.until_gone()
    (tmp_path / "done").rmdir()
    with pytest.raises(Abandoned, match="rank 0 gave up and cleaned up"):
        second.until_gone()


@pytest.mark.parametrize("after_s", [0.02, 0.3, 5.0, 100.0])
def test_an_answer_is_found_soon_and_with_few_looks(tmp_path: Path, after_s: float) -> None:
    class Counting(Files):
        looks = 0

        def names(self, path: Path) -> list[str]:
            self.looks += 1
            return super().names(path)

    (tmp_path / "m").mkdir()
    clock, files = Standing(), Counting()
    first, second = (FileMeeting(tmp_path / "m", rank, 2, files, clock, 200.0, "") for rank in (0, 1))
    clock.events = [(after_s, lambda: second.tell("held", 1))]
    assert first.hear("held", 1) == 1
    assert clock.time - after_s <= max(0.0011, min(0.09 * after_s, 0.051))
    assert files.looks <= 60 + after_s / 0.05
