"""Files of others as checkpoints that restore takes."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from tests.ckpt.test_export import Tied, every_type, same
from transom_hpc.base.errors import CheckpointError, StateError, UsageError
from transom_hpc.ckpt import Checkpointer, importing, list_checkpoints, verify
from transom_hpc.ckpt.arriving import arrive
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.importing import Imported, import_state


def put(source: Path, directory: Path, step: int = 7, key: str = "") -> Imported:
    done = import_state(arrive(source), directory, step, key)
    assert verify(done.path) == []
    return done


def restored(directory: Path, state: Any) -> int:
    with Checkpointer(directory) as checkpointer:
        return checkpointer.restore(state)


def trained() -> tuple[Tied, torch.optim.Optimizer]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(model.head(model.embed(torch.tensor([1, 2])))[:, :4]).sum().backward()
    optimizer.step()
    return model, optimizer


def of(model: torch.nn.Module) -> dict[str, Any]:
    return dict(model.state_dict())


def test_a_torch_file(directory: Path, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": of(model), "optimizer": optimizer.state_dict(), "step": 7}, tmp_path / "x.pt")
    done = put(tmp_path / "x.pt", directory)
    assert done.places == {"model": "module", "optimizer": "optimizer", "step": "plain"}
    again, other = trained()
    state = {"model": again, "optimizer": other, "step": 0}
    assert restored(directory, state) == 7
    assert state["step"] == 7
    same(of(again), of(model))
    same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_an_optimizer_before_its_first_step(directory: Path, tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": of(model), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    put(tmp_path / "x.pt", directory)
    again = Tied()
    other = torch.optim.AdamW(again.parameters())
    assert restored(directory, {"model": again, "optimizer": other}) == 7
    same(other.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_state_dict_alone(directory: Path, tmp_path: Path) -> None:
    model, _ = trained()
    torch.save(model.state_dict(), tmp_path / "x.pth")
    assert put(tmp_path / "x.pth", directory).places == {"model": "module"}
    safetensors.torch.save_model(model, tmp_path / "x.safetensors")
    done = put(tmp_path / "x.safetensors", directory, 8, "net")
    assert done.places == {"net": "module"}
    for key, step in (("model", 7), ("net", 8)):
        again = Tied()
        if step == 7:
            (directory / "step-000000008").rename(directory / "aside")
        assert restored(directory, {key: again}) == step
        same(of(again), of(model))
        if step == 7:
            (directory / "aside").rename(directory / "step-000000008")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_type(directory: Path, tmp_path: Path) -> None:
    state = {"all": {"of": {name: t.clone() for name, t in every_type().items()}}}
    state["all"]["of"]["turned"] = torch.arange(12.0).reshape(3, 4).T
    torch.save(state, tmp_path / "x.pt")
    put(tmp_path / "x.pt", directory)
    empty = {"all": {"of": {name: torch.zeros_like(t) for name, t in state["all"]["of"].items()}}}
    assert restored(directory, empty) == 7
    same(empty, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_dcp(directory: Path, tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "list": [1, torch.ones(3)]}
    state["object"] = slice(1, 2)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    done = put(tmp_path / "dcp", directory)
    assert [name for name, _ in done.left_out] == ["object"]
    again, other = trained()
    live = {"model": again, "optimizer": other, "list": [0, torch.zeros(3)]}
    assert restored(directory, live) == 7
    same(of(again), of(model))
    same(other.state_dict()["state"], optimizer.state_dict()["state"])
    same(live["list"], [1, torch.ones(3)])


def test_back_from_an_export(directory: Path, tmp_path: Path) -> None:
    from tests.ckpt.test_export import saved, write

    model, _ = trained()
    checkpoint = saved(tmp_path / "first", {"model": model, "n": 1})
    for name in ("x.pt", "x.safetensors"):
        write(checkpoint, tmp_path / name, "model")
        put(tmp_path / name, directory / name)
        again = Tied()
        restored(directory / name, {"model": again})
        same(of(again), of(model))
        assert again.head.weight is again.embed.weight


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_code_is_not_run(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": torch.ones(1), "x": Evil()}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="is not unpickled, since that would run code"):
        arrive(tmp_path / "x.pt")
    (tmp_path / "y.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match="y.pt"):
        arrive(tmp_path / "y.pt")
    dcp.save({"x": Evil(), "y": torch.ones(1)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert [name for name, _ in put(tmp_path / "dcp", directory).left_out] == ["x"]
    assert not (tmp_path / "evil").exists()


def test_what_is_no_such_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    (tmp_path / "x.pt").write_bytes(b"nothing")
    torch.save(torch.ones(1000), tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:700])
    (tmp_path / "folder").mkdir()
    for name, why in (
        ("none.pt", "there is no"),
        ("x.safetensors", "no whole safetensors file"),
        ("x.pt", "x.pt"),
        ("cut.pt", "no whole torch file"),
        ("folder", "it has no .metadata"),
    ):
        with pytest.raises(UsageError, match=why):
            arrive(tmp_path / name)


def names(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".attempt"
    }


def test_what_is_there_stays(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(7, {"x": torch.ones(3)}, block=True)
    before, attempt = names(directory), (directory / ".attempt").read_bytes()
    torch.save({"model": {"w": torch.zeros(3)}}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match="step 7 of .* is there already"):
        import_state(arrive(tmp_path / "x.pt"), directory, 7)
    assert names(directory) == before
    assert (directory / ".attempt").read_bytes() == attempt
    with Checkpointer(directory):
        monkeypatch.setattr("transom_hpc.ckpt.start.this_process", other_process())
        with pytest.raises(CheckpointError, match="another program writes to"):
            import_state(arrive(tmp_path / "x.pt"), directory, 8)
    monkeypatch.undo()
    assert names(directory) == before

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Files, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        import_state(arrive(tmp_path / "x.pt"), directory, 8)
    monkeypatch.undo()
    assert {name: data for name, data in names(directory).items() if name in before} == before
    assert [found.step for found in list_checkpoints(directory)] == [7]
    put(tmp_path / "x.pt", directory, 8)
    assert not (directory / ".writer").exists()


def other_process() -> Any:
    """As a process that is not the one that has the directory."""
    from dataclasses import replace

    from transom_hpc.ckpt.claim import this_process

    return lambda *facts: replace(this_process(*facts), pid=1, started="0")


def test_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(3)}}, tmp_path / "x.pt")
    arrived = arrive(tmp_path / "x.pt")
    source = importing.Arriving(importing.state.walk(arrived.state).leaves, {})
    source.entries()
    source._here.clear()
    arrived.state["model"]["w"] += 1
    with pytest.raises(StateError, match="model/w changed while it was being read"):
        source.data(0, 0, 12)


def test_no_dict(directory: Path, tmp_path: Path) -> None:
    torch.save([torch.ones(1)], tmp_path / "x.pt")
    with pytest.raises(UsageError, match="name a place for it with --as"):
        put(tmp_path / "x.pt", directory)
    put(tmp_path / "x.pt", directory, 7, "things")
    live = {"things": [torch.zeros(1)]}
    assert restored(directory, live) == 7
    same(live["things"], [torch.ones(1)])
