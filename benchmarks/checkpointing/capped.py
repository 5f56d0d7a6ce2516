"""Mounts storage with a capped rate for the process that asks, and for nobody else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_NEW_MOUNTS, _PRIVATE, _NOSUID_NODEV, _DETACH = 0x20000, 0x44000, 0x6, 0x2


class NoMount(Exception):
    """It can't be mounted here; the message says why."""


@contextlib.contextmanager
def storage(folder: Path, bytes_per_s: float) -> Iterator[Path]:
    """A folder whose reads and whose writes have this rate each.

    The mount is made in a mount namespace of this process and those that it starts, so that it is gone when they are,
    however they end.

    Args:
        folder: an empty one; both what is behind and the mount are made in it.

    Raises:
        NoMount: no right to mount, or no FUSE.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    behind, front = folder / "behind", folder / "front"
    behind.mkdir()
    front.mkdir()
    if libc.unshare(_NEW_MOUNTS) or libc.mount(None, b"/", None, _PRIVATE, None):
        raise NoMount(f"no mount namespace of its own: {os.strerror(ctypes.get_errno())} (needs root)")
    try:
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NoMount(f"/dev/fuse: {error.strerror}") from error
    options = f"fd={fuse},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},max_read={1 << 20}"
    if libc.mount(b"capped", os.fsencode(front), b"fuse", _NOSUID_NODEV, options.encode()):
        problem = os.strerror(ctypes.get_errno())
        os.close(fuse)
        raise NoMount(f"mounting failed: {problem}")
    server = Path(__file__).with_name("passthrough.py")
    process = subprocess.Popen([sys.executable, str(server), str(fuse), str(behind), str(bytes_per_s)], pass_fds=[fuse])
    os.close(fuse)
    try:
        yield front
    finally:
        libc.umount2(os.fsencode(front), _DETACH)
        process.kill()  # what is still open in the mount must not keep it
        process.wait()
