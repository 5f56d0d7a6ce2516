"""The file hand, wrapped: every call is counted, and one of them fails, is cut short, or is the last one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transom_hpc.ckpt.files import Files


class Faulty(Files):
    """Does what Files does, but for the call with the number `at`.

    Listing a folder is not counted: how often ranks look is a matter of time.

    Args:
        at: counted from 0 over all calls that change or read something on disk; None: none.
        fault: an errno, "kill" (SIGKILL before the call), "killed-after" or "short" (a write of a few bytes).
        where: only calls on this folder or below count.
    """

    def __init__(self, at: int | None = None, fault: int | str = 0, where: Path = Path("/")) -> None:
        self.calls: list[str] = []
        self._at = at
        self._fault = fault
        self._where = str(where)
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def aim(self, at: int, fault: int | str) -> None:
        """Count anew, and let the call with this number from now on fail."""
        self.calls.clear()
        self._at, self._fault = at, fault

    def _do(self, name: str, path: str, call: Callable[[], Any], fault_bytes: Callable[[], int] | None = None) -> Any:
        if not path.startswith(self._where):
            return call()
        with self._lock:
            number = len(self.calls)
            self.calls.append(f"{name} {Path(path).name}")
        if number != self._at:
            return call()
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "short" and fault_bytes is not None:
            return fault_bytes()
        if isinstance(self._fault, int):
            raise OSError(self._fault, os.strerror(self._fault), path)
        answer = call()
        if self._fault == "killed-after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    def make_dir(self, path: Path, mode: int = 0o777) -> None:
        self._do("make_dir", str(path), lambda: Files.make_dir(self, path, mode))

    def size(self, path: Path) -> int:
        found: int = self._do("size", str(path), lambda: Files.size(self, path))
        return found

    def read(self, path: Path) -> bytes:
        found: bytes = self._do("read", str(path), lambda: Files.read(self, path))
        return found

    def write(self, path: Path, data: bytes) -> None:
        self._do("write", str(path), lambda: Files.write(self, path, data))

    def publish(self, path: Path, data: bytes) -> None:
        self._do("publish", str(path), lambda: Files.publish(self, path, data))

    def open(self, path: Path, flags: int) -> int:
        fd: int = self._do("open", str(path), lambda: Files.open(self, path, flags))
        self._paths[fd] = str(path)
        return fd

    def allocate(self, fd: int, size: int) -> None:
        self._do("allocate", self._paths[fd], lambda: Files.allocate(self, fd, size))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        some = data[: max(1, len(data) // 3)]
        sent: int = self._do(
            "pwrite",
            self._paths[fd],
            lambda: Files.pwrite(self, fd, data, offset),
            lambda: os.pwrite(fd, some, offset) if len(some) % 4096 == 0 else self._buffered(fd, some, offset),
        )
        return sent

    def _buffered(self, fd: int, data: memoryview, offset: int) -> int:
        """A short write of an odd length, which O_DIRECT itself would refuse."""
        again = os.open(self._paths[fd], os.O_WRONLY)
        try:
            return os.pwrite(again, data, offset)
        finally:
            os.close(again)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        got: int = self._do("pread", self._paths[fd], lambda: Files.pread(self, fd, into, offset))
        return got

    def fsync(self, fd: int) -> None:
        self._do("fsync", self._paths[fd], lambda: Files.fsync(self, fd))

    def fsync_dir(self, path: Path) -> None:
        self._do("fsync_dir", str(path), lambda: Files.fsync_dir(self, path))

    def rename(self, source: Path, target: Path) -> None:
        self._do("rename", str(target), lambda: Files.rename(self, source, target))

    def remove(self, path: Path) -> None:
        self._do("remove", str(path), lambda: Files.remove(self, path))

    def free_bytes(self, path: Path) -> int:
        found: int = self._do("free_bytes", str(path), lambda: Files.free_bytes(self, path))
        return found
