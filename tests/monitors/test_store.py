"""The readings on disk, and the process that writes them."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import h5py
import pandas
import pytest

from transom_hpc.monitors.reading import METRICS, Reading, encode_reading
from transom_hpc.monitors.recorder import Recorder
from transom_hpc.monitors.store import append_readings, load_readings, new_store_path

Record: TypeAlias = Callable[[Path, float], Recorder]


def readings(host: str, first: int, count: int) -> list[Reading]:
    return [
        Reading(host, "A0001-L01", number, 1e9 + number, cpu_use=0.5, step_min=float(number))
        for number in range(first, first + count)
    ]


def test_one_line_reads_a_table(tmp_path: Path) -> None:
    path = tmp_path / "A0001-L01.h5"
    append_readings(path, readings("n1", 1, 3) + readings("n2", 1, 2))
    append_readings(path, readings("n1", 4, 300))
    frame = pandas.DataFrame(h5py.File(path)["nodes/n1"][:])
    assert list(frame.columns) == ["number", "time_s", *METRICS]
    assert list(frame["number"]) == list(range(1, 304))
    assert frame["cpu_use"].eq(0.5).all()
    assert frame["load_1m"].isna().all()  # missing, never zero
    whole = load_readings(path)
    assert whole.groupby("host").size().to_dict() == {"n1": 303, "n2": 2}
    assert whole["time_s"].is_monotonic_increasing


def test_an_empty_file_has_no_readings(tmp_path: Path) -> None:
    path = tmp_path / "A0001-L01.h5"
    append_readings(path, [])
    assert not path.exists()
    with h5py.File(path, "w"):
        pass
    assert load_readings(path).empty


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "health"
    names = [new_store_path(folder, "A0001-L01").name for _ in range(3)]
    assert names == ["A0001-L01.h5", "A0001-L01-2.h5", "A0001-L01-3.h5"]


def test_many_small_appends_do_not_swell_the_file(tmp_path: Path) -> None:
    path, small = tmp_path / "many.h5", tmp_path / "once.h5"
    for number in range(0, 500, 5):
        append_readings(path, readings("n1", number, 5))
    append_readings(small, readings("n1", 0, 500))
    assert path.stat().st_size < 2 * small.stat().st_size + 100_000


def wait_for_rows(path: Path, count: int) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if path.exists() and path.stat().st_size and len(load_readings(path)) >= count:
            return
        time.sleep(0.1)
    pytest.fail("no rows were written")


@pytest.fixture
def record() -> Iterator[Record]:
    """Makes recorders that end with the test, however it ends."""
    with ExitStack() as stack:

        def make(path: Path, flush_s: float) -> Recorder:
            recorder = Recorder(path, flush_s)
            stack.callback(recorder.close, 5.0)
            stack.callback(recorder._process.kill)
            return recorder

        yield make


def test_the_recorder_writes_while_it_runs_and_at_its_end(tmp_path: Path, record: Record) -> None:
    path = new_store_path(tmp_path, "A0001-L01")
    recorder = record(path, 0.2)
    for reading in readings("n1", 1, 10):
        recorder.add(reading)
    wait_for_rows(path, 10)
    for reading in readings("n1", 11, 10):
        recorder.add(reading)
    assert recorder.close(20.0)
    assert list(load_readings(path)["number"]) == list(range(1, 21))
    assert recorder.dropped == 0


def test_a_killed_recorder_leaves_a_readable_file_and_no_error(tmp_path: Path, record: Record) -> None:
    path = new_store_path(tmp_path, "A0001-L01")
    recorder = record(path, 0.1)
    for reading in readings("n1", 1, 10):
        recorder.add(reading)
    wait_for_rows(path, 10)
    time.sleep(0.3)
    os.kill(recorder._process.pid, signal.SIGKILL)
    recorder._process.wait(10)
    for reading in readings("n1", 11, 10):
        recorder.add(reading)
    assert recorder.close(5.0)
    assert recorder.dropped > 0
    assert len(load_readings(path)) == 10


def test_a_recorder_that_does_not_keep_up_never_holds_up_the_caller(tmp_path: Path, record: Record) -> None:
    recorder = record(tmp_path / "x.h5", 0.1)
    os.kill(recorder._process.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        for reading in readings("n1", 1, 2000):
            recorder.add(reading)
        assert time.monotonic() - start < 5
        assert recorder.dropped > 1000
    finally:
        os.kill(recorder._process.pid, signal.SIGCONT)
    assert recorder.close(20.0)


def test_a_folder_that_can_not_be_written_is_said_once_and_costs_nothing_else(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "transom_hpc.monitors.store", str(tmp_path / "absent" / "x.h5"), "0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        for reading in readings("n1", 1, 4):
            process.stdin.write(encode_reading(reading))
            process.stdin.flush()
            time.sleep(0.5)
        process.stdin.close()
        text = process.stderr.read().decode()
        assert process.wait(20) == 0
    assert text.count("readings not written") == 1


def test_signals_do_not_end_the_recorder_before_it_has_written(tmp_path: Path, record: Record) -> None:
    path = new_store_path(tmp_path, "A0001-L01")
    recorder = record(path, 0.5)
    recorder.add(readings("n1", 1, 1)[0])
    wait_for_rows(path, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        os.kill(recorder._process.pid, number)
    recorder.add(readings("n1", 2, 1)[0])
    assert recorder.close(20.0)
    assert len(load_readings(path)) == 2


def test_a_kill_at_any_moment_leaves_the_rows_before_it(tmp_path: Path) -> None:
    """Written to without a pause, so that most kills come in the middle of a write."""
    command = [sys.executable, "-m", "transom_hpc.monitors.store"]
    paths = [tmp_path / f"{number}.h5" for number in range(6)]
    writers = [subprocess.Popen([*command, str(path), "0.02"], stdin=subprocess.PIPE, bufsize=0) for path in paths]
    try:
        ends: dict[Path, float] = {}
        number = 0
        while any(writer.poll() is None for writer in writers):
            number += 1
            rows = b"".join(encode_reading(readings(f"n{node}", number, 1)[0]) for node in range(8))
            for writer, path in zip(writers, paths, strict=True):
                if path not in ends and path.exists() and path.stat().st_size:
                    ends[path] = time.monotonic() + random.uniform(0.1, 1.5)
                if writer.poll() is None and writer.stdin is not None:
                    writer.stdin.write(rows)
                    if time.monotonic() > ends.get(path, math.inf):
                        writer.kill()
                        writer.wait()
            time.sleep(0.01)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            if writer.stdin is not None:
                writer.stdin.close()
    for path in paths:
        frame = load_readings(path)
        assert len(frame) >= 8
        assert frame["cpu_use"].eq(0.5).all()
