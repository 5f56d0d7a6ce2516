"""Slots: which one a save may have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.shm import Folder, Segment
from transom_hpc.ckpt.slots import Slots


@pytest.fixture
def slots(staging: Path, directory: Path) -> Iterator[Slots]:
    folder = Folder(staging, False, Files())
    folder.open()
    made = Slots(folder, directory, 0, 1, "A1", Files(), None, 1)
    yield made
    made.close()
    folder.close()


def test_no_more_than_two(slots: Slots) -> None:
    first, second = slots.take(1000)[0], slots.take(1000)[0]
    assert first is not None
    assert second is not None
    assert slots.take(1000) == (None, "")
    slots.give(first)
    assert slots.take(1000) == (first, "")
    slots.give(first)
    slots.give(second)


def whole(slots: Slots, step: int) -> Segment:
    segment, _ = slots.take(200_000)
    assert segment is not None
    segment.forget()
    segment.declare_whole(step, "A1", 100_000, slots.table((), ()))
    return segment


def test_the_newest_is_spared(slots: Slots) -> None:
    """Also where the other one is used or can't be had."""
    older, newer = whole(slots, 5), whole(slots, 6)
    slots.give(older)
    slots.give(newer)
    assert slots.take(200_000, sparing=True)[0] is older
    assert slots.take(200_000, sparing=True) == (None, "")
    slots.give(older)
    newer.forget()  # as a save that has failed leaves it
    assert slots.take(200_000, sparing=True)[0] is newer
    slots.give(newer)
    assert slots.take(200_000)[0] is older, "it was used longest ago"


def test_one_slot_is_none_to_spare(staging: Path, directory: Path) -> None:
    folder = Folder(staging, False, Files())
    folder.open()
    narrow = Slots(folder, directory, 0, 1, "A1", Files(), 300_000, 1)
    only = whole(narrow, 5)
    narrow.give(only)
    assert narrow.take(200_000, sparing=True)[0] is None
    assert narrow.take(200_000)[0] is only
    narrow.close()
    folder.close()


def test_the_one_that_was_begun_later_is_used_later(slots: Slots) -> None:
    older, newer = whole(slots, 5), whole(slots, 6)
    slots.give(newer)
    slots.give(older)
    assert slots.take(200_000)[0] is older


def test_one_that_is_being_made_ready_is_waited_for(slots: Slots) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slowly(_: object) -> None:
        begun.set()
        assert go_on.wait(10)

    preparing = threading.Thread(target=slots.prepare, args=(1000, slowly))
    preparing.start()
    assert begun.wait(10)
    other, _ = slots.take(1000)
    assert other is not None
    threading.Timer(0.2, go_on.set).start()
    segment, why = slots.take(1000)
    assert segment is not None, "a save would have been left out"
    assert why == ""
    assert go_on.is_set()
    preparing.join(10)
    slots.give(segment)
    slots.give(other)


def test_the_newest_that_an_earlier_program_left_is_overwritten_last(staging: Path, directory: Path) -> None:
    folder = Folder(staging, False, Files())
    folder.open()
    before = Slots(folder, directory, 0, 1, "A1", Files(), None, 1)
    for step in (7, 5):
        segment, _ = before.take(200_000)
        assert segment is not None
        segment.declare_whole(step, "A1", 100_000, before.table((), ()))
    (staging / f"{before.prefix}A1.0").rename(staging / f"{before.prefix}A1.copy")  # as another host gives it back
    after = Slots(folder, directory, 0, 1, "A2", Files(), None, 1)
    left = after.left()
    assert [item.step for item in left] == [7, 5]
    after.adopt(left)
    assert after.take(200_000)[0] is left[1].segment
    assert after.take(200_000)[0] is left[0].segment
    third = Slots(folder, directory, 0, 1, "A3", Files(), None, 1)
    assert [item.step for item in third.left()] == [7, 5], "as long as nothing is put there"
    after.close()
    folder.close()


def test_what_an_earlier_program_left_becomes_a_slot_as_it_is_mapped(staging: Path, directory: Path) -> None:
    folder = Folder(staging, False, Files())
    folder.open()
    before = Slots(folder, directory, 0, 1, "A1", Files(), None, 1)
    segment, _ = before.take(200_000)
    assert segment is not None
    segment.array(0, 100_000)[:] = 7
    segment.declare_whole(5, "A1", 100_000, before.table((), ()))
    after = Slots(folder, directory, 0, 1, "A2", Files(), None, 1)
    left = after.left()
    assert [item.step for item in left] == [5]
    after.adopt(left)
    taken, _ = after.take(200_000)
    assert taken is left[0].segment
    assert taken.path.exists()
    assert not segment.path.exists()
    taken.array(0, 100_000)[:] = 8
    assert taken.path.read_bytes().count(8) >= 100_000, "the name and the mapping are of two files"
    after.close()
    assert not list(staging.glob("*-rank-*"))
    folder.close()
