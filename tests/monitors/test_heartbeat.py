"""The heartbeat record: whole or not there, cheap, and never in the program's way."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from transom_hpc.monitors.heartbeat import (
    PHASES,
    Heartbeat,
    HeartbeatWriter,
    beat_path,
    parse_heartbeat,
    read_heartbeats,
    start_ticks,
    summarise,
)

ATTEMPT = "A0002-L03"


def test_what_is_written_is_read(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    writer = HeartbeatWriter(beat_path(tmp_path, 3), 3, ATTEMPT)
    assert writer.error is None
    (first,) = read_heartbeats(tmp_path, ATTEMPT)
    assert (first.phase, first.step, first.loss, first.saved_step, first.step_s) == ("starting", None, None, None, None)
    writer.phase("restoring")
    assert read_heartbeats(tmp_path, None)[0].phase == "restoring"
    writer.beat(10)
    writer.beat(12, loss=2.5, saved_step=8, stall_s=0.5)
    writer.beat(13, stall_s=0.25)
    (beat,) = read_heartbeats(tmp_path, ATTEMPT)
    assert before <= beat.beat_ns <= time.monotonic_ns()
    assert beat.step_s is not None
    assert 0 < beat.step_s < 1
    assert beat == Heartbeat(
        rank=3,
        attempt=ATTEMPT,
        pid=os.getpid(),
        start_ticks=start_ticks(os.getpid()),
        phase="training",
        step=13,
        beat_ns=beat.beat_ns,
        step_s=beat.step_s,
        loss=2.5,
        saved_step=8,
        stall_s=0.75,
        good_step=12,
    )
    writer.phase("stopping")
    writer.beat(14, loss=math.nan)
    (beat,) = read_heartbeats(tmp_path, ATTEMPT)
    assert beat.phase == "stopping"
    assert beat.loss is not None
    assert math.isnan(beat.loss)
    writer.close()
    writer.beat(15)
    assert read_heartbeats(tmp_path, ATTEMPT)[0].step == 14


def test_other_attempts_and_foreign_files_are_left_out(tmp_path: Path) -> None:
    HeartbeatWriter(beat_path(tmp_path, 0), 0, "A0001-L01").close()
    HeartbeatWriter(beat_path(tmp_path, 1), 1, ATTEMPT).close()
    whole = beat_path(tmp_path, 1).read_bytes()
    beat_path(tmp_path, 2).write_bytes(whole[:50])
    beat_path(tmp_path, 3).write_bytes(b"x" * 256)
    beat_path(tmp_path, 4).write_bytes(b"")
    beat_path(tmp_path, 5).mkdir()
    beat_path(tmp_path, 6).symlink_to(beat_path(tmp_path, 1))
    os.mkfifo(beat_path(tmp_path, 7))
    (tmp_path / "beat-12").write_bytes(whole)
    (tmp_path / "stop").touch()
    assert [beat.rank for beat in read_heartbeats(tmp_path, ATTEMPT)] == [1]
    assert [beat.rank for beat in read_heartbeats(tmp_path, None)] == [0, 1]
    assert read_heartbeats(tmp_path / "absent", None) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a file to another user")
def test_a_file_of_another_user_is_left_out(tmp_path: Path) -> None:
    HeartbeatWriter(beat_path(tmp_path, 1), 1, ATTEMPT).close()
    os.chown(beat_path(tmp_path, 1), 12345, -1)
    assert read_heartbeats(tmp_path, None) == []


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    writer = HeartbeatWriter(beat_path(tmp_path, 0), 0, ATTEMPT)
    writer.beat(1)
    older = beat_path(tmp_path, 0).read_bytes()
    writer.beat(2, loss=1.0)
    newer = beat_path(tmp_path, 0).read_bytes()
    assert parse_heartbeat(newer) is not None
    differing = [at for at in range(len(older)) if older[at] != newer[at]]
    for cut in range(differing[0] + 1, differing[-1] + 1):
        assert parse_heartbeat(newer[:cut] + older[cut:]) is None, cut
        assert parse_heartbeat(older[:cut] + newer[cut:]) is None, cut


def test_a_record_under_way_is_left_out(tmp_path: Path) -> None:
    HeartbeatWriter(beat_path(tmp_path, 0), 0, ATTEMPT).close()
    record = bytearray(beat_path(tmp_path, 0).read_bytes())
    end = len(bytes(record).rstrip(b"\0"))
    assert zlib.crc32(record[: end - 4]).to_bytes(4, "little") == record[end - 4 : end]
    assert parse_heartbeat(bytes(record)) is not None
    record[8] |= 1
    record[end - 4 : end] = zlib.crc32(record[: end - 4]).to_bytes(4, "little")
    assert parse_heartbeat(bytes(record)) is None


_HAMMER = """
import sys
from pathlib import Path
from transom_hpc.monitors.heartbeat import HeartbeatWriter
writer = HeartbeatWriter(Path(sys.argv[1]), 7, "A0001-L01")
print("go", flush=True)
step = 0
while True:
    step += 1
    writer.beat(step, loss=float(step), saved_step=step)
