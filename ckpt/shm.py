"""Memory of the node that outlives the program: segments, plain files in a private folder of shared memory.

A segment has a header (whose it is, which step, whether it is whole), the bytes of the arrays, and a table of what
they are. It is ours to reuse while we live and to adopt when a program of ours died; nobody else's is ever touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from transom_hpc.base.errors import CheckpointError
from transom_hpc.ckpt.files import Files

HEADER_BYTES = 4096
ALIGN = 4096
ROOT = Path("/dev/shm")
_PREFIX = "transom"
_GONE = ".gone-"
_TRIES = 10
_MAGIC = b"TRNSMSEG"
_STRUCT = struct.Struct("<8sIIQQQ64s40s")  # magic, format, state, uid, step, table bytes, attempt, boot id
_SUMS = struct.Struct("<QQQ")  # bytes of the arrays, sum of the table, sum of the above
_FORMAT = 1
_WHOLE = 1
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; Python has no name for it yet


def align(nbytes: int) -> int:
    """The next multiple of a page."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Header:
    """What a whole segment says about itself."""

    step: int
    attempt: str
    table: bytes
    used: int
    """Bytes that the arrays take, in whole pages; the table comes behind them."""


class Segment:
    """One reused file of shared memory, mapped.

    Args:
        path: of the file.
        files: the hand that reserves its memory.
    """

    def __init__(self, path: Path, files: Files) -> None:
        self.path = path
        self._files = files
        self._map: mmap.mmap | None = None
        self._size = 0
        self.undo: Callable[[], None] | None = None
        """What has to be done before the memory goes, as where a driver has locked its pages."""

    @property
    def capacity(self) -> int:
        """Bytes for arrays and table."""
        return max(0, self._size - HEADER_BYTES)

    def reserve(self, nbytes: int) -> None:
        """Make room. Contents are lost when it grows; it never shrinks.

        Raises:
            OSError: ENOSPC: the memory is not there. Never a SIGBUS later.
        """
        size = HEADER_BYTES + align(nbytes)
        if size > self._size or self._map is None:
            fd = self._files.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            try:
                os.fchmod(fd, 0o600)
                self._files.allocate(fd, size)
                if os.fstat(fd).st_size < size:  # a file system without reservation: not shared memory
                    raise OSError(errno.ENOSPC, "the staging folder can't reserve memory", str(self.path))
                self.let_go()
                self._map = mmap.mmap(fd, size)
                self._size = size
            finally:
                self._files.close(fd)

    def open(self) -> None:
        """Map what another program left.

        Raises:
            OSError, ValueError: it is not there, or is no segment.
        """
        fd = self._files.open(self.path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            facts = os.fstat(fd)
            if facts.st_uid != os.getuid() or facts.st_size < HEADER_BYTES:
                raise ValueError(f"{self.path} is no segment of ours")
            if facts.st_blocks * 512 < facts.st_size:
                raise ValueError(f"{self.path} has holes")
            self._map = mmap.mmap(fd, facts.st_size)
            self._size = facts.st_size
        finally:
            self._files.close(fd)

    def remove(self) -> None:
        """Remove the file; it is made anew when room is next asked for. Whoever has it mapped keeps what is in it."""
        self._files.remove(self.path)
        self._map, self._size = None, 0

    def let_go(self) -> None:
        """The memory that is mapped now is about to go."""
        undo, self.undo = self.undo, None
        if undo is not None:
            undo()

    def populate(self) -> None:
        """Have the kernel map every page now, so that the first copy does not wait for it page by page."""
        if self._map is not None:
            try:
                self._map.madvise(_POPULATE_WRITE)
            except OSError:
                pass  # Linux before 5.14: the first copy is slower

    def data(self, begin: int, end: int) -> memoryview:
        """Bytes [begin, end) of the room for arrays."""
        assert self._map is not None
        return memoryview(self._map)[HEADER_BYTES + begin : HEADER_BYTES + end]

    def array(self, begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The same as an array that can be written to."""
        return np.frombuffer(self.data(begin, end), dtype=np.uint8)

    def forget(self) -> None:
        """What is in it is no longer whole. Called before the first byte changes."""
        assert self._map is not None
        self._map[: _STRUCT.size] = bytes(_STRUCT.size)

    def declare_whole(self, step: int, attempt: str, used: int, table: bytes) -> None:
        """Everything is in it: write the table behind the arrays, then the header.

        Args:
            step: the training step.
            attempt: whose.
            used: bytes that the arrays take.
            table: what they are.
        """
        assert self._map is not None
        at = HEADER_BYTES + align(used)
        if at + len(table) > self._size:
            return  # no room: it serves this program, but none that comes after
        self._map[at : at + len(table)] = table
        packed = _STRUCT.pack(
            _MAGIC, _FORMAT, _WHOLE, os.getuid(), step, len(table), attempt.encode()[:64], boot_id().encode()
        )
        sums = _SUMS.pack(align(used), xxhash.xxh3_64_intdigest(table), xxhash.xxh3_64_intdigest(packed))
        self._map[_STRUCT.size : _STRUCT.size + len(sums)] = sums
        self._map[: _STRUCT.size] = packed

    def header(self) -> Header | None:
        """What it says about itself; None where it is not whole or not of this boot."""
        assert self._map is not None
        packed = bytes(self._map[: _STRUCT.size])
        magic, version, state, uid, step, table_bytes, attempt, boot = _STRUCT.unpack(packed)
        if magic != _MAGIC or version != _FORMAT or state != _WHOLE or uid != os.getuid():
            return None
        used, table_sum, own_sum = _SUMS.unpack(self._map[_STRUCT.size : _STRUCT.size + _SUMS.size])
        if own_sum != xxhash.xxh3_64_intdigest(packed) or boot.rstrip(b"\0").decode("ascii", "replace") != boot_id():
            return None
        at = HEADER_BYTES + used
        table = bytes(self._map[at : at + table_bytes])
        if len(table) != table_bytes or table_sum != xxhash.xxh3_64_intdigest(table):
            return None
        return Header(step, attempt.rstrip(b"\0").decode("utf-8", "replace"), table, used)

    def mark(self) -> bytes:
        """What changes as soon as anything in it may: `forget` comes before the first byte that is written."""
        assert self._map is not None
        return bytes(self._map[: _STRUCT.size + _SUMS.size])


class Folder:
    """A private folder for the segments of one program on this node.

    While a program lives it holds a shared lock on the folder's file `.lives`, which the kernel lets go when the
    program dies, however it dies.

    Args:
        path: of the folder. One that is given belongs to whoever gave it and is left standing.
        owned: whether we made its name, so that it goes when the last program using it closes.
        files: the hand on the file system.
    """

    def __init__(self, path: Path, owned: bool, files: Files) -> None:
        self.path = path
        self._owned = owned
        self._files = files
        self._lock: int | None = None

    def open(self) -> None:
        """Make it if need be, and hold it.

        Raises:
            CheckpointError: it is someone else's, or others may write in it.
        """
        for _ in range(_TRIES):
            try:
                self._files.make_dir(self.path, 0o700)
                facts = self.path.lstat()
                if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
                    break
                lock = self._files.open(self.path / ".lives", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            except (FileNotFoundError, FileExistsError):
                continue  # taken away just now, by another program that found nobody in it
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_at(lock, self.path / ".lives"):
                self._lock = lock
                return
            self._files.close(lock)
        raise CheckpointError(
            f"the staging folder {self.path} is not a private folder of this user; give another one as shm=",
            path=self.path,
        )

    def segments(self, prefix: str) -> Iterator[Path]:
        """Segments that are there, by the beginning of their names."""
        try:
            found = sorted(self._files.names(self.path))
        except OSError:
            return
        yield from (self.path / name for name in found if name.startswith(prefix))

    def close(self) -> None:
        """Let go; remove the folder where it is ours and nobody else lives in it."""
        if self._lock is None:
            return
        try:
            # Between the lock that we held and the one that keeps others out, somebody else may have been here.
            if self._owned and _alone(self._lock) and _is_at(self._lock, self.path / ".lives"):
                _take_away(self.path, self._files)
        finally:
            self._files.close(self._lock)
            self._lock = None


def _take_away(path: Path, files: Files) -> None:
    """Remove a folder that is locked against others. It loses its name first, so that nobody comes in meanwhile."""
    aside = path.with_name(f"{path.name}{_GONE}{os.getpid()}-{threading.get_ident()}")
    files.rename(path, aside)
    files.remove(aside)


def _is_at(fd: int, path: Path) -> bool:
    """Whether that file still has that name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _alone(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def default_path(directory: Path, root: Path = ROOT) -> Path:
    """The folder that programs saving into `directory` use on a node when none is given."""
    name = xxhash.xxh3_64_hexdigest(str(directory.resolve()).encode())
    return root / f"{_PREFIX}-{os.getuid()}-{name}"


def reclaim(keep: Path, files: Files, root: Path = ROOT) -> list[Path]:
    """Remove folders like ours whose programs are all dead, except `keep`.

    Returns:
        What was removed. Folders of other users, of programs that live, and those that were given to a program (such as
        a launcher's, whose program may be about to start again) are not touched.
    """
    removed = []
    ours = f"{_PREFIX}-{os.getuid()}-{'[0-9a-f]' * 16}"
    for path in root.glob(f"{ours}{_GONE}*"):  # by a program that was killed while it did so
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                files.remove(path)
    for path in root.glob(ours):
        try:
            facts = path.lstat()
            if path == keep or not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
                continue
            fd = files.open(path / ".lives", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, or nothing of ours after all
        try:
            if _alone(fd) and _is_at(fd, path / ".lives"):
                _take_away(path, files)
                removed.append(path)
        except OSError:
            continue
        finally:
            files.close(fd)
    return removed


def boot_id() -> str:
    """What the kernel calls its present life."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
