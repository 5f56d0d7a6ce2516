"""Bytes to and from a file at given offsets, past the page cache, several transfers in flight.

O_DIRECT wants offset, length and memory address in multiples of 4 KiB. Memory that is not aligned goes through a small
aligned buffer; an odd end of an array, and everything where the file system refuses O_DIRECT, goes through the page
cache.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from transom_hpc.ckpt import lanes
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES

ALIGN = 4096

_HUGE_BYTES = 2 << 20
_HUGE_PAGE = 14  # MADV_HUGEPAGE
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_buffers = threading.local()
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes on their way to a file.

    Args:
        begin: of the first one in its dataset.
        nbytes: how many.
        data: the bytes; asked for when their turn comes, so that they may still be on their way until then.
    """

    begin: int
    nbytes: int
    data: Callable[[], memoryview]


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank puts into one dataset.

    Args:
        file: name of the data file in the checkpoint's folder.
        dataset: path in the HDF5 file.
        offset: of the dataset's first byte in the file.
        pieces: in order.
        turns: see layout.Span.
    """

    file: str
    dataset: str
    offset: int
    pieces: tuple[Piece, ...]
    turns: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.nbytes for piece in self.pieces)


class Writer(Protocol):
    """Puts bytes into files that are laid out already."""

    def write(
        self, folder: Path, names: Sequence[str], batches: Sequence[Batch], progress: Callable[[], None]
    ) -> float:
        """Write and make durable.

        Args:
            folder: that holds the files.
            names: of all data files, the same on all ranks.
            batches: what this rank writes.
            progress: called after each piece, from several threads.

        Returns:
            How long it took, in seconds, without the wait for ranks that came later.

        Raises:
            OSError, SaveError: something is not on disk.
        """


class DirectWriter:
    """pwrite at the planned offsets, with O_DIRECT where that is possible."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def write(
        self, folder: Path, names: Sequence[str], batches: Sequence[Batch], progress: Callable[[], None]
    ) -> float:
        began = time.perf_counter()
        with ExitStack() as opened:
            targets = {
                name: opened.enter_context(Target(self._files, folder / name, os.O_WRONLY))
                for name in names
                if any(batch.file == name for batch in batches)
            }
            lanes.run(
                partial(_send, targets[batch.file], piece, batch.offset, progress)
                for batch in batches
                for piece in batch.pieces
            )
            for target in targets.values():
                self._files.fsync(target.buffered)
        return time.perf_counter() - began


def _send(target: Target, piece: Piece, offset: int, progress: Callable[[], None]) -> None:
    target.put(piece.data(), offset + piece.begin)
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
            held = buffer()
            while done < whole:
                count = min(whole - done, len(held))
                held[:count] = data[done : done + count]
                sent = self._put(self._direct, held[:count], offset + done)
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
        past_cache = self._direct is not None and offset % ALIGN == 0
        whole = len(into) // ALIGN * ALIGN if past_cache and len(into) and address(into) % ALIGN == 0 else 0
        done = self._get(self._direct, into[:whole], offset) if whole else 0
        if past_cache and done == whole:  # an odd end, or all of it where the memory is not aligned
            held = buffer()
            while done < len(into):
                want = min(len(into) - done, len(held))
                got = min(want, self._get(self._direct, held[: -(-want // ALIGN) * ALIGN], offset + done))
                into[done : done + got] = held[:got]
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


def room(nbytes: int) -> memoryview:
    """Fresh aligned memory, given back when nobody refers to it any more."""
    made = memoryview(mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    in_large_pages(address(made), len(made))
    return made


def in_large_pages(begin: int, nbytes: int) -> None:
    """Ask for large pages for memory in which nothing is yet: it is there, and given back, in a fraction of the time.

    An advice: where the kernel does not follow it, nothing else changes. In a virtual machine whose host takes free
    memory back, the first touch waits for the host, with large pages more than with scattered small ones.

    Args:
        begin: address of the first byte.
        nbytes: how many.
    """
    if nbytes < _HUGE_BYTES:
        return
    # To whole pages outwards, so that memory that lies next to this is not cut off from it in the kernel's books.
    page = begin // ALIGN * ALIGN
    end = -(-(begin + nbytes) // ALIGN) * ALIGN
    _libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(end - page), _HUGE_PAGE)


def address(data: memoryview) -> int:
    """Where the bytes lie in memory."""
    return int(np.frombuffer(data, dtype=np.uint8).__array_interface__["data"][0])


def buffer() -> memoryview:
    """This thread's aligned buffer, of PIECE_BYTES. Used by `put` and `get` where memory or length are odd."""
    if not hasattr(_buffers, "held"):
        _buffers.held = room(PIECE_BYTES)
    held: memoryview = _buffers.held
    return held


def pieces(begin: int, end: int, data: Callable[[int, int], memoryview], whole: bool = False) -> tuple[Piece, ...]:
    """Cut bytes [begin, end) of an array into pieces on their way.

    Args:
        data: gives the bytes of the array from one to another.
        whole: leave them in one.
    """
    size = end - begin if whole else PIECE_BYTES
    cut = [(at, min(at + size, end)) for at in range(begin, end, size or 1)]
    return tuple(Piece(at, stop - at, partial(data, at, stop)) for at, stop in cut)
