"""Samples of an array that is copied later: a second proof, beside the version counter, that it is still as it was.

What a program writes through `.data`, a numpy view or a storage moves no counter, and numpy arrays have none. So a few
bytes of each block are read when the state is walked, and again from the live array when the block has been copied.
Small arrays are read whole. A change of all or most of an array shows; one that falls between the samples does not.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from transom_hpc.ckpt import kinds
from transom_hpc.ckpt.layout import BLOCK_BYTES
from transom_hpc.ckpt.state import Leaf

WHOLE_BYTES = 4096
"""Arrays up to this size are compared whole."""

SPOT_BYTES = 64
SPOTS = 4
"""In each block, from its first byte to its last."""

_SCATTERED = 16


class Samples:
    """Some bytes of one leaf, as they are now.

    Args:
        leaf: a tensor or an array in this machine's memory.
    """

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf
        self._pointer = pointer = _pointer(leaf)
        self._together = _together(leaf)
        spots: Sequence[tuple[int, int]] = ()
        if pointer:
            spots = _spread(leaf.nbytes) if self._together else _scattered(leaf)
        self._taken = [(at, ctypes.string_at(pointer + at, count)) for at, count in spots]

    def moved(self) -> bool:
        """Whether the array has other memory now, and the old one may be gone."""
        return _pointer(self._leaf) != self._pointer

    def changed(self, begin: int, end: int) -> bool:
        """Whether bytes [begin, end) differ, where they were looked at; all where elements do not lie together."""
        if self.moved():
            return True
        return any(
            ctypes.string_at(self._pointer + at, len(was)) != was
            for at, was in self._taken
            if not self._together or begin <= at < end
        )


def _pointer(leaf: Leaf) -> int:
    """Where the array lies; 0 where that is not this machine's memory."""
    source = leaf.source
    if isinstance(source, np.ndarray):
        return int(source.__array_interface__["data"][0])
    if kinds.is_tensor(source) and source.is_cpu:
        return int(source.data_ptr())
    return 0


def _together(leaf: Leaf) -> bool:
    source = leaf.source
    if isinstance(source, np.ndarray):
        return bool(source.flags.c_contiguous)
    return not kinds.is_tensor(source) or source.is_contiguous()


@lru_cache
def _spread(nbytes: int) -> list[tuple[int, int]]:
    """Offset from the pointer, and length, of each sample, where the bytes lie together."""
    if nbytes <= WHOLE_BYTES:
        return [(0, nbytes)]
    found = []
    for begin in range(0, nbytes, BLOCK_BYTES):
        last = min(begin + BLOCK_BYTES, nbytes) - SPOT_BYTES
        found += [
            (begin + (last - begin) * i // (SPOTS - 1) if last > begin else max(0, last), SPOT_BYTES)
            for i in range(SPOTS)
        ]
    return found


def _scattered(leaf: Leaf) -> list[tuple[int, int]]:
    """The same where they don't: single elements, since what lies between them may be someone else's."""
    source = leaf.source
    if isinstance(source, np.ndarray):
        strides, width = source.strides, source.itemsize
    else:
        assert kinds.is_tensor(source)
        width = source.element_size()
        strides = tuple(width * stride for stride in source.stride())
    count = math.prod(leaf.shape)
    found = []
    for i in range(min(count, _SCATTERED)):
        index = np.unravel_index((count - 1) * i // max(1, min(count, _SCATTERED) - 1), leaf.shape)
        found.append((sum(int(k) * stride for k, stride in zip(index, strides, strict=True)), width))
    return found
