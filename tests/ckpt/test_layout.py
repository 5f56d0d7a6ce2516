"""The plan: every byte once, evenly spread, the same for the same input."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt.layout import (
    BLOCK_BYTES,
    LEAST_BLOCK_BYTES,
    PIECE_BYTES,
    SPLIT_BYTES,
    Entry,
    Plan,
    block_bytes,
    block_count,
    blocks,
    boxes,
    overlap,
    plan,
)


def entry(name: str, nbytes: int, total: str = "a") -> Entry:
    return Entry(f"tensors/{name}", "uint8", (nbytes,), (nbytes,), (0,), nbytes, (total,) * len(blocks(nbytes)))


sizes = st.lists(st.integers(0, 40 << 20), min_size=1, max_size=12)


@given(sizes, st.lists(st.integers(0, 60 << 20), min_size=1, max_size=6))
def test_every_byte_is_written_once_and_the_work_is_even(shared: list[int], own: list[int]) -> None:
    common = [entry(f"s{i}", n) for i, n in enumerate(shared)]
    held = [[*common, entry("own", n, f"r{rank}")] for rank, n in enumerate(own)]
    made = plan(held)
    assert made == plan(held)
    written: dict[int, list[tuple[int, int]]] = {}
    for work in made.work:
        for span in work:
            assert span.begin < span.end
            assert span.begin % SPLIT_BYTES == 0
            written.setdefault(span.shard, []).append((span.begin, span.end))
    for index, shard in enumerate(made.shards):
        spans = sorted(written.get(index, []))
        assert sum(end - begin for begin, end in spans) == shard.entry.nbytes
        assert all(a[1] == b[0] for a, b in pairwise(spans))
    if len(own) > 1:
        even = max([*own, -(-(sum(shared) + sum(own)) // len(own))])
        assert max(made.bytes_of(rank) for rank in range(len(own))) <= even + len(shared) * SPLIT_BYTES


@given(sizes, st.lists(st.integers(0, 60 << 20), min_size=1, max_size=6))
def test_what_is_written_together_falls_to_all_alike(shared: list[int], own: list[int]) -> None:
    common = [entry(f"s{i}", n) for i, n in enumerate(shared)]
    held = [[*common, entry("own", n, f"r{rank}")] for rank, n in enumerate(own)]
    made = plan(held, together=True)
    assert made.shards == plan(held).shards
    written: dict[int, list[tuple[int, int]]] = {}
    turning = []
    for work in made.work:
        turning.append([(span.shard, span.turns) for span in work if span.turns])
        for span in work:
            assert span.begin < span.end
            assert not span.turns or span.end - span.begin <= span.turns * PIECE_BYTES
            written.setdefault(span.shard, []).append((span.begin, span.end))
    assert all(turns == turning[0] for turns in turning), "the same turns in the same order on all ranks"
    if len(own) > 1:
        large = [i for i, s in enumerate(made.shards) if s.rank is None and s.entry.nbytes >= len(own) * SPLIT_BYTES]
        assert [i for i, _ in turning[0]] == large
    for index, shard in enumerate(made.shards):
        spans = sorted(written.get(index, []))
        assert sum(end - begin for begin, end in spans) == shard.entry.nbytes
        assert all(a[1] == b[0] for a, b in pairwise(spans))


@given(sizes, st.integers(1, 7))
def test_files_are_even_and_change_nothing_else(shared: list[int], files: int) -> None:
    held = [[entry(f"s{i}", n) for i, n in enumerate(shared)] + [Entry("structure/m", "json", (9,), (9,), (0,), 9, "")]]
    made = plan(held, files)
    assert made.work == plan(held).work
    loads = [sum(s.entry.nbytes for s in made.shards if s.file == file) for file in range(files)]
    assert max(loads) <= sum(shared) / files + max(shared) + 9
    assert [s.file for s in made.shards if s.entry.dtype == "json"] == [0]
    used = sorted({s.file for s in made.shards if s.entry.nbytes})
    assert used == list(range(len(used))), "no file is left out"


def test_what_is_one_element_in_the_file_is_written_by_one_rank() -> None:
    text = Entry("structure/m", "json", (9 << 20,), (9 << 20,), (0,), 9 << 20, ("a",))
    for together in (False, True):
        made = plan([[text, entry("w", 8 << 20)]] * 3, together=together)
        assert sum(span.shard == 0 for work in made.work for span in work) == 1


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_a_run_of_elements_as_boxes(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    numbers = np.arange(total).reshape(shape)
    found = boxes(shape, first, count)
    cells = [numbers[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].ravel() for box in found]
    assert np.concatenate(cells).tolist() == list(range(first, first + count))
    assert len(found) <= 2 * len(shape) - 1


def test_what_differs_in_one_bit_is_kept_per_rank() -> None:
    made = plan([[entry("w", 8, "a"), entry("x", 8)], [entry("w", 8, "b"), entry("x", 8)]])
    assert [(s.path, s.rank) for s in made.shards] == [
        ("/tensors/x", None),
        ("/ranks/0/tensors/w", 0),
        ("/ranks/1/tensors/w", 1),
    ]


def test_a_name_that_one_rank_lacks_is_private() -> None:
    made = plan([[entry("w", 8)], []])
    assert [(s.path, s.rank) for s in made.shards] == [("/ranks/0/tensors/w", 0)]


def test_parts_of_an_array_are_shards() -> None:
    def part(rank: int) -> Entry:
        return Entry("tensors/u", "float32", (2, 3), (4, 3), (2 * rank, 0), 24, (str(rank),))

    made = plan([[part(0)], [part(1)]])
    assert [(s.path, s.rank, s.holders) for s in made.shards] == [("/shards/0/u", 0, ()), ("/shards/1/u", 1, ())]


def shard(name: str, nbytes: int, number: int, count: int, total: str = "a") -> Entry:
    """One of equal parts of an array."""
    sums = (f"{number}{total}",) * block_count(nbytes)
    return Entry(f"tensors/{name}", "uint8", (nbytes,), (nbytes * count,), (nbytes * number,), nbytes, sums)


def once(made: Plan) -> None:
    """Every byte is written once, and only by who has it."""
    written: dict[int, list[tuple[int, int]]] = {}
    for rank, work in enumerate(made.work):
        for span in work:
            of = made.shards[span.shard]
            assert rank in of.holders if of.holders else of.rank in (None, rank)
            written.setdefault(span.shard, []).append((span.begin, span.end))
    for index, item in enumerate(made.shards):
        spans = sorted(written.get(index, []))
        assert sum(end - begin for begin, end in spans) == item.entry.nbytes
        assert all(a[1] == b[0] for a, b in pairwise(spans))


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 9 << 20), min_size=1, max_size=5), st.booleans())
def test_replicas_of_shards_are_kept_once(shards: int, replicas: int, sizes: list[int], together: bool) -> None:
    """As HSDP has them, beside what all ranks hold."""
    ranks = range(shards * replicas)
    held = [
        [shard(f"w{i}", n, r % shards, shards) for i, n in enumerate(sizes)] + [entry("all", 9 << 20)] for r in ranks
    ]
    made = plan(held, together=together)
    once(made)
    stored = sum(item.entry.nbytes for item in made.shards)
    assert stored == sum(sizes) * shards + (9 << 20)
    assert len({item.path for item in made.shards}) == len(made.shards)
    for item in made.shards:
        if shards > 1 and replicas > 1 and item.path.startswith("/shards/"):
            assert (item.rank, len(item.holders)) == (None, replicas)
            assert item.path.startswith(f"/shards/{item.holders[0]}/")
    loads = [made.bytes_of(rank) for rank in ranks]
    assert max(loads) <= stored / len(ranks) + (2 + len(sizes)) * SPLIT_BYTES


def test_stages_of_a_pipeline_are_written_by_all_that_hold_them() -> None:
    """Two stages on three ranks each; the last layer's size evens nothing out, what all hold does."""
    stages = [[entry("a", 30 << 20), entry("b", 6 << 20)], [entry("c", 12 << 20)]]
    held = [[*stages[rank // 3], entry("all", 24 << 20)] for rank in range(6)]
    made = plan(held)
    once(made)
    assert {item.entry.name: (item.path, item.rank, item.holders) for item in made.shards} == {
        "tensors/all": ("/tensors/all", None, ()),
        "tensors/a": ("/tensors/a", None, (0, 1, 2)),
        "tensors/b": ("/tensors/b", None, (0, 1, 2)),
        "tensors/c": ("/tensors/c", None, (3, 4, 5)),
    }
    assert [made.bytes_of(rank) for rank in range(6)] == [12 << 20] * 6


def test_replicas_that_differ_are_kept_for_each() -> None:
    """Also where several hold one of the two."""
    held = [[shard("w", 8, r % 2, 2, "b" if r == 2 else "a")] for r in range(6)]
    made = plan(held)
    once(made)
    assert [(s.path, s.rank, s.holders) for s in made.shards] == [
        ("/shards/0/w", 0, (0, 4)),
        ("/shards/1/w", None, (1, 3, 5)),
        ("/shards/2/w", 2, ()),
    ]


def test_an_array_that_one_rank_has_whole_and_others_in_empty_parts() -> None:
    """As one row cut for three ranks is: the name of the whole stays free for the virtual dataset."""
    held = [[Entry("tensors/w", "uint8", (n, 4), (1, 4), (1 - n, 0), 4 * n, ("a",) * n)] for n in (1, 0, 0)]
    made = plan(held)
    once(made)
    assert [(s.path, s.rank, s.holders) for s in made.shards] == [("/shards/0/w", 0, ()), ("/shards/1/w", None, (1, 2))]


def test_arrays_that_only_share_a_name() -> None:
    held = [[entry("w", 8)], [entry("w", 9)], [shard("w", 4, 0, 3)]]
    made = plan(held)
    once(made)
    assert [s.rank for s in made.shards] == [0, 1, 2]
    assert len({s.path for s in made.shards}) == 3


@given(st.integers(0, 1 << 45))
def test_sizes_of_blocks(nbytes: int) -> None:
    size = block_bytes(nbytes)
    assert LEAST_BLOCK_BYTES <= size <= BLOCK_BYTES
    assert size & (size - 1) == 0
    assert block_count(nbytes) == -(-nbytes // size)
    if size < BLOCK_BYTES:
        assert block_count(nbytes) <= 161
    if size > LEAST_BLOCK_BYTES:
        assert block_count(nbytes) >= 80
    if nbytes < 1 << 32:
        cut = blocks(nbytes)
        assert len(cut) == block_count(nbytes)
        assert [begin for begin, _ in cut] == [i * size for i in range(len(cut))]
        assert not cut or cut[-1][1] == nbytes


axes_of_a_box = st.tuples(st.integers(0, 9), st.integers(0, 9))


@given(st.lists(st.tuples(axes_of_a_box, axes_of_a_box), min_size=1, max_size=3))
def test_overlap_of_boxes(axes: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    a_start, a_shape = [a[0] for a, _ in axes], [a[1] for a, _ in axes]
    b_start, b_shape = [b[0] for _, b in axes], [b[1] for _, b in axes]
    common = [set(range(a, a + n)) & set(range(b, b + m)) for (a, n), (b, m) in axes]
    found = overlap(a_start, a_shape, b_start, b_shape)
    if not all(common):
        assert found is None
    else:
        assert found == (tuple(min(c) for c in common), tuple(len(c) for c in common))
