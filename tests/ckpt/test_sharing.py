"""Ranks of a host that read together: each block once; and whoever is let down reads by itself, and right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from transom_hpc.ckpt import portions, sharing
from transom_hpc.ckpt.board import SKIPPED, Board
from transom_hpc.ckpt.fetch import Fault, FileTier, Load, Put, as_room, fetch
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry, blocks
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.sharing import Company, Sharing

SHAPE = (3000, 2000)


@pytest.fixture
def matrix(tmp_path: Path) -> np.ndarray[Any, Any]:
    """48 MB in a file."""
    made = np.random.default_rng(5).random(SHAPE)
    (tmp_path / "data").write_bytes(made.tobytes())
    return made


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    folder = Path("/dev/shm") / f"transom-test-sharing-{tmp_path.name}"
    folder.mkdir()
    yield folder
    left = [path.name for path in folder.iterdir()]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert left == []


def stored(matrix: np.ndarray[Any, Any]) -> Stored:
    data = matrix.tobytes()
    sums = tuple(xxhash.xxh3_128_hexdigest(data[a:b]) for a, b in blocks(len(data)))
    return Stored(Entry("tensors/u", "numpy:<f8", SHAPE, SHAPE, (0, 0), len(data), sums), None, "/u", "data", 0)


class Reader:
    """One rank, which wants some columns."""

    def __init__(self, item: Stored, folder: Path, shm: Path, rank: int, count: int, allow: bool = True) -> None:
        self.company = Company(shm, "g", "t", rank, tuple(range(count)))
        self.sharing = Sharing(self.company, Files(), lambda _: allow)
        self.item, self.folder = item, folder
        width = SHAPE[1] // count
        self.place = (0, rank * width), (SHAPE[0], width)
        self.room = np.zeros(self.place[1])
        self.read = 0
        self.faults: list[Fault] | None = None

    def load(self) -> Load:
        memory = self.room.reshape(-1).view(np.uint8).data
        put = Put(self.item.entry, self.place, as_room(memory, self.place[1], 8), self.place[0])
        return Load(self.item, range(len(self.item.entry.sums)), [put])

    def run(self) -> None:
        with FileTier(Files(), self.folder, ["data"]) as tier:
            self.faults = self.sharing.fetch(tier, [self.load()], [self.item])
            if self.faults is None:
                self.faults = fetch(tier, [self.load()])
            self.read = tier.read_bytes

    def right(self, matrix: np.ndarray[Any, Any]) -> bool:
        return bool(np.array_equal(self.room, matrix[:, self.place[0][1] :][:, : self.place[1][1]]))


def together(*work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=job) for job in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_host_reads_once(matrix: Any, tmp_path: Path, shm: Path) -> None:
    readers = [Reader(stored(matrix), tmp_path, shm, rank, 4) for rank in range(4)]
    together(*(reader.run for reader in readers))
    assert all(reader.faults == [] and reader.right(matrix) for reader in readers)
    assert sum(reader.read for reader in readers) == matrix.nbytes
    assert all(reader.read <= matrix.nbytes / 4 + (8 << 20) for reader in readers)
    assert all(reader.read + reader.sharing.handed_bytes == matrix.nbytes for reader in readers)
    memory = sum(path.stat().st_size for path in shm.iterdir())
    assert memory < 4 * (sharing.SLOTS * (8 << 20) + (1 << 16)), "bounded, whatever is read"
    for reader in readers:
        reader.sharing.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "SILENT_S", 0.5)


@pytest.mark.usefixtures("hasty")
def test_nobody_there(matrix: Any, tmp_path: Path, shm: Path) -> None:
    reader = Reader(stored(matrix), tmp_path, shm, 0, 2)
    reader.run()
    assert reader.faults == []
    assert reader.right(matrix)
    assert reader.read == matrix.nbytes
    reader.sharing.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("then", ["nothing", "board", "leaves"])
def test_a_partner_that_dies(
    matrix: Any, tmp_path: Path, shm: Path, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has said what it needs, and perhaps made its board; for one that says so nobody waits."""
    if then == "leaves":
        monkeypatch.setattr(sharing, "SILENT_S", 60.0)
    reader, other = (Reader(stored(matrix), tmp_path, shm, rank, 2) for rank in range(2))

    def dies() -> None:
        load = other.load()
        other.sharing.tell({0: portions.ranges(load.blocks)})
        if then != "nothing":
            assert other.sharing._hear() is not None
            other.sharing._meet(*shape(reader), {0, 1})
            if then == "leaves" and other.sharing._mine is not None:
                other.sharing._mine.leave()

    began = time.monotonic()
    together(reader.run, dies)
    assert time.monotonic() - began < 20
    assert reader.faults == []
    assert reader.right(matrix)
    assert reader.read == matrix.nbytes
    for one in (reader, other):
        one.sharing.close()


