"""Writing files so that a reader, or a crash, sees the old content or the new one and nothing between."""

from __future__ import annotations

import os
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable: a rename is not on disk before this (rename(2), fsync(2))."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file whole: temporary name, fsync, rename, fsync of the folder.

    Raises:
        OSError: the file was not written; an older one of that name is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def rename_dir(source: Path, target: Path) -> None:
    """Give a finished folder its name, durably.

    Raises:
        OSError: among others ENOTEMPTY or EEXIST where the target exists already.
    """
    source.rename(target)
    fsync_dir(target.parent)
