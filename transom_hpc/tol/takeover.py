"""Starts the launcher that takes over, on this host, in a step of its own, and lets go of it.

A step of its own, since Slurm ends the steps that span a dead host when it notices that the host is dead. Letting go:
an srun that is ended ends its step, also when it is killed (srun's helper process sees to that; tried), unless both are
killed at the same moment. The step then lives on by itself until its task ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from transom_hpc.tol.job import Job, batch_environment
from transom_hpc.tol.journal import begun_after
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.succession import TakeOver

_PATIENCE_S = 30.0
# The batch script's output files are this step's too, so that the job's output goes on where it was.
_SHELL = 'exec >> "$1" 2>> "$2"; shift 2; exec "$@"'


def start_launcher(
    run: RunDir,
    job: Job,
    taken: TakeOver,
    program: Sequence[str],
    outputs: tuple[str, str],
    environment: Mapping[str, str],
) -> str:
    """Start a launcher for attempt `taken.before` + 1, which the caller has claimed, and wait until it has begun.

    Args:
        run: the run directory.
        job: the job; the launcher starts on its home.
        taken: what it is to know.
        program: what the lost launcher ran.
        outputs: the job's files for standard output and standard error.
        environment: of this process, as it was started.

    Returns:
        "" when it has begun to write its journal, else what went wrong; nothing of it is left then.
    """
    argv = [*_step(job), "sh", "-c", _SHELL, "transom-launcher", *outputs, *_launch(run, taken), *program]
    try:
        process = subprocess.Popen(
            argv,
            env=batch_environment(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # it and its helper are one group, and killed as one
        )
    except OSError as error:
        return f"srun can't be started: {error}"
    try:
        return _wait(run, taken, process)
    finally:
        _let_go(process)


def _wait(run: RunDir, taken: TakeOver, process: subprocess.Popen[str]) -> str:
    until = time.monotonic() + _PATIENCE_S
    while not begun_after(run.journal, taken.before):
        if process.poll() is not None:
            assert process.stderr is not None
            words = process.stderr.read().strip().splitlines()
            return f"the launcher's step ended (exit status {process.returncode}): {words[-1] if words else ''}"
        if time.monotonic() >= until:
            process.terminate()  # so that it ends the step
            with suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            return f"the launcher's step did not begin within {_PATIENCE_S:.0f} s"
        time.sleep(0.1)
    return ""


def _step(job: Job) -> Sequence[str]:
    return (
        "srun",
        "--overlap",
        "--no-kill",
        "--mem=0",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={job.home}",
        "--mpi=none",
        "--gres=none",
        "--cpu-bind=none",
        "--input=none",
        "--output=none",
        "--error=none",
        "--job-name=launcher",
    )


def _launch(run: RunDir, taken: TakeOver) -> Sequence[str]:
    return (
        sys.executable,
        "-P",
        "-m",
        "transom_hpc",
        "launch",
        f"--run-dir={run.path}",
        f"--after={taken.before}",
        f"--lost={','.join(taken.lost)}",
        f"--evidence={taken.evidence}",
        "--",
    )


def _let_go(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(2.0)
    if process.stderr is not None:
        process.stderr.close()
