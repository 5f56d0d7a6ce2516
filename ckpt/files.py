"""The hand on the file system: everything a save, a commit, a restore or a delete asks the kernel for.

One class, so that tests can wrap it and make any call fail, hang or be the last one before a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

from transom_hpc.base import atomic

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

_NO_ALLOCATE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class Files:
    """The kernel's own answers. Every method raises OSError as the kernel gives it."""

    def make_dir(self, path: Path, mode: int = 0o777) -> None:
        """Make a folder and those above it; one that exists is fine."""
        path.mkdir(mode=mode, parents=True, exist_ok=True)

    def names(self, path: Path) -> list[str]:
        """What is in a folder. Opening it makes NFS ask the server, where asking for one name may not."""
        return os.listdir(path)  # noqa: PTH208  (pathlib's version makes an object for each name)

    def exists(self, path: Path) -> bool:
        """Whether there is such a file."""
        return path.exists()

    def size(self, path: Path) -> int:
        """Bytes in a file."""
        return path.stat().st_size

    def read(self, path: Path) -> bytes:
        """A small file, whole."""
        return path.read_bytes()

    def write(self, path: Path, data: bytes) -> None:
        """A small file, whole or not at all, on disk when this returns."""
        atomic.write_bytes(path, data)

    def publish(self, path: Path, data: bytes) -> None:
        """A small file for other ranks to see, whole or not at all. A crash may lose it."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(data)
        temporary.rename(path)

    def open(self, path: Path, flags: int) -> int:
        """A descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def close(self, fd: int) -> None:
        """Give a descriptor back."""
        os.close(fd)

    def allocate(self, fd: int, size: int) -> None:
        """Reserve the file's blocks, so that a full disk shows before any byte is written.

        Not posix_fallocate: where the file system can't reserve, that writes to every block instead.
        """
        if size and _libc.fallocate(fd, 0, 0, size):
            number = ctypes.get_errno()
            if number not in _NO_ALLOCATE:
                raise OSError(number, os.strerror(number))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Bytes written, perhaps fewer than asked."""
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Bytes read, perhaps fewer than asked; 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

    def fsync(self, fd: int) -> None:
        """The file's bytes are on disk."""
        os.fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        """The folder's names are on disk."""
        atomic.fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name. A folder never replaces one that has something in it."""
        os.rename(source, target)  # noqa: PTH104  (rename(2) as it is)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that is in it; one that is not there, or that somebody else is just
        removing, is fine."""
        while path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):  # of what the other one was faster with
                shutil.rmtree(path)
                return
        path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """What an ordinary user may still write there, as the file system tells it."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def free_inodes(self, path: Path) -> int | None:
        """Files that may still be made there; None where the file system does not count them."""
        facts = os.statvfs(path)
        return facts.f_favail if facts.f_files else None
