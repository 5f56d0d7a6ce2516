"""Where copies of other hosts' segments are put: never over the newest that is whole, never without memory for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from transom_hpc.ckpt import cargo, copies
from transom_hpc.ckpt.cargo import Held, Spoilt
from transom_hpc.ckpt.copies import Copies
from transom_hpc.ckpt.exchange import Strips, cut
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.replicas import Item
from transom_hpc.ckpt.shm import Folder, Segment
from transom_hpc.ckpt.slots import Left, Slots, read_left
from transom_hpc.ckpt.staging import Staged
from transom_hpc.ckpt.state import Leaf

SIZE = 100_000


class Origin:
    """Another host, with a rank."""

    def __init__(self, folder: Path, directory: Path, rank: int) -> None:
        folder.mkdir(mode=0o700)
        self.folder = Folder(folder, False, Files())
        self.folder.open()
        self.slots = Slots(self.folder, directory, rank, 2, "A1", Files(), None, 1)
        self.rank = rank

    def save(self, step: int, attempt: str = "A1") -> Left:
        """Stage a state, and what is then in memory."""
        arrays = {"tensors/same": np.full(SIZE, step, "u1"), "tensors/own": np.full(SIZE, 100 * self.rank + step, "u1")}
        leaves = [Leaf(name, array, "numpy:|u1", array.shape, array.nbytes) for name, array in arrays.items()]
        segment, _ = self.slots.take(4 * SIZE)
        assert segment is not None
        staged = Staged(
            leaves, segment, step, lambda e, p, u: segment.declare_whole(step, attempt, u, self.slots.table(e, p))
        )
        staged.begin()
        staged.background()
        staged.settled()
        self.slots.give(segment)
        left = read_left(Segment(segment.path, Files()))
        assert left is not None
        return left


@pytest.fixture
def origin(staging: Path, directory: Path) -> Iterator[Origin]:
    found = Origin(staging / ".origin", directory, 1)
    yield found
    found.slots.close()
    found.folder.close()
    for path in (staging / ".origin").iterdir():
        path.unlink()
    (staging / ".origin").rmdir()


@pytest.fixture
def here(staging: Path) -> Iterator[Path]:
    folder = staging / ".here"
    folder.mkdir(mode=0o700)
    (folder / ".lives").touch()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def send(
    left: Left, kept: Copies, purpose: str = "copy", spoil: Callable[[Segment], None] | None = None, pieces: int = 99
) -> str:
    """Bring a segment there, without a network.

    Returns:
        Why it was not taken; empty where it was.
    """
    held = Held(left)
    intake = kept.accept(held.facts(purpose))
    if isinstance(intake, str):
        return intake or "it is here"
    assert isinstance(intake, cargo.Arriving)
    wanted: list[tuple[int, int]] = []

    def ready(strips: Strips) -> None:
        wanted.extend(strips)
        for begin, end in cut(strips)[:pieces]:
            intake.room(begin, end)[:] = held.piece(begin, end)
        if spoil is not None:
            assert intake._segment is not None
            spoil(intake._segment)

    def until(place: int) -> None:
        if pieces < len(wanted) and place > wanted[pieces][0]:
            raise RuntimeError("the rest does not come")

    try:
        intake.take_in(ready, until)
    except Exception as error:
        return str(error)
    return ""


def there(kept: Copies) -> list[int]:
    return sorted(item.step for item in kept.inventory() if item.copy)


def test_two_at_most_and_the_newest_stays(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", None, 0, Files())
    for step, whole in ((1, [1]), (2, [1, 2]), (3, [2, 3]), (4, [3, 4])):
        assert send(origin.save(step), kept) == ""
        assert there(kept) == whole
    again = origin.save(5)
    assert send(again, kept, pieces=1) == "the rest does not come"
    assert there(kept) == [4], "the one before stays until the new one is whole"
    assert len(list(here.glob("copy.*"))) == 1, "bytes that come late meet nothing"
    assert send(again, kept, spoil=lambda segment: segment.array(5, 6).fill(77)).endswith("is not what its sum says")
    assert there(kept) == [4]
    assert send(again, kept) == ""
    assert there(kept) == [4, 5]
    assert send(again, kept) == "it is here"


def test_a_later_attempt_is_newer_though_its_step_is_not(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", None, 0, Files())
    for step, attempt in ((7, "A1"), (8, "A1"), (5, "A2"), (6, "A2")):
        assert send(origin.save(step, attempt), kept) == ""
    assert there(kept) == [5, 6]


def test_another_server_finds_them(origin: Origin, here: Path) -> None:
    send(origin.save(1), Copies(here, "h", None, 0, Files()))
    (item,) = Copies(here, "h2", None, 0, Files()).inventory()
    assert (item.host, item.rank, item.world_size, item.step, item.attempt, item.copy) == ("h2", 1, 2, 1, "A1", True)


def test_memory_is_asked_for_first(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", 300_000, 0, Files())
    assert send(origin.save(1), kept) == ""
    assert send(origin.save(2), kept) == "it takes 0 MB of memory and 0 MB may be used for copies"
    assert there(kept) == [1]
    assert len(list(here.glob("copy.*"))) == 1
    assert send(origin.save(2), Copies(here, "h", None, 10**12, Files())).startswith("it takes"), "its own ranks' slots"


def test_a_folder_that_was_given_back_does_not_come_back(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", None, 0, Files())
    (here / ".lives").unlink()
    assert send(origin.save(1), kept) == "this host leaves"
    assert list(here.iterdir()) == []


def test_what_is_here_already_is_not_sent(origin: Origin, here: Path, directory: Path) -> None:
    """Replicas of a model: this host's own rank has saved the same."""
    kept = Copies(here, "h", None, 1, Files())
    mine = Origin(here / ".own", directory, 0)
    own = mine.save(3)
    (here / own.segment.path.name).write_bytes(own.segment.path.read_bytes())
    left = origin.save(3)
    held = Held(left)
    intake = kept.accept(held.facts("copy"))
    assert isinstance(intake, cargo.Arriving)
    wanted: list[tuple[int, int]] = []

    def ready(strips: Strips) -> None:
        wanted.extend(strips)
        for begin, end in strips:
            intake.room(begin, end)[:] = held.piece(begin, end)

    intake.take_in(ready, lambda _: None)
    assert sum(end - begin for begin, end in wanted) == SIZE, "its own"
    (item,) = [item for item in kept.inventory() if item.copy]
    found = kept.find(item.name, 3, "A1")
    assert found is not None
    cargo.compare(found)
    mine.slots.close()
    mine.folder.close()
    for path in (here / ".own").iterdir():
        path.unlink()
    (here / ".own").rmdir()


