"""Who reads what: every needed block by one of those that need it, evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt.layout import PIECE_BYTES, block_bytes, block_count
from transom_hpc.ckpt.portions import portions, ranges


@st.composite
def needs(draw: st.DrawFn, sizes: list[int]) -> dict[int, dict[int, list[list[int]]]]:
    found: dict[int, dict[int, list[list[int]]]] = {}
    for rank in draw(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)):
        found[rank] = {}
        for part, nbytes in enumerate(sizes):
            blocks = draw(st.sets(st.integers(0, block_count(nbytes) - 1), max_size=9))
            if blocks:
                found[rank][part] = ranges(sorted(blocks))
    return found


@given(st.lists(st.integers(1, 60 << 20), min_size=1, max_size=3), st.data(), st.sets(st.integers(0, 9)))
def test_every_block_is_read_by_one_that_needs_it(sizes: list[int], data: st.DataObject, serving: set[int]) -> None:
    wanted = data.draw(needs(sizes))
    order = dict(enumerate(sizes))
    cut = portions(wanted, order, serving)
    assert cut == portions(dict(reversed(wanted.items())), order, serving)
    assert [portion.number for portion in cut] == list(range(len(cut)))
    assert [portion.part for portion in cut] == sorted(portion.part for portion in cut)
    had: dict[tuple[int, int], set[int]] = {}
    for portion in cut:
        size = block_bytes(sizes[portion.part])
        assert portion.reader in portion.ranks
        assert len(portion.ranks) == 1 or portion.reader in serving
        assert portion.end - portion.begin <= max(PIECE_BYTES, size)
        assert portion.begin % size == 0
        assert portion.end % size == 0 or portion.end == sizes[portion.part]
        for block in range(portion.begin // size, -(-portion.end // size)):
            ranks = had.setdefault((portion.part, block), set())
            assert not ranks & set(portion.ranks), "once"
            ranks.update(portion.ranks)
            assert len(portion.ranks) == 1 or ranks == set(portion.ranks)
    right: dict[tuple[int, int], set[int]] = {}
    for rank, parts in wanted.items():
        for part, found in parts.items():
            for first, last in found:
                for block in range(first, last + 1):
                    right.setdefault((part, block), set()).add(rank)
    assert had == right


def test_what_all_need_is_spread_evenly() -> None:
    sizes = {0: 1 << 30, 1: 5 << 20, 2: 300}
    wanted = {rank: {part: [[0, block_count(size) - 1]] for part, size in sizes.items()} for rank in range(4)}
    read = dict.fromkeys(wanted, 0)
    for portion in portions(wanted, sizes, set(wanted)):
        assert portion.ranks == (0, 1, 2, 3)
        read[portion.reader] += portion.end - portion.begin
    assert max(read.values()) - min(read.values()) <= 16 << 20


def test_ranges() -> None:
    assert ranges([]) == []
    assert ranges([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]
