"""Two programs on one directory: the second is refused by name; what the dead left holds nobody up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import CheckpointError
from transom_hpc.ckpt import Checkpointer
from transom_hpc.ckpt.claim import Claim, Holder, Standing, is_alive, judge, this_process, this_start
from transom_hpc.ckpt.files import Files

ME = Holder("a", "boot-a", "pid:[1]", 10, "100", 0, "", "T2", "now")
ELSEWHERE = replace(ME, host="b", boot="boot-b", pid=7)


@pytest.mark.parametrize(
    ("holder", "alive", "standing"),
    [
        (ME, True, Standing.OVER),  # this process itself
        (replace(ME, pid=11), True, Standing.ALIVE),
        (replace(ME, pid=11), False, Standing.OVER),
        (replace(ME, started="99"), False, Standing.OVER),
        (replace(ME, space="pid:[2]", pid=11), False, Standing.UNKNOWN),  # a container: not seen from here
        (replace(ME, boot="boot-before"), False, Standing.UNKNOWN),  # or another machine of the same name
        (ELSEWHERE, False, Standing.UNKNOWN),
        (None, False, Standing.UNKNOWN),
    ],
)
def test_who_is_alive(holder: Holder | None, alive: bool, standing: Standing) -> None:
    assert judge(holder, ME, alive) is standing


def test_an_earlier_attempt_of_the_same_job_is_over() -> None:
    assert judge(replace(ELSEWHERE, job="c:5"), replace(ME, job="c:5"), False) is Standing.OVER
    assert judge(replace(ELSEWHERE, job="c:5"), replace(ME, job="c:6"), False) is Standing.UNKNOWN
    assert judge(replace(ELSEWHERE, job="d:5"), replace(ME, job="c:5"), False) is Standing.UNKNOWN
    assert judge(replace(ME, pid=11, job="c:5"), replace(ME, job="c:5"), True) is Standing.ALIVE, "two steps at once"


def test_no_boot_id_proves_nothing() -> None:
    assert judge(replace(ME, boot="", pid=11), replace(ME, boot=""), False) is Standing.UNKNOWN


def me(attempt: str = "A1") -> Holder:
    return this_process(attempt, "now", {})


def test_processes_are_told_apart() -> None:
    here = me()
    assert is_alive(here)
    assert not is_alive(replace(here, started="1")), "the number was used again"
    assert is_alive(replace(here, pid=1, started=""))
    child = subprocess.Popen([sys.executable, "-c", ""])
    time.sleep(0.3)
    facts = replace(here, pid=child.pid, started="")
    assert not is_alive(facts), "a process that nobody has buried is dead"
    child.wait()
    assert not is_alive(facts)
    assert is_alive(replace(here, pid=1, started="5"), Path("/nowhere")), "what /proc hides lives"


def claim(directory: Path, holder: Holder, **times: float) -> Claim:
    return Claim(directory, holder, Files(), SystemClock(), **times)


def put(directory: Path, holder: Holder, beat: int = 0) -> Path:
    path = directory / ".writer"
    path.write_bytes(json.dumps(asdict(holder)).encode() + b"\n%012d\n" % beat)
    return path


def test_a_process_on_this_host_that_lives_keeps_the_directory(tmp_path: Path) -> None:
    put(tmp_path, replace(me(), pid=os.getppid(), started="", job="7"))
    before = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"another program writes to .*: host .*, pid \d+, job 7, attempt A1"
    ) as e:
        claim(tmp_path, me()).take()
    assert time.monotonic() - before < 1
    assert f"If it is certainly gone, remove {tmp_path / '.writer'}" in str(e.value)
    claim(tmp_path, me()).take(insist=True)


def test_what_a_dead_process_left_holds_nobody_up(tmp_path: Path) -> None:
    path = put(tmp_path, replace(me(), pid=os.getppid(), started="5"))
    taken = claim(tmp_path, me("A2"))
    before = time.monotonic()
    taken.take()
    assert time.monotonic() - before < 1
    assert json.loads(path.read_bytes().partition(b"\n")[0])["attempt"] == "A2"
    taken.release()
    taken.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff\n"])
def test_a_file_that_cannot_be_read_is_watched(tmp_path: Path, text: bytes) -> None:
    (tmp_path / ".writer").write_bytes(text)
    claim(tmp_path, me(), watch_s=0.2).take()


def test_another_host_is_watched(tmp_path: Path) -> None:
    path = put(tmp_path, replace(me(), boot="another"))
    before = time.monotonic()
    first = claim(tmp_path, me(), watch_s=0.4)
    first.take()
    assert time.monotonic() - before >= 0.4
    first.release()
    put(tmp_path, replace(me(), boot="another"))
    beat = threading.Timer(0.15, lambda: put(tmp_path, replace(me(), boot="another"), 1))
    beat.start()
    with pytest.raises(CheckpointError, match="another program writes"):
        claim(tmp_path, me(), watch_s=20).take()
    path.unlink()


def test_it_beats_and_stops(tmp_path: Path) -> None:
    taken = claim(tmp_path, me(), beat_s=0.02)
    taken.take()
    path = tmp_path / ".writer"
    seen = set()
    for _ in range(200):
        seen.add(path.read_bytes())
        time.sleep(0.005)
        if len(seen) > 2:
            break
    assert len(seen) > 2
    newer = claim(tmp_path, me("A2"), beat_s=60)
    newer.take()
    text = path.read_bytes()
    time.sleep(0.1)
    assert path.read_bytes() == text, "the first does not write into the second's file"
    taken.release()
    assert path.exists(), "nor does it remove it"
    newer.release()
    assert not [t for t in threading.enumerate() if t.name == "transom-beat"]


def test_a_newcomer_that_was_faster_is_not_removed(tmp_path: Path) -> None:
    there = put(tmp_path, replace(me(), boot="dead"))
    old = there.read_bytes()
    put(tmp_path, replace(me(), pid=os.getppid(), started=""))
    now = there.read_bytes()
    claim(tmp_path, me())._take_away(old)
    assert there.read_bytes() == now


HOLDS = """
import os, sys, time
from transom_hpc.ckpt import Checkpointer
ckpt = Checkpointer(sys.argv[1])
print("holds", flush=True)
exec(sys.argv[2])
"""


def hold(directory: Path, then: str) -> subprocess.Popen[str]:
    found = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", HOLDS, str(directory), then], stdout=subprocess.PIPE, text=True
    )
    assert found.stdout is not None
    assert found.stdout.readline() == "holds\n"
    return found


def test_a_second_program(directory: Path) -> None:
    first = hold(directory, "time.sleep(60)")
    try:
        attempt = json.loads((directory / ".attempt").read_bytes())["attempt"]
        with pytest.raises(CheckpointError, match=f"pid {first.pid}, attempt {attempt}"):
            Checkpointer(directory)
        assert json.loads((directory / ".attempt").read_bytes())["attempt"] == attempt, "the first goes on"
    finally:
        first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    Checkpointer(directory).close()  # not buried yet: a zombie
    first.wait()
    first.stdout.close()  # type: ignore[union-attr]
    assert not (directory / ".writer").exists()


def test_a_forked_child_and_a_program_that_does_not_close(directory: Path) -> None:
    then = (
        "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\nassert os.path.exists(sys.argv[1] + '/.writer')"
    )
    first = hold(directory, then)
    assert first.wait(30) == 0
    first.stdout.close()  # type: ignore[union-attr]
    assert not (directory / ".writer").exists()


def test_the_launcher_decides_for_its_programs(directory: Path, monkeypatch: Any) -> None:
    directory.mkdir()
    put(directory, replace(me(), pid=os.getppid(), started=""))
    with pytest.raises(CheckpointError, match="another program writes"):
        Checkpointer(directory, attempt="A0001-L02")
    monkeypatch.setenv("TRANSOM_ATTEMPT", "A0001-L02")
    Checkpointer(directory, attempt="A0001-L02").close()


def test_a_constructor_that_fails_holds_nothing(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm").chmod(0o777)
    with pytest.raises(CheckpointError, match="not a private folder"):
        Checkpointer(directory, shm=tmp_path / "shm")
    assert not (directory / ".writer").exists()
    Checkpointer(directory, attempt="A2").close()
    with pytest.raises(CheckpointError, match="newer than A1"):
        Checkpointer(directory, attempt="A1")
    assert not (directory / ".writer").exists()


def test_this_start_is_this_process() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(this_start() == START)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert this_start() == START


START = this_start()
