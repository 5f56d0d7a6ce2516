"""Several ranks as real processes: one file by all of them, the same step for all of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import h5py
import pytest

from transom_hpc.ckpt import list_checkpoints, verify

pytestmark = pytest.mark.timeout(120)


def test_ddp_goes_on_bitwise(ranks: Any, directory: Path, tmp_path: Path) -> None:
    whole = ranks("ddp", 2, "A1", directory=tmp_path / "other", total=7)
    assert whole.codes == [0, 0], whole.errors
    first = ranks("ddp", 2, "A1", directory=directory, total=4)
    assert first.codes == [0, 0], first.errors
    second = ranks("ddp", 2, "A2", directory=directory, total=7)
    assert second.codes == [0, 0], second.errors
    for rank in (0, 1):
        assert second.said[rank]["start"] == 4
        assert second.said[rank]["digests"]["7"] == whole.said[0]["digests"]["7"]
        assert second.said[rank]["mine"] == [rank]
    found = list_checkpoints(directory)
    assert [c.step for c in found] == [2, 4, 6]
    assert verify(found[-1].path) == []


def test_what_all_hold_is_stored_once(ranks: Any, directory: Path) -> None:
    done = ranks("ddp", 3, "A1", directory=directory, total=2)
    assert done.codes == [0, 0, 0], done.errors
    (found,) = list_checkpoints(directory)
    assert found.manifest.world_size == 3
    stored = [(item.rank, item.entry.name) for item in found.manifest.stored]
    assert (None, "tensors/model/0.weight") in stored
    assert all(rank is None for rank, name in stored if "/model" in name or "/optimizer" in name)
    assert {rank for rank, name in stored if name == "tensors/rng/torch"} == {0, 1, 2}
    with h5py.File(found.path / "data-00000.h5") as file:
        assert file["tensors/model/0.weight"].shape == (128, 64)
        assert file["ranks/2/tensors/rng/torch"].dtype == "u1"


def test_a_rank_that_cannot_save_stops_the_others_at_once(ranks: Any, directory: Path) -> None:
    before = time.monotonic()
    done = ranks("unlike", 2, "A1", directory=directory, bad=1)
    assert time.monotonic() - before < 45
    assert done.codes == [0, 0], done.errors
    assert done.said[1].startswith("StateError: f: ")
    assert "rank 1 gave up" in done.said[0]
    assert list_checkpoints(directory) == []


def test_arrays_without_a_communication_library(ranks: Any, directory: Path) -> None:
    assert ranks("arrays", 3, "A1", directory=directory, total=4).codes == [0, 0, 0]
    again = ranks("arrays", 3, "A2", directory=directory, total=6)
    assert again.codes == [0, 0, 0], again.errors
    assert [said["start"] for said in again.said] == [4, 4, 4]
    assert [said["own"] for said in again.said] == [[0], [1], [2]]
    assert again.said[0]["same"] == 5 + sum(range(6))
