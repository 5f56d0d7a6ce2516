"""Finding, stopping and ending exactly the processes that are meant."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from transom_hpc.base.errors import LabError
from transom_hpc.lab import processes
from transom_hpc.lab.processes import Process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    env = {"TEST_MARK": f"here {os.getpid()}", "PATH": os.environ["PATH"]}
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait"], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mine = processes.descendants([processes.look(process.pid).process])  # type: ignore[union-attr]
        yield process
        processes.send(mine, signal.SIGKILL)


def test_a_number_given_out_again_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    facts = processes.look(sleeper.pid)
    assert facts is not None
    earlier = Process(sleeper.pid, facts.process.start - 1)
    assert not processes.is_alive(earlier)
    processes.send([earlier], signal.SIGKILL)
    assert processes.is_alive(facts.process)


def test_the_dead_are_not_alive_before_they_are_collected() -> None:
    child = subprocess.Popen(["true"])
    facts = processes.look(child.pid)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (now := processes.look(child.pid)) and now.state != "Z":
        time.sleep(0.01)
    assert facts is not None
    assert not processes.is_alive(facts.process)
    child.wait()


def test_marked_processes_are_found_with_their_children(sleeper: subprocess.Popen[bytes]) -> None:
    found = {process.pid for process in processes.marked("TEST_MARK", f"here {os.getpid()}")}
    assert sleeper.pid in found
    assert len(found) == 2
    assert found == {
        p.pid for p in processes.descendants([p for p in processes.children(os.getpid()) if p.pid in found])
    }
    assert processes.marked("TEST_MARK", "elsewhere") == []


def test_a_process_that_forks_all_the_time_can_be_stopped(tmp_path: Path) -> None:
    beat = tmp_path / "beat"
    # A shell waits for its child inside the kernel until the child has called exec: it can't be stopped there.
    line = f"while :; do /bin/date +%N > '{beat}'; done"
    with subprocess.Popen(["sh", "-c", line], start_new_session=True) as process:
        facts = processes.look(process.pid)
        assert facts is not None
        for _ in range(20):
            assert processes.stop_all(lambda: processes.descendants([facts.process]))
            before = beat.read_text() if beat.exists() else ""
            time.sleep(0.02)
            assert (beat.read_text() if beat.exists() else "") == before
            processes.send(processes.descendants([facts.process]), signal.SIGCONT)
        os.killpg(process.pid, signal.SIGKILL)


def test_a_wait_that_ends_without_success_says_what_and_shows_the_log(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.write_text("first\nlast words\n")
    with pytest.raises(LabError, match=r"it is not up after 0.1 s \(daemon.log: last words\)$") as failed:
        processes.wait_until(lambda: False, "it is not up", 0.1, log, tmp_path / "none.log")
    assert failed.value.log == f"--- {log}\nfirst\nlast words"


def test_a_program_that_fails_is_missing_or_hangs_is_an_error() -> None:
    assert processes.call(["echo", "a b"]) == "a b\n"
    with pytest.raises(LabError, match="failed: oh no$") as failed:
        processes.call(["sh", "-c", "echo oh no >&2; exit 3"])
    assert failed.value.code == 3
    with pytest.raises(LabError, match="no-such-program is missing"):
        processes.call(["no-such-program"])
    with pytest.raises(LabError, match="did not end within 0.2 s"):
        processes.call(["sleep", "60"], timeout_s=0.2)
