"""Which bytes go where: from what every rank holds to who writes what. Pure; every rank computes the same answer.

A shard is a box of a global array: `start` and `shape` in `global_shape`. What is bitwise the same on all ranks under
the same name is kept once and its writing is spread evenly over the ranks; what differs is kept per rank. The offsets
of arrays in the file are not decided here: HDF5 gives them (see h5file).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transom_hpc.ckpt import dtypes

BLOCK_BYTES = 16 << 20
"""Bytes that one checksum covers. Small enough to name the place of a fault, large enough to cost nothing."""

SPLIT_BYTES = 1 << 20
"""Writing of one array is split between ranks at multiples of this many bytes, so that no two share a page."""

PIECE_BYTES = 8 << 20
"""One transfer. A fraction of the checksum's block, so that a block never needs two threads."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank holds under one name.

    Args:
        name: `tensors/`, `structure/` or `objects/`, and the escaped path in the state (see names).
        dtype: element type (see dtypes).
        shape: of the part that this rank holds.
        global_shape: of the whole array; the same as shape where it is not sharded.
        start: index of the part's first element in the whole array.
        nbytes: bytes of the part.
        sums: xxh3-128 in hexadecimal of each BLOCK_BYTES of it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    nbytes: int
    sums: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One array, or part of one, as the file will hold it.

    Args:
        path: of the dataset in the file.
        rank: the rank whose own it is; None where all ranks hold the same.
        entry: what it is.
        file: number of the data file that holds it.
    """

    path: str
    rank: int | None
    entry: Entry
    file: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that one rank writes: [begin, end) of the shard with this index in the plan.

    `turns` is 0 where a single rank writes the whole shard, or several without regard to each other. Otherwise all
    ranks write a part of it, in so many transfers of PIECE_BYTES or less that they make together; the part of a rank
    may need one transfer less than that.
    """

    shard: int
    begin: int
    end: int
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who writes what.

    Args:
        shards: everything that the file holds, in file order.
        work: for each rank, in rank order, the bytes that it writes.
    """

    shards: tuple[Shard, ...]
    work: tuple[tuple[Span, ...], ...]

    def bytes_of(self, rank: int) -> int:
        """How many bytes a rank writes."""
        return sum(span.end - span.begin for span in self.work[rank])


def is_whole(entry: Entry) -> bool:
    """Whether the entry is the whole array."""
    return entry.shape == entry.global_shape


def data_file(number: int) -> str:
    """The name of a data file in the checkpoint's folder."""
    return f"data-{number:05d}.h5"


def plan(held: Sequence[Sequence[Entry]], files: int = 1, together: bool = False) -> Plan:
    """Decide what is kept, in which file, and who writes it.

    Args:
        held: for each rank, in rank order, what it holds. Names are unique within a rank.
        files: data files to spread it over; no more are used than there are arrays.
        together: cut what all ranks hold into a part for each of them where it is large enough, for a writer whose
            transfers are collective. Changes who writes what, never where it lies.

    Returns:
        The plan: the same for the same input, whoever computes it.
    """
    everywhere = _common(held)
    shards: list[Shard] = []
    shared: list[int] = []
    own: list[list[int]] = [[] for _ in held]
    for entry in held[0]:
        if entry.name in everywhere:
            shared.append(len(shards))
            shards.append(Shard(_path(entry, None, len(held)), None, entry))
    for rank, entries in enumerate(held):
        for entry in entries:
            if entry.name not in everywhere:
                own[rank].append(len(shards))
                shards.append(Shard(_path(entry, rank, len(held)), rank, entry))
    alike = [i for i in shared if together and _can_be_cut(shards[i].entry, len(held))]
    rest = [i for i in shared if i not in set(alike)]
    cuts = [[_part(shards[i].entry.nbytes, rank, len(held)) for i in alike] for rank in range(len(held))]
    loads = [
        sum(shards[i].entry.nbytes for i in own[rank]) + sum(end - begin for begin, end in cuts[rank])
        for rank in range(len(held))
    ]
    parts = _spread([(shards[i].entry.nbytes, _is_one(shards[i].entry)) for i in rest], loads)
    work = [
        tuple(
            [Span(i, *cut, _turns(shards[i].entry.nbytes, len(held))) for i, cut in zip(alike, cuts[rank], strict=True)]
            + [Span(rest[i], begin, end) for i, begin, end in parts[rank]]
            + [Span(i, 0, shards[i].entry.nbytes) for i in own[rank] if shards[i].entry.nbytes]
        )
        for rank in range(len(held))
    ]
    return Plan(_filed(shards, files), tuple(work))


def _is_one(entry: Entry) -> bool:
    """Whether HDF5 holds it as one element, which can't be written in parts."""
    return entry.dtype == dtypes.JSON


def _can_be_cut(entry: Entry, ranks: int) -> bool:
    return ranks > 1 and entry.nbytes >= ranks * SPLIT_BYTES and not _is_one(entry)


