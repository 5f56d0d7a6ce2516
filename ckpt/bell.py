"""Tells at once when something gets a name in a folder of this node, or loses one, where the kernel does (inotify).

Programs and their node's checkpoint server find each other's files so, without looking all the time. What other hosts
do is not heard, and a kernel may have no more bells to give: then it is a plain wait, and the caller looks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from pathlib import Path

from transom_hpc.base.clock import Clock

_MOVED_FROM, _MOVED_TO, _DELETE, _DELETE_SELF, _MOVE_SELF = 0x40, 0x80, 0x200, 0x400, 0x800
_EVENTS = _MOVED_FROM | _MOVED_TO | _DELETE | _DELETE_SELF | _MOVE_SELF

_libc = ctypes.CDLL(None, use_errno=True)


class Bell:
    """Rings when names in a folder change. What happens after it was made is never missed.

    Args:
        folder: that is there.
        clock: for the waits where it can't ring.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._clock = clock
        self._fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0 and _libc.inotify_add_watch(self._fd, os.fsencode(folder), ctypes.c_uint32(_EVENTS)) < 0:
            self.close()
        self._poll = select.poll()
        if self._fd >= 0:
            self._poll.register(self._fd, select.POLLIN)

    def __enter__(self) -> Bell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """It rings no more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def wait(self, longest_s: float, blind_s: float) -> bool:
        """Wait until it rings.

        Args:
            longest_s: longest wait, in seconds.
            blind_s: the wait where it can't ring.

        Returns:
            Whether it rang.
        """
        if self._fd < 0:
            self._clock.sleep(blind_s)
            return False
        if not self._poll.poll(longest_s * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._fd, 1 << 16):
                pass
        return True
