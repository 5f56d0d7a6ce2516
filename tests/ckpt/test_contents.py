"""Whole arrays out of parts, read in one pass and compared on the way."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.ckpt.together import Box, leaf, together
from transom_hpc.base.errors import CorruptCheckpoint
from transom_hpc.ckpt import contents
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.contents import Array, arrays, read, stream
from transom_hpc.ckpt.layout import BLOCK_BYTES


def named(checkpoint: Checkpoint, name: str) -> Array:
    (found,) = [array for array in arrays(checkpoint.manifest) if array.name == f"tensors/{name}"]
    return found


def test_columns_and_rows_and_blocks(directory: Path) -> None:
    whole = np.arange(6 * 8, dtype="<f4").reshape(6, 8)
    columns: list[Box] = [((0, 0), (6, 3)), ((0, 3), (6, 5))]
    rows: list[Box] = [((0, 0), (1, 8)), ((1, 0), (5, 8))]
    held = [
        [leaf("columns", whole, columns[rank]), leaf("rows", whole, rows[rank]), leaf("own", whole + rank)]
        for rank in range(2)
    ]
    checkpoint = together(directory, 1, held)
    for name in ("columns", "rows"):
        array = named(checkpoint, name)
        assert (array.rank, array.shape, array.nbytes) == (None, (6, 8), whole.nbytes)
        assert read(checkpoint, array) == whole.tobytes()
        for most in (4, 20, 36, 100):
            assert b"".join(bytes(piece) for piece in stream(checkpoint, array, None, most)) == whole.tobytes()
    own = [array for array in arrays(checkpoint.manifest) if array.name == "tensors/own"]
    assert [array.rank for array in own] == [0, 1]
    assert read(checkpoint, own[1]) == (whole + 1).tobytes()


def test_parts_that_make_no_whole(directory: Path) -> None:
    whole = np.arange(10, dtype="<i4")
    checkpoint = together(directory, 1, [[leaf("x", whole, ((0,), (4,)))], [leaf("x", whole, ((6,), (3,)))]])
    found = [array for array in arrays(checkpoint.manifest) if array.name == "tensors/x"]
    assert [array.place for array in found] == ["x[0:4]", "x[6:9]"]
    assert read(checkpoint, found[1]) == whole[6:9].tobytes()


@some.composite
def cuts(draw: some.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    shape = draw(some.lists(some.integers(1, 7), min_size=1, max_size=3))
    return tuple(shape), [sorted(draw(some.sets(some.integers(1, max(1, n - 1)), max_size=2))) for n in shape]


@given(cuts())
@settings(deadline=None)
def test_tiles(drawn: tuple[tuple[int, ...], list[list[int]]]) -> None:
    shape, at = drawn
    edges = [sorted({0, *inner, n}) for n, inner in zip(shape, at, strict=True)]
    parts: list[Box] = [((), ())]
    for edge in edges:
        parts = [((*s, b), (*n, e - b)) for s, n in parts for b, e in pairwise(edge)]
    assert contents._tiles(parts, shape)
    assert not contents._tiles(parts[1:], shape)
    assert not contents._tiles([*parts, parts[0]], shape)
    if len(parts) > 1:
        assert not contents._tiles([parts[1], *parts[1:]], shape) or parts[0][1] != parts[1][1]


def test_a_changed_byte_is_found_wherever_it_is(directory: Path) -> None:
    whole = np.zeros(BLOCK_BYTES + 5000, dtype=np.uint8)
    checkpoint = together(directory, 1, [[leaf("x", whole)]])
    array = named(checkpoint, "x")
    assert read(checkpoint, array) == whole.tobytes()
    path = checkpoint.path / array.parts[0].file
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, len(whole) - 1):
        with path.open("r+b") as file:
            file.seek(array.parts[0].offset + place)
            file.write(b"\x01")
        with pytest.raises(CorruptCheckpoint, match="x: the bytes have changed"):
            read(checkpoint, array)
        with path.open("r+b") as file:
            file.seek(array.parts[0].offset + place)
            file.write(b"\x00")


def test_a_file_that_ends_too_early(directory: Path) -> None:
    checkpoint = together(directory, 1, [[leaf("x", np.ones(100000, dtype="<f8"))]])
    array = named(checkpoint, "x")
    path = checkpoint.path / array.parts[0].file
    with path.open("r+b") as file:
        file.truncate(array.parts[0].offset + 5000)
    with pytest.raises(CorruptCheckpoint, match="only 5000 of"):
        read(checkpoint, array)
