"""What a checkpoint holds, seen as whole arrays whatever parts they were saved in, and read front to back.

Reading is one pass in bounded memory, and every byte is compared with its checksum on the way: parts are boxes, and the
elements of a whole array in row-major order meet those of each box in row-major order too. For tools that look at
checkpoints; restoring has its own way (see restore).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import xxhash

from transom_hpc.base.errors import CorruptCheckpoint
from transom_hpc.ckpt import direct, dtypes, names
from transom_hpc.ckpt.catalog import Checkpoint, Fault
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES, blocks, boxes, overlap
from transom_hpc.ckpt.manifest import Manifest, Stored
from transom_hpc.ckpt.shm import align

_BUFFERS_BYTES = 64 << 20
"""For reading ahead in all parts of one array together."""

_SMALLEST_BUFFER = 64 << 10
_GRID_CELLS = 1 << 20


@dataclass(frozen=True, slots=True)
class Array:
    """One array of a checkpoint, or the bytes of an object.

    Args:
        name: as in the manifest.
        rank: whose own it is; None where it belongs to all.
        dtype: element type (see dtypes).
        shape: of all of it.
        start: where it begins, for a part of an array whose parts do not make a whole; else None.
        parts: what it is stored in. They cover it, each element once.
    """

    name: str
    rank: int | None
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...] | None
    parts: tuple[Stored, ...]

    @property
    def key(self) -> tuple[str, int | None, tuple[int, ...] | None]:
        """What tells it from the others of a checkpoint."""
        return (self.name, self.rank, self.start)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(part.entry.nbytes for part in self.parts)

    @property
    def place(self) -> str:
        """Its name as a person reads it, without the rank."""
        text = names.shown(self.name)
        if self.start is not None:
            text += f"[{','.join(f'{b}:{b + n}' for b, n in zip(self.start, self.shape, strict=True))}]"
        return text


def arrays(manifest: Manifest) -> list[Array]:
    """Everything in a checkpoint, in file order. Pure."""
    grouped: dict[tuple[str, int | None], list[Stored]] = {}
    for item in manifest.stored:
        whole = item.entry.shape == item.entry.global_shape
        grouped.setdefault((item.entry.name, item.rank if whole else -1), []).append(item)
    found: list[Array] = []
    for (name, rank), items in grouped.items():
        entry = items[0].entry
        if rank == -1 and _tiles([(i.entry.start, i.entry.shape) for i in items], entry.global_shape):
            found.append(Array(name, None, entry.dtype, entry.global_shape, None, tuple(items)))
        elif rank == -1:
            found += [Array(name, i.rank, i.entry.dtype, i.entry.shape, i.entry.start, (i,)) for i in items]
        else:
            found += [Array(name, rank, i.entry.dtype, i.entry.shape, None, (i,)) for i in items]
    return found


def _tiles(parts: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether boxes cover an array, each element once."""
    filled = [(start, size) for start, size in parts if math.prod(size)]
    if sum(math.prod(size) for _, size in filled) != math.prod(shape):
        return False
    edges = [sorted({at for s, n in filled for at in (s[k], s[k] + n[k])}) for k in range(len(shape))]
    if math.prod(len(edge) for edge in edges) > _GRID_CELLS:
        return all(overlap(*a, *b) is None for a, b in combinations(filled, 2))
    places = [{at: i for i, at in enumerate(edge)} for edge in edges]
    cells = np.zeros([max(0, len(edge) - 1) for edge in edges], dtype=np.int32)
    for start, size in filled:
        cells[tuple(slice(p[b], p[b + n]) for p, b, n in zip(places, start, size, strict=True))] += 1
    return bool((cells == 1).all())


def read(checkpoint: Checkpoint, array: Array) -> bytes:
    """A small array or object, whole.

    Raises:
        CorruptCheckpoint: its bytes are not those that were written.
    """
    return b"".join(bytes(piece) for piece in stream(checkpoint, array))


