"""Reads the blocks of stored parts that are needed, compares each with its checksum, and puts its elements in place.

Every block is read once, whichever elements of it go to how many places. Where stored and wanted bytes lie together
alike they are read straight into their place; elements that don't go through a small buffer. What is put somewhere is
compared afterwards: nobody may look at a place before all faults are known.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from transom_hpc.ckpt import direct, dtypes, lanes, layout, names, reads
from transom_hpc.ckpt.direct import address
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES, Entry
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.reads import Place
from transom_hpc.ckpt.shm import Segment, align

LANES = 8
"""Transfers on their way from a file: while some are summed, as many as the disk wants are still being read."""

_CACHED_BYTES = 256 << 10
"""Of memory, summed and then copied: less than a core's own cache."""

Room = np.ndarray[Any, Any]

_UNITS: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}
"""Elements are moved as bits, whatever they stand for; those of other widths byte by byte."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Bytes that are not those that were written.

    Args:
        file: in the checkpoint's folder.
        name: of the array, as in the state; empty where it is about the whole file.
        rank: whose array; None where ranks share it.
        offset: in the file, of the first block that is wrong (see layout.blocks).
        what: what is wrong.
    """

    file: str
    name: str
    rank: int | None
    offset: int
    what: str

    def __str__(self) -> str:
        about = f"{self.name}: " if self.name else ""
        whose = f" (rank {self.rank})" if self.rank is not None else ""
        return f"{self.file}: {about}{self.what} at byte {self.offset}{whose}"


def as_room(memory: memoryview, shape: Sequence[int], width: int) -> Room:
    """Memory as an array of elements of so many bytes, to put them in."""
    unit = _UNITS.get(width)
    if unit is None:
        return np.frombuffer(memory, np.uint8).reshape(*(shape or (1,)), width)
    return np.frombuffer(memory, unit).reshape(shape or (1,))


