"""From ranges of indices to reads: everything that is wanted, once, from the right part, and no block too many."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt import reads
from transom_hpc.ckpt.layout import LEAST_BLOCK_BYTES, blocks
from transom_hpc.ckpt.reads import Cover, Parts, Place, needed, runs


def tiling(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Place]:
    """The boxes into which cuts along each axis divide an array, empty ones among them."""
    edges = [sorted([0, *cut, size]) for size, cut in zip(shape, cuts, strict=True)]
    return [
        (tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*map(pairwise, edges))
    ]


def slices(place: Place) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(*place, strict=True))


shapes = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@st.composite
def places(draw: st.DrawFn, shape: Sequence[int]) -> Place:
    start = tuple(draw(st.integers(0, size)) for size in shape)
    return start, tuple(draw(st.integers(0, size - first)) for size, first in zip(shape, start, strict=True))


def check(shape: Sequence[int], parts: Sequence[Place], wanted: Place, found: Cover) -> None:
    """Each element comes from the first part that has it; what none has is missing."""
    right = np.full(shape, -1)
    for number in range(len(parts) - 1, -1, -1):
        right[slices(parts[number])] = number
    there = np.full(shape, -2)
    for take in found.takes:
        assert (there[slices((take.start, take.shape))] == -2).all(), "once"
        there[slices((take.start, take.shape))] = take.part
    for place in found.missing:
        assert (there[slices(place)] == -2).all()
        there[slices(place)] = -1
    outside = np.ones(shape, bool)
    outside[slices(wanted)] = False
    assert (there[outside] == -2).all()
    assert np.array_equal(there[~outside], right[~outside])


@given(shapes, st.data())
def test_any_cut_of_an_array_gives_any_other(shape: list[int], data: st.DataObject) -> None:
    parts = tiling(shape, [data.draw(st.lists(st.integers(0, size), max_size=3)) for size in shape])
    parts = list(data.draw(st.permutations(parts)))
    other = tiling(shape, [data.draw(st.lists(st.integers(0, size), max_size=3)) for size in shape])
    index = Parts(parts)
    for wanted in other:
        found = index.cover(*wanted)
        check(shape, parts, wanted, found)
        assert found.missing == ()
        assert found.overlaps == ()
        assert len(found.takes) <= len(parts)


@given(shapes, st.data(), st.sampled_from([1, 8, 1 << 20]))
def test_parts_that_overlap_and_leave_gaps(shape: list[int], data: st.DataObject, cells: int) -> None:
    """Also where the grid is halved."""
    parts = data.draw(st.lists(places(shape), min_size=1, max_size=7))
    wanted = data.draw(places(shape))
    before, reads._CELLS = reads._CELLS, cells
    try:
        found = Parts(parts).cover(*wanted)
    finally:
        reads._CELLS = before
    check(shape, parts, wanted, found)
    for first, second in found.overlaps:
        assert first < second
        painted = np.zeros(shape, int)
        for number in (first, second):
            painted[slices(parts[number])] += 1
        assert painted.max() == 2


def test_the_first_part_that_has_all_is_enough() -> None:
    found = Parts([((2,), (4,)), ((0,), (9,)), ((2,), (4,))]).cover((3,), (2,))
    assert [(take.part, take.start, take.shape) for take in found.takes] == [(0, (3,), (2,))]
    assert found.overlaps == ()


def test_what_nobody_has_is_named() -> None:
    found = Parts([((0, 0), (2, 5)), ((4, 0), (2, 5))]).cover((1, 1), (5, 2))
    assert found.missing == (((2, 1), (2, 2)),)
    assert Parts([]).cover((1,), (2,)).missing == (((1,), (2,)),)
    assert Parts([((0, 0), (0, 7))]).cover((1, 1), (5, 2)).missing == (((1, 1), (5, 2)),)


def test_a_single_number() -> None:
    found = Parts([((), ())]).cover((), ())
    assert [(take.part, take.start, take.shape) for take in found.takes] == [(0, (), ())]
    assert Parts([((), ())]).cover((), ()).missing == ()


@pytest.mark.parametrize("mesh", [(8192,), (64, 64), (16, 16, 16)])
def test_thousands_of_parts(mesh: tuple[int, ...]) -> None:
    """The time of this process grows with their number, not with its square."""
    parts = tiling([4 * n for n in mesh], [range(4, 4 * n, 4) for n in mesh])
    began = time.process_time()
    index = Parts(parts)
    whole = index.cover((0,) * len(mesh), [4 * n for n in mesh])
    assert len(whole.takes) == len(parts)
    for wanted in parts[:: len(parts) // 50]:
        assert len(index.cover(tuple(max(0, a - 2) for a in wanted[0]), wanted[1]).takes) <= 2 ** len(mesh)
    assert time.process_time() - began < 2.0


@given(shapes, st.data(), st.sampled_from([1, 2, 3, 8]))
def test_runs_of_bytes(shape: list[int], data: st.DataObject, width: int) -> None:
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    box = start, tuple(data.draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True))
    numbers = np.arange(math.prod(shape) * width).reshape(*shape, width)
    wanted = numbers[slices(box)].ravel()
    begins, length = runs(*box, shape, width)
    assert (begins[:, None] + np.arange(length)).ravel().tolist() == wanted.tolist()
    assert len(begins) == 1 + int((np.diff(wanted) > 1).sum()), "no two touch"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.data(), st.sampled_from([1, 12, 5000, 300_000]))
def test_blocks_that_are_needed(shape: list[int], data: st.DataObject, width: int) -> None:
    nbytes = math.prod(shape) * width
    boxes = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        box = tuple(data.draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True))
        boxes.append((start, box))
    found = needed(boxes, shape, width, nbytes).tolist()
    wanted = set()
    for box in boxes:
        begins, length = runs(*box, shape, width)
        for begin in begins.tolist():
            size = blocks(nbytes)[0][1]
            wanted |= set(range(begin // size, (begin + length - 1) // size + 1))
    assert found == sorted(wanted)


def test_a_column_of_very_many_rows_is_no_long_list() -> None:
    begins, length = runs((0, 3), (1 << 40, 1), (1 << 40, 8), 4, LEAST_BLOCK_BYTES)
    assert len(begins) == 1
    assert length == ((1 << 40) - 1) * 32 + 4


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 8), (8, 1), (1, 8), (8, 3), (3, 2), (2, 4)])
@pytest.mark.parametrize("shape", [(4096, 4096), (50257, 768), (6151, 11008), (1 << 33,)])
def test_little_more_is_read_than_needed(before: int, after: int, shape: tuple[int, ...]) -> None:
    """Each rank by itself, from parts of large arrays in bf16, however many ranks there were."""

    def rows(ranks: int, rank: int) -> Place:
        step = -(-shape[0] // ranks)
        first = min(rank * step, shape[0])
        return (first, *(0 for _ in shape[1:])), (min(step, shape[0] - first), *shape[1:])

    parts = [rows(before, rank) for rank in range(before)]
    index = Parts(parts)
    read = 0
    for rank in range(after):
        for take in index.cover(*rows(after, rank)).takes:
            start, size = parts[take.part]
            nbytes = 2 * math.prod(size)
            within = tuple(a - b for a, b in zip(take.start, start, strict=True))
            cut = blocks(nbytes)
            read += sum(cut[i][1] - cut[i][0] for i in needed([(within, take.shape)], size, 2, nbytes))
    assert read <= 1.1 * 2 * math.prod(shape)
