"""The readings on disk, and the process that writes them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import pandas
import pytest

from transom_hpc.monitors.reading import METRICS, Reading
from transom_hpc.monitors.recorder import Recorder
from transom_hpc.monitors.store import append_readings, load_readings, new_store_path


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


def test_the_recorder_writes_while_it_runs_and_at_its_end(tmp_path: Path) -> None:
    path = new_store_path(tmp_path, "A0001-L01")
    recorder = Recorder(path, flush_s=0.2)
    for reading in readings("n1", 1, 10):
        recorder.add(reading)
    wait_for_rows(path, 10)
    for reading in readings("n1", 11, 10):
        recorder.add(reading)
    assert recorder.close(20.0)
    assert list(load_readings(path)["number"]) == list(range(1, 21))
    assert recorder.dropped == 0


def test_a_killed_recorder_leaves_a_readable_file_and_no_error(tmp_path: Path) -> None:
    path = new_store_path(tmp_path, "A0001-L01")
    recorder = Recorder(path, flush_s=0.1)
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


def test_a_recorder_that_does_not_keep_up_never_holds_up_the_caller(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "x.h5", flush_s=0.1)
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
    from transom_hpc.monitors.reading import encode_reading

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


def test_signals_do_not_end_the_recorder_before_it_has_written(tmp_path: Path) -> None:
    path = new_store_path(tmp_path, "A0001-L01")
    recorder = Recorder(path, flush_s=0.5)
    recorder.add(readings("n1", 1, 1)[0])
    wait_for_rows(path, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        os.kill(recorder._process.pid, number)
    recorder.add(readings("n1", 2, 1)[0])
    assert recorder.close(20.0)
    assert len(load_readings(path)) == 2