def test_a_replica_that_never_comes_is_not_waited_for_long(
    origin: Origin, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEND_S", 0.1)
    assert send(origin.save(1), Copies(here, "h", None, 1, Files())) == ""


def test_given_back(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", None, 0, Files())
    send(origin.save(1), kept)
    (item,) = kept.inventory()
    kept.give_back(item)
    (now,) = kept.inventory()
    assert (now.copy, now.step, now.name) == (False, 1, f"{item.whose}A1.copy")
    assert send(origin.save(1), kept, "return") == "it is here"
    with pytest.raises(Spoilt, match="is not whole any more"):
        kept.give_back(item)


def test_a_spoilt_copy_is_not_given_back(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", None, 0, Files())
    send(origin.save(1), kept)
    (item,) = kept.inventory()
    left = kept.find(item.name, 1, "A1")
    assert left is not None
    left.segment.array(SIZE + 3 * 4096, SIZE + 3 * 4096 + 1)[:] ^= 1
    with pytest.raises(Spoilt, match="is not what its sum says"):
        kept.give_back(item)
    assert kept.inventory() == []


def test_what_another_host_gives_back(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", None, 1, Files())
    assert send(origin.save(4), kept, "return") == ""
    (item,) = kept.inventory()
    assert (item.copy, item.name) == (False, f"{item.whose}A1.copy")


@pytest.mark.parametrize("fault", ["name", "attempt", "places", "used", "whose", "no json"])
def test_offers_that_are_none(origin: Origin, here: Path, fault: str) -> None:
    facts = dict(Held(origin.save(1)).facts("copy"))
    table = json.loads(facts["table"])
    match fault:
        case "name":
            facts["whose"] = "../x"
        case "attempt":
            facts["attempt"] = "../x"
        case "places":
            table["places"][0] = -5
        case "used":
            facts["used"] = 4096
        case "whose":
            table["whose"] = "0000aaaa-rank-00000."
    facts["table"] = "{" if fault == "no json" else json.dumps(table)
    kept = Copies(here, "h", None, 0, Files())
    answer = kept.accept(facts)
    assert isinstance(answer, str)
    assert answer
    assert list(here.glob("copy*")) == []


def test_what_nobody_needs_goes(origin: Origin, here: Path) -> None:
    kept = Copies(here, "h", None, 0, Files())
    send(origin.save(1), kept)
    (item,) = kept.inventory()
    kept.tidy([])
    assert there(kept) == [1], "nothing newer is safe"
    kept.newest[item.group] = 2
    kept.tidy([item.whose])
    assert there(kept) == [1], "it is to be kept"
    kept.tidy([])
    assert there(kept) == []


def test_a_source_that_is_used_anew_does_not_last(origin: Origin) -> None:
    held = Held(origin.save(1))
    assert held.lasts()
    origin.save(2)
    assert held.lasts(), "the other slot"
    origin.save(3)
    assert not held.lasts()


def test_items_are_plain() -> None:
    made = Item("h", "n", "0000aaaa-rank-00001.", 1, 2, 3, "A1", False)
    assert made.group == "0000aaaa"
