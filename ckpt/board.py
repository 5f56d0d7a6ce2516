"""Shared memory by which one rank hands on what it reads: slots with bytes, and a word for each portion of them.

Written by one rank, read by those of its host; each word has one writer. Nothing in it is trusted: bytes are compared
with their checksums by whoever copies them.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np

from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.shm import align

SKIPPED = 0xFFFFFFFF
"""Stands for the slot of a portion that is not handed on."""

_HEADER_BYTES = 64


class Board:
    """One rank's board.

    Args:
        path: of its file.
        portions: how many there are.
        slot_bytes: room in each slot, a multiple of a page.
    """

    def __init__(self, path: Path, portions: int, slot_bytes: int, files: Files) -> None:
        self._path = path
        self._files = files
        self._count = portions
        self._slot_bytes = slot_bytes
        self._slots_at = align(_HEADER_BYTES + 5 * portions)
        self._map: mmap.mmap | None = None
        self.slots = 0

    def make(self, slots: int) -> None:
        """Make it, empty.

        Raises:
            OSError: there is no such memory.
        """
        self.slots = slots
        size = self._slots_at + slots * self._slot_bytes
        unfinished = self._path.with_name(f"{self._path.name}.tmp")
        fd = self._files.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            os.fchmod(fd, 0o600)
            self._files.allocate(fd, size)
            if os.fstat(fd).st_size < size:
                raise OSError(errno.ENOSPC, "the staging folder can't reserve memory", str(self._path))
            self._map_it(fd, size)
            self._files.rename(unfinished, self._path)  # whoever finds it finds it whole
        except BaseException:
            self._files.remove(unfinished)
            raise
        finally:
            self._files.close(fd)

    def open(self) -> None:
        """Map what another rank has made.

        Raises:
            OSError, ValueError: it is not there, or not whole.
        """
        fd = self._files.open(self._path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            facts = os.fstat(fd)
            if facts.st_uid != os.getuid() or facts.st_size < self._slots_at:
                raise ValueError(f"{self._path} is no board of ours")
            self.slots = (facts.st_size - self._slots_at) // max(1, self._slot_bytes)
            self._map_it(fd, facts.st_size)
        finally:
            self._files.close(fd)

    def _map_it(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size)
        self._signs = np.frombuffer(self._map, np.uint64, 2)
        self._published = np.frombuffer(self._map, np.uint32, self._count, _HEADER_BYTES)
        self._taken = np.frombuffer(self._map, np.uint8, self._count, _HEADER_BYTES + 4 * self._count)

    def slot(self, number: int) -> memoryview:
        """The bytes of a slot.

        Raises:
            ValueError: there is no such slot.
        """
        if self._map is None or not 0 <= number < self.slots:
            raise ValueError(f"{self._path} has no slot {number}")
        at = self._slots_at + number * self._slot_bytes
        return memoryview(self._map)[at : at + self._slot_bytes]

    def beat(self) -> None:
        """Show that this rank goes on."""
        self._signs[0] += 1

    @property
    def beats(self) -> int:
        """Changes as long as its rank goes on."""
        return int(self._signs[0])

    def leave(self) -> None:
        """Say that nothing more will come."""
        self._signs[1] = 1

    @property
    def left(self) -> bool:
        """Whether nothing more will come."""
        return bool(self._signs[1])

    def publish(self, portion: int, slot: int) -> None:
        """Say in which slot a portion is."""
        self._published[portion] = SKIPPED if slot == SKIPPED else slot + 1
        self.beat()

    def published(self, portion: int) -> int | None:
        """In which slot a portion is, or SKIPPED; None as long as that is not said."""
        found = int(self._published[portion])
        return None if found == 0 else found if found == SKIPPED else found - 1

    def take(self, portion: int) -> None:
        """Say that this rank needs a portion no more, whoever reads it."""
        self._taken[portion] = 1
        self.beat()

    def has_taken(self, portion: int) -> bool:
        """Whether its rank has said so."""
        return bool(self._taken[portion])
