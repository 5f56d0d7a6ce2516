"""Submission where no cluster is needed."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, tzinfo
from pathlib import Path

import pytest

from transom_hpc import submission
from transom_hpc.base.errors import RunDirError, SlurmMissing, SpecError
from transom_hpc.tol.spec import JobSpec


def test_runs_of_the_same_second_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noon(datetime):
        @classmethod
        def now(cls, _zone: tzinfo | None = None) -> Noon:
            return cls(2026, 3, 1, 12, 0, 0)

    monkeypatch.setattr(submission, "datetime", Noon)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    runs = [submission.submit(JobSpec(local=True), "true") for _ in range(3)]
    stem = "transom-20260301-120000"
    assert [run.path.name for run in runs] == [stem, f"{stem}-2", f"{stem}-3"]
    assert [run.job.result() for run in runs if run.job is not None] == [0, 0, 0]


def test_a_folder_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "transom-runs").write_text("a file")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunDirError, match="can't write run directory"):
        submission.submit(JobSpec(local=True), "true")
    with pytest.raises(RunDirError, match="can't read run directory"):
        submission.submit(JobSpec(local=True, run_dir="x" * 300), "true")


def test_a_program_where_the_spec_belongs() -> None:
    with pytest.raises(SpecError, match="takes a JobSpec and then the program; the first is 'true'"):
        submission.submit("true", "now")  # type: ignore[arg-type]


def test_slurm_without_a_cluster(tmp_path: Path) -> None:
    """What Slurm's commands say where its packages are installed and nothing is set up."""
    for name in ("sinfo", "sbatch"):
        (tmp_path / name).write_text(
            f"#!/bin/sh\necho '{name}: fatal: Could not establish a configuration source' >&2\nexit 1\n"
        )
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    argv = [sys.executable, "-P", "-m", "transom_hpc", "submit", "--", "true"]
    answer = subprocess.run(
        argv, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60, check=False
    )
    assert answer.returncode == 2
    assert answer.stderr.startswith("transom: Slurm's commands are here, but no cluster is set up for them")
    assert "transom lab up" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("limit", ["2", "1:30", "0:01:59", "0-0:2"])
def test_a_time_limit_that_leaves_no_time_to_work(limit: str) -> None:
    with pytest.raises(SpecError, match="leaves no time to work: the program is asked to save and leave 120 s before"):
        submission.submit(JobSpec(time=limit), "true")


@pytest.mark.parametrize("limit", ["0", "2:01", "UNLIMITED", None])
def test_other_time_limits_are_not_refused_here(limit: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmMissing):
        submission.submit(JobSpec(time=limit), "/bin/true")
