"""What differs between two checkpoints: arrays by value, everything else by name. Reads only.

Checksums first: of what has equal ones nothing is read. The rest is read a block at a time on both sides, whatever
parts each side keeps an array in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from transom_hpc.base.errors import CorruptCheckpoint
from transom_hpc.ckpt import catalog, dtypes, fill, names
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.contents import Array, arrays, is_array, read, stream
from transom_hpc.ckpt.direct import Target, room
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import BLOCK_BYTES, blocks
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.numbers import Apart, apart, size_of
from transom_hpc.ckpt.shm import align

ONLY_A, ONLY_B = "only in A", "only in B"
DTYPE, SHAPE, VALUES = "other type", "other shape", "other values"
OBJECT, STRUCTURE = "other object", "other containers or names"

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that differs.

    Args:
        name: as a person reads it.
        rank: whose own it is; None where it belongs to all ranks.
        what: one of the texts above.
        a, b: type and shape of an array, or the value of a plain one; empty where there is none.
        apart: how far the values are apart; only for VALUES.
    """

    name: str
    rank: int | None
    what: str
    a: str = ""
    b: str = ""
    apart: Apart | None = None


@dataclass(slots=True)
class Comparison:
    """Two checkpoints held against each other.

    Args:
        equal: arrays that are bitwise the same.
        changes: arrays that are not, largest difference first.
        others: plain values and objects that are not the same.
        nbytes: bytes that were read of each side for that.
    """

    equal: int = 0
    changes: list[Change] = field(default_factory=list)
    others: list[Change] = field(default_factory=list)
    nbytes: int = 0

    @property
    def same(self) -> bool:
        """Whether both hold the same, bit for bit."""
        return not (self.changes or self.others)


@dataclass(frozen=True, slots=True)
class _Pair:
    a: Array
    b: Array

    @property
    def shown(self) -> Array:
        """The one of both that says whose it is."""
        return self.b if self.a.rank is None else self.a


def to_read(a: Checkpoint, b: Checkpoint) -> int:
    """Bytes of each side that `compare` will read of arrays. Reads nothing."""
    return sum(_cost(pair) for pair in _matched(a, b)[0] if is_array(pair.a) and _alike(pair))


def compare(a: Checkpoint, b: Checkpoint, progress: Callable[[int], None] | None = None) -> Comparison:
    """Compare two checkpoints, of whatever numbers of ranks.

    What one side keeps once for all ranks and the other for each rank is compared with each of these.

    Args:
        progress: called with the number of bytes of one side after each piece of arrays.

    Raises:
        CorruptCheckpoint: bytes that had to be read are not those that were written.
        OSError: they could not be read.
    """
    found = Comparison()
    pairs, only_a, only_b = _matched(a, b)
    for pair in pairs:
        if is_array(pair.a) and is_array(pair.b):
            _compare_arrays(a, b, pair, found, progress)
        elif pair.a.dtype == dtypes.JSON == pair.b.dtype:
            found.others += _compare_structure(a, b, pair)
        elif _sums(pair.a) != _sums(pair.b):
            found.others.append(Change(pair.shown.place, pair.shown.rank, OBJECT))
    for side, what, arrays_ in ((a, ONLY_A, only_a), (b, ONLY_B, only_b)):
        for array in arrays_:
            found_here = found.changes if is_array(array) else found.others
            kind = _kind(array) if is_array(array) else ""
            if array.dtype == dtypes.JSON:
                found.others += [
                    Change(place, array.rank, what, *((_short(value), "") if side is a else ("", _short(value))))
                    for place, value in _values(side, array).items()
                ]
            else:
                found_here.append(
                    Change(array.place, array.rank, what, kind if side is a else "", kind if side is b else "")
                )
    found.changes.sort(key=lambda change: change.name)
    found.changes.sort(key=_order, reverse=True)
    return found


def _order(change: Change) -> tuple[bool, tuple[float, float, int]]:
    return (change.apart is None, size_of(change.apart) if change.apart is not None else (0.0, 0.0, 0))


def _matched(a: Checkpoint, b: Checkpoint) -> tuple[list[_Pair], list[Array], list[Array]]:
    """What belongs together, and what is only in A, and only in B."""
    left, right = {i.key: i for i in arrays(a.manifest)}, {i.key: i for i in arrays(b.manifest)}
    by_ranks: dict[tuple[Any, Any], list[Array]] = {}
    for key, array in right.items():
        if array.rank is not None and key not in left:
            by_ranks.setdefault((array.name, array.start), []).append(array)
    pairs: list[_Pair] = []
    only_a: list[Array] = []
    used = set()
    for key, mine in left.items():
        others = [right[key]] if key in right else []
        if not others and mine.rank is not None and (mine.name, None, mine.start) in right:
            others = [right[mine.name, None, mine.start]]
        elif not others and mine.rank is None:
            others = by_ranks.get((mine.name, mine.start), [])
        pairs += [_Pair(mine, other) for other in others]
        used |= {other.key for other in others}
        if not others:
            only_a.append(mine)
    return pairs, only_a, [array for key, array in right.items() if key not in used]


def _alike(pair: _Pair) -> bool:
    return (pair.a.dtype, pair.a.shape) == (pair.b.dtype, pair.b.shape)


def _place(item: Stored) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (item.entry.start, item.entry.shape)


