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

_SHAPES = ((4 << 20, 8), (8 << 20, 4), (16 << 20, 4))
"""Bytes of a transfer, and how many are in flight; which is fastest depends on the disk."""

_MOST_BYTES = 16 << 20


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
        together(jobs, threads)
        return time.perf_counter() - before


class Disk:
    """Reads and writes a file as fast as the disk can: O_DIRECT, large transfers, several in flight.

    It is written over, so that the file system has nothing to write of its own. The shape of the transfers is the one
    that turns out to be fastest here.

    Args:
        path: of the file, which is made.
        nbytes: how many each measurement moves.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path = path
        self._nbytes = nbytes
        self._size = -(-nbytes // _MOST_BYTES) * _MOST_BYTES
        self._rooms = [memoryview(mmap.mmap(-1, _MOST_BYTES)) for _ in range(max(count for _, count in _SHAPES))]
        for room in self._rooms:
            room[:] = os.urandom(_MOST_BYTES)
        self._shape = {os.O_WRONLY: _SHAPES[0], os.O_RDONLY: _SHAPES[0]}
        self._seconds(os.O_WRONLY, _SHAPES[0])
        for flags in self._shape:
            tried = {shape: min(self._seconds(flags, shape) for _ in range(2)) for shape in _SHAPES}
            self._shape[flags] = min(tried, key=lambda shape: tried[shape])

    def write_seconds(self) -> float:
        """Write over it, and fsync."""
        return self._seconds(os.O_WRONLY, self._shape[os.O_WRONLY])

    def read_seconds(self) -> float:
        """Read it."""
        return self._seconds(os.O_RDONLY, self._shape[os.O_RDONLY])

    def fill_seconds(self) -> float:
        """Read it into memory that nobody has touched, as a program that starts must: in large pages where there are
        any."""
        room = mmap.mmap(-1, self._size)
        room.madvise(mmap.MADV_HUGEPAGE)
        return self._seconds(os.O_RDONLY, self._shape[os.O_RDONLY], memoryview(room))

    def _seconds(self, flags: int, shape: tuple[int, int], fresh: memoryview | None = None) -> float:
        piece, count = shape
        fd = os.open(self._path, flags | os.O_CREAT | os.O_DIRECT, 0o600)

        def lane(number: int) -> None:
            room = self._rooms[number][:piece]
            for at in range(number * piece, self._size, count * piece):
                if fresh is not None:
                    room = fresh[at : at + piece]
                done = os.pwrite(fd, room, at) if flags == os.O_WRONLY else os.preadv(fd, [room], at)
                if done != piece:
                    raise OSError("a short transfer")

        try:
            before = time.perf_counter()
            together([partial(lane, number) for number in range(count)], count)
            os.fsync(fd)
            return (time.perf_counter() - before) * self._nbytes / self._size
        finally:
            os.close(fd)


def together(jobs: Sequence[Callable[[], object]], threads: int) -> None:
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
