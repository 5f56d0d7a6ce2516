"""The guard: another launcher in place of one that was killed, and an end where an end was asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

GUARD = """
import sys
from transom_hpc.tol import guard
if sys.argv[1] == "patient":
    guard._SHORT_S = 0.0
sys.exit(guard.Guard([sys.executable, "-c", sys.argv[2], *sys.argv[3:]], 3).run())
"""
BEGIN = """
import os, signal, subprocess, sys, time
from pathlib import Path
from transom_hpc.tol.guard import supervisor
folder = Path(sys.argv[-1])
killed = sys.argv[1].removeprefix("--killed=") if sys.argv[1].startswith("--killed=") else ""
(folder / f"began-{os.getpid()}").write_text(killed)
assert supervisor() == os.getppid()
"""


def start(folder: Path, how: str, launcher: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", GUARD, how, BEGIN + launcher, "--other", str(folder)], stdout=subprocess.PIPE, text=True
    )


def began(folder: Path) -> list[str]:
    """Why each launcher was started, in order."""
    return [path.read_text() for path in sorted(folder.glob("began-*"), key=lambda path: path.stat().st_mtime_ns)]


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.02)


def test_exit_statuses_pass_through(tmp_path: Path) -> None:
    process = start(tmp_path, "", "sys.exit(75)")
    assert process.communicate(timeout=20)[0] == ""
    assert process.returncode == 75
    assert began(tmp_path) == [""]


def test_another_one_takes_over_from_one_that_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "patient", "if not killed: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit(7)")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 7
    first, second = began(tmp_path)
    assert first == ""
    assert second.endswith("was killed (SIGKILL)")
    assert second.startswith("the launcher's process on ")
    assert f"{second}; another one takes over" in out


def test_what_the_killed_one_left_is_ended_first(tmp_path: Path) -> None:
    """Also what does not listen; nothing is left as a zombie."""
    launcher = """
if not killed:
    deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60 & wait; sleep 60"], start_new_session=True)
    (folder / "deaf").write_text(str(deaf.pid))
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGSEGV)
os.kill(int((folder / "deaf").read_text()), 0)
"""
    process = start(tmp_path, "patient", launcher)
    process.communicate(timeout=20)
    assert process.returncode == 1, "ProcessLookupError: it is gone"
    assert not psutil.pid_exists(int((tmp_path / "deaf").read_text()))


def test_no_other_where_each_is_killed_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, "", "os.kill(os.getpid(), signal.SIGKILL)")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL
    assert len(began(tmp_path)) == 3
    assert "no other is started" in out


LISTENING = """
def heard(number, frame):
    (folder / f"heard-{number}").touch()
    if number == signal.SIGTERM:
        sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, heard)
(folder / "listening").touch()
while True:
    time.sleep(0.05)
"""


def test_signals_are_passed_on(tmp_path: Path) -> None:
    process = start(tmp_path, "", LISTENING)
    wait_for(tmp_path / "listening")
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        process.send_signal(number)
        wait_for(tmp_path / f"heard-{number}")
    process.communicate(timeout=20)
    assert process.returncode == 75


def test_a_poke_that_comes_too_early_ends_nobody(tmp_path: Path) -> None:
    process = start(tmp_path, "", "(folder / 'up').touch()\ntime.sleep(1)\nsys.exit(5)")
    wait_for(tmp_path / "up")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=20)
    assert process.returncode == 5
    assert len(began(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_started_once_an_end_was_asked_for(tmp_path: Path, number: signal.Signals) -> None:
    """Slurm kills all that have not ended in time after SIGTERM; or it met a launcher that did not listen yet."""
    deaf = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)\n(folder / 'up').touch()\ntime.sleep(60)"
    process = start(tmp_path, "patient", deaf)
    wait_for(tmp_path / "up")
    process.send_signal(number)
    time.sleep(0.3)
    (launcher,) = psutil.Process(process.pid).children()
    launcher.kill()
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "no other is started" in out
    assert len(began(tmp_path)) == 1


def test_a_launcher_that_sigterm_kills_is_the_last(tmp_path: Path) -> None:
    process = start(tmp_path, "patient", "os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(9)")
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(began(tmp_path)) == 1


def test_without_a_guard_the_launcher_supervises() -> None:
    from transom_hpc.tol.guard import supervisor

    assert supervisor() == os.getpid()
    os.environ["TRANSOM_GUARD"] = "1"  # inherited by something that the guard did not start
    try:
        assert supervisor() == os.getpid()
    finally:
        del os.environ["TRANSOM_GUARD"]
