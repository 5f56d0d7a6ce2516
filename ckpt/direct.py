"""Bytes to and from a file at given offsets, past the page cache, several transfers in flight.

O_DIRECT wants offset, length and memory address in multiples of 4 KiB. Memory that is not aligned goes through a small
aligned buffer; an odd end of an array, and everything where the file system refuses O_DIRECT, goes through the page
cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from transom_hpc.ckpt import lanes
from transom_hpc.ckpt.files import Files

ALIGN = 4096
PIECE_BYTES = 8 << 20
"""One transfer. A fraction of the checksum's block, so that a block never needs two threads."""

_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_buffers = threading.local()


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes on their way to a file.

    Args:
        offset: in the file.
        data: the bytes; asked for when their turn comes, so that they may still be on their way until then.
        nbytes: how many.
    """

    offset: int
    data: Callable[[], memoryview]
    nbytes: int


class Writer(Protocol):
    """Puts bytes into a file that is laid out already."""

    def write(self, path: Path, pieces: Iterable[Piece], progress: Callable[[], None]) -> None:
        """Write and make durable; `progress` is called after each piece, from several threads.

        Raises:
            OSError: something is not on disk.
        """


class DirectWriter:
    """pwrite at the planned offsets, with O_DIRECT where that is possible."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(self, path: Path, pieces: Iterable[Piece], progress: Callable[[], None]) -> None:
        with Target(self._files, path, os.O_WRONLY) as target:
            lanes.run([partial(_send, target, piece, progress) for piece in pieces])
            self._files.fsync(target.buffered)


def _send(target: Target, piece: Piece, progress: Callable[[], None]) -> None:
    target.put(piece.data(), piece.offset)
    progress()


class Target:
    """A file opened twice: past the page cache and through it."""

    def __init__(self, files: Files, path: Path, flags: int) -> None:
        self._files = files
        self.path = path
        self.buffered = files.open(path, flags)
        self._direct: int | None = None
        try:
            self._direct = files.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno not in _REFUSED:
                files.close(self.buffered)
                raise

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._direct is not None:
                self._files.close(self._direct)
        finally:
            self._files.close(self.buffered)

    def put(self, data: memoryview, offset: int) -> None:
        """Write all of it."""
        whole = len(data) // ALIGN * ALIGN if self._direct is not None and offset % ALIGN == 0 else 0
        done = 0
        if whole and address(data) % ALIGN == 0:
            done = self._put(self._direct, data[:whole], offset)
        elif whole:
            buffer = _buffer()
            while done < whole:
                count = min(whole - done, len(buffer))
                buffer[:count] = data[done : done + count]
                sent = self._put(self._direct, buffer[:count], offset + done)
                done += sent
                if sent < count:
                    break
        if done < len(data):
            self._put(self.buffered, data[done:], offset + done)

    def _put(self, fd: int | None, data: memoryview, offset: int) -> int:
        """Write through one descriptor; less than all only where O_DIRECT turns out to be refused."""
        assert fd is not None
        done = 0
        while done < len(data):
            try:
                sent = self._files.pwrite(fd, data[done:], offset + done)
            except OSError as error:
                if fd == self._direct and error.errno in _REFUSED:
                    return done
                raise
            if sent <= 0:
                raise OSError(errno.EIO, "the file system wrote nothing and gave no reason", str(self.path))
            done += sent
        return done

    def get(self, into: memoryview, offset: int) -> int:
        """Read; fewer bytes than asked only at the end of the file."""
        whole = len(into) // ALIGN * ALIGN if self._direct is not None and offset % ALIGN == 0 else 0
        done = 0
        if whole and address(into) % ALIGN == 0:
            done = self._get(self._direct, into[:whole], offset)
        elif self._direct is not None and offset % ALIGN == 0:
            buffer = _buffer()
            while done < len(into):
                want = min(len(into) - done, len(buffer))
                got = min(want, self._get(self._direct, buffer[: -(-want // ALIGN) * ALIGN], offset + done))
                into[done : done + got] = buffer[:got]
                done += got
                if got < want:
                    break
        if done < len(into):
            done += self._get(self.buffered, into[done:], offset + done)
        return done

    def _get(self, fd: int | None, into: memoryview, offset: int) -> int:
        assert fd is not None
        done = 0
        while done < len(into):
            try:
                got = self._files.pread(fd, into[done:], offset + done)
            except OSError as error:
                if fd == self._direct and error.errno in _REFUSED:
                    break
                raise
            done += got
            if got == 0 or (fd == self._direct and got % ALIGN):
                break
        return done


def address(data: memoryview) -> int:
    """Where the bytes lie in memory."""
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def _buffer() -> memoryview:
    """This thread's aligned buffer."""
    if not hasattr(_buffers, "held"):
        _buffers.held = memoryview(mmap.mmap(-1, PIECE_BYTES))
    held: memoryview = _buffers.held
    return held


def pieces(offset: int, begin: int, end: int, data: Callable[[int, int], memoryview]) -> list[Piece]:
    """Cut bytes [begin, end) of an array that lies at this offset into pieces on their way."""
    cut = [(at, min(at + PIECE_BYTES, end)) for at in range(begin, end, PIECE_BYTES)]
    return [Piece(offset + at, partial(data, at, stop), stop - at) for at, stop in cut]
