"""A bell rings at once, misses nothing, and where it can't ring it is a wait."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from transom_hpc.base.clock import SystemClock
from transom_hpc.ckpt import bell
from transom_hpc.ckpt.bell import Bell
from transom_hpc.ckpt.files import Files


def test_it_rings_for_what_was_there_before_the_wait_and_only_once(tmp_path: Path) -> None:
    with Bell(tmp_path, SystemClock()) as heard:
        Files().publish(tmp_path / "order", b"1")
        assert heard.wait(10, 0)
        assert not heard.wait(0, 0)
        (tmp_path / "order").unlink()
        assert heard.wait(10, 0)
        assert not heard.wait(0, 0)


def test_it_ends_a_wait(tmp_path: Path) -> None:
    with Bell(tmp_path, SystemClock()) as heard:
        late = threading.Timer(0.05, Files().publish, (tmp_path / "order", b"1"))
        late.start()
        assert heard.wait(20, 0)
        late.join()


def test_looks_do_not_ring(tmp_path: Path) -> None:
    """Else a server would wake itself."""
    (tmp_path / "order").touch()
    with Bell(tmp_path, SystemClock()) as heard:
        os.close(os.open(tmp_path / "order", os.O_RDWR))
        os.utime(tmp_path / "order")
        os.listdir(tmp_path)  # noqa: PTH208
        assert not heard.wait(0.01, 0)


@pytest.mark.parametrize("why", ["no folder", "no more bells"])
def test_where_it_cannot_ring_it_waits(tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def inotify_init1(self, _flags: int) -> int:
            return -1

    if why == "no more bells":
        monkeypatch.setattr(bell, "_libc", Kernel())
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with Bell(tmp_path / "none", SystemClock()) as heard:
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        began = time.monotonic()
        assert not heard.wait(20, 0.02)
        assert 0.02 <= time.monotonic() - began < 10