def _sums(array: Array) -> list[Any]:
    return [(*_place(part), part.entry.sums) for part in sorted(array.parts, key=_place)]


def _aligned(pair: _Pair) -> list[tuple[Stored, Stored]] | None:
    """The parts of both sides, where they are cut alike."""
    if len(pair.a.parts) == 1 == len(pair.b.parts):
        return [(pair.a.parts[0], pair.b.parts[0])]
    left, right = sorted(pair.a.parts, key=_place), sorted(pair.b.parts, key=_place)
    if list(map(_place, left)) != list(map(_place, right)):
        return None
    return list(zip(left, right, strict=True))


def _unlike(pair: _Pair) -> Iterator[tuple[Stored, Stored, int, int, int]]:
    """Blocks (of A, of B, number, begin, end) with other checksums, of arrays that are cut alike."""
    for one, two in _aligned(pair) or []:
        for i, (begin, end) in enumerate(blocks(one.entry.nbytes)):
            if one.entry.sums[i] != two.entry.sums[i]:
                yield one, two, i, begin, end


def _cost(pair: _Pair) -> int:
    if _aligned(pair) is None:
        return pair.a.nbytes
    return sum(end - begin for *_, begin, end in _unlike(pair))


def _kind(array: Array) -> str:
    return f"{array.dtype} {'x'.join(map(str, array.shape)) or 'scalar'}"


def _compare_arrays(
    a: Checkpoint, b: Checkpoint, pair: _Pair, found: Comparison, progress: Callable[[int], None] | None
) -> None:
    name, rank = pair.shown.place, pair.shown.rank
    if not _alike(pair):
        what = SHAPE if pair.a.dtype == pair.b.dtype else DTYPE
        found.changes.append(Change(name, rank, what, _kind(pair.a), _kind(pair.b)))
        return
    total = Apart()
    cost = _cost(pair)
    if cost:
        found.nbytes += cost
        total = sum(_compared(a, b, pair, progress), total)
    if total.differing:
        found.changes.append(Change(name, rank, VALUES, _kind(pair.a), _kind(pair.b), total))
    else:
        found.equal += 1


def _compared(a: Checkpoint, b: Checkpoint, pair: _Pair, progress: Callable[[int], None] | None) -> Iterator[Apart]:
    """What must be read, a piece at a time."""
    if _aligned(pair) is None:
        for x, y in zip(stream(a, pair.a, progress), stream(b, pair.b), strict=True):
            yield apart(x, y, pair.a.dtype)
        return
    left = room(min(align(pair.a.nbytes), BLOCK_BYTES))
    right = room(min(align(pair.a.nbytes), BLOCK_BYTES))
    left_out = math.prod(pair.a.shape)
    for one, two, index, begin, end in _unlike(pair):
        size = end - begin
        if size > len(left):
            left, right = room(align(size)), room(align(size))
        _load(a, one, index, begin, end, left[:size])
        _load(b, two, index, begin, end, right[:size])
        part = apart(left[:size], right[:size], pair.a.dtype)
        left_out -= part.elements
        yield part
        if progress is not None:
            progress(size)
    yield Apart(elements=left_out)


def _load(checkpoint: Checkpoint, item: Stored, index: int, begin: int, end: int, into: memoryview) -> None:
    with Target(Files(), checkpoint.path / item.file, os.O_RDONLY) as source:
        faults = catalog.check_block(source, item, index, begin, end, into)
    if faults:
        raise CorruptCheckpoint(
            f"{checkpoint.path}: {faults[0]}", path=checkpoint.path, step=checkpoint.step, name=faults[0].name
        )


def _compare_structure(a: Checkpoint, b: Checkpoint, pair: _Pair) -> list[Change]:
    """Plain values and the kinds of containers, place by place."""
    if _sums(pair.a) == _sums(pair.b):
        return []
    left, right = _values(a, pair.a), _values(b, pair.b)
    rank = pair.shown.rank
    changes = [
        Change(
            place,
            rank,
            ONLY_B if place not in left else ONLY_A if place not in right else VALUES,
            _short(left.get(place, "")),
            _short(right.get(place, "")),
        )
        for place in dict.fromkeys((*left, *right))
        if left.get(place) != right.get(place)
    ]
    return changes or [Change(pair.shown.place, rank, STRUCTURE)]


def _values(checkpoint: Checkpoint, array: Array) -> dict[str, str]:
    """The plain values of a document, by place; arrays and pickled objects are compared as such."""
    document = json.loads(read(checkpoint, array))
    if document[0] == "root":
        return dict(_places(document[1], ()))
    return dict(_places(document[2], (names.unescape(array.name.partition("/")[2]),)))


def _places(node: Any, parts: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    kind = node[0] if isinstance(node, list) else ""
    if kind in ("tensor", "array", "longbytes", "longbytearray", "pickle"):
        return
    if kind in ("module", "optimizer", "object"):
        yield from _places(node[1], parts)
    elif kind in ("dict", "odict") and node[1]:
        for _, text, inner in node[1]:
            yield from _places(inner, (*parts, text))
    elif kind in ("list", "tuple", "named") and any(isinstance(item, list) for item in node[-1]):
        for i, inner in enumerate(node[-1]):
            yield from _places(inner, (*parts, str(i)))
    elif kind in ("dict", "odict", "list", "tuple", "named"):
        yield names.place(parts), repr(node[-1])
    else:
        yield names.place(parts), repr(fill.plain(node))


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
