"""transom ckpt on real checkpoints, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner, Result

from transom_hpc.ckpt import Checkpointer, read_checkpoint
from transom_hpc.cli.ckpt import ckpt
from transom_hpc.tol.rundir import RunDir, register
from transom_hpc.tol.spec import JobSpec, Submitted


def call(*arguments: str | Path, text: str | None = None) -> Result:
    return CliRunner().invoke(ckpt, [str(argument) for argument in arguments], input=text)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with steps 10 and 20."""
    with Checkpointer(tmp_path / "run" / "checkpoints", every=10) as checkpointer:
        for step in (10, 20):
            state = {"weights": numpy.arange(5000.0) + step, "name": "test"}
            checkpointer.save(step, state, block=True, metrics={"loss": 1.0 / step})
    return tmp_path / "run"


def damage(run: Path, step: int) -> int:
    """Flip a bit in the weights; their offset in the file."""
    found = read_checkpoint(run / "checkpoints" / f"step-{step:09d}")
    item = next(item for item in found.manifest.stored if "weights" in item.entry.name)
    path = found.path / item.file
    data = bytearray(path.read_bytes())
    data[item.offset + 17] ^= 1
    path.write_bytes(data)
    return item.offset


def test_ls(run: Path) -> None:
    (run / "checkpoints" / "step-000000010" / "manifest.json").write_bytes(b"{}")
    rows = json.loads(call("ls", run, "--json").stdout)
    assert [row["step"] for row in rows] == [10, 20]
    assert "manifest.json" in rows[0]["problem"]
    assert (rows[1]["problem"], rows[1]["world_size"], rows[1]["metrics"]) == ("", 1, {"loss": 0.05})
    assert rows[1]["bytes"] > 40000
    assert "whole" in call("ls", run / "checkpoints").stdout


def test_show(run: Path) -> None:
    facts = json.loads(call("show", run, "--json").stdout)
    assert (facts["step"], facts["writer"]) == (20, "direct")
    weights = next(array for array in facts["arrays"] if array["name"] == "weights")
    assert (weights["dtype"], weights["shape"], weights["bytes"]) == ("numpy:<f8", [5000], 40000)
    assert "weights" in (shown := call("show", run, "10").stdout)
    assert "with the direct writer into data-00000.h5" in shown
    missing = call("show", run, "15")
    assert missing.exception is not None
    assert "no checkpoint of step 15" in str(missing.exception)
    assert "there are 10, 20" in str(missing.exception)


def test_verify_names_the_place(run: Path) -> None:
    assert call("verify", run, "--all").exit_code == 0
    offset = damage(run, 10)
    assert call("verify", run).exit_code == 0, "the newest is whole"
    answer = call("verify", run, "10", "20", "--json")
    assert answer.exit_code == 1
    first, second = json.loads(answer.stdout)
    assert second == {"step": 20, "faults": []}
    (fault,) = first["faults"]
    assert (fault["name"], fault["offset"], fault["what"]) == ("weights", offset, "the bytes have changed")
    assert f"weights: the bytes have changed at byte {offset}" in call("verify", run, "10").stdout


def test_verify_a_file_cut_short(run: Path) -> None:
    path = run / "checkpoints" / "step-000000020" / "data-00000.h5"
    path.write_bytes(path.read_bytes()[:-100])
    answer = call("verify", run)
    assert answer.exit_code == 1
    assert "bytes and should have" in answer.stdout


def test_rm(run: Path) -> None:
    refused = call("rm", run, "20", "--yes")
    assert "step 20 is the newest whole checkpoint, and a run would fall back to step 10" in str(refused.exception)
    assert call("rm", run, "10", text="n\n").exit_code == 1
    assert len(json.loads(call("ls", run, "--json").stdout)) == 2
    assert call("rm", run, "10", text="y\n").exit_code == 0
    assert [row["step"] for row in json.loads(call("ls", run, "--json").stdout)] == [20]
    assert call("rm", run, "20", "--yes").exit_code == 0
    assert [path.name for path in (run / "checkpoints").iterdir() if "step" in path.name] == []


def test_a_newest_that_is_damaged_can_go(run: Path) -> None:
    (run / "checkpoints" / "step-000000020" / "manifest.json").unlink()
    assert call("rm", run, "20", "--yes").exit_code == 0


def test_by_job_id(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    RunDir(run).write(Submitted(JobSpec(), ("true",), "/", job_id="7012"))
    register(RunDir(run))
    assert call("ls", "7012").output == call("ls", run).output
    assert "no run with job id 7013" in str(call("ls", "7013").exception)


def test_nothing_there(tmp_path: Path) -> None:
    assert "no run directory at" in str(call("ls", tmp_path / "none").exception)
    assert "no checkpoint in" in str(call("ls", tmp_path).exception)
