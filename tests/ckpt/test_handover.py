"""What a program waits for when other hosts have its state in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from transom_hpc.ckpt import Checkpointer, handover, orders
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.handover import GATHER_S, GATHERING, Handover
from transom_hpc.ckpt.orders import Rank, Signs
from transom_hpc.ckpt.shm import Folder


class Clock:
    """Time of which each look takes some."""

    def __init__(self) -> None:
        self.time = 0.0
        self.looked: Callable[[], None] = lambda: None

    def now(self) -> float:
        self.time += 0.25
        self.looked()
        return self.time

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc)

    def sleep(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def waiting(staging: Path, directory: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Handover]:
    monkeypatch.setattr(handover.Bell, "wait", lambda *_: False)  # time is the clock's
    folder = Folder(staging, False, Files())
    folder.open()
    yield Handover(folder, Rank(directory, 0, 2, "A0001-L02", "p."), Files(), clock)
    folder.close()


def test_it_is_over(waiting: Handover, staging: Path, clock: Clock) -> None:
    orders.sign(staging, Signs("A0001-L02", True, 3), Files())
    assert waiting.until_gathered("A0001-L02")
    assert clock.time == 0


def test_as_long_as_something_moves(waiting: Handover, staging: Path, clock: Clock) -> None:
    orders.sign(staging, Signs("A0001-L01", True), Files())  # of the launch before

    def move() -> None:
        if clock.time < 3 * GATHER_S:
            orders.sign(staging, Signs("A0001-L02", False, int(clock.time)), Files())
        else:
            orders.sign(staging, Signs("A0001-L02", True, 9), Files())

    clock.looked = move
    assert waiting.until_gathered("A0001-L02")
    assert clock.time >= 3 * GATHER_S


@pytest.mark.parametrize("there", [None, Signs("A0001-L01", True, 5), Signs("A0001-L02", False, 5)])
def test_not_for_ever(waiting: Handover, staging: Path, clock: Clock, there: Signs | None) -> None:
    """No server comes, or it stops: nothing is brought any more, so that nothing comes into what is being used."""
    if there is not None:
        orders.sign(staging, there, Files())
    assert not waiting.until_gathered("A0001-L02")
    assert GATHER_S < clock.time < GATHER_S * 2 + 2
    assert orders.signs(staging, Files()) == Signs("A0001-L02", True, 0)


def test_without_a_launcher_there_is_nothing_to_wait_for(
    directory: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Handover, "until_gathered", lambda _, launch: told.append(launch))
    with Checkpointer(directory, attempt="A1", shm=staging) as ckpt:
        assert ckpt.restore({"n": 0}) == 0
        assert told == []
        monkeypatch.setenv(GATHERING, "A0001-L02")
        ckpt.restore({"n": 0})
        assert told == ["A0001-L02"]
    assert not (staging / ".restored").exists()
    (staging / orders.GATHERED).unlink(missing_ok=True)


def test_the_launcher_hears_where_the_state_came_from(
    directory: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSOM_ATTEMPT", "A0001-L01")
    with Checkpointer(directory, attempt="A0001-L01", shm=staging) as ckpt:
        ckpt.save(3, {"n": 3}, block=True)
        assert ckpt.restore({"n": 0}) == 3
        assert (staging / ".restored").read_text() == '{"step": 3, "source": "step-000000003"}'
