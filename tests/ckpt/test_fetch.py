"""Elements of stored parts get where they belong, each block read once, and no byte that was changed goes unnoticed."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt import dtypes, fetch, reads
from transom_hpc.ckpt.fetch import FileTier, Load, Put, as_room
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry, blocks
from transom_hpc.ckpt.manifest import Stored


def part(start: tuple[int, ...], shape: tuple[int, ...], of: tuple[int, ...], dtype: str, data: bytes) -> Entry:
    sums = tuple(xxhash.xxh3_128_hexdigest(data[a:b]) for a, b in blocks(len(data)))
    return Entry("tensors/u", dtype, shape, of, start, len(data), sums)


DTYPES = ["bool", "bfloat16", "float32", "numpy:<c16", "raw:'|S5'", "raw:[('a', '<i2'), ('b', '<f8')]"]


@given(st.lists(st.integers(1, 9), max_size=3), st.sampled_from(DTYPES), st.data())
def test_elements_from_any_box_to_any_other(shape: list[int], dtype: str, data: st.DataObject) -> None:
    """Given in pieces that begin and end anywhere."""

    def box() -> tuple[tuple[int, ...], tuple[int, ...]]:
        start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        return start, tuple(data.draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True))

    def within(place: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(*place, strict=True))

    width = dtypes.numpy_dtype(dtype).itemsize
    whole = np.random.default_rng(3).integers(1, 255, (*shape, width), np.uint8)
    stored, wanted = box(), box()
    raw = whole[within(stored)].tobytes()
    entry = part(*stored, tuple(shape), dtype, raw)
    room = np.zeros(math.prod(wanted[1]) * width, np.uint8)
    cover = reads.Parts([stored]).cover(*wanted)
    right = np.zeros_like(whole)
    step = width if width in (1, 2, 4, 8, 16) else 1  # blocks of other types cut elements in two
    for take in cover.takes:
        put = Put(entry, (take.start, take.shape), as_room(room.data, wanted[1], width), wanted[0])
        right[within((take.start, take.shape))] = whole[within((take.start, take.shape))]
        at = 0
        while at < len(raw):
            count = step * data.draw(st.integers(1, len(raw) // step))
            piece = memoryview(raw)[at : at + count]
            there = put.memory(at, at + len(piece))
            if there is not None:
                there[:] = piece
            else:
                put.copy(piece, at)
            at += len(piece)
    assert room.tobytes() == right[within(wanted)].tobytes()


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """A matrix of 40 MB in a file, by rows."""
    matrix = np.random.default_rng(5).random((2500, 2000))
    data = matrix.tobytes()
    (tmp_path / "data").write_bytes(bytes(4096) + data + bytes(4096))
    return matrix, Stored(part((0, 0), (2500, 2000), (2500, 2000), "numpy:<f8", data), None, "/u", "data", 4096)


class Counting(Files):
    """Remembers what was read."""

    def __init__(self) -> None:
        self.read: list[tuple[int, int]] = []

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self.read.append((offset, len(into)))
        return super().pread(fd, into, offset)


def test_each_block_is_read_once_for_all_that_want_it(stored: Any, tmp_path: Path) -> None:
    matrix, item = stored
    rooms = [np.zeros((2500, 30)), np.zeros((2500, 30)), np.zeros((500, 2000))]
    places = [((0, 100), (2500, 30)), ((0, 110), (2500, 30)), ((700, 0), (500, 2000))]
    puts = [
        Put(item.entry, place, as_room(room.reshape(-1).view(np.uint8).data, place[1], 8), place[0])
        for room, place in zip(rooms, places, strict=True)
    ]
    files = Counting()
    with FileTier(files, tmp_path, ["data"]) as tier:
        assert fetch.fetch(tier, [Load(item, range(len(item.entry.sums)), puts)]) == []
        assert tier.read_bytes == item.entry.nbytes
    spans = sorted(files.read)
    assert all(a + n <= b for (a, n), (b, _) in pairwise(spans)), "nothing twice"
    assert len(spans) < 9, "in large pieces"
    for room, (start, shape) in zip(rooms, places, strict=True):
        assert np.array_equal(room, matrix[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))])


def test_only_blocks_that_are_needed_are_read_and_compared(stored: Any, tmp_path: Path) -> None:
    _, item = stored
    path = tmp_path / "data"
    raw = bytearray(path.read_bytes())
    raw[4096 + 3_000_000] ^= 1
    path.write_bytes(raw)
    size = blocks(item.entry.nbytes)[0][1]
    with FileTier(Files(), tmp_path, ["data"]) as tier:
        assert fetch.fetch(tier, [Load(item, [0, 1, 60])]) == []
        assert tier.read_bytes == 3 * size
        (fault,) = fetch.fetch(tier, [Load(item, range(len(item.entry.sums)))])
    assert fault.offset == 4096 + 3_000_000 // size * size
    assert fault.what == "the bytes have changed"


def test_a_file_that_is_too_short(stored: Any, tmp_path: Path) -> None:
    _, item = stored
    with (tmp_path / "data").open("r+b") as file:
        file.truncate(4096 + item.entry.nbytes - 100)
    with FileTier(Files(), tmp_path, ["data"]) as tier:
        faults = fetch.fetch(tier, [fetch.everything(item, memoryview(bytearray(item.entry.nbytes)))])
    begin, end = blocks(item.entry.nbytes)[-1]
    assert [(f.offset, f.what) for f in faults] == [
        (4096 + begin, f"only {end - begin - 100} of {end - begin} bytes are there")
    ]


def test_the_last_bytes_of_an_array_of_many_gigabytes(tmp_path: Path) -> None:
    """Of a sparse file: elements beyond the offsets that 32 bits can hold, by rows and by columns."""
    rows = (5 << 30) // 8192 + 3
    nbytes = rows * 8192
    data = bytearray(np.random.default_rng(3).bytes(4 << 20))
    with (tmp_path / "data").open("wb") as file:
        file.truncate(4096 + nbytes)
        file.seek(4096 + nbytes - len(data))
        file.write(data)
    cut = blocks(nbytes)
    empty = xxhash.xxh3_128_hexdigest(bytes(cut[0][1]))
    last = bytes(cut[-1][1] - cut[-1][0] - len(data)) if cut[-1][1] - cut[-1][0] > len(data) else b""
    assert cut[-1][1] - cut[-1][0] <= len(data)
    tail = bytes(len(data)) if last else bytes(data)
    begin = cut[-2][0]
    whole = (bytes(2 * cut[0][1]) + tail)[-(nbytes - begin) :]
    sums = [empty] * (len(cut) - 2)
    sums += [xxhash.xxh3_128_hexdigest(whole[a - begin : b - begin]) for a, b in cut[-2:]]
    entry = Entry("tensors/u", "bfloat16", (rows, 4096), (rows, 4096), (0, 0), nbytes, tuple(sums))
    item = Stored(entry, None, "/u", "data", 4096)
    right = np.frombuffer(whole, np.uint16).reshape(-1, 4096)[-9:]
    room = np.zeros((9, 4096), np.uint16)
    place = (rows - 9, 0), (9, 4096)
    load = Load(item, reads.needed([place], entry.shape, 2, nbytes).tolist())
    load.puts.append(Put(entry, place, as_room(room.view(np.uint8).reshape(-1).data, place[1], 2), place[0]))
    assert len(load.blocks) <= 2
    column = np.zeros((rows, 1), np.uint16)
    strip = (0, 4095), (rows, 1)
    also = Put(entry, strip, as_room(column.view(np.uint8).reshape(-1).data, strip[1], 2), strip[0])
    load.puts.append(also)
    with FileTier(Files(), tmp_path, ["data"]) as tier:
        assert fetch.fetch(tier, [load]) == []
    assert np.array_equal(room, right)
    assert np.array_equal(column[-9:, 0], right[:, -1])
