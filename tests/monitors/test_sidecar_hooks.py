"""What a sidecar does with its hooks: in processes of their own, one rank each, without MPI."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from transom_hpc.monitors.verdict import Bye, Progress, parse_line

_SCRIPT = """
import sys, time
from pathlib import Path
from transom_hpc.monitors.exchange import leave
from transom_hpc.monitors.sidecar import Sidecar, SidecarConfig, SidecarHooks

class Nobody:
    rank, size = {rank}, {size}
    def send(self, target, kind, body):
        return True
    def receive(self):
        return []

def orphaned(dead, evidence):
    print("orphaned", dead, file=sys.stderr, flush=True)
    {orphaned}

def isolated():
    print("isolated", file=sys.stderr, flush=True)
    {isolated}

config = SidecarConfig(
    "A0001-L01", Path(sys.argv[1]), run_dir=Path(sys.argv[2]), supervisor_pid=int(sys.argv[3]),
    period_s=0.2, ping_s=0.1, start_deadline_s=0.5,
)
leave(Sidecar(config, SidecarHooks(isolated, orphaned), exchange=Nobody()).run())
"""


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the test, however the test ends."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def start(
    folder: Path, launcher: int, rank: int = 0, size: int = 1, **bodies: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    script = _SCRIPT.format(rank=rank, size=size, **({"orphaned": "pass", "isolated": "pass"} | bodies))
    command = [sys.executable, "-c", script, str(folder), str(folder), str(launcher)]
    return running(command)


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} was not said")


def wait_for_first_line(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert parse_line(process.stdout.readline()) is not None


def test_a_hook_that_works_is_waited_for(tmp_path: Path) -> None:
    """Requeueing makes Slurm send SIGTERM to the very process that does it."""
    with running(["sleep", "60"]) as launcher:
        body = f"time.sleep(2.0); Path({str(tmp_path / 'done')!r}).touch()"
        with start(tmp_path, launcher.pid, orphaned=body) as sidecar:
            wait_for_first_line(sidecar)
            launcher.kill()
            launcher.wait()
            wait_for(sidecar, "orphaned ()")
            sidecar.send_signal(signal.SIGTERM)
            output, _ = sidecar.communicate(timeout=20)
    assert sidecar.returncode == 0
    assert (tmp_path / "done").exists()
    assert parse_line(output.splitlines()[-1]) == Bye("asked to stop (SIGTERM)")


def test_a_hook_that_fails_is_recorded_and_the_watch_goes_on(tmp_path: Path) -> None:
    with (
        running(["sleep", "60"]) as launcher,
        start(tmp_path, launcher.pid, orphaned="raise OSError('no scontrol')") as sidecar,
    ):
        wait_for_first_line(sidecar)
        launcher.kill()
        launcher.wait()
        wait_for(sidecar, "the hook for a lost launcher failed: OSError('no scontrol')")
        time.sleep(1.0)
        assert sidecar.poll() is None
        sidecar.send_signal(signal.SIGTERM)
        output, errors = sidecar.communicate(timeout=20)
    assert sidecar.returncode == 0
    assert "failed" not in errors  # once
    assert sum(isinstance(parse_line(line), Progress) for line in output.splitlines()) > 4


@pytest.mark.parametrize("body", ["pass", "raise OSError('no')"])
def test_who_is_cut_off_leaves_whatever_its_hook_does(tmp_path: Path, body: str) -> None:
    with start(tmp_path, 4194303, rank=1, size=3, isolated=body) as sidecar:
        wait_for(sidecar, "isolated")
        assert sidecar.wait(20) == 3
        assert sidecar.stdout is not None
        assert sidecar.stdout.read() == ""  # only rank 0 speaks


def test_a_run_directory_that_can_not_be_written_costs_only_the_readings(tmp_path: Path) -> None:
    (tmp_path / "health").touch()
    with start(tmp_path, 4194303) as sidecar:
        wait_for(sidecar, "readings are not kept")
        time.sleep(1.0)
        assert sidecar.poll() is None
        sidecar.send_signal(signal.SIGTERM)
        output, _ = sidecar.communicate(timeout=20)
    assert sidecar.returncode == 0
    assert sum(isinstance(parse_line(line), Progress) for line in output.splitlines()) > 2
