"""Parts of arrays in a state: what the walk makes of them, and what a match wants for them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import Block, fill
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.state import walk


def whole(name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
    return Entry(name, dtype, shape, shape, (0,) * len(shape), 0, ())


def test_a_part_is_one_leaf_that_knows_its_place() -> None:
    field = np.arange(30.0).reshape(5, 6)
    walked = walk({"u": Block(field[1:-1, 1:-1], [100, 40], (np.int64(3), 8)), "all": Block(field, (5, 6), (0, 0))})
    u, everything = walked.leaves
    assert (u.name, u.shape, u.global_shape, u.start) == ("tensors/u", (3, 4), (100, 40), (3, 8))
    assert np.shares_memory(u.source, field)  # type: ignore[arg-type]
    assert (everything.global_shape, everything.start) == (None, None), "all of it is no part"
    assert walked.structure["u"] == walk({"u": np.ones((100, 40))}).structure["u"], "fits a whole array, too"


def test_equal_memory_at_two_places_is_two_parts() -> None:
    part = np.ones(4)
    walked = walk({"a": Block(part, (8,), (0,)), "b": Block(part, (8,), (4,)), "c": Block(part, (8,), (4,))})
    assert [leaf.name for leaf in walked.leaves] == ["tensors/a", "tensors/b"]


@pytest.mark.parametrize(
    ("shape", "global_shape", "start"),
    [((2,), (8,), (7,)), ((2,), (8,), (-1,)), ((2,), (8, 1), (0, 0)), ((2,), (8,), ()), ((0,), (8,), (9,))],
)
def test_a_part_that_is_not_inside_is_refused(shape: Any, global_shape: Any, start: Any) -> None:
    with pytest.raises(StateError, match="is not inside"):
        Block(np.ones(shape), global_shape, start)


def test_a_block_of_something_else_is_refused() -> None:
    with pytest.raises(StateError, match="not a list"):
        Block([1, 2], (2,), (0,))  # type: ignore[arg-type]
    with pytest.raises(StateError, match="u: a Block of objects"):
        walk({"u": Block(np.array([None, ""]), (2,), (0,))})


def test_an_empty_part_is_a_leaf_without_bytes() -> None:
    (leaf,) = walk({"u": Block(np.ones((0, 4)), (6, 4), (6, 0))}).leaves
    assert (leaf.nbytes, leaf.shape, leaf.global_shape, leaf.start) == (0, (0, 4), (6, 4), (6, 0))


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_a_live_part_wants_its_box(make: Any) -> None:
    field: Any = make((5, 6))
    dtype = "numpy:<f8" if isinstance(field, np.ndarray) else "float32"
    state = {"u": Block(field[1:-1, 1:-1], (9, 9), (2, 3))}
    entry = whole("tensors/u", dtype, (9, 9))
    found = fill.match(walk({"u": make((9, 9))}).structure, {"tensors/u": entry}, state)
    assert not found.complain()
    (target,) = found.targets["tensors/u"]
    assert (target.fresh, target.start, target.shape) == (False, (2, 3), (3, 4))
    target.array[:] = 1
    assert float(field.sum()) == 12
    before = state["u"]
    found.apply()
    assert state["u"] is before


def test_a_read_only_part_is_replaced() -> None:
    field = np.zeros(4)
    field.flags.writeable = False
    state = {"u": Block(field, (9,), (2,))}
    entry = whole("tensors/u", "numpy:<f8", (9,))
    found = fill.match(walk({"u": np.zeros(9)}).structure, {"tensors/u": entry}, state)
    (target,) = found.targets["tensors/u"]
    assert (target.fresh, target.start, target.shape) == (True, (2,), (4,))
    found.apply()
    assert state["u"].array is target.array
    assert (state["u"].global_shape, state["u"].start) == ((9,), (2,))


@pytest.mark.parametrize(
    ("live", "says"),
    [
        (Block(np.zeros(4), (8,), (0,)), r"u .stored: \[9\] numpy:<f8; here: shape \[8\]"),
        (Block(np.zeros(4, dtype=np.float32), (9,), (0,)), "here: numpy:<f4"),
        (Block(torch.zeros(4), (9,), (0,)), "here: Block"),
        (np.zeros(8), r"here: shape \[8\]"),
        (None, "here: NoneType"),
    ],
)
def test_what_does_not_fit_is_named(live: Any, says: str) -> None:
    stored = walk({"u": Block(np.zeros(5), (9,), (4,))})
    found = fill.match(stored.structure, {"tensors/u": whole("tensors/u", "numpy:<f8", (9,))}, {"u": live})
    (message,) = found.misshaped
    assert re.search(says, message)
    assert not found.targets


def test_plain_arrays_want_all() -> None:
    found = fill.match(
        walk({"u": np.zeros((3, 4))}).structure,
        {"tensors/u": whole("tensors/u", "numpy:<f8", (3, 4))},
        {"u": np.zeros((3, 4))},
    )
    (target,) = found.targets["tensors/u"]
    assert (target.start, target.shape) == ((0, 0), (3, 4))


def test_new_parts_of_what_was_tied_are_as_different_as_the_live_ones() -> None:
    one = np.zeros(9)
    left, right = np.zeros(4), np.zeros(5)
    for part in (left, right):
        part.flags.writeable = False
    state = {"a": Block(left, (9,), (0,)), "b": Block(right, (9,), (4,)), "c": Block(left, (9,), (0,))}
    entry = whole("tensors/a", "numpy:<f8", (9,))
    found = fill.match(walk({"a": one, "b": one, "c": one}).structure, {"tensors/a": entry}, state)
    assert [(target.start, target.shape) for target in found.targets["tensors/a"]] == [((0,), (4,)), ((4,), (5,))]
    found.apply()
    assert state["a"].array is state["c"].array
