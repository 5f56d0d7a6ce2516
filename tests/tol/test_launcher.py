"""The launcher where its own surroundings fail; `srun` is a script that starts its tasks on this host."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.slurm.commands import SlurmCommands
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.causes import BUDGETS, Budget, Cause
from transom_hpc.tol.events import Ending
from transom_hpc.tol.job import Job
from transom_hpc.tol.launcher import Launcher
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted

# The program's step becomes the program; the sidecar's and the server's live on without a word; the others end well.
SRUN = """#!/bin/bash
kind=
while [[ $1 == --* ]]; do
    case $1 in --job-name=*) kind=${1#*=};; esac
    shift
done
case $kind in
    program) exec env SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_STEP_NUM_TASKS=1 SLURMD_NODENAME=n1 "$@";;
    sidecar|server) exec sleep 60;;
    clean) exec "$@";;
esac
"""

Launch = Callable[[Sequence[str]], Launcher]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Run a program under a launcher in tmp_path/run."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\nexit 1\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    run = RunDir(tmp_path / "run")
    run.create()
    job = Job(900_000_000 + os.getpid(), 0, ("n1",), "n1")
    site = SiteConfig(sample_period_s=0.1, silent_periods=1)

    def launch(program: Sequence[str]) -> Launcher:
        submitted = Submitted(JobSpec(run_dir=str(run.path)), tuple(program), str(tmp_path))
        launcher = Launcher(run, submitted, job, site, SlurmCommands(), os.environ)
        launcher.run()
        shutil.rmtree(job.shm, ignore_errors=True)
        return launcher

    return launch


def kinds(path: Path) -> list[tuple[str, Any]]:
    return [(entry.kind, entry.facts.get("problem")) for entry in RunDir(path).entries()]


def test_a_program_that_ends_well(launch: Launch, tmp_path: Path) -> None:
    assert launch(["touch", str(tmp_path / "ran")]).finish.ending is Ending.WELL
    assert (tmp_path / "ran").exists()
    assert kinds(tmp_path / "run") == [("start", None), ("launch", None), ("end", None)]


def test_a_journal_that_can_not_be_written(
    launch: Launch, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def full(fd: int, data: bytes | memoryview) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().suffix == ".jsonl":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    assert launch(["touch", str(tmp_path / "ran")]).finish.ending is Ending.WELL
    assert (tmp_path / "ran").exists()
    output = capfd.readouterr().out
    assert output.count("the journal can't be written (No space left on device)") == 1


def test_a_sidecar_that_can_not_be_started(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "run" / "logs" / "A0001-L01-sidecar.log").mkdir()
    assert launch(["touch", str(tmp_path / "ran")]).finish.ending is Ending.WELL
    ((_, problem),) = [entry for entry in kinds(tmp_path / "run") if entry[0] == "monitoring"]
    assert "the sidecar can't be started" in problem


def test_a_program_that_can_not_be_started(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin" / "srun").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(BUDGETS, Cause.SLURM, Budget(2, 0.01))
    finish = launch(["true"]).finish
    assert finish.ending is Ending.BADLY
    assert "Slurm fault came 3 times without a new checkpoint since the start: the program could not" in finish.why


def test_a_run_that_went_on_without_this_host(launch: Launch, tmp_path: Path) -> None:
    """It stood still, and a later attempt works on the run: this one waits for its end, and starts nothing."""
    journal = tmp_path / "run" / "journal"
    end = {"ending": "ended well", "why": "the program ended", "code": 0, "committed": 0}
    line = json.dumps({"time": "2026-01-01T00:00:00+00:00", "attempt": "A0002-L01", "kind": "end", "host": "n2", **end})
    script = f": > {journal}/A0002.claim; echo '{line}' > {journal}/A0002-n2.jsonl; exit 1"
    finish = launch(["sh", "-c", script]).finish
    assert (finish.ending, finish.code) == (Ending.LEFT, 0)
    assert finish.why == "another launcher led to the end: ended well, the program ended"
    assert [kind for kind, _ in kinds(tmp_path / "run")].count("restart") == 0