def shape(reader: Reader) -> tuple[int, int]:
    """How many portions there are, and the room for one."""
    needs = {0: portions.ranges(reader.load().blocks)}
    cut = portions.portions({0: needs, 1: needs}, {0: reader.item.entry.nbytes}, {0, 1})
    return len(cut), 8 << 20


@pytest.mark.usefixtures("hasty")
def test_what_is_handed_on_spoilt_is_read_again(matrix: Any, tmp_path: Path, shm: Path) -> None:
    reader, other = (Reader(stored(matrix), tmp_path, shm, rank, 2) for rank in range(2))

    def spoils() -> None:
        other.sharing.tell({0: portions.ranges(other.load().blocks)})
        assert other.sharing._hear() is not None
        count, room = shape(reader)
        other.sharing._meet(count, room, {0, 1})
        board = other.sharing._mine
        assert board is not None
        for number in range(count):
            board.publish(number, number % 3 if number % 4 else SKIPPED)
            board.take(number)

    together(reader.run, spoils)
    assert reader.faults == []
    assert reader.right(matrix)
    assert reader.read == matrix.nbytes
    assert reader.sharing.handed_bytes == 0
    for one in (reader, other):
        one.sharing.close()


@pytest.mark.parametrize("allowed", [(False, False), (True, False)])
def test_without_room_to_hand_on(matrix: Any, tmp_path: Path, shm: Path, allowed: tuple[bool, bool]) -> None:
    readers = [Reader(stored(matrix), tmp_path, shm, rank, 2, allow) for rank, allow in enumerate(allowed)]
    together(*(reader.run for reader in readers))
    assert all(reader.faults == [] and reader.right(matrix) for reader in readers)
    assert [reader.read for reader in readers] == [matrix.nbytes, 0 if any(allowed) else matrix.nbytes]
    for reader in readers:
        reader.sharing.close()


def test_a_damaged_file_is_noticed_by_all_that_need_it(matrix: Any, tmp_path: Path, shm: Path) -> None:
    with (tmp_path / "data").open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"spoilt")
    readers = [Reader(stored(matrix), tmp_path, shm, rank, 3) for rank in range(3)]
    together(*(reader.run for reader in readers))
    for reader in readers:
        assert [fault.what for fault in reader.faults or []] == ["the bytes have changed"]
        reader.sharing.close()


def test_one_that_takes_no_part(matrix: Any, tmp_path: Path, shm: Path) -> None:
    readers = [Reader(stored(matrix), tmp_path, shm, rank, 3) for rank in range(3)]
    readers[1].sharing.tell({})
    together(readers[0].run, readers[2].run)
    assert readers[0].read + readers[2].read == matrix.nbytes
    assert readers[0].right(matrix)
    assert readers[2].right(matrix)
    for reader in readers:
        reader.sharing.close()


def test_what_was_left_behind_goes(shm: Path, tmp_path: Path, matrix: Any) -> None:
    """By a program that was killed while it read."""
    for name in (".g.board-12-old-00001", ".g.needs-old-00001", ".g.board-12-old-00001.tmp"):
        (shm / name).touch()
    Reader(stored(matrix), tmp_path, shm, 1, 2).sharing.close()
    assert list(shm.iterdir()) == []


def test_a_board_of_another_size(shm: Path) -> None:
    board = Board(shm / "b", 100, 8192, Files())
    board.make(4)
    other = Board(shm / "b", 100, 8192, Files())
    other.open()
    board.publish(7, 3)
    board.publish(8, SKIPPED)
    board.slot(3)[:2] = b"xy"
    assert [other.published(number) for number in (6, 7, 8)] == [None, 3, SKIPPED]
    assert bytes(other.slot(3)[:2]) == b"xy"
    with pytest.raises(ValueError, match="no slot 4"):
        other.slot(4)
    with pytest.raises(ValueError, match="no board"):
        Board(shm / "b", 1 << 20, 8192, Files()).open()
    with pytest.raises(OSError, match="reserve|space"):
        Board(shm / "c", 1, 1 << 44, Files()).make(4)
    (shm / "b").unlink()
