"""From what a rank wants of arrays to the loads that bring it, and from loaded bytes to live arrays.

A want is a box of one array, with all places of the state that want the same. Owns which stored parts give it, and how
its bytes get into the live arrays; where it is loaded to before that is decided by its user (restore).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transom_hpc.ckpt import direct, dtypes, fill, kinds, leaves, names
from transom_hpc.ckpt.fetch import Load, Put, as_room, move
from transom_hpc.ckpt.layout import block_count, cuts, overlap
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.reads import Cover, Parts, Place, Take, needed, runs
from transom_hpc.ckpt.state import Leaf
from transom_hpc.ckpt.stock import Stock

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Want:
    """A box of one array that is wanted.

    Args:
        name: of the array, or of an object.
        start, shape: of the box, in indices of the whole array.
        nbytes: of the box.
        takes: what gives it; parts are those of the stock.
        targets: live arrays, and new ones, that want it; none for an object.
        room: memory for it; None as long as there is none.
    """

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    takes: tuple[Take, ...]
    targets: Sequence[fill.Target]
    room: memoryview | None = None

    @property
    def fresh(self) -> fill.Target | None:
        """A new array that wants it: nobody sees that before the agreement."""
        return next((target for target in self.targets if target.fresh), None)


@dataclass(slots=True)
class Wants:
    """What one rank wants.

    Args:
        wants: what there is.
        gaps: what there is not: places, and which elements are stored nowhere. What is new and wants them is `void`.
        void: whether a new array would stay without its elements.
        overlaps: arrays of which stored parts overlap and need not be alike, and of which two ranks.
    """

    wants: list[Want]
    gaps: list[str]
    void: bool
    overlaps: list[str]


def wants(stock: Stock, match: fill.Match) -> Wants:
    """What a state wants of a stock."""
    found = Wants([], [], False, [])
    for name in match.objects:
        entry = stock.entries[name]
        take = Take(0, entry.start, entry.shape)
        found.wants.append(Want(name, entry.start, entry.shape, entry.nbytes, (take,), ()))
    for name, targets in match.targets.items():
        places: dict[Place, list[fill.Target]] = {}
        for target in targets:
            if target.array.nbytes:
                places.setdefault((target.start, target.shape), []).append(target)
        parts: Parts | None = None
        for (start, shape), alike in places.items():
            stored = stock.parts[name]
            first = stored[0].entry
            if overlap(first.start, first.shape, start, shape) == (start, shape):
                cover = Cover((Take(0, start, shape),), (), ())
            else:
                parts = parts or Parts([(item.entry.start, item.entry.shape) for item in stored])
                cover = parts.cover(start, shape)
            if cover.missing:
                found.gaps.append(f"{names.shown(name)} (no rank saved {_ranges(cover.missing[0])})")
                found.void |= any(target.fresh for target in alike)
                continue
            if cover.overlaps:
                one, other = (stored[number].lowest for number in cover.overlaps[0])
                found.overlaps.append(f"{names.shown(name)} (ranks {one} and {other})")
            found.wants.append(Want(name, start, shape, alike[0].array.nbytes, cover.takes, alike))
    return found


def _ranges(place: Place) -> str:
    return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(*place, strict=True)) + "]"


def loads(stock: Stock, wanted: Sequence[Want]) -> list[Load]:
    """What has to be read for these wants, each block once; it is put where a want has room."""
    takes: dict[tuple[str, int], list[tuple[Take, Want]]] = {}
    for want in wanted:
        for take in want.takes:
            takes.setdefault((want.name, take.part), []).append((take, want))
    found = []
    for (name, number), given in takes.items():
        item = stock.parts[name][number]
        entry = item.entry
        width = dtypes.numpy_dtype(entry.dtype).itemsize
        if any(take.shape == entry.shape for take, _ in given):
            load = Load(item, range(block_count(entry.nbytes)))
        else:
            within = [(_less(take.start, entry.start), take.shape) for take, _ in given]
            load = Load(item, needed(within, entry.shape, width, entry.nbytes).tolist())
        for take, want in given:
            if want.room is not None:
                room = as_room(want.room, want.shape, width)
                load.puts.append(Put(entry, (take.start, take.shape), room, want.start))
        found.append(load)
    return found


def _less(place: Sequence[int], origin: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(place, origin, strict=True))


def together(stock: Stock, want: Want) -> tuple[Stored, int, int] | None:
    """The stored part that has all of a want as one run of bytes, and which; None where there is none."""
    if len(want.takes) != 1:
        return None
    item = stock.parts[want.name][want.takes[0].part]
    entry = item.entry
    if want.shape == entry.shape:
        return item, 0, entry.nbytes
    width = dtypes.numpy_dtype(entry.dtype).itemsize
    begins, length = runs(_less(want.start, entry.start), want.shape, entry.shape, width)
    return (item, int(begins[0]), int(begins[0]) + length) if len(begins) == 1 else None


def memory(array: torch.Tensor | np.ndarray[Any, Any]) -> memoryview | None:
    """The array's own bytes, to be written to; None where its elements do not lie together in this machine's memory."""
    if array.nbytes == 0 or (isinstance(array, np.ndarray) and not array.flags.writeable):
        return None
    return leaves.in_place(Leaf("", array.detach() if kinds.is_tensor(array) else array, "", (), array.nbytes))


def fill_in(target: fill.Target, name: str, data: memoryview) -> list[Callable[[], None]]:
    """Jobs that put an array's bytes into its place; none where they are there."""
    array = target.array
    there = memory(array)
    if there is None:
        return [lambda: _fill_scattered(array, name, data)]
    if direct.address(there) == direct.address(data):
        return []
    return [lambda b=b, e=e: move(there[b:e], data[b:e]) for b, e in cuts(array.nbytes)]  # type: ignore[misc]


def _fill_scattered(array: torch.Tensor | np.ndarray[Any, Any], name: str, data: memoryview) -> None:
    flat = np.frombuffer(data, dtype=np.uint8)
    if isinstance(array, np.ndarray):
        np.copyto(array, flat.view(array.dtype).reshape(array.shape))
        return
    from transom_hpc.ckpt import tensors

    tensors.copy_in(array, flat, name)