def stream(
    checkpoint: Checkpoint, array: Array, progress: Callable[[int], None] | None = None, most_bytes: int = PIECE_BYTES
) -> Iterator[memoryview]:
    """The bytes of an array in row-major order, some at a time.

    What was handed out is proven when the iterator is at its end, not before.

    Args:
        progress: called with the number of bytes after each piece.
        most_bytes: of one piece; all but the last have that many, or as many whole elements as fit.

    Yields:
        Memory that is used again for the next piece.

    Raises:
        CorruptCheckpoint: bytes are not those that were written.
        OSError: they could not be read.
    """
    elements = math.prod(array.shape)
    if not elements or not array.nbytes:
        return
    width = array.nbytes // elements
    count = max(1, most_bytes // width)
    parts = [item for item in array.parts if item.entry.nbytes]
    size = max(_SMALLEST_BUFFER, min(PIECE_BYTES, align(_BUFFERS_BYTES // len(parts))))
    with ExitStack() as opened:
        files = Files()
        targets = {
            name: opened.enter_context(direct.Target(files, checkpoint.path / name, os.O_RDONLY))
            for name in {item.file for item in parts}
        }
        readers = [_Part(checkpoint, item, targets[item.file], size) for item in parts]
        room = np.empty(min(count, elements) * width, dtype=np.uint8)
        for first in range(0, elements, count):
            now = min(count, elements - first)
            piece = room[: now * width]
            if len(readers) == 1:
                readers[0].into(piece)
            else:
                _gather(readers, array.shape, first, now, piece, width)
            yield piece.data
            if progress is not None:
                progress(now * width)


def _gather(
    readers: Sequence[_Part], shape: Sequence[int], first: int, count: int, piece: np.ndarray[Any, Any], width: int
) -> None:
    """A run of elements of an array from all parts that have some of them."""
    done = 0
    for start, size in boxes(shape, first, count):
        inside = math.prod(size)
        box = piece[done * width : (done + inside) * width].view(np.dtype((np.void, width))).reshape(size)
        done += inside
        for part in readers:
            both = overlap(start, size, part.start, part.shape)
            if both is None:
                continue
            own = np.empty(math.prod(both[1]) * width, dtype=np.uint8)
            part.into(own)
            where = tuple(slice(b - s, b - s + n) for b, s, n in zip(both[0], start, both[1], strict=True))
            box[where] = own.view(np.dtype((np.void, width))).reshape(both[1])


class _Part:
    """One part, read front to back, its checksums compared as it goes."""

    def __init__(self, checkpoint: Checkpoint, item: Stored, target: direct.Target, size: int) -> None:
        self.start, self.shape = item.entry.start, item.entry.shape
        self._checkpoint = checkpoint
        self._item = item
        self._target = target
        self._room = direct.room(min(size, align(item.entry.nbytes)))
        self._ahead = self._room[:0]
        self._read = 0
        self._taken = 0
        self._blocks = enumerate(blocks(item.entry.nbytes))
        self._block, (self._begin, self._end) = next(self._blocks)
        self._sum = xxhash.xxh3_128()

    def into(self, room: np.ndarray[Any, Any]) -> None:
        """The next bytes."""
        done = 0
        while done < len(room):
            if not self._ahead:
                self._fetch()
            count = min(len(room) - done, len(self._ahead), self._end - self._taken)
            room[done : done + count] = np.frombuffer(self._ahead[:count], dtype=np.uint8)
            self._sum.update(self._ahead[:count])
            self._ahead = self._ahead[count:]
            done, self._taken = done + count, self._taken + count
            if self._taken == self._end:
                self._compare()

    def _fetch(self) -> None:
        want = min(len(self._room), self._item.entry.nbytes - self._read)
        got = min(want, self._target.get(self._room[: align(want)], self._item.offset + self._read))
        if not got:
            self._fail(f"only {self._read - self._begin} of {self._end - self._begin} bytes are there")
        self._read += got
        self._ahead = self._room[:got]

    def _compare(self) -> None:
        if self._sum.hexdigest() != self._item.entry.sums[self._block]:
            self._fail("the bytes have changed")
        self._sum.reset()
        self._block, (self._begin, self._end) = next(self._blocks, (0, (0, 0)))

    def _fail(self, what: str) -> None:
        item = self._item
        fault = Fault(item.file, names.shown(item.entry.name), item.rank, item.offset + self._begin, what)
        raise CorruptCheckpoint(
            f"{self._checkpoint.path}: {fault}",
            path=self._checkpoint.path,
            step=self._checkpoint.step,
            name=fault.name,
            offset=fault.offset,
        )


def is_array(array: Array) -> bool:
    """Whether it is an array and not the bytes of an object."""
    return not dtypes.is_object(array.dtype)