def _part(nbytes: int, rank: int, ranks: int) -> tuple[int, int]:
    """The bytes [begin, end) of an array that fall to a rank when all get the same."""
    units = -(-nbytes // SPLIT_BYTES)
    return units * rank // ranks * SPLIT_BYTES, min(nbytes, units * (rank + 1) // ranks * SPLIT_BYTES)


def _turns(nbytes: int, ranks: int) -> int:
    """Transfers that the largest part needs."""
    units = -(-nbytes // SPLIT_BYTES)
    return -(-(-(-units // ranks) * SPLIT_BYTES) // PIECE_BYTES)


def _filed(shards: Sequence[Shard], files: int) -> tuple[Shard, ...]:
    """Give each array a file: the largest first, each to the file that has least. Objects stay in the first file."""
    arrays = [i for i, s in enumerate(shards) if s.entry.nbytes and not dtypes.is_object(s.entry.dtype)]
    number = [0] * len(shards)
    loads = [(0, file) for file in range(files)]
    for i in sorted(arrays, key=lambda i: (-shards[i].entry.nbytes, i)):
        load, number[i] = loads[0]
        heapq.heapreplace(loads, (load + shards[i].entry.nbytes, number[i]))
    return tuple(replace(shard, file=number[i]) if number[i] else shard for i, shard in enumerate(shards))


def _common(held: Sequence[Sequence[Entry]]) -> frozenset[str]:
    """Names under which all ranks hold the same whole array, bit for bit."""
    common = {entry.name: entry for entry in held[0] if is_whole(entry)}
    for entries in held[1:]:
        mine = {entry.name: entry for entry in entries}
        common = {name: entry for name, entry in common.items() if mine.get(name) == entry}
    return frozenset(common)


def _path(entry: Entry, rank: int | None, world_size: int) -> str:
    if not is_whole(entry):
        return f"/shards/{rank or 0}/{entry.name.partition('/')[2]}"
    return f"/{entry.name}" if rank is None or world_size == 1 else f"/ranks/{rank}/{entry.name}"


def _spread(sizes: Sequence[tuple[int, bool]], loads: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Cut a row of arrays into one run for each worker, so that with its own load every worker ends up even.

    Args:
        sizes: bytes of each array, and whether it must not be cut.
        loads: bytes that each worker has to write anyway.

    Returns:
        For each worker (array, begin, end), in order; together they cover every byte once.
    """
    left = sum(size for size, _ in sizes)
    room = _level(left, loads)
    work: list[list[tuple[int, int, int]]] = [[] for _ in loads]
    worker, used = 0, 0
    for index, (size, whole) in enumerate(sizes):
        begin = 0
        while begin < size:
            while worker < len(loads) - 1 and used >= room[worker]:
                worker, used = worker + 1, 0
            end = size
            if worker < len(loads) - 1 and not whole:
                end = min(size, begin + math.ceil((room[worker] - used) / SPLIT_BYTES) * SPLIT_BYTES)
            work[worker].append((index, begin, end))
            used += end - begin
            begin = end
    return work


def _level(total: int, loads: Sequence[int]) -> list[int]:
    """How much of the total each worker takes so that the heaviest one is as light as can be (water filling)."""
    order = sorted(range(len(loads)), key=lambda i: loads[i])
    level, poured = 0, 0
    for count, worker in enumerate(order, start=1):
        poured += loads[worker]
        reached = math.ceil((total + poured) / count)
        if count == len(order) or reached <= loads[order[count]]:
            level = reached
            break
    return [max(0, level - load) for load in loads]


def blocks(nbytes: int) -> list[tuple[int, int]]:
    """The byte ranges [begin, end) that have a checksum each."""
    return [(begin, min(begin + BLOCK_BYTES, nbytes)) for begin in range(0, nbytes, BLOCK_BYTES)]


def overlap(
    a_start: Sequence[int], a_shape: Sequence[int], b_start: Sequence[int], b_shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The box that two boxes of one global array have in common.

    Returns:
        Start and shape of it, in global indices; None where they have no element in common.
    """
    start = tuple(max(a, b) for a, b in zip(a_start, b_start, strict=True))
    stop = tuple(min(a + n, b + m) for a, n, b, m in zip(a_start, a_shape, b_start, b_shape, strict=True))
    if any(end <= begin for begin, end in zip(start, stop, strict=True)):
        return None
    return start, tuple(end - begin for begin, end in zip(start, stop, strict=True))


def boxes(shape: Sequence[int], first: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The boxes (start, shape) that together are a run of elements of an array in row-major order.

    Args:
        shape: of the array, at least one axis.
        first: number of the first element.
        count: how many, at least one.
    """
    if len(shape) == 1:
        return [((first,), (count,))]
    row = math.prod(shape[1:])
    top, skipped = divmod(first, row)
    bottom, last = divmod(first + count, row)
    if top == bottom or (skipped and top + 1 == bottom and last == 0):
        return [((top, *start), (1, *size)) for start, size in boxes(shape[1:], skipped, count)]
    found = []
    if skipped:
        found += boxes(shape, first, row - skipped)
        top += 1
    if bottom > top:
        found.append(((top, *(0 for _ in shape[1:])), (bottom - top, *shape[1:])))
    if last:
        found += boxes(shape, bottom * row, last)
    return found
