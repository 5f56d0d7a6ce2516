"""Blank data files: laid out by HDF5 in memory, and copied from there as long as the layout stays the same.

What HDF5 writes depends only on names, types and shapes, and those rarely change between the saves of a run. So the
second and later files cost a few small writes where HDF5 takes a tenth of a second of the program's interpreter. HDF5
itself writes to no disk here: where that is full it does not report an error, it crashes (see sheet).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_hpc.ckpt import h5file
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Shard, data_file
from transom_hpc.ckpt.sheet import Sheet


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

    def make(self, folder: Path, shards: Sequence[Shard], attributes: Mapping[str, Any]) -> dict[str, int]:
        """Make the files, which do not exist yet, with their blocks reserved.

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
            self._copy(folder / data_file(number), pattern)
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

    def _lay_out(self, number: int, shards: Sequence[Shard], attributes: Mapping[str, Any]) -> _Pattern:
        sheet = Sheet()
        offsets = h5file.lay_out(sheet, number, shards, attributes, self.align_bytes)
        return _Pattern(sheet.size, offsets, list(sheet.written()))

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            sent = self._files.pwrite(fd, view, offset)
            view, offset = view[sent:], offset + sent
