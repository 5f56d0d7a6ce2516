"""Where the benchmark works: a folder of its own, quiet and cold when a measurement asks for it, gone at the end."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PIECE = 4 << 20


class Ground:
    """A folder for what is written, and one in shared memory.

    Args:
        path: the folder.
        shared: private folder in shared memory, for programs that die.
    """

    def __init__(self, path: Path, shared: Path) -> None:
        self.path = path
        self._shared = shared
        self._count = 0

    def fresh(self) -> Path:
        """A new empty folder."""
        self._count += 1
        path = self.path / f"c{self._count}"
        path.mkdir()
        return path

    def memory(self) -> Path:
        """A new empty private folder in shared memory."""
        self._count += 1
        path = self._shared / f"m{self._count}"
        path.mkdir(0o700)
        return path

    def inside(self, path: Path) -> Ground:
        """The same with files elsewhere."""
        return Ground(path, self._shared)


@contextmanager
def ground(where: Path | None) -> Iterator[Ground]:
    """A ground that is gone afterwards, also after an interrupt or SIGTERM.

    Args:
        where: on the file system to measure; None: the temporary folder.
    """
    leave_on_term()
    path = Path(tempfile.mkdtemp(prefix="transom-bench-", dir=where))
    # Named and held like a checkpointer's own folders, so that the next one clears what a SIGKILL leaves of it.
    shared = Path(f"/dev/shm/transom-{os.getuid()}-{secrets.token_hex(8)}")
    shared.mkdir(0o700)
    try:
        with (shared / ".lives").open("w") as lives:
            fcntl.flock(lives, fcntl.LOCK_SH)
            yield Ground(path, shared)
    finally:
        gone(path)
        gone(shared)


def leave_on_term() -> None:
    """SIGTERM ends the process as an exception, so that it cleans up."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def gone(path: Path) -> None:
    """Remove a folder."""
    shutil.rmtree(path, ignore_errors=True)


def die_with_parent() -> None:
    """This process must not outlive the one that started it."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def settle(pause_s: float) -> None:
    """What went before is over: deletions, write-back, the journal."""
    time.sleep(pause_s)
    os.sync()


def chill(*paths: Path) -> bool:
    """Take files, or all files in folders, out of the page cache.

    Returns:
        Whether they are out of it, as far as samples tell.
    """
    files = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*")) if f.is_file()]
    for _ in range(3):  # pages that were used just now are passed over the first time
        os.sync()
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        if all(map(_is_cold, files)):
            return True
        time.sleep(0.05)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError:
        return False
    return all(map(_is_cold, files))


def _is_cold(file: Path) -> bool:
    size = file.stat().st_size
    page = [bytearray(4096)]
    fd = os.open(file, os.O_RDONLY)
    try:
        for at in range(0, size, max(4096, size // 16 // 4096 * 4096)):
            try:
                if os.preadv(fd, page, at, os.RWF_NOWAIT):
                    return False
            except BlockingIOError:
                continue  # not in the cache
            except OSError as error:
                if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                    return True  # this file system can't tell
                raise
        return True
    finally:
        os.close(fd)


def warm_machine(nbytes: int) -> None:
    """Touch so much memory once. A virtual machine gets each page of its own memory when it is first touched, many
    times slower than later; that says nothing about a program."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = mmap.mmap(-1, max(_PIECE, min(nbytes, free // 2)))
    for at in range(0, len(room), 4096):
        room[at] = 1
    room.close()
