"""Which stored bytes a part of an array needs, and where each of them goes. Pure.

An array is stored in parts: boxes of it, each in row-major order, each with checksums for its blocks (see layout). A
rank that restores wants a box of the array, cut in whatever way. From the one to the other in two steps: which part
gives which elements (`Parts`), and which bytes of a part those are (`runs`, `needed`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from transom_hpc.ckpt.layout import block_bytes

Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape of a box, in indices of the whole array."""

_CELLS = 1 << 20
"""Of a grid in which boxes are painted; a larger one is halved until it is small enough."""


@dataclass(frozen=True, slots=True)
class Take:
    """Elements that one part gives.

    Args:
        part: its number.
        start: of their box, in indices of the whole array.
        shape: of their box.
    """

    part: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cover:
    """How a wanted box comes together.

    Args:
        takes: boxes that have no element in common.
        missing: start and shape of boxes that no part has; empty where all is there.
        overlaps: parts of which the second would have given elements that are taken from the first.
    """

    takes: tuple[Take, ...]
    missing: tuple[Place, ...]
    overlaps: tuple[tuple[int, int], ...]


class Parts:
    """The parts of one array.

    Args:
        places: of each part. Where some overlap, the one that comes first gives the elements.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        axes = len(places[0][0]) if places else 0
        self._none = axes == 0  # a single number: an array of no axes has one element
        starts = np.array([start or (0,) for start, _ in places], np.int64).reshape(len(places), max(1, axes))
        shapes = np.array([shape or (1,) for _, shape in places], np.int64).reshape(len(places), max(1, axes))
        self._starts, self._stops = starts, starts + shapes
        some = np.flatnonzero((shapes > 0).all(axis=1))
        # Sought along the axis in which they differ most, so that those that can't matter are not even looked at.
        axis = max(range(starts.shape[1]), key=lambda axis: len(np.unique(starts[some, axis])))
        self._axis = axis
        self._order = some[np.argsort(starts[some, axis], kind="stable")]
        self._begins = starts[self._order, axis]
        self._ends = np.maximum.accumulate(self._stops[self._order, axis])

    def cover(self, start: Sequence[int], shape: Sequence[int]) -> Cover:
        """Put a wanted box together.

        Args:
            start, shape: in indices of the whole array.

        Returns:
            What gives each of its elements.
        """
        if len(self._starts) == 0:
            return Cover((), ((tuple(start), tuple(shape)),), ()) if 0 not in shape else Cover((), (), ())
        low = np.array([0] if self._none else start, np.int64)
        high = low + np.array([1] if self._none else shape, np.int64)
        if (high <= low).any():
            return Cover((), (), ())
        takes: list[tuple[int, Indices, Indices]] = []
        missing: list[tuple[Indices, Indices]] = []
        overlaps: set[tuple[int, int]] = set()
        self._cover(self._near(low, high), low, high, takes, missing, overlaps)
        return Cover(
            tuple(Take(number, *self._place(begin, end)) for number, begin, end in takes),
            tuple(self._place(begin, end) for begin, end in missing),
            tuple(sorted(overlaps)),
        )

    def _place(self, low: Indices, high: Indices) -> Place:
        if self._none:
            return (), ()
        return tuple(low.tolist()), tuple((high - low).tolist())

    def _near(self, low: Indices, high: Indices) -> Indices:
        """The numbers of parts that have something of a box, in order."""
        first = np.searchsorted(self._ends, low[self._axis], "right")
        last = np.searchsorted(self._begins, high[self._axis], "left")
        return np.sort(self._within(self._order[first:last], low, high))

    def _within(self, numbers: Indices, low: Indices, high: Indices) -> Indices:
        inside = (self._stops[numbers] > low) & (self._starts[numbers] < high)
        found: Indices = numbers[inside.all(axis=1)]
        return found

    def _cover(
        self,
        numbers: Indices,
        low: Indices,
        high: Indices,
        takes: list[tuple[int, Indices, Indices]],
        missing: list[tuple[Indices, Indices]],
        overlaps: set[tuple[int, int]],
    ) -> None:
        if len(numbers) == 0:
            missing.append((low, high))
            return
        begins = np.maximum(self._starts[numbers], low)
        ends = np.minimum(self._stops[numbers], high)
        if (begins[0] == low).all() and (ends[0] == high).all():
            takes.append((int(numbers[0]), low, high))
            return
        cuts = [
            np.unique(np.concatenate((begins[:, a], ends[:, a], low[a : a + 1], high[a : a + 1]))) for a in _axes(low)
        ]
        if math.prod(len(cut) - 1 for cut in cuts) > _CELLS:
            axis = max(_axes(low), key=lambda axis: len(cuts[axis]))
            middle = cuts[axis][len(cuts[axis]) // 2]
            first, second = high.copy(), low.copy()
            first[axis] = second[axis] = middle
            self._cover(self._within(numbers, low, first), low, first, takes, missing, overlaps)
            self._cover(self._within(numbers, second, high), second, high, takes, missing, overlaps)
            return
        _paint(numbers, begins, ends, cuts, takes, missing, overlaps)


def _paint(
    numbers: Indices,
    begins: Indices,
    ends: Indices,
    cuts: Sequence[Indices],
    takes: list[tuple[int, Indices, Indices]],
    missing: list[tuple[Indices, Indices]],
    overlaps: set[tuple[int, int]],
) -> None:
    """Give each cell between the cuts to the first part that has it."""
    owner = np.full([len(cut) - 1 for cut in cuts], -1, np.int32)
    firsts = np.stack([np.searchsorted(cut, begins[:, a]) for a, cut in enumerate(cuts)], axis=1)
    lasts = np.stack([np.searchsorted(cut, ends[:, a]) for a, cut in enumerate(cuts)], axis=1)
    boxes = [tuple(map(slice, a, b)) for a, b in zip(firsts.tolist(), lasts.tolist(), strict=True)]
    for i in range(len(boxes) - 1, -1, -1):
        owner[boxes[i]] = i
    apart = int((lasts - firsts).prod(axis=1).sum()) == int(np.count_nonzero(owner >= 0))
    for i, box in enumerate(boxes):
        mine = owner[box] == i if not apart else None
        if mine is None or mine.all():
            takes.append((int(numbers[i]), begins[i], ends[i]))
            continue
        overlaps.update((int(numbers[other]), int(numbers[i])) for other in np.unique(owner[box][~mine]))
        for low, high in _boxes_of(mine):
            takes.append((int(numbers[i]), _bounds(cuts, firsts[i] + low), _bounds(cuts, firsts[i] + high)))
    missing += [(_bounds(cuts, low), _bounds(cuts, high)) for low, high in _boxes_of(owner < 0)]


def _axes(low: Indices) -> range:
    return range(len(low))


def _bounds(cuts: Sequence[Indices], cell: Indices) -> Indices:
    return np.array([cut[i] for cut, i in zip(cuts, cell, strict=True)], np.int64)


def _boxes_of(cells: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[tuple[Indices, Indices]]:
    """Boxes that together are the cells that are set."""
    left = cells.copy()
    found = []
    while left.any():
        low = np.array(np.unravel_index(int(left.argmax()), left.shape), np.int64)
        high = low + 1
        for axis in range(left.ndim - 1, -1, -1):
            while high[axis] < left.shape[axis]:
                begin, end = low.copy(), high.copy()
                begin[axis], end[axis] = high[axis], high[axis] + 1
                if not left[tuple(map(slice, begin, end))].all():
                    break
                high[axis] += 1
        left[tuple(map(slice, low, high))] = False
        found.append((low, high))
    return found


def runs(
    start: Sequence[int], shape: Sequence[int], of_shape: Sequence[int], width: int, gap: int = 1
) -> tuple[Indices, int]:
    """The runs of bytes that a box is, in an array in row-major order.

    Args:
        start: of the box, in indices of the array.
        shape: of the box, without an axis of length 0.
        of_shape: of the array.
        width: bytes of one element.
        gap: runs with fewer bytes than this between them are taken for one; 1: they touch.

    Returns:
        First byte of each run, ascending, and how many bytes each one has.
    """
    strides = [width] * len(of_shape)
    for axis in range(len(of_shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * of_shape[axis + 1]
    first = sum(begin * stride for begin, stride in zip(start, strides, strict=True))
    length = width
    loops: list[tuple[int, int]] = []
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        if count == 1:
            continue
        if not loops and stride - length < gap:
            length += (count - 1) * stride
        else:
            loops.append((count, stride))
    begins = np.array([first], np.int64)
    for count, stride in loops:
        begins = (np.arange(count, dtype=np.int64)[:, None] * stride + begins[None, :]).ravel()
    return begins, length


def needed(takes: Sequence[Place], of_shape: Sequence[int], width: int, nbytes: int) -> Indices:
    """The blocks of a part (see layout.blocks) that have something of these boxes, ascending.

    Args:
        takes: start and shape of boxes, in indices of the part.
        of_shape: of the part.
        width: bytes of one element.
        nbytes: of the part.
    """
    size = block_bytes(nbytes)
    steps = np.zeros(-(-nbytes // size) + 1, np.int64)
    for start, shape in takes:
        begins, length = runs(start, shape, of_shape, width, size)  # between two that are closer lies no whole block
        np.add.at(steps, begins // size, 1)
        np.add.at(steps, (begins + length - 1) // size + 1, -1)
    return np.flatnonzero(np.cumsum(steps[:-1]))
