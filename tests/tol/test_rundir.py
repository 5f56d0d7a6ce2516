from __future__ import annotations

import os
from pathlib import Path

import pytest

from transom_hpc.base.errors import RunDirError
from transom_hpc.tol.rundir import RunDir, register, registered
from transom_hpc.tol.spec import JobSpec, Submitted


def made(path: Path) -> RunDir:
    run = RunDir(path)
    run.create()
    run.write(Submitted(JobSpec(), ("true",), "/"))
    return run


def test_create_twice(tmp_path: Path) -> None:
    run = made(tmp_path / "a" / "run")
    run.create()
    assert run.submitted().program == ("true",)
    assert run.entries() == []
    assert run.committed_steps() == []


def test_memory_of_one_host_is_not_shared() -> None:
    path = Path(f"/dev/shm/transom-test-{os.getpid()}/run")
    with pytest.raises(RunDirError, match="is not shared: it lies on tmpfs"):
        RunDir(path).create()
    assert not path.parent.exists(), "nothing is left behind"


def test_somebody_elses_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunDirError, match="not a run directory: it holds 'thesis.tex'"):
        RunDir(tmp_path).create()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="can't write run directory .*: Not a directory"):
        RunDir(tmp_path / "file" / "run").create()


def test_committed_steps_need_a_manifest(tmp_path: Path) -> None:
    run = made(tmp_path)
    for name in ("step-000000010", "step-000000020", ".step-000000030.A0001-L01", "step-x"):
        (run.checkpoints / name).mkdir()
    (run.checkpoints / "step-000000010" / "manifest.json").touch()
    (run.checkpoints / "step-x" / "manifest.json").touch()
    assert run.committed_steps() == [10]


def test_list_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert registered() == []
    first, second = made(tmp_path / "one"), made(tmp_path / "two")
    register(first)
    register(second)
    register(second)
    assert set(registered()) == {first, second}
    first.spec.unlink()
    assert registered() == [second]


def test_unwritable_home_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    register(made(tmp_path / "run"))
    assert registered() == []
