"""transom ckpt on real checkpoints, whole and damaged."""

from __future__ import annotations

import json
import math
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


def test_ls_shows_what_was_put_aside(run: Path) -> None:
    with Checkpointer(run / "checkpoints", every=10, distrust="20@T99999999T000000.000000") as checkpointer:
        assert checkpointer.restore({"weights": numpy.zeros(5000), "name": ""}) == 10
    rows = json.loads(call("ls", run, "--json").stdout)
    assert [(row["step"], row["problem"].partition(".T")[0]) for row in rows] == [
        (10, ""),
        (20, "put aside as .distrusted-step-000000020"),
    ]
    assert rows[1]["problem"].endswith(": it is not trusted")
    assert Path(rows[1]["path"]).is_dir()
    with Checkpointer(run / "checkpoints", every=10, distrust="10@T99999999T000000.000000") as checkpointer:
        assert checkpointer.restore({"weights": numpy.zeros(5000), "name": ""}) == 0
    assert [row["step"] for row in json.loads(call("ls", run, "--json").stdout)] == [10, 20]
    assert "not trusted" in " ".join(call("ls", run).stdout.split())


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


def test_show_by_its_own_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run / "checkpoints" / "step-000000010"
    assert json.loads(call("show", folder, "--json").stdout)["step"] == 10
    monkeypatch.chdir(folder)
    assert json.loads(call("show", ".", "--json").stdout)["step"] == 10
    assert call("verify", folder).exit_code == 0
    assert "no checkpoint of step 20" in str(call("show", folder, "20").exception)
    assert "no checkpoint in" in str(call("rm", folder, "10", "--yes").exception), "rm looks at all that are there"


def test_diff(run: Path) -> None:
    answer = call("diff", run, "10", "20")
    assert answer.exit_code == 1
    assert max(map(len, answer.stdout.splitlines())) <= 80
    assert [line.split() for line in answer.stdout.splitlines()] == [
        ["ARRAY", "MAX", "ABS", "MAX", "REL", "DIFFER", "NAN"],
        ["weights", "10", "0.5", "100.0%"],
        ["0", "arrays", "are", "bitwise", "equal,", "1", "arrays", "differ", "(80", "kB", "read)"],
    ]
    facts = json.loads(call("diff", run, "20", "10", "--json").stdout)
    assert (facts["same"], facts["equal"], facts["others"]) == (False, 0, [])
    assert facts["arrays"][0] == {
        "name": "weights", "rank": None, "what": "other values", "a": "numpy:<f8 5000", "b": "numpy:<f8 5000",
        "elements": 5000, "differing": 5000, "nans": 0, "max_abs": 10.0, "max_rel": 0.5,
    }  # fmt: skip
    folders = [run / "checkpoints" / f"step-{step:09d}" for step in (10, 20)]
    assert call("diff", *folders).stdout == answer.stdout
    same = call("diff", run, "10", "10")
    assert (same.exit_code, same.stdout) == (0, "1 arrays are bitwise equal, nothing differs (0 B read)\n")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("10", "15"), "no checkpoint of step 15"),
        (("ten", "20"), "must be steps"),
        ((), "diff takes RUN STEP_A STEP_B"),
        (("10", "20", "30"), "diff takes RUN STEP_A STEP_B"),
        (("--jsn",), "No such option"),
    ],
)
def test_diff_in_trouble(run: Path, arguments: tuple[str, ...], why: str) -> None:
    answer = call("diff", run, *arguments)
    assert answer.exit_code == 2
    assert why in answer.stderr


def test_diff_of_damage(run: Path) -> None:
    damage(run, 10)
    answer = call("diff", run, "10", "20")
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert "weights: the bytes have changed" in answer.stderr


def test_diff_with_infinity_and_long_names(tmp_path: Path) -> None:
    for step, value in ((1, 0.0), (2, math.inf)):
        with Checkpointer(tmp_path, keep=9) as checkpointer:
            state = {"transformer.layers.11.attention.output.projection" * 2: numpy.full(3, value), "n": step}
            checkpointer.save(step, state | {f"x{i}": numpy.full(2, step) for i in range(40)}, block=True)
    facts = json.loads(call("diff", tmp_path, "1", "2", "--json").stdout)
    assert (facts["arrays"][0]["max_abs"], facts["others"][0]["b"]) == ("inf", "2")
    shown = call("diff", tmp_path, "1", "2").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "n: 1 / 2" in shown
    assert "and 11 more; --all shows them" in shown
    assert "more" not in call("diff", tmp_path, "1", "2", "--all").stdout


def test_export_and_import(run: Path, tmp_path: Path) -> None:
    assert "array" in call("export", run, "10", tmp_path / "x.pt").stdout
    done = json.loads(call("export", run, tmp_path / "x.safetensors", "--json").stdout)
    assert (done["step"], done["arrays"], done["tied"]) == (20, 1, {})
    assert done["left_out"] == [{"name": "name", "why": "no tensor"}]
    again = call("export", run, tmp_path / "x.safetensors")
    assert "is there already; --force replaces it" in str(again.exception)
    forced = call("export", run, tmp_path / "x.safetensors", "--force").stdout
    assert "left out: name (no tensor)" in forced
    made = call("import", tmp_path / "x.safetensors", run, "--step", "15", "--as", "state")
    assert made.exit_code == 0
    assert "state: as of modules" in made.stdout
    assert "restore takes the newest step, which is 20" in made.stdout
    facts = json.loads(call("show", run, "15", "--json").stdout)
    assert facts["arrays"][0]["name"] == "state/weights"
    answer = call("import", tmp_path / "x.pt", run, "--step", "15")
    assert "step 15 of" in str(answer.exception)
    made = json.loads(call("import", tmp_path / "x.pt", tmp_path / "new", "--step", "3", "--json").stdout)
    assert (made["step"], made["newest"], made["places"]) == (3, True, {"weights": "plain", "name": "plain"})
    assert "export takes RUN, one STEP" in str(call("export", run, "10", "20", tmp_path / "y.pt").exception)
    assert call("export", run, "x.pt", tmp_path / "y.pt").exit_code == 2
    assert call("import", tmp_path / "x.pt", run).exit_code == 2


def test_import_into_a_new_run(run: Path, tmp_path: Path) -> None:
    call("export", run, tmp_path / "x.pt")
    (tmp_path / "fresh").mkdir()
    RunDir(tmp_path / "fresh").write(Submitted(JobSpec(), ("true",), "/", job_id="7013"))
    assert call("import", tmp_path / "x.pt", tmp_path / "fresh", "--step", "1").exit_code == 0
    assert [path.name for path in (tmp_path / "fresh" / "checkpoints").glob("step*")] == ["step-000000001"]


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
