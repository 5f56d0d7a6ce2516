"""Lines to a reader that may be slow or gone. Owns the sidecar's standard output.

A pipe that is full or broken never holds up the sidecar, and never ends it.
"""

from __future__ import annotations

import os
import stat
from collections import deque

_MAX_LINES = 2000


class Outlet:
    """Writes lines to a file descriptor, whole and at once, without ever waiting.

    Args:
        fd: where to. A pipe or socket is made non-blocking.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pending: deque[bytes] = deque(maxlen=_MAX_LINES)  # the oldest go first when nobody reads
        self._rest = b""
        self._open = True
        try:
            mode = os.fstat(fd).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                os.set_blocking(fd, False)
        except OSError:
            self._open = False

    @property
    def is_open(self) -> bool:
        """False once the reader is known to be gone."""
        return self._open

    def write(self, line: str) -> None:
        """Add a line, and write what can be written."""
        self._pending.append(line.encode(errors="replace"))
        self.flush()

    def flush(self) -> bool:
        """Write what can be written without waiting; True when nothing is left to write."""
        while self._open and (self._rest or self._pending):
            if not self._rest:
                self._rest = self._pending.popleft()
            try:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
            except BlockingIOError:
                return False
            except OSError:  # nobody reads any more
                self._open = False
        return True
