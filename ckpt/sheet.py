"""A file in memory for HDF5 to write to, of which only the pages that were written take room.

HDF5 reports no error where it closes a file whose last writes failed, as on a full disk: it ends the program with a
segmentation fault. Here no write fails. Offers what h5py asks of a file object.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

PAGE = 4096


class Sheet:
    """Bytes by page; what was not written is zero."""

    def __init__(self) -> None:
        self.size = 0
        self._pages: dict[int, bytearray] = {}
        self._at = 0

    def written(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each run of pages that were written and are not all zero."""
        run: list[bytearray] = []
        first = 0
        for number in sorted(number for number, page in self._pages.items() if any(page)):
            if run and number != first + len(run):
                yield first * PAGE, b"".join(run)
                run = []
            if not run:
                first = number
            run.append(self._pages[number])
        if run:
            yield first * PAGE, b"".join(run)[: self.size - first * PAGE]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def truncate(self, size: int | None = None) -> int:
        self.size = self._at if size is None else size
        return self.size

    def flush(self) -> None:
        """Nothing is kept back."""

    def write(self, data: memoryview) -> int:
        given = memoryview(data).cast("B")
        done = 0
        while done < len(given):
            number, begin = divmod(self._at + done, PAGE)
            count = min(len(given) - done, PAGE - begin)
            page = self._pages.setdefault(number, bytearray(PAGE))
            page[begin : begin + count] = given[done : done + count]
            done += count
        self._at += done
        self.size = max(self.size, self._at)
        return done

    def readinto(self, into: memoryview) -> int:
        room = memoryview(into).cast("B")
        wanted = max(0, min(len(room), self.size - self._at))
        done = 0
        while done < wanted:
            number, begin = divmod(self._at + done, PAGE)
            count = min(wanted - done, PAGE - begin)
            page = self._pages.get(number)
            room[done : done + count] = bytes(count) if page is None else page[begin : begin + count]
            done += count
        self._at += done
        return done

    def read(self, count: int = -1) -> bytes:
        room = bytearray(max(0, self.size - self._at) if count < 0 else count)
        return bytes(room[: self.readinto(memoryview(room))])
