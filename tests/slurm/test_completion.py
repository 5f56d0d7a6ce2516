"""Ending a job as its own user, without its batch script."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

from transom_hpc.base.errors import SlurmMissing
from transom_hpc.lab import Lab
from transom_hpc.slurm.completion import complete_job

COMPLETE = """
import sys
from transom_hpc.base.errors import SlurmError
from transom_hpc.slurm.completion import complete_job
try:
    complete_job(int(sys.argv[1]), int(sys.argv[2]))
except SlurmError as error:
    sys.exit(str(error))
"""


def complete(lab: Lab, job_id: str, code: int, *, root: bool = False) -> subprocess.CompletedProcess[str]:
    return lab.run("n1", [sys.executable, "-c", COMPLETE, job_id, str(code)], check=False, root=root)


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_ends_as_its_user_says(healthy_lab: Lab) -> None:
    lab = healthy_lab
    for code, state in ((0, "COMPLETED"), (3, "FAILED")):
        script = ["sbatch", "--parsable", "--requeue", "-o", "/dev/null", "--wrap", "sleep 300"]
        job_id = lab.run("login", script).stdout.strip()
        for _ in range(100):
            if "JobState=RUNNING" in shown(lab, job_id):
                break
        assert complete(lab, job_id, code).stderr == ""
        for _ in range(200):
            if "JobState=COMPLETING" not in shown(lab, job_id):
                break
        # The exit status is that of the batch script that was ended, where there is one.
        assert {f"JobState={state}", "Restarts=0"} <= set(shown(lab, job_id).split()), shown(lab, job_id)


@pytest.mark.slurm
@pytest.mark.slow
def test_a_refusal_is_in_slurms_words(healthy_lab: Lab) -> None:
    assert complete(healthy_lab, "4000000", 0).stderr == "Slurm did not end job 4000000: Invalid job id specified\n"


def shown(lab: Lab, job_id: str) -> str:
    return lab.run("login", ["scontrol", "-o", "show", "job", job_id]).stdout


def test_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ctypes.util, "find_library", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing, match="scancel"):
        complete_job(1, 0)
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho 'PluginDir               = {tmp_path}:/nowhere'\n")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(SlurmMissing, match="scancel"):
        complete_job(1, 0)