class Put:
    """Elements of a stored part on their way to a place of theirs.

    Args:
        part: that has them.
        place: which, in indices of the whole array; at least one.
        room: where they belong (see as_room).
        origin: index in the whole array of the room's first element.
    """

    def __init__(self, part: Entry, place: Place, room: Room, origin: Sequence[int]) -> None:
        width = dtypes.numpy_dtype(part.dtype).itemsize
        bytewise = width not in _UNITS
        self._of = (*(part.shape or (1,)), width) if bytewise else part.shape or (1,)
        start, shape = place
        within = tuple(a - b for a, b in zip(start, part.start, strict=True)) or (0,)
        self._start = (*within, 0) if bytewise else within
        self._shape = (*(shape or (1,)), width) if bytewise else shape or (1,)
        at = tuple(a - b for a, b in zip(start, origin, strict=True)) or (0,)
        self._into = room[tuple(slice(a, a + n) for a, n in zip(at, shape or (1,), strict=True))]
        self._width = 1 if bytewise else width
        self._straight: tuple[int, int, memoryview] | None = None
        if not self._into.flags.c_contiguous:
            return
        if self._shape == self._of:
            self._straight = 0, part.nbytes, self._into.reshape(-1).view(np.uint8).data
            return
        begins, length = reads.runs(self._start, self._shape, self._of, self._width)
        if len(begins) == 1:
            begin = int(begins[0])
            self._straight = begin, begin + length, self._into.reshape(-1).view(np.uint8).data

    def memory(self, begin: int, end: int) -> memoryview | None:
        """Where bytes [begin, end) of the part belong, if all of them are wanted and lie together there too."""
        if self._straight is None or begin < self._straight[0] or end > self._straight[1]:
            return None
        return self._straight[2][begin - self._straight[0] : end - self._straight[0]]

    def copy(self, data: memoryview, begin: int) -> None:
        """Copy what is wanted of the part's bytes from `begin` on."""
        if self._straight is not None:
            first, last = max(begin, self._straight[0]), min(begin + len(data), self._straight[1])
            if first < last:
                there = self._straight[2][first - self._straight[0] : last - self._straight[0]]
                move(there, data[first - begin : last - begin])
            return
        flat = np.frombuffer(data, dtype=_UNITS[self._width])
        done = 0
        for start, shape in layout.boxes(self._of, begin // self._width, len(flat)):
            count = math.prod(shape)
            common = layout.overlap(start, shape, self._start, self._shape)
            if common is not None:
                found = flat[done : done + count].reshape(shape)[_slices(common, start)]
                np.copyto(self._into[_slices(common, self._start)], found)
            done += count


def _slices(place: Place, origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(*place, origin, strict=True))


def move(into: memoryview, data: memoryview) -> None:
    """Copy bytes, letting go of the interpreter meanwhile."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))


@dataclass(slots=True)
class Load:
    """What is needed of one stored part.

    Args:
        item: it.
        blocks: the numbers of its blocks, ascending.
        puts: where their elements go; none to compare them only.
    """

    item: Stored
    blocks: Sequence[int]
    puts: list[Put] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        whole = self.item.entry.nbytes
        size = layout.block_bytes(whole)
        return sum(min(size, whole - block * size) for block in self.blocks)


def everything(item: Stored, into: memoryview | None = None) -> Load:
    """All of a stored part.

    Args:
        into: memory for it; None to compare it only.
    """
    entry = item.entry
    puts = []
    if into is not None and entry.nbytes:
        room = as_room(into, entry.shape, dtypes.numpy_dtype(entry.dtype).itemsize)
        puts = [Put(entry, (entry.start, entry.shape), room, entry.start)]
    return Load(item, range(layout.block_count(entry.nbytes)), puts)


class Tier(Protocol):
    """Where stored parts are read from."""

    lanes: int
    step: int
    """Bytes that are best read at a time: a power of two, at least 256 KiB."""

    def fetch(self, item: Stored, begin: int, end: int, into: memoryview | None) -> memoryview:
        """Bytes [begin, end) of a stored part; fewer where there are not as many.

        Args:
            into: where they belong. They may be somewhere else nevertheless; None where they don't lie together.

        Returns:
            The bytes, good until this thread fetches others.
        """


class FileTier:
    """The files of a checkpoint, open.

    Args:
        folder: of the checkpoint.
        names: of its data files.
    """

    lanes = LANES
    step = PIECE_BYTES

    def __init__(self, files: Files, folder: Path, names: Iterable[str]) -> None:
        self._files, self._folder, self._names = files, folder, sorted(set(names))
        self._opened = ExitStack()
        self._targets: dict[str, direct.Target] = {}
        self._lock = threading.Lock()
        self.read_bytes = 0
        """What was read so far."""

    def __enter__(self) -> FileTier:
        with ExitStack() as opened:
            for name in self._names:
                target = direct.Target(self._files, self._folder / name, os.O_RDONLY)
                self._targets[name] = opened.enter_context(target)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def fetch(self, item: Stored, begin: int, end: int, into: memoryview | None) -> memoryview:
        """See Tier."""
        # Whole pages into our own buffer; what lies behind the end is not looked at.
        room = direct.buffer()[: align(end - begin)] if into is None else into
        got = min(end - begin, self._targets[item.file].get(room, item.offset + begin))
        with self._lock:
            self.read_bytes += got
        return room[:got]


class MemoryTier:
    """Segments of this host, mapped.

    Args:
        segments: by what stands as `file` in what is stored.
    """

    lanes = lanes.LANES
    step = _CACHED_BYTES

    def __init__(self, segments: Mapping[str, Segment]) -> None:
        self._segments = segments

    def fetch(self, item: Stored, begin: int, end: int, into: memoryview | None) -> memoryview:  # noqa: ARG002
        """See Tier."""
        return self._segments[item.file].data(item.offset + begin, item.offset + end)


def fetch(
    tier: Tier,
    loads: Sequence[Load],
    compare: bool = True,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Fault]:
    """Read blocks, compare them and put their elements in place, several at a time, in the order of files and offsets.

    Args:
        compare: whether to compare them with their checksums; not where that was done before.
        progress: called with a number of bytes after each piece of work, from several threads.

    Returns:
        The blocks that are not as they were written.

    Raises:
        OSError: something could not be read.
    """
    faults: list[Fault] = []
    jobs = [
        partial(run, tier, load, begin, end, faults, compare, progress)
        for load in sorted(loads, key=lambda load: (load.item.file, load.item.offset))
        for begin, end in _stretches(load, max(tier.step, PIECE_BYTES))
    ]
    lanes.run(jobs, tier.lanes)
    return sorted(faults, key=lambda fault: (fault.file, fault.offset))


def _stretches(load: Load, most: int) -> list[tuple[int, int]]:
    """The byte ranges of blocks that follow each other, cut into such as one thread reads."""
    nbytes = load.item.entry.nbytes
    size = layout.block_bytes(nbytes)
    found: list[tuple[int, int]] = []
    for block in load.blocks:
        begin, end = block * size, min((block + 1) * size, nbytes)
        if found and found[-1][1] == begin and end - found[-1][0] <= most:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def run(
    tier: Tier,
    load: Load,
    begin: int,
    end: int,
    faults: list[Fault],
    compare: bool = True,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Read, compare and put in place bytes [begin, end) of a stored part, which are whole blocks of it. See `fetch`."""
    item = load.item
    size = layout.block_bytes(item.entry.nbytes)
    step = tier.step if load.puts else max(tier.step, PIECE_BYTES)
    summed, got = xxhash.xxh3_128(), 0
    for at in range(begin, end, step):
        stop = min(at + step, end)
        places = ((put, put.memory(at, stop)) for put in load.puts)
        straight, room = next((found for found in places if found[1] is not None), (None, None))
        data = tier.fetch(item, at, stop, room)
        for first in range(at, stop, size) if compare else ():
            last = min(first + size, stop)
            if first % size == 0:
                summed, got = xxhash.xxh3_128(), 0
            piece = data[first - at : last - at]
            summed.update(piece)
            got += len(piece)
            if last % size == 0 or last == item.entry.nbytes:
                block = first // size
                what = "the bytes have changed" if summed.hexdigest() != item.entry.sums[block] else ""
                if got < last - block * size:
                    what = f"only {got} of {last - block * size} bytes are there"
                if what:
                    shown = names.shown(item.entry.name)
                    faults.append(Fault(item.file, shown, item.rank, item.offset + block * size, what))
        in_place = straight is not None and room is not None and len(data) and address(data) == address(room)
        for put in load.puts:
            if not (in_place and put is straight) and len(data) == stop - at:
                put.copy(data, at)
        progress(stop - at)
