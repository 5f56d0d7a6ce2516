"""Checkpoints as safetensors and torch files, read back by the libraries that own these formats."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from tests.ckpt.together import leaf, together
from transom_hpc.base.errors import CorruptCheckpoint, UsageError
from transom_hpc.ckpt import Checkpointer, dtypes, export, read_checkpoint
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.export import Exported


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(4)


def saved(directory: Path, state: Any) -> Checkpoint:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(20, state, block=True)
    return read_checkpoint(directory / "step-000000020")


def write(checkpoint: Checkpoint, path: Path, only: str = "", rank: int | None = None, **options: Any) -> Exported:
    return export.export(checkpoint, export.plan(checkpoint, path, only, rank), path, **options)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> None:
    """Equal bit for bit, containers and types too."""
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    elif isinstance(a, dict):
        assert type(a) is type(b)
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert type(a) is type(b)
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert type(a) is type(b)
        assert a == b


def test_a_module_both_ways(directory: Path, tmp_path: Path) -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(model.head(model.embed(torch.tensor([1, 2])))[:, :4]).sum().backward()
    optimizer.step()
    checkpoint = saved(directory, {"model": model, "optimizer": optimizer, "step": 3})
    for name in ("m.pt", "m.pth"):
        done = write(checkpoint, tmp_path / name, "model")
        assert (done.tied, done.left_out, done.nbytes) == ({}, [], (tmp_path / name).stat().st_size)
        loaded = torch.load(tmp_path / name, weights_only=True, mmap=True)
        same(loaded, dict(model.state_dict()))
        assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
        Tied().load_state_dict(loaded)
    done = write(checkpoint, tmp_path / "m.safetensors", "model")
    assert done.tied == {"head.weight": "embed.weight"}
    again = Tied()
    assert safetensors.torch.load_model(again, tmp_path / "m.safetensors") == (set(), [])
    same(dict(again.state_dict()), dict(model.state_dict()))
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "step": "20", "head.weight": "embed.weight"}
    done = write(checkpoint, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    assert list(loaded) == ["model", "optimizer", "step"]
    assert loaded["step"] == 3
    other = torch.optim.AdamW(again.parameters())
    other.load_state_dict(loaded["optimizer"])
    same(other.state_dict()["state"], optimizer.state_dict()["state"])
    write(checkpoint, tmp_path / "all.safetensors")
    names = safetensors.torch.load_file(tmp_path / "all.safetensors").keys()
    assert "model.embed.weight" in names
    assert any(name.startswith("optimizer.state.") and name.endswith(".exp_avg_sq") for name in names)


def every_type() -> dict[str, torch.Tensor]:
    raw = torch.from_numpy(np.random.default_rng(3).integers(0, 256, 96, dtype=np.uint8))
    state = {name: raw.view(getattr(torch, name)).reshape(-1, 2) for name in dtypes._TORCH if name != "bool"}
    return state | {"bool": raw.reshape(-1, 2) > 100, "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}


def test_every_type(directory: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: complex32 is experimental
        state = every_type()
        checkpoint = saved(directory, state)
        assert write(checkpoint, tmp_path / "x.pt").left_out == []
        same(torch.load(tmp_path / "x.pt", weights_only=True, mmap=True), state)
        done = write(checkpoint, tmp_path / "x.safetensors")
        loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
        assert {name for name, _ in done.left_out} == set(state) - set(loaded)
        assert set(state) - set(loaded) == {
            "complex128", "complex64", "complex32", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
            "float4_e2m1fn_x2",
        }  # fmt: skip
        assert ("complex64", "safetensors has no element type complex64") in done.left_out
        same({name: loaded[name] for name in state if name in loaded}, {n: state[n] for n in state if n in loaded})


def test_plain_values_and_what_is_left_out(directory: Path, tmp_path: Path) -> None:
    state = {
        "array": np.arange(5.0),
        "big": np.arange(3, dtype=">i4"),
        "number": np.float32(1.5),
        "object": slice(1, 2),
        "list": [1, object, torch.ones(2)],
        "values": (1, 2.5, None, "x", b"y", 3j, {1, 2}, frozenset([3]), float("inf"), bytearray(b"z"), b"l" * 300),
        7: {"k": torch.zeros(1)},
    }
    checkpoint = saved(directory, state)
    done = write(checkpoint, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert [name for name, _ in done.left_out] == ["big", "object", "list/1"]
    same(loaded["array"], torch.arange(5.0, dtype=torch.float64))
    assert loaded["number"] == 1.5
    same(loaded["list"], [1, None, torch.ones(2)])
    assert loaded["values"] == (*state["values"][:7], {3}, *state["values"][8:])
    assert list(loaded)[-1] == 7
    done = write(checkpoint, tmp_path / "x.safetensors")
    assert set(safetensors.torch.load_file(tmp_path / "x.safetensors")) == {"array", "list.2", "7.k"}
    assert ("values/1", "no tensor") in done.left_out
    write(checkpoint, tmp_path / "one.safetensors", "list/2")
    assert list(safetensors.torch.load_file(tmp_path / "one.safetensors")) == ["2"]
    with pytest.raises(UsageError, match="nothing at modle; there are array, big, number"):
        export.plan(checkpoint, tmp_path / "y.pt", "modle")
    with pytest.raises(UsageError, match="no array to export from values"):
        export.plan(checkpoint, tmp_path / "y.pt", "values")
    with pytest.raises(UsageError, match=r"must end with one of .safetensors, .pt, .pth"):
        export.plan(checkpoint, tmp_path / "y.bin")


def test_two_names_that_become_one(directory: Path, tmp_path: Path) -> None:
    checkpoint = saved(directory, {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})
    with pytest.raises(UsageError, match=r"two places of the state have the name a\.b"):
        export.plan(checkpoint, tmp_path / "x.safetensors")
    write(checkpoint, tmp_path / "x.pt")


def test_parts_stages_and_ranks(directory: Path, tmp_path: Path) -> None:
    """Parts become whole, stages of a pipeline one dict; what each rank has for itself is left out or chosen."""
    whole = np.arange(60, dtype="<f4").reshape(6, 10)
    held, structure = [], []
    for rank in range(2):
        held.append(
            [
                leaf("model/w", whole, ((0, 5 * rank), (6, 5)), "float32"),
                leaf(f"model/{rank}.b", whole[rank], None, "float32"),
                leaf("own", whole[rank], None, "float32"),
            ]
        )
        stage = [[key, key, ["tensor", f"tensors/model/{key}"]] for key in ("w", f"{rank}.b")]
        structure.append(
            {
                "model": ["key", "model", ["module", ["dict", stage]]],
                "own": ["key", "own", ["tensor", "tensors/own"]],
                "number": ["key", "number", rank],
                "row": ["key", "row", ["list", [["tuple", [1, 2, rank]], 3]]],
            }
        )
    checkpoint = together(directory, 20, held, structure)
    write(checkpoint, tmp_path / "m.safetensors", "model")
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    same(loaded["w"], torch.from_numpy(whole))
    same(loaded["1.b"], torch.from_numpy(whole[1]))
    done = write(checkpoint, tmp_path / "x.pt")
    assert [name for name, _ in done.left_out] == ["own", "number", "row/0"]
    write(checkpoint, tmp_path / "one.pt", rank=1)
    one = torch.load(tmp_path / "one.pt", weights_only=True)
    same((one["own"], one["number"]), (torch.from_numpy(whole[1]), 1))
    assert one["row"] == [(1, 2, 1), 3]
    with pytest.raises(UsageError, match="rank 2: the checkpoint is of 2 ranks"):
        export.plan(checkpoint, tmp_path / "y.pt", "", 2)


def test_torch_file_is_a_whole_zip_file(directory: Path, tmp_path: Path) -> None:
    """Its checksums too, of which torch takes no notice; and as torch.save lays it out."""
    state = {"a": torch.arange(1000.0), "z": torch.zeros(0), "b": torch.ones(3, dtype=torch.int8)}
    write(saved(directory, state), tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        ours = archive.infolist()
    (tmp_path / "theirs").mkdir()
    torch.save(state, tmp_path / "theirs" / "x.pt")
    with zipfile.ZipFile(tmp_path / "theirs" / "x.pt") as archive:
        theirs = archive.infolist()
    assert [info.filename for info in ours] == [info.filename for info in theirs]
    (first, last), (begin, end) = ([infos[4].header_offset, infos[7].header_offset] for infos in (ours, theirs))
    assert [ours[4].filename, ours[7].filename] == ["x/data/0", "x/version"]
    one, other = (tmp_path / "x.pt").read_bytes(), (tmp_path / "theirs" / "x.pt").read_bytes()
    assert one[first:last] == other[begin:end], "headers, bytes and checksums of all arrays"


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_no_file_after_a_failure(directory: Path, tmp_path: Path, name: str) -> None:
    checkpoint = saved(directory, {"a": torch.ones(5), "b": torch.arange(1000.0)})
    place = tmp_path / "out"
    place.mkdir()
    write(checkpoint, place / name)
    before = (place / name).read_bytes()
    with pytest.raises(UsageError, match="is there already; --force"):
        write(checkpoint, place / name)
    (item,) = [item for item in checkpoint.manifest.stored if item.entry.name == "tensors/b"]
    with (checkpoint.path / item.file).open("r+b") as file:
        file.seek(item.offset + 3999)
        file.write(b"\x07")
    with pytest.raises(CorruptCheckpoint, match="b: the bytes have changed"):
        write(checkpoint, place / name, replace=True)
    assert (place / name).read_bytes() == before, "the file that was there is untouched"
    assert [path.name for path in place.iterdir()] == [name]
    with pytest.raises(UsageError, match="there is no folder"):
        write(checkpoint, place / "none" / name)


def test_no_room(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(directory, {"a": torch.ones(5)})
    monkeypatch.setattr(export.Files, "free_bytes", lambda *_: 19)
    with pytest.raises(UsageError, match="GB left and the file takes"):
        write(checkpoint, tmp_path / "x.pt")


def test_header_as_the_format_says(directory: Path, tmp_path: Path) -> None:
    write(saved(directory, {"b": torch.ones(3, dtype=torch.int8), "a": torch.ones(2)}), tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length]) == {
        "__metadata__": {"format": "pt", "step": "20"},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "I8", "shape": [3], "data_offsets": [8, 11]},
    }
    assert data[8 + length :] == b"\x00\x00\x80\x3f" * 2 + b"\x01" * 3
