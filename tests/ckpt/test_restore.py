"""Damage is found before any of it reaches the state; all ranks fall back alike; what does not fit is named."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from transom_hpc.base.errors import CorruptCheckpoint, OtherFormat, StateError
from transom_hpc.ckpt import Checkpointer, SaveWarning, list_checkpoints, verify

BIG = 9_000_000  # two transfers and a tail


def fresh() -> dict[str, Any]:
    return {"big": torch.zeros(BIG, dtype=torch.uint8), "small": torch.zeros(3), "n": 0}


def at(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {"big": torch.randint(0, 255, (BIG,), dtype=torch.uint8), "small": torch.randn(3), "n": step}


def right(state: dict[str, Any], step: int) -> bool:
    wanted = at(step)
    return state["n"] == step and all(torch.equal(state[k], wanted[k]) for k in ("big", "small"))


@pytest.fixture
def two(directory: Path) -> Path:
    """Steps 1 and 2."""
    with Checkpointer(directory) as ckpt:
        for step in (1, 2):
            ckpt.save(step, at(step), block=True)
    return directory


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def damages(folder: Path) -> dict[str, Callable[[], object]]:
    data, manifest = folder / "data-00000.h5", folder / "manifest.json"
    stored = {i.entry.name: i for i in list_checkpoints(folder.parent)[-1].manifest.stored}
    big, small = stored["tensors/big"], stored["tensors/small"]
    older = folder.with_name("step-000000001")
    found: dict[str, Callable[[], object]] = {
        "first bit": lambda: flip(data, big.offset),
        "last bit": lambda: flip(data, big.offset + BIG - 1),
        "small tensor": lambda: flip(data, small.offset + 5),
        "structure": lambda: flip(data, stored["structure/n"].offset + 10),
        "no manifest": manifest.unlink,
        "no data": data.unlink,
        "older data": lambda: shutil.copy(older / data.name, data),
        "older manifest": lambda: shutil.copy(older / manifest.name, manifest),
        "older folder": lambda: (shutil.rmtree(folder), shutil.copytree(older, folder)),
        "zeros": lambda: data.write_bytes(bytes(data.stat().st_size)),
    }  # fmt: skip
    for path in (data, manifest):
        for share in (0.0, 0.01, 0.5, 0.999):
            size = int(path.stat().st_size * share)
            found[f"{path.name} cut at {share:.1%}"] = lambda path=path, size=size: os.truncate(path, size)
        found[f"{path.name} one byte longer"] = lambda path=path: path.write_bytes(path.read_bytes() + b"x")
    size = manifest.stat().st_size
    for offset in range(0, size, max(1, size // 25)):
        found[f"manifest bit at {offset}"] = lambda offset=offset: flip(manifest, offset)
    return found


def test_every_damage_is_found_and_the_one_before_taken(two: Path, tmp_path: Path, caplog: Any) -> None:
    names = list(damages(two / "step-000000002"))
    assert len(names) > 40
    for name in names:
        copy = tmp_path / "copy"
        shutil.copytree(two, copy)
        damages(copy / "step-000000002")[name]()
        caplog.clear()
        state = fresh()
        with caplog.at_level(logging.WARNING), Checkpointer(copy) as ckpt:
            assert ckpt.restore(state) == 1, name
            assert right(state, 1), name
            assert "step 2 is not restored" in caplog.text, name
            ckpt.save(2, at(2), block=True)  # its step can be saved again
            assert ckpt.last_committed == 2, name
        assert [c.step for c in list_checkpoints(copy)] == [1, 2], name
        shutil.rmtree(copy)


def test_nothing_whole_is_an_error_and_touches_nothing(two: Path) -> None:
    for step in (1, 2):
        flip(two / f"step-{step:09d}" / "data-00000.h5", 100_000)
    state = fresh()
    with Checkpointer(two) as ckpt, pytest.raises(CorruptCheckpoint, match="no checkpoint of 2 is whole") as caught:
        ckpt.restore(state)
    assert caught.value.step == 2
    assert int(state["big"].max()) == 0
    assert len(list(two.glob("step-*"))) == 2, "left for a person to look at"


def of_another_version(folder: Path) -> bytes:
    """Make a checkpoint one of a format that is not known."""
    was = (folder / "manifest.json").read_bytes()
    body = was[was.index(b'"body":') + len(b'"body":') : -2]
    text = b'{"transom_checkpoint":9,"xxh3":"%s","body":%s}\n' % (xxhash.xxh3_128_hexdigest(b"9" + body).encode(), body)
    (folder / "manifest.json").write_bytes(text)
    return text


def test_what_another_version_wrote_is_refused_and_left_as_it_is(two: Path) -> None:
    """It is not damaged: going on from the one before would lose what it holds, and putting it aside hide it."""
    newest = two / "step-000000002"
    text = of_another_version(newest)
    state = fresh()
    with Checkpointer(two) as ckpt:
        with pytest.raises(OtherFormat, match="step-000000002 was written by another version.*format 9"):
            ckpt.restore(state)
        with pytest.raises(OtherFormat):
            ckpt.save(2, at(2), block=True)
    assert not state["big"].any()
    assert (newest / "manifest.json").read_bytes() == text
    with pytest.raises(OtherFormat):
        verify(newest)


def test_an_older_one_of_another_version_is_in_nobodys_way(two: Path) -> None:
    text = of_another_version(two / "step-000000001")
    state = fresh()
    with Checkpointer(two, keep=1) as ckpt:
        assert ckpt.restore(state) == 2
        assert right(state, 2)
        ckpt.save(3, at(3), block=True)
    assert (two / "step-000000001" / "manifest.json").read_bytes() == text
    assert [found.step for found in list_checkpoints(two)] == [3]


def test_damage_touches_no_tensor(two: Path) -> None:
    shutil.rmtree(two / "step-000000001")
    stored = {i.entry.name: i for i in list_checkpoints(two)[-1].manifest.stored}
    flip(two / "step-000000002" / "data-00000.h5", stored["tensors/big"].offset + BIG - 1)
    state = fresh()
    with Checkpointer(two) as ckpt, pytest.raises(CorruptCheckpoint, match="big: the bytes have changed"):
        ckpt.restore(state)
    assert int(state["big"].max()) == 0
    assert float(state["small"].abs().max()) == 0
    assert state["n"] == 0


def test_several_data_files(directory: Path) -> None:
    state = {f"t{i}": torch.full((50_000 * i,), float(i)) for i in range(1, 6)}
    with Checkpointer(directory, data_files=3) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state, block=True)
    found = list_checkpoints(directory)[-1]
    assert list(found.manifest.files) == [f"data-{number:05d}.h5" for number in range(3)]
    sizes = [sum(i.entry.nbytes for i in found.manifest.stored if i.file == name) for name in found.manifest.files]
    assert max(sizes) < 1.3 * min(sizes)
    (last,) = [i for i in found.manifest.stored if i.entry.name == "tensors/t4"]
    assert last.file != "data-00000.h5"
    flip(found.path / last.file, last.offset + 50)
    assert [(f.file, f.name, f.offset) for f in verify(found.path)] == [(last.file, "t4", last.offset)]
    (directory / "step-000000002" / "data-00002.h5").unlink()
    with Checkpointer(directory, data_files=1) as ckpt:
        restored = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert ckpt.restore(restored) == 1
        ckpt.save(4, state, block=True)
    assert all(torch.equal(restored[name], tensor) for name, tensor in state.items())
    assert [(c.step, len(c.manifest.files)) for c in list_checkpoints(directory)] == [(1, 3), (4, 1)]


def test_without_room_for_staging_the_file_is_read_twice(two: Path) -> None:
    state = fresh()
    with Checkpointer(two, shm_bytes=4096) as ckpt:
        assert ckpt.restore(state) == 2
    assert right(state, 2)
    stored = {i.entry.name: i for i in list_checkpoints(two)[-1].manifest.stored}
    flip(two / "step-000000002" / "data-00000.h5", stored["tensors/small"].offset)
    state = fresh()
    with Checkpointer(two, shm_bytes=4096) as ckpt:
        assert ckpt.restore(state) == 1
    assert right(state, 1)


def test_one_rank_sees_damage_and_all_fall_back(ranks: Any, directory: Path) -> None:
    assert ranks("arrays", 2, "A1", directory=directory, total=4).codes == [0, 0]
    found = list_checkpoints(directory)[-1]
    (own,) = [i for i in found.manifest.stored if i.rank == 1 and i.entry.name == "tensors/own"]
    flip(found.path / own.file, own.offset)
    assert [str(f) for f in verify(found.path)] == [
        f"data-00000.h5: own: the bytes have changed at byte {own.offset} (rank 1)"
    ]
    again = ranks("arrays", 2, "A2", directory=directory, total=4)
    assert again.codes == [0, 0], again.errors
    assert [said["start"] for said in again.said] == [2, 2]
    assert [c.step for c in list_checkpoints(directory)] == [2, 4]


def test_verify_names_file_tensor_and_offset(two: Path) -> None:
    folder = two / "step-000000002"
    assert verify(folder) == []
    stored = {i.entry.name: i for i in list_checkpoints(two)[-1].manifest.stored}
    flip(folder / "data-00000.h5", stored["tensors/big"].offset + 5)
    (fault,) = verify(folder)
    assert (fault.file, fault.name, fault.rank) == ("data-00000.h5", "big", None)
    assert fault.offset == stored["tensors/big"].offset


def test_every_difference_is_named_at_once(directory: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"model": model, "old": 1, "x": torch.ones(2), "l": [1, 2]}, block=True)
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 2), torch.nn.Linear(2, 2))
    before = other[0].weight.detach().clone()
    state = {"model": other, "new": torch.zeros(1), "x": torch.ones(2, dtype=torch.float64), "l": [1, 2, 3]}
    with Checkpointer(directory) as ckpt, pytest.raises(StateError) as caught:
        ckpt.restore(state)
    message = str(caught.value)
    for part in (
        "model/2.weight",
        "new",
        "only in the checkpoint: old",
        "model/0.weight (stored: [8, 4]",
        "here: shape [9, 4]",
        "x (stored: [2] float32; here: float64)",
        "l (stored: 2 items; here: 3)",
    ):
        assert part in message, part
    assert torch.equal(other[0].weight, before)


def test_not_strict_takes_what_fits_and_says_so(directory: Path) -> None:
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"a": torch.ones(2), "b": torch.ones(2), "c": 5}, block=True)
    state = {"a": torch.zeros(2), "b": torch.zeros(3), "c": 0, "d": 1}
    with Checkpointer(directory) as ckpt, pytest.warns(SaveWarning, match="without what does not fit.*: d;.*b"):
        assert ckpt.restore(state, strict=False) == 1
    assert state["a"].tolist() == [1, 1]
    assert state["b"].tolist() == [0, 0, 0]
    assert (state["c"], state["d"]) == (5, 1)


def test_an_optimizer_with_other_groups_is_refused(directory: Path) -> None:
    one = torch.nn.Linear(2, 2)
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"o": torch.optim.Adam(one.parameters())}, block=True)
    groups = [{"params": [one.weight]}, {"params": [one.bias]}]
    with (
        Checkpointer(directory) as ckpt,
        pytest.raises(StateError, match=r"o/param_groups .stored: \[2\].*here: \[1, 1\]"),
    ):
        ckpt.restore({"o": torch.optim.Adam(groups)})


def test_pickles_are_opened_only_where_the_state_has_an_object(directory: Path) -> None:
    class Box:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return self.value

        def load_state_dict(self, value: Any) -> None:
            self.value = value

    strange = np.random.default_rng(1)
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"x": strange, "box": Box({"a": 1, "b": strange})}, block=True)
    with Checkpointer(directory) as ckpt, pytest.raises(StateError, match="box/b .stored as a pickled object"):
        ckpt.restore({"x": np.random.default_rng(2), "box": Box({"a": 0})})
    state = {"x": np.random.default_rng(2), "box": Box(None)}
    with Checkpointer(directory, unpickle=True) as ckpt:
        ckpt.restore(state)
    assert state["x"].random() == np.random.default_rng(1).random()


def test_more_ranks_than_saved(ranks: Any, directory: Path) -> None:
    assert ranks("arrays", 1, "A1", directory=directory, total=2).codes == [0]
    again = ranks("arrays", 2, "A2", directory=directory, total=2)
    assert again.codes == [1, 1]
    assert "StateError" in again.errors[1]
    assert "own" in again.errors[1]


def test_fewer_ranks_do_not_drop_what_ranks_had_of_their_own(ranks: Any, directory: Path) -> None:
    assert ranks("resized", 3, "A1", directory=directory, own=True).codes == [0, 0, 0]
    refused = ranks("resized", 2, "A2", directory=directory, own=True)
    for said in refused.said:
        assert said["error"] == (
            "step 2: the checkpoint does not fit the state: own of rank 2 has no rank to go to: the checkpoint is of 3 "
            "ranks and here are 2; run it on 3 ranks; strict=False takes what fits"
        )
    taken = ranks("resized", 2, "A3", directory=directory, own=True, strict=False)
    assert [said["own"] for said in taken.said] == [10.0, 11.0]
    assert [said["same"] for said in taken.said] == [5.0, 5.0]
    (warning,) = taken.said[0]["said"]
    assert "restored step 2 without what does not fit: own of rank 2 has no rank to go to" in warning
    assert taken.said[1]["said"] == []


def test_more_ranks_than_had_something_of_their_own(ranks: Any, directory: Path) -> None:
    assert ranks("resized", 2, "A1", directory=directory, own=True).codes == [0, 0]
    refused = ranks("resized", 3, "A2", directory=directory, own=True)
    for said in refused.said:
        assert (
            "rank 2: the checkpoint does not fit the state: own is kept for each rank, and there is none for rank 2: "
            "the checkpoint is of 2 ranks and here are 3; not in the checkpoint: own"
        ) in said["error"]
        assert "run it on 2 ranks; strict=False takes what fits" in said["error"]
    taken = ranks("resized", 3, "A3", directory=directory, own=True, strict=False)
    assert [said["own"] for said in taken.said] == [10.0, 11.0, 2.0]
    assert [len(said["said"]) for said in taken.said] == [1, 0, 0]
    assert "rank 2: own is kept for each rank" in taken.said[0]["said"][0]


def test_what_all_ranks_share_fits_any_number_of_them(ranks: Any, directory: Path) -> None:
    """Also what rank 0 alone has, since there is always a rank 0."""
    assert ranks("resized", 2, "A1", directory=directory, own=False).codes == [0, 0]
    for attempt, count in (("A2", 3), ("A3", 1)):
        again = ranks("resized", count, attempt, directory=directory, own=False)
        assert [said["start"] for said in again.said] == [2] * count
        assert [said["same"] for said in again.said] == [5.0] * count
        assert all(said["said"] == [] for said in again.said)


def test_memory_of_a_program_that_died(ranks: Any, directory: Path) -> None:
    died = ranks("dies", 2, "A1", directory=directory)
    assert died.codes == [-9, -9], died.errors
    assert [c.step for c in list_checkpoints(directory)] == [2]
    again = ranks("lives", 2, "A2", directory=directory)
    assert again.codes == [0, 0], again.errors
    assert [said["start"] for said in again.said] == [4, 4], "step 4 was whole in memory only"
    assert all(said["right"] for said in again.said)


def test_memory_that_has_changed_is_not_trusted(ranks: Any, directory: Path, staging: Path) -> None:
    assert ranks("dies", 2, "A1", directory=directory).codes == [-9, -9]
    newest = max((p for p in staging.glob("*-rank-00001.*")), key=lambda p: p.stat().st_mtime_ns)
    flip(newest, 4096 + 100)
    again = ranks("lives", 2, "A2", directory=directory)
    assert again.codes == [0, 0], again.errors
    assert [said["start"] for said in again.said] == [2, 2]
    assert all(said["right"] for said in again.said)
