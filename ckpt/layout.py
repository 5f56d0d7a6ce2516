"""Which bytes go where: from what every rank holds to who writes what. Pure; every rank computes the same answer.

A shard is a box of a global array: `start` and `shape` in `global_shape`. What several ranks hold under the same name
at the same place, bit for bit, is kept once and its writing is spread evenly over those ranks; what differs is kept
for each. The offsets of arrays in the file are not decided here: HDF5 gives them (see h5file). Which of these bytes a
restore needs is in `reads`.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from transom_hpc.ckpt import dtypes

BLOCK_BYTES = 16 << 20
"""Bytes that one checksum covers at most. Small enough to name the place of a fault, large enough to cost nothing."""

LEAST_BLOCK_BYTES = 256 << 10
"""Bytes that one checksum covers at least, where there are as many: below that a read costs the disk as much."""

_BLOCKS = 80
"""Checksums of an array at least, where its size allows it: a rank reads less than a block too much at each end of what
it needs, so eight ranks that cut an array anew read at most a tenth more than it has."""

SPLIT_BYTES = 1 << 20
"""Writing of one array is split between ranks at multiples of this many bytes, so that no two share a page."""

PIECE_BYTES = 8 << 20
"""One transfer. A fraction of the largest checksum's block; one thread reads a block whatever its size."""


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
        sums: xxh3-128 in hexadecimal of each of its `blocks`.
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
        rank: whose it is: the rank, or the lowest of those, that hold it where others hold something else at its
            place, or nothing; None where no rank that has this place of the array holds anything else.
        entry: what it is.
        file: number of the data file that holds it.
        holders: the ranks that hold it where they are several, but not all; empty otherwise.
    """

    path: str
    rank: int | None
    entry: Entry
    file: int = 0
    holders: tuple[int, ...] = ()


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
    shards, ranks = _shards(held)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(shards)):
        groups.setdefault(ranks[i], []).append(i)
    everybody = tuple(range(len(held)))
    alike = [i for i in groups.get(everybody, ()) if together and _can_be_cut(shards[i].entry, len(held))]
    apart = set(alike)
    work: list[list[Span]] = []
    for rank in everybody:
        cuts = [_part(shards[i].entry.nbytes, rank, len(held)) for i in alike]
        turns = [_turns(shards[i].entry.nbytes, len(held)) for i in alike]
        work.append([Span(i, *cut, turn) for i, cut, turn in zip(alike, cuts, turns, strict=True)])
    loads = [sum(span.end - span.begin for span in spans) for spans in work]
    # Those that fewest can write go first, so that the others even it out.
    for group in sorted(groups, key=lambda group: (len(group), group)):
        rest = [i for i in groups[group] if i not in apart]
        sizes = [(shards[i].entry.nbytes, _is_one(shards[i].entry)) for i in rest]
        for rank, parts in zip(group, _spread(sizes, [loads[rank] for rank in group]), strict=True):
            work[rank] += [Span(rest[i], begin, end) for i, begin, end in parts]
            loads[rank] += sum(end - begin for _, begin, end in parts)
    return Plan(_filed(shards, files), tuple(map(tuple, work)))


def _shards(held: Sequence[Sequence[Entry]]) -> tuple[list[Shard], list[tuple[int, ...]]]:
    """Each different thing that is held once, and the ranks that hold it; what all hold comes first."""
    holders: dict[Entry, list[int]] = {}
    for rank, entries in enumerate(held):
        for entry in entries:
            holders.setdefault(entry, []).append(rank)
    at_place = Counter((entry.name, entry.start, entry.shape) for entry in holders)
    kinds = Counter(name for name, _, _ in {(e.name, e.dtype, e.global_shape) for e in holders})
    cut = {entry.name for entry in holders if not is_whole(entry)}
    shards: list[Shard] = []
    ranks: list[tuple[int, ...]] = []
    for entry in sorted(holders, key=lambda entry: len(holders[entry]) < len(held)):
        mine = tuple(holders[entry])
        all_alike = kinds[entry.name] == 1 and at_place[entry.name, entry.start, entry.shape] == 1
        own = None if len(mine) == len(held) or (len(mine) > 1 and all_alike) else mine[0]
        several = len(mine) > 1 and len(mine) < len(held)
        path = _path(entry, own, mine[0], entry.name in cut)
        shards.append(Shard(path, own, entry, 0, mine if several else ()))
        ranks.append(mine)
    return shards, ranks


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


def _path(entry: Entry, own: int | None, lowest: int, cut: bool) -> str:
    if cut:
        return f"/shards/{lowest}/{entry.name.partition('/')[2]}"
    return f"/{entry.name}" if own is None else f"/ranks/{own}/{entry.name}"


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


def block_bytes(nbytes: int) -> int:
    """How many bytes of an array of this size one checksum covers: a power of two."""
    return min(max(1 << max(0, (nbytes // _BLOCKS).bit_length() - 1), LEAST_BLOCK_BYTES), BLOCK_BYTES)


def block_count(nbytes: int) -> int:
    """How many checksums an array of this size has."""
    return -(-nbytes // block_bytes(nbytes))


def blocks(nbytes: int) -> list[tuple[int, int]]:
    """The byte ranges [begin, end) of an array of this size that have a checksum each."""
    return cuts(nbytes, block_bytes(nbytes))


def cuts(nbytes: int, most: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """Byte ranges [begin, end) of at most so many bytes that together are all, for work that is done piece by piece."""
    return [(begin, min(begin + most, nbytes)) for begin in range(0, nbytes, most)]


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
