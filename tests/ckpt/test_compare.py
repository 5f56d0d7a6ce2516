"""Two checkpoints held against each other."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ckpt.together import leaf, together
from transom_hpc.base.errors import CorruptCheckpoint
from transom_hpc.ckpt import Checkpointer, compare, read_checkpoint
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.compare import Comparison, to_read
from transom_hpc.ckpt.layout import BLOCK_BYTES


def saved(directory: Path, *states: Any) -> list[Checkpoint]:
    with Checkpointer(directory, keep=9) as checkpointer:
        for step, state in enumerate(states, 1):
            checkpointer.save(step, state, block=True)
    return [read_checkpoint(directory / f"step-{step:09d}") for step in range(1, 1 + len(states))]


def facts(found: Comparison) -> list[tuple[Any, ...]]:
    return [(c.name, c.rank, c.what, c.apart and (c.apart.differing, c.apart.max_abs)) for c in found.changes]


def test_what_is_equal_is_not_read(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": np.arange(1000.0), "b": torch.full((3,), math.nan), "n": 1, "o": object}
    a, b = saved(directory, state, state)
    monkeypatch.setattr(compare, "stream", None)
    monkeypatch.setattr(compare, "_load", None)
    found = compare.compare(a, b)
    assert (found.same, found.equal, found.nbytes, to_read(a, b)) == (True, 2, 0, 0)


def test_arrays_largest_difference_first(directory: Path) -> None:
    base = {
        "small": torch.ones(10, dtype=torch.bfloat16),
        "large": torch.zeros(4),
        "same": torch.zeros(3),
        "nan": torch.tensor([math.nan, 1.0]),
        "shape": torch.zeros(2, 3),
        "type": torch.zeros(2),
        "gone": torch.zeros(2),
    }
    other = {name: tensor.clone() for name, tensor in base.items() if name != "gone"}
    other["small"][3] = 1.5
    other["large"][1:] = -7.0
    other["nan"][1] = math.nan
    other["shape"] = torch.zeros(3, 2)
    other["type"] = torch.zeros(2, dtype=torch.float64)
    other["new"] = torch.zeros(1)
    a, b = saved(directory, base, other)
    found = compare.compare(a, b)
    assert facts(found) == [
        ("gone", None, "only in A", None),
        ("new", None, "only in B", None),
        ("shape", None, "other shape", None),
        ("type", None, "other type", None),
        ("nan", None, "other values", (1, math.inf)),
        ("large", None, "other values", (3, 7.0)),
        ("small", None, "other values", (1, 0.5)),
    ]
    assert found.equal == 1
    assert not found.same
    by_name = {change.name: change for change in found.changes}
    assert (by_name["shape"].a, by_name["shape"].b) == ("float32 2x3", "float32 3x2")
    assert by_name["type"].b == "float64 2"


def test_only_blocks_that_differ_are_read(directory: Path) -> None:
    base = np.zeros(3 * BLOCK_BYTES // 8 + 5)
    other = base.copy()
    other[-1], other[0] = 4.0, -1.0
    a, b = saved(directory, {"x": base}, {"x": other})
    seen: list[int] = []
    found = compare.compare(a, b, seen.append)
    assert sum(seen) == found.nbytes == to_read(a, b) < base.nbytes
    (change,) = found.changes
    assert change.apart is not None
    assert (change.apart.elements, change.apart.differing, change.apart.max_abs) == (len(base), 2, 4.0)


def test_values_and_objects(directory: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: dict[str, Any] = {
        "optimizer": optimizer,
        "epoch": 1,
        "list": [1, {"x": 2.5}],
        "object": slice(1, 2),
        "long": "a" * 500,
        "kind": {"k": 1},
    }
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state, block=True)
        optimizer.param_groups[0]["lr"] = 0.2
        state |= {"epoch": 2, "list": [1, {"x": math.inf}], "object": slice(1, 3), "long": "a" * 499 + "b", "new": None}
        state["kind"] = OrderedDict(k=1)
        checkpointer.save(2, state, block=True)
    a, b = (read_checkpoint(directory / f"step-{step:09d}") for step in (1, 2))
    found = compare.compare(a, b)
    told = {c.name: (c.what, c.a, c.b) for c in found.others}
    long = told.pop("long")
    assert long[0] == "other values"
    assert len(long[1]) == 200
    assert told == {
        "optimizer/param_groups/0/lr": ("other values", "0.1", "0.2"),
        "epoch": ("other values", "1", "2"),
        "list/1/x": ("other values", "2.5", "inf"),
        "object": ("other object", "", ""),
        "kind": ("other containers or names", "", ""),
        "new": ("only in B", "", "None"),
    }
    assert found.changes == []
    back = {c.name: c.what for c in compare.compare(b, a).others}
    assert back["new"] == "only in A"


def test_cut_otherwise(directory: Path) -> None:
    """Rows on two ranks against columns on three, whole against parts, and one value changed."""
    whole = np.random.default_rng(1).standard_normal((64, 48)).astype("<f4")
    changed = whole.copy()
    changed[40, 7] += 3
    rows = [((0, 0), (10, 48)), ((10, 0), (54, 48))]
    columns = [((0, 0), (64, 5)), ((0, 5), (64, 20)), ((0, 25), (64, 23))]
    a = together(directory, 1, [[leaf("x", whole, box), leaf("y", whole)] for box in rows])
    b = together(directory, 2, [[leaf("x", whole, box), leaf("y", whole)] for box in columns])
    c = together(directory, 3, [[leaf("x", changed, box), leaf("y", whole, box)] for box in columns])
    assert compare.compare(a, b).same
    assert compare.compare(a, b).equal == 2
    for one, other in ((a, c), (b, c), (c, a)):
        found = compare.compare(one, other)
        assert [(n, r, w) for n, r, w, _ in facts(found)] == [("x", None, "other values")]
        assert found.changes[0].apart is not None
        assert found.changes[0].apart.differing == 1
        assert found.changes[0].apart.max_abs == pytest.approx(3, rel=1e-5)
        assert found.nbytes == to_read(one, other)


def test_once_for_all_against_each_rank(directory: Path) -> None:
    one = np.arange(8.0)
    a = together(directory, 1, [[leaf("x", one)], [leaf("x", one)]])
    b = together(directory, 2, [[leaf("x", one)], [leaf("x", one + 1)]])
    assert facts(compare.compare(a, b)) == [("x", 1, "other values", (8, 1.0))]
    assert facts(compare.compare(b, a)) == [("x", 1, "other values", (8, 1.0))]
    c = together(directory, 3, [[leaf("x", one)], [leaf("x", one + 1)], [leaf("x", one + 2)]])
    assert facts(compare.compare(b, c)) == [("x", 2, "only in B", None)]


def test_damage_is_an_error(directory: Path) -> None:
    a, b = saved(directory, {"x": np.zeros(9)}, {"x": np.ones(9)})
    (item,) = [item for item in b.manifest.stored if item.entry.name == "tensors/x"]
    with (b.path / item.file).open("r+b") as file:
        file.seek(item.offset)
        file.write(b"\x07")
    with pytest.raises(CorruptCheckpoint, match="x: the bytes have changed"):
        compare.compare(a, b)