"""


def test_a_reader_never_sees_half_of_one_beat_and_half_of_another(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HAMMER, str(beat_path(tmp_path, 7))], stdout=subprocess.PIPE
    ) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            until = time.monotonic() + 1.5
            seen = 0
            while time.monotonic() < until:
                for beat in read_heartbeats(tmp_path, None):
                    if beat.step is not None:
                        assert beat.loss == beat.saved_step == beat.step
                        seen += 1
            assert seen > 100
        finally:
            writer.kill()


def test_an_older_attempt_that_wakes_up_changes_nothing(tmp_path: Path) -> None:
    old = HeartbeatWriter(beat_path(tmp_path, 0), 0, "A0001-L01")
    new = HeartbeatWriter(beat_path(tmp_path, 0), 0, "A0001-L02")
    new.beat(5)
    old.beat(99)
    assert [(beat.attempt, beat.step) for beat in read_heartbeats(tmp_path, None)] == [("A0001-L02", 5)]


def test_no_room_or_no_rights_never_ends_the_program(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = HeartbeatWriter(tmp_path / "file" / "beat-000000", 0, ATTEMPT)
    assert isinstance(writer.error, OSError)
    writer.beat(1, loss=1.0)
    writer.phase("saving")
    writer.close()


_NO_ROOM = """
import resource, sys
from pathlib import Path
from transom_hpc.monitors.heartbeat import HeartbeatWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
writer = HeartbeatWriter(Path(sys.argv[1]), 0, "A0001-L01")
writer.beat(1)
print(type(writer.error).__name__)
"""


def test_no_room_is_an_error_at_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _NO_ROOM, str(beat_path(tmp_path, 0))]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "OSError"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a file system that is full")
def test_a_full_file_system_is_an_error_and_no_bus_error(tmp_path: Path) -> None:
    shell = (
        f"mount -t tmpfs -o size=64k none {tmp_path} && "
        f"dd if=/dev/zero of={tmp_path}/filler bs=4096 count=100 2>/dev/null; "
        f"exec {sys.executable} -c '{_NO_ROOM}' {beat_path(tmp_path, 0)}"
    ).replace("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", "")
    answer = subprocess.run(["unshare", "--mount", "sh", "-c", shell], capture_output=True, text=True, timeout=30)
    assert (answer.returncode, answer.stdout.strip()) == (0, "OSError"), answer.stderr


def test_a_wrong_argument_never_ends_the_program(tmp_path: Path) -> None:
    writer = HeartbeatWriter(beat_path(tmp_path, 0), 0, ATTEMPT)
    writer.beat("x")  # type: ignore[arg-type]
    writer.beat(2, loss=object())  # type: ignore[arg-type]
    writer.phase("no such phase")
    assert writer.error is not None
    writer.beat(3)
    assert read_heartbeats(tmp_path, None)[0].step == 3


def test_it_is_private(tmp_path: Path) -> None:
    HeartbeatWriter(tmp_path / "shm" / "beat-000000", 0, ATTEMPT).close()
    assert (tmp_path / "shm").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "shm" / "beat-000000").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "shm").iterdir()] == ["beat-000000"]


def test_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, transom_hpc.monitors.heartbeat\n"
        "print([name for name in ('torch', 'numpy', 'mpi4py', 'h5py', 'psutil', 'msgspec') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert answer.stdout.strip() == "[]"


def test_a_beat_is_cheap(tmp_path: Path) -> None:
    writer = HeartbeatWriter(beat_path(tmp_path, 0), 0, ATTEMPT)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for step in range(500):
            writer.beat(step, loss=1.0, saved_step=2, stall_s=0.1)
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 15e-6  # about 2 us here; the bar leaves room for slower machines


def beat(rank: int, step: int | None, pid: int = 1, loss: float | None = None, beat_ns: int = 0) -> Heartbeat:
    return Heartbeat(rank, ATTEMPT, pid, 0, "training", step, beat_ns, 0.5, loss, 3, 0.25)


def test_the_summary_of_a_host() -> None:
    beats = [
        beat(4, 12, loss=1.0, beat_ns=5_000_000_000),
        beat(5, 11, loss=3.0, beat_ns=4_000_000_000),
        beat(6, 12, loss=math.nan, beat_ns=5_000_000_000),
        beat(7, 2, pid=9),
    ]
    figures = summarise(beats, lambda pid, _: pid == 1, 6_000_000_000)
    assert figures == {
        "ranks": 3.0,
        "ended": 1.0,
        "step_min": 11.0,
        "step_max": 12.0,
        "behind_rank": 5.0,
        "phase": float(PHASES.index("training")),
        "step_s": 0.5,
        "loss": 2.0,
        "bad_losses": 1.0,
        "bad_since": None,
        "bad_count": None,
        "good_step": None,
        "saved_step": 3.0,
        "stall_s": 0.25,
        "beat_age_s": 2.0,
    }


def test_since_when_a_loss_is_bad_is_exact_however_seldom_it_is_read(tmp_path: Path) -> None:
    writer = HeartbeatWriter(beat_path(tmp_path, 0), 0, ATTEMPT)

    def bad() -> tuple[int | None, int, int | None]:
        (beat,) = read_heartbeats(tmp_path, ATTEMPT)
        return beat.bad_since, beat.bad_count, beat.good_step

    assert bad() == (None, 0, None)
    writer.beat(101)
    assert bad() == (None, 0, 100)  # what it began from has led to no loss yet
    writer.beat(102, loss=math.nan)
    writer.beat(103)  # no loss at this step: it says nothing
    writer.beat(104, loss=-math.inf)
    assert bad() == (102, 2, 100)
    writer.beat(105, loss=1.0)
    assert bad() == (None, 0, 105)
    writer.beat(106)
    writer.beat(107, loss=math.inf)
    writer.phase("saving")
    assert bad() == (107, 1, 105)


def test_the_summary_of_bad_losses_is_the_earliest_of_the_ranks_that_have_them() -> None:
    fine = beat(0, 60, loss=1.0)
    one = dataclasses.replace(beat(1, 60, loss=math.nan), bad_since=50, bad_count=11, good_step=49)
    two = dataclasses.replace(beat(2, 60, loss=math.inf), bad_since=51, bad_count=2, good_step=45)
    figures = summarise([fine, one, two], lambda *_: True, 0)
    assert [figures[name] for name in ("bad_losses", "bad_since", "bad_count", "good_step")] == [2.0, 50.0, 2.0, 45.0]


def test_a_rank_without_a_step_is_behind_all() -> None:
    figures = summarise([beat(0, 5), beat(1, None)], lambda *_: True, 0)
    assert figures["step_min"] is None
    assert figures["behind_rank"] == 1.0
    assert figures["step_max"] == 5.0


def test_a_host_without_a_program_has_no_step() -> None:
    assert summarise([], lambda *_: True, 0) == {"ranks": 0.0, "ended": 0.0}
    assert summarise([beat(0, 5)], lambda *_: False, 0) == {"ranks": 0.0, "ended": 1.0}
