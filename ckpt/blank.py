"""Blank data files: laid out by HDF5 once, and from then on copied from memory as long as the layout stays the same.

What HDF5 writes depends only on names, types and shapes, and those rarely change between the saves of a run. So the
second and later files cost a few small writes where HDF5 takes a tenth of a second of the program's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_hpc.ckpt import h5file
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Shard


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Everything of a file but its data.

    Args:
        size: of the file in bytes.
        offsets: of each dataset.
        rest: what is not data: offset and bytes, zeros left out.
    """

    size: int
    offsets: dict[str, int]
    rest: list[tuple[int, bytes]]


class Blanks:
    """Makes data files without data.

    Args:
        align_bytes: see h5file.lay_out.
    """

    def __init__(self, files: Files, align_bytes: int = h5file.ALIGN) -> None:
        self._files = files
        self._align_bytes = align_bytes
        self._key: tuple[Any, ...] = ()
        self._pattern: _Pattern | None = None

    def make(self, path: Path, shards: Sequence[Shard], attributes: Mapping[str, Any]) -> dict[str, int]:
        """Make a file that does not exist yet, with its blocks reserved.

        Returns:
            The byte offset of each dataset that has bytes, by its path.

        Raises:
            OSError: there is no room, or the file could not be made.
        """
        key = (
            tuple((s.path, s.entry.dtype, s.entry.shape, s.entry.start, s.entry.global_shape) for s in shards),
            tuple(attributes.items()),
        )
        if self._pattern is not None and key == self._key:
            fd = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                self._files.allocate(fd, self._pattern.size)
                os.truncate(fd, self._pattern.size)
                for offset, data in self._pattern.rest:
                    self._write(fd, data, offset)
            finally:
                self._files.close(fd)
            return self._pattern.offsets
        offsets = h5file.lay_out(path, shards, attributes, self._align_bytes)
        sizes = {shard.path: shard.entry.nbytes for shard in shards}
        fd = self._files.open(path, os.O_RDWR)
        try:
            size = self._files.size(path)
            self._files.allocate(fd, size)
            self._key, self._pattern = key, _Pattern(size, offsets, _rest(fd, size, offsets, sizes))
        finally:
            self._files.close(fd)
        return offsets

    def _write(self, fd: int, data: bytes, offset: int) -> None:
        view = memoryview(data)
        while view:
            sent = self._files.pwrite(fd, view, offset)
            view, offset = view[sent:], offset + sent


def _rest(fd: int, size: int, offsets: Mapping[str, int], sizes: Mapping[str, int]) -> list[tuple[int, bytes]]:
    """Everything between the datasets."""
    found = []
    at = 0
    for offset, nbytes in [*sorted((offset, sizes[path]) for path, offset in offsets.items()), (size, 0)]:
        if offset > at:
            data = os.pread(fd, offset - at, at)
            if data.strip(b"\0"):
                found.append((at, data))
        at = offset + nbytes
    return found
