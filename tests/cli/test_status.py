"""transom status where no Slurm is asked: what it makes of runs that can't be read, and how it is printed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Journal
from transom_hpc.tol.rundir import RunDir, register
from transom_hpc.tol.spec import JobSpec, Submitted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs on its user's list, of which the newer can't be read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for age, name in enumerate(("broken", "whole")):
        run = RunDir(tmp_path / name)
        run.logs.mkdir(parents=True)
        run.journal.mkdir()
        run.write(Submitted(JobSpec(local=True), ("true",), "/", job_id=f"70{age}", submitit=str(run.logs)))
        (run.logs / f"70{age}_0_log.out").write_text("hello\n")
        register(run)
    (tmp_path / "broken" / "spec.json").write_text("{")
    os.utime(tmp_path / "whole" / "spec.json", (1e9, 1e9))
    return tmp_path


def status(*arguments: str, columns: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "transom_hpc", "status", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    environment |= {} if columns is None else {"COLUMNS": columns}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_a_run_that_can_not_be_read_does_not_hide_the_others(folder: Path) -> None:
    listed = status()
    assert listed.returncode == 0
    assert "whole" in listed.stdout
    assert listed.stderr.startswith(f"transom: left out: {folder}/broken/spec.json can't be read: ")
    assert len(listed.stderr.splitlines()) == 1
    assert [item["run_dir"] for item in json.loads(status("--json").stdout)] == [str(folder / "whole")]
    assert "whole" in status("701").stdout  # the search for a job passes by the broken one


def test_one_run_that_can_not_be_read_is_an_error(folder: Path) -> None:
    shown = status(str(folder / "broken"))
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "spec.json can't be read" in shown.stderr
    shown = status("x" * 300)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("transom: can't read run directory ")


def test_paths_in_a_pipe_are_whole(folder: Path) -> None:
    shown = status(str(folder / "whole")).stdout
    assert f"run         {folder}/whole" in shown
    assert f"output      {folder}/whole/logs/701_0_log.out" in shown
    assert max(map(len, status(str(folder / "whole"), columns="40").stdout.splitlines())) <= 40


def test_who_leads_and_who_is_left_out(folder: Path) -> None:
    run = RunDir(folder / "whole")
    journal = Journal(run.journal, 2, "n2")
    journal.append(Attempt(2, 0), "start", job_id=701, succeeds="A0001-L00", ended_by="")
    lost = {"cause": "host silent", "host_out": "n1", "evidence": "not heard for 3 s", "committed": 5, "step": 9}
    journal.append(Attempt(2, 0), "restart", **lost)
    journal.append(Attempt(2, 0), "stacks", folder="/logs/stacks", behind="rank 3 on n2 is behind, at step 41")
    journal.append(Attempt(2, 0), "distrust", below=60, upto="A0001-L02", evidence="")
    journal.append(Attempt(2, 0), "pause", cause="host silent", seconds=30)
    journal.close()
    shown = " ".join(status(str(run.path)).stdout.split())
    for words in (
        "launcher of attempt 2; it took over from that of attempt 1",
        "last hang rank 3 on n2 is behind, at step 41; stacks: /logs/stacks",
        "not trusted step 60 and later ones saved by A0001-L02 or before",
        "Hosts left out HOST CAUSE SINCE EVIDENCE n1 host silent 0 s not heard for 3 s",
        "before the next start, since host silent came again",
    ):
        assert words in shown.replace(" 1 s not heard", " 0 s not heard"), shown


@pytest.mark.usefixtures("folder")
def test_a_phase_is_not_broken_in_two() -> None:
    assert " local " in status(columns="40").stdout


def test_the_folder_has_gone(folder: Path) -> None:
    command = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    argv = ["sh", "-c", command, "sh", sys.executable, "-P", "-m", "transom_hpc", "status", "701"]
    shown = subprocess.run(argv, capture_output=True, text=True, cwd=folder, timeout=60, check=False)
    assert shown.returncode == 1
    assert shown.stderr == "transom: No such file or directory (is the current folder still there?)\n"
