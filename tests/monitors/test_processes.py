"""Ending a program, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from transom_hpc.monitors.heartbeat import start_ticks
from transom_hpc.monitors.processes import end_older_steps, end_program, end_server, is_running


@pytest.fixture
def attempt() -> str:
    return f"A9{os.getpid()}-L01"  # nobody else's, whatever runs on this machine


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


_ORPHAN = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid, flush=True)"


def orphan(attempt: str, stack: ExitStack, mark: str = "TRANSOM_ATTEMPT") -> int:
    """A process of an attempt that is not a child of this one."""
    environment = {**os.environ, mark: attempt}
    answer = subprocess.run([sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE, env=environment, check=True)
    pid = int(answer.stdout)
    stack.callback(end_quietly, pid)
    return pid


def of_a_step(stack: ExitStack, **environment: str) -> int:
    """A process with these variables that is not a child of this one."""
    answer = subprocess.run(
        [sys.executable, "-c", _ORPHAN], stdout=subprocess.PIPE, env={**os.environ, **environment}, check=True
    )
    pid = int(answer.stdout)
    stack.callback(end_quietly, pid)
    return pid


def end_quietly(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


def test_only_processes_of_the_attempt_end(attempt: str, started: ExitStack) -> None:
    mine, other, spared = (orphan(name, started) for name in (attempt, attempt + "9", attempt))
    assert end_program(attempt, {spared}) == [mine]
    assert not is_running(mine, 0)
    assert is_running(other, 0)
    assert is_running(spared, 0)
    assert end_program("A9-no-such-attempt") == []


def test_the_server_of_a_folder_ends(attempt: str, started: ExitStack) -> None:
    folder = Path("/dev/shm") / attempt
    server = orphan(str(folder), started, "TRANSOM_SERVER")
    other = orphan(f"{folder}9", started, "TRANSOM_SERVER")
    program = orphan(str(folder), started)
    assert end_server(folder) == [server]
    assert is_running(other, 0)
    assert is_running(program, 0)


def test_what_is_started_again_ends_again(attempt: str, tmp_path: Path) -> None:
    """A shell that is not of the attempt, and no child of ours, starts the next one as soon as one has ended."""
    loop = f"for i in 1 2 3; do touch {tmp_path}/$i; TRANSOM_ATTEMPT={attempt} sleep 60; done"
    subprocess.run(["sh", "-c", f"({loop}) >/dev/null 2>&1 &"], check=True)
    until = time.monotonic() + 20
    while not (tmp_path / "1").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.1)
    assert len(end_program(attempt, deadline_s=10.0)) == 3
    assert end_program(attempt) == []


def test_whether_a_process_runs() -> None:
    me = os.getpid()
    assert is_running(me, start_ticks(me))
    assert is_running(me, 0)
    assert not is_running(me, start_ticks(me) + 1)  # the number was given to another process
    child = subprocess.Popen(["true"])
    until = time.monotonic() + 10
    while is_running(child.pid, 0) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_running(child.pid, 0)  # ended, and not waited for yet
    child.wait()
    assert not is_running(child.pid, 0)


def test_what_older_steps_of_a_job_left_ends(attempt: str, started: ExitStack) -> None:
    folder = f"/dev/shm/{attempt}"
    older = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "4"}
    left = [of_a_step(started, **older, **{mark: folder}) for mark in ("TRANSOM_SHM", "TRANSOM_SERVER")]
    spared = [
        of_a_step(started, **older, TRANSOM_SHM=f"{folder}9"),
        of_a_step(started, **older),  # the new launcher
        of_a_step(started, **{**older, "SLURM_STEP_ID": "6"}, TRANSOM_SHM=folder),
        of_a_step(started, **{**older, "SLURM_STEP_ID": "5"}, TRANSOM_SHM=folder),
        of_a_step(started, **{**older, "SLURM_JOB_ID": "77"}, TRANSOM_SHM=folder),
        of_a_step(started, TRANSOM_SHM=folder, SLURM_JOB_ID="7"),
    ]
    assert end_older_steps(7, 5, Path(folder)) == sorted(left)
    assert not any(is_running(pid, 0) for pid in left)
    assert all(is_running(pid, 0) for pid in spared)
