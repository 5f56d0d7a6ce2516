"""What the machine can do: memory copies, and its disk past the page cache. Every figure stands beside one of these."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

_PIECE = 4 << 20
_IN_FLIGHT = 8


class Copy:
    """Copies a state within memory: warm, so many threads.

    Args:
        tensors: of the state. As much memory again is held.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sources = [t.detach().numpy() for t in tensors]
        self._targets = [np.ones_like(a) for a in self._sources]

    def seconds(self, threads: int = 2) -> float:
        """Copy every byte once."""
        pairs = list(zip(self._sources, self._targets, strict=True))
        jobs = [lambda a=a, b=b: ctypes.memmove(b.ctypes.data, a.ctypes.data, a.nbytes) for a, b in pairs]
        before = time.perf_counter()
        _together(jobs, threads)
        return time.perf_counter() - before


class Disk:
    """Reads and writes a file as fast as the disk can: O_DIRECT, 4 MiB, 8 in flight.

    It is written over, so that the file system has nothing to write of its own.

    Args:
        path: of the file; it stays as large as it is now.
        nbytes: how many each measurement moves.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._pieces = max(_IN_FLIGHT, nbytes // _PIECE)
        self._nbytes = nbytes
        self._rooms = [memoryview(mmap.mmap(-1, _PIECE)) for _ in range(_IN_FLIGHT)]
        for room in self._rooms:
            room[:] = os.urandom(_PIECE)
        self.write_seconds()

    def write_seconds(self) -> float:
        """Write over it, and fsync."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            before = time.perf_counter()
            self._move(lambda room, at: os.pwrite(fd, room, at))
            os.fsync(fd)
            return self._scaled(before)
        finally:
            os.close(fd)

    def read_seconds(self) -> float:
        """Read it."""
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        try:
            before = time.perf_counter()
            self._move(lambda room, at: os.preadv(fd, [room], at))
            return self._scaled(before)
        finally:
            os.close(fd)

    def _move(self, transfer: Callable[[memoryview, int], int]) -> None:
        rooms = self._rooms

        def one(number: int) -> None:
            for piece in range(number, self._pieces, _IN_FLIGHT):
                if transfer(rooms[number], piece * _PIECE) != _PIECE:
                    raise OSError("a short transfer")

        _together([partial(one, number) for number in range(_IN_FLIGHT)], _IN_FLIGHT)

    def _scaled(self, before: float) -> float:
        return (time.perf_counter() - before) * self._nbytes / (self._pieces * _PIECE)


def _together(jobs: Sequence[Callable[[], object]], threads: int) -> None:
    """Do all jobs; the caller's thread is one of so many."""
    waiting = list(reversed(jobs))
    errors: list[BaseException] = []

    def work() -> None:
        while waiting and not errors:
            try:
                waiting.pop()()
            except IndexError:
                return
            except BaseException as error:
                errors.append(error)

    helpers = [threading.Thread(target=work) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]


def rate(nbytes: int, seconds: float) -> str:
    """For people."""
    return f"{nbytes / seconds / 1e9:.2f} GB/s"
