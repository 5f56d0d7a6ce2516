"""Blank data files: laid out by HDF5 in memory, and copied from there as long as the layout stays the same.

What HDF5 writes depends only on names, types and shapes, and those rarely change between the saves of a run. So the
second and later files cost a few small writes where HDF5 takes a tenth of a second of the program's interpreter. HDF5
itself writes to no disk here: where that is full it does not report an error, it crashes (see sheet).

A file of a checkpoint that was deleted is taken again where it has the same layout: its blocks are there, so nothing
has to be found or reserved, and disks that make room when they are first written to (thin provisioning) take half the
time. For whoever reads, it is deleted all the same: one that anybody has open, or that has a second name, is not taken.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_hpc.ckpt import h5file
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Shard, data_file
from transom_hpc.ckpt.sheet import Sheet

_F_SETSIG = 10  # Python has no name for it


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Everything of a file but its data.

    Args:
        size: of the file in bytes.
        offsets: of each dataset.
        rest: what is not data: offset and bytes, empty pages left out.
    """

    size: int
    offsets: dict[str, int]
    rest: list[tuple[int, bytes]]


class Blanks:
    """Makes data files without data.

    Args:
        align_bytes: see h5file.lay_out.
        count: data files of a checkpoint, such as the number of storage targets; no more than there are arrays.
    """

    def __init__(self, files: Files, align_bytes: int = h5file.ALIGN, count: int = 1) -> None:
        self._files = files
        self.align_bytes = align_bytes
        self.count = count
        self._key: tuple[Any, ...] = ()
        self._patterns: list[_Pattern] = []

    def make(
        self, folder: Path, shards: Sequence[Shard], attributes: Mapping[str, Any], deleted: Path | None = None
    ) -> dict[str, int]:
        """Make the files, which do not exist yet, with their blocks reserved.

        Args:
            folder: where.
            shards: what will be in them.
            attributes: see h5file.lay_out.
            deleted: folder of a checkpoint that is no longer one; its files are taken, or removed.

        Returns:
            The byte offset in its file of each dataset that has bytes, by its path.

        Raises:
            OSError: there is no room, or a file could not be made.
        """
        key = (
            tuple((s.path, s.file, s.entry.dtype, s.entry.shape, s.entry.start, s.entry.global_shape) for s in shards),
            tuple(attributes.items()),
        )
        if key != self._key:
            numbers = range(1 + max((shard.file for shard in shards), default=0))
            self._patterns = [self._lay_out(number, shards, attributes) for number in numbers]
            self._key = key
        for number, pattern in enumerate(self._patterns):
            name = data_file(number)
            if deleted is None or not self._take(deleted / name, folder / name, pattern):
                self._copy(folder / name, pattern)
        return {path: offset for pattern in self._patterns for path, offset in pattern.offsets.items()}

    def _copy(self, path: Path, pattern: _Pattern) -> None:
        fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._files.allocate(fd, pattern.size)
            os.truncate(fd, pattern.size)
            for offset, data in pattern.rest:
                self._write(fd, data, offset)
        finally:
            self._files.close(fd)

    def _take(self, old: Path, path: Path, pattern: _Pattern) -> bool:
        """Give a file another name, if it is as we would make it but for its data, and nobody else has it; else remove
        it, so that its room is free."""
        try:
            fd = self._files.open(old, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            facts = os.fstat(fd)
            taken = facts.st_nlink == 1 and facts.st_size == pattern.size <= facts.st_blocks * 512
            taken = taken and all(self._holds(fd, data, offset) for offset, data in pattern.rest)
            taken = taken and _nobody_else_has(fd)
            if taken:
                self._files.rename(old, path)
        finally:
            self._files.close(fd)
        if not taken:
            self._files.remove(old)
        return taken

    def _holds(self, fd: int, data: bytes, offset: int) -> bool:
        room = bytearray(len(data))
        return self._files.pread(fd, memoryview(room), offset) == len(data) and room == data

    def _lay_out(self, number: int, shards: Sequence[Shard], attributes: Mapping[str, Any]) -> _Pattern:
        sheet = Sheet()
        offsets = h5file.lay_out(sheet, number, shards, attributes, self.align_bytes)
        return _Pattern(sheet.size, offsets, list(sheet.written()))

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            sent = self._files.pwrite(fd, view, offset)
            view, offset = view[sent:], offset + sent


def _nobody_else_has(fd: int) -> bool:
    """Whether the kernel lets us have the file for ourselves: a lease for writing is given where nobody has it open.
    On file systems of several hosts it is given only by those that know of all of them."""
    try:
        # Whoever opens the file in this moment waits until the lease is given back. We are told so by a signal, which
        # ends a program unless it is one like this.
        fcntl.fcntl(fd, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
