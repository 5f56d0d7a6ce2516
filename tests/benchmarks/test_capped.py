"""The storage with a capped rate: the right bytes, never faster than the cap, and gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="no /dev/fuse on this machine"),
]

USER = """
    import json, os, sys, time
    sys.path.insert(0, sys.argv[2])
    from pathlib import Path
    from checkpointing import capped

    data = os.urandom(8 << 20)
    with capped.storage(Path(sys.argv[1]), 20e6) as front:
        before = time.perf_counter()
        with open(front / "file", "wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        write = time.perf_counter() - before
        before = time.perf_counter()
        assert (front / "file").read_bytes() == data
        read = time.perf_counter() - before
        (front / "a").mkdir()
        (front / "a" / "b").mkdir()
        os.rename(front / "file", front / "a" / "b" / "moved")
        os.rename(front / "a", front / "c")
        assert sorted(p.name for p in front.rglob("*")) == ["b", "c", "moved"]
        fd = os.open(front / "direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(fd, 0, 8192)
        assert os.fstat(fd).st_size == 8192
        os.ftruncate(fd, 4096)
        os.close(fd)
        assert (front / "direct").stat().st_size == 4096
        (front / "direct").unlink()
        assert (front / "c" / "b" / "moved").read_bytes() == data
        print(json.dumps([write, read]), flush=True)
        if len(sys.argv) > 3:
            time.sleep(60)
"""


def program(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(USER), str(folder), str(BENCHMARKS), *more]


def servers(folder: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [words] if "passthrough.py" in words and str(folder) in words else []
    return found


def test_bytes_and_rate(tmp_path: Path) -> None:
    done = subprocess.run(program(tmp_path), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    write, read = map(float, done.stdout.strip(" []\n").split(","))
    assert min(write, read) > (8 << 20) / 20e6 * 0.9
    assert (tmp_path / "behind" / "c" / "b" / "moved").stat().st_size == 8 << 20
    assert list((tmp_path / "front").iterdir()) == []
    assert not servers(tmp_path)


def test_nothing_is_left_of_one_that_was_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(program(tmp_path, "stay"), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    assert servers(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while servers(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not servers(tmp_path)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
