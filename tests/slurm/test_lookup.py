"""A job that Slurm took although sbatch was not answered: found by its mark, never submitted twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transom_hpc.base.errors import SlurmRefused, SlurmUnreachable
from transom_hpc.executor import LauncherExecutor
from transom_hpc.slurm.commands import SlurmCommands
from transom_hpc.slurm.lookup import find_unheard
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.slurm.text import RS, US
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec

MARK = "transom:0123456789ab"
HEADER = "JOBID|JOBID|STATE|REASON|NODES|START_TIME|END_TIME|NODELIST|EXC_NODES|COMMENT|NAME"
OTHER = "7|7|RUNNING|None|1|2026-11-30T12:00:00|N/A|n1||(null)|job"
OURS = f"8|8|PENDING|Priority|1|N/A|N/A|||{MARK}|transom"
SILENT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
NO_ANSWER = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


class Impatient:
    """A clock whose sleeps take no time."""

    def now(self) -> float:
        return 0.0

    def wall(self) -> object:
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        """At once."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder, first on PATH, for programs of Slurm that answer as they are told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr("transom_hpc.slurm.lookup._PAUSES_S", (0.0, 0.0))
    answer(folder, "srun", "exit 0")
    return folder


def answer(folder: Path, program: str, script: str) -> None:
    (folder / program).write_text(f"#!/bin/sh\n{script}\n")
    (folder / program).chmod(0o755)


def queue(*rows: str) -> str:
    text = "".join(RS + row.replace("|", US) + "\n" for row in (HEADER, *rows))
    return f"cat <<'END'\n{text}END"


def executor(tmp_path: Path) -> LauncherExecutor:
    run = RunDir(tmp_path / "run")
    run.create()
    return LauncherExecutor(run, JobSpec(), SiteConfig(), 1, str(tmp_path), MARK)


def test_taken_although_not_heard(programs: Path, tmp_path: Path) -> None:
    answer(programs, "sbatch", SILENT)
    answer(programs, "squeue", queue(OTHER, OURS))
    job = executor(tmp_path).send(print, "x")
    assert job.job_id == "8"
    names = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert "8_submission.sh" in names
    assert "8_submitted.pkl" in names, "a function is found where the job looks for it"


def test_not_taken(programs: Path, tmp_path: Path) -> None:
    answer(programs, "sbatch", SILENT)
    answer(programs, "squeue", queue(OTHER))
    with pytest.raises(SlurmRefused, match="Socket timed out"):
        executor(tmp_path).send(print, "x")


def test_not_known(programs: Path, tmp_path: Path) -> None:
    answer(programs, "sbatch", SILENT)
    answer(programs, "squeue", NO_ANSWER)
    with pytest.raises(SlurmUnreachable, match=f"look for {MARK} in: squeue"):
        executor(tmp_path).send(print, "x")


def test_a_plain_no_is_not_looked_up(programs: Path, tmp_path: Path) -> None:
    answer(programs, "sbatch", "echo 'sbatch: error: invalid partition specified: x' >&2; exit 1")
    answer(programs, "squeue", "exit 9")
    with pytest.raises(SlurmRefused, match="invalid partition"):
        executor(tmp_path).send(print, "x")


def test_silence_first_and_then_an_answer(programs: Path) -> None:
    answer(programs, "squeue", f"[ -e {programs}/asked ] || {{ : > {programs}/asked; {NO_ANSWER}; }}\n{queue(OURS)}")
    assert find_unheard(SlurmCommands(), MARK, Impatient(), (0.0, 0.0)) == 8  # type: ignore[arg-type]
