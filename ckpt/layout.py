"""Which bytes go where: from what every rank holds to who writes what. Pure; every rank computes the same answer.

A shard is a box of a global array: `start` and `shape` in `global_shape`. What is bitwise the same on all ranks under
the same name is kept once and its writing is spread evenly over the ranks; what differs is kept per rank. The offsets
of arrays in the file are not decided here: HDF5 gives them (see h5file).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BLOCK_BYTES = 16 << 20
"""Bytes that one checksum covers. Small enough to name the place of a fault, large enough to cost nothing."""

SPLIT_BYTES = 1 << 20
"""Writing of one array is split between ranks at multiples of this many bytes, so that no two share a page."""


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
    """

    path: str
    rank: int | None
    entry: Entry


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that one rank writes: [begin, end) of the shard with this index in the plan."""

    shard: int
    begin: int
    end: int


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


def plan(held: Sequence[Sequence[Entry]]) -> Plan:
    """Decide what is kept and who writes it.

    Args:
        held: for each rank, in rank order, what it holds. Names are unique within a rank.

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
    own_bytes = [sum(shards[i].entry.nbytes for i in mine) for mine in own]
    parts = _spread([shards[i].entry.nbytes for i in shared], own_bytes)
    work = [
        tuple(
            [Span(shared[i], begin, end) for i, begin, end in parts[rank]]
            + [Span(i, 0, shards[i].entry.nbytes) for i in own[rank] if shards[i].entry.nbytes]
        )
        for rank in range(len(held))
    ]
    return Plan(tuple(shards), tuple(work))


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


def _spread(sizes: Sequence[int], loads: Sequence[int]) -> list[list[tuple[int, int, int]]]:
    """Cut a row of arrays into one run for each worker, so that with its own load every worker ends up even.

    Args:
        sizes: bytes of each array.
        loads: bytes that each worker has to write anyway.

    Returns:
        For each worker (array, begin, end), in order; together they cover every byte once.
    """
    left = sum(sizes)
    room = _level(left, loads)
    work: list[list[tuple[int, int, int]]] = [[] for _ in loads]
    worker, used = 0, 0
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            last = worker == len(loads) - 1
            free = size - begin if last else room[worker] - used
            end = min(size, begin + free)
            if end < size:
                end = min(size, begin + math.ceil((end - begin) / SPLIT_BYTES) * SPLIT_BYTES)
            if end > begin:
                work[worker].append((index, begin, end))
                used += end - begin
                begin = end
            if not last and used >= room[worker]:
                worker, used = worker + 1, 0
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


def offsets(shards: Sequence[Shard], placed: Mapping[str, int]) -> list[int]:
    """The byte offset of each shard, from where HDF5 placed each dataset; 0 for those without bytes."""
    return [placed[shard.path] if shard.entry.nbytes else 0 for shard in shards]
