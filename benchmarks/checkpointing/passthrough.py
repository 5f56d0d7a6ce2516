"""A file system that hands everything on to a folder, at a capped rate: shared storage as slow as one wants it.

Speaks the kernel's FUSE protocol (linux/fuse.h, 7.31) without a library. Reads and writes have one budget each; what
has no bytes (names, attributes, fsync) costs nothing. Runs as a process of its own, so that no client waits for itself:

    passthrough.py FD FOLDER BYTES_PER_SECOND

FD is an open /dev/fuse on which the mount was made; the process ends with the mount, or with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import stat
import struct
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

MOST_BYTES = 1 << 20
"""In one request."""

WORKERS = 3
_BURST_S = 0.02
_HEADER = struct.Struct("<IIQQIIII")
_INIT = struct.Struct("<IIIIHHIIHHI28x")
_ASYNC_READ, _ATOMIC_TRUNC, _BIG_WRITES, _MAX_PAGES = 1 << 0, 1 << 3, 1 << 5, 1 << 22


class Budget:
    """So many bytes a second, for everybody together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, nbytes: int) -> None:
        """Return when so many bytes have had their time."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + nbytes / self._rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


@dataclass(eq=False)
class Node:
    """A name that the kernel knows."""

    number: int
    parent: Node | None
    name: bytes
    children: dict[bytes, Node] = field(default_factory=dict)


class Server:
    """Answers the kernel's requests.

    Args:
        fuse: the open /dev/fuse.
        folder: where everything goes.
        bytes_per_s: the cap, for each direction.
    """

    def __init__(self, fuse: int, folder: Path, bytes_per_s: float) -> None:
        self._fuse = fuse
        self._folder = folder
        self._reading, self._writing = Budget(bytes_per_s), Budget(bytes_per_s)
        self._lock = threading.Lock()
        self._nodes = {1: Node(1, None, b"")}
        self._listings: dict[int, list[os.DirEntry[str]]] = {}
        self._answers = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 9: self._mkdir, 10: self._unlink, 11: self._rmdir,
            12: self._rename, 14: self._open, 15: self._read, 16: self._write, 17: self._statfs, 18: self._release,
            20: self._fsync, 25: self._nothing, 26: self._init, 27: self._opendir, 28: self._readdir,
            29: self._releasedir, 30: self._fsyncdir, 35: self._create, 38: self._nothing, 43: self._fallocate,
            45: self._rename2,
        }  # fmt: skip

    def work(self) -> None:
        """Answer until the mount is gone. Runs in several threads."""
        buffer = bytearray(MOST_BYTES + 65536)
        while True:
            try:
                count = os.readv(self._fuse, [buffer])
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                return  # ENODEV: unmounted
            _, opcode, unique, number, *_ = _HEADER.unpack_from(buffer)
            if opcode in (2, 36, 42):  # forget, interrupt: want no answer
                continue
            answer = self._answers.get(opcode)
            try:
                if answer is None:
                    raise OSError(errno.ENOSYS, "")
                body, code = answer(number, memoryview(buffer)[_HEADER.size : count]), 0
            except OSError as error:
                body, code = b"", -(error.errno or errno.EIO)
            with contextlib.suppress(OSError):  # a request that was interrupted is gone
                os.writev(self._fuse, [struct.pack("<IiQ", 16 + len(body), code, unique), body])

    # -- names

    def _path(self, number: int, name: bytes = b"") -> Path:
        with self._lock:
            parts = [name] if name else []
            node: Node | None = self._nodes[number]
            while node is not None and node.parent is not None:
                parts.append(node.name)
                node = node.parent
        return self._folder.joinpath(*(os.fsdecode(part) for part in reversed(parts)))

    def _entry(self, number: int, name: bytes) -> bytes:
        facts = self._path(number, name).lstat()
        with self._lock:
            parent = self._nodes[number]
            node = parent.children.get(name)
            if node is None:
                node = parent.children[name] = Node(len(self._nodes) + 1, parent, name)
                self._nodes[node.number] = node
        return struct.pack("<QQQQII", node.number, 0, 1, 1, 0, 0) + _attributes(facts)

    def _gone(self, number: int, name: bytes) -> None:
        with self._lock:
            self._nodes[number].children.pop(name, None)

    def _lookup(self, number: int, body: memoryview) -> bytes:
        return self._entry(number, _text(body))

    def _getattr(self, number: int, body: memoryview) -> bytes:
        flags, _, handle = struct.unpack_from("<IIQ", body)
        facts = os.fstat(handle) if flags & 1 else self._path(number).lstat()
        return struct.pack("<QII", 1, 0, 0) + _attributes(facts)

    def _setattr(self, number: int, body: memoryview) -> bytes:
        valid, _, handle, size, *_ = struct.unpack_from("<IIQQ", body)
        mode = struct.unpack_from("<I", body, 68)[0]
        path = self._path(number)
        if valid & 1:
            path.chmod(stat.S_IMODE(mode))
        if valid & 8:
            os.truncate(handle if valid & 64 else path, size)
        return struct.pack("<QII", 1, 0, 0) + _attributes(path.lstat())

    def _mkdir(self, number: int, body: memoryview) -> bytes:
        mode, _ = struct.unpack_from("<II", body)
        name = _text(body[8:])
        self._path(number, name).mkdir(stat.S_IMODE(mode))
        return self._entry(number, name)

    def _unlink(self, number: int, body: memoryview) -> bytes:
        self._path(number, _text(body)).unlink()
        self._gone(number, _text(body))
        return b""

    def _rmdir(self, number: int, body: memoryview) -> bytes:
        self._path(number, _text(body)).rmdir()
        self._gone(number, _text(body))
        return b""

    def _rename(self, number: int, body: memoryview) -> bytes:
        (to,) = struct.unpack_from("<Q", body)
        return self._move(number, to, body[8:])

    def _rename2(self, number: int, body: memoryview) -> bytes:
        to, flags = struct.unpack_from("<QI", body)
        if flags:
            raise OSError(errno.EINVAL, "")
        return self._move(number, to, body[16:])

    def _move(self, number: int, to: int, body: memoryview) -> bytes:
        old, new, *_ = bytes(body).split(b"\0")
        self._path(number, old).rename(self._path(to, new))
        with self._lock:
            node = self._nodes[number].children.pop(old, None)
            if node is not None:
                node.parent, node.name = self._nodes[to], new
                self._nodes[to].children[new] = node
        return b""

    def _opendir(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        handle = os.open(self._path(number), os.O_RDONLY | os.O_DIRECTORY)
        with os.scandir(self._path(number)) as found:
            self._listings[handle] = list(found)
        return struct.pack("<QIi", handle, 0, 0)

    def _readdir(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        handle, offset, size = struct.unpack_from("<QQI", body)
        out = bytearray()
        for index, entry in enumerate(self._listings[handle][offset:], start=offset + 1):
            kind = 4 if entry.is_dir(follow_symlinks=False) else 8
            name = os.fsencode(entry.name)
            record = struct.pack("<QQII", entry.inode(), index, len(name), kind) + name
            record += bytes(-len(record) % 8)
            if len(out) + len(record) > size:
                break
            out += record
        return bytes(out)

    def _releasedir(self, number: int, body: memoryview) -> bytes:
        handle = struct.unpack_from("<Q", body)[0]
        self._listings.pop(handle, None)
        return self._release(number, body)

    def _statfs(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        f = os.statvfs(self._folder)
        counts = (f.f_blocks, f.f_bfree, f.f_bavail, f.f_files, f.f_ffree)
        return struct.pack("<QQQQQIIII24x", *counts, f.f_bsize, f.f_namemax, f.f_frsize, 0)

    # -- bytes

    def _open(self, number: int, body: memoryview) -> bytes:
        (flags,) = struct.unpack_from("<I", body)
        return struct.pack("<QIi", os.open(self._path(number), _kept(flags)), 0, 0)

    def _create(self, number: int, body: memoryview) -> bytes:
        flags, mode, _, _ = struct.unpack_from("<IIII", body)
        name = _text(body[16:])
        handle = os.open(self._path(number, name), _kept(flags) | os.O_CREAT, stat.S_IMODE(mode))
        return self._entry(number, name) + struct.pack("<QIi", handle, 0, 0)

    def _read(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        handle, offset, size = struct.unpack_from("<QQI", body)
        data = os.pread(handle, size, offset)
        self._reading.spend(len(data))
        return data

    def _write(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        handle, offset, size = struct.unpack_from("<QQI", body)
        self._writing.spend(size)
        done = os.pwrite(handle, body[40 : 40 + size], offset)
        # The kernel begins to write it now, so that fsync has nothing left to do: the cap is the only cost.
        os.posix_fadvise(handle, offset, size, os.POSIX_FADV_DONTNEED)
        return struct.pack("<II", done, 0)

    def _fsync(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        os.fsync(struct.unpack_from("<Q", body)[0])
        return b""

    _fsyncdir = _fsync

    def _fallocate(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        handle, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "")
        os.posix_fallocate(handle, offset, length)
        return b""

    def _release(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _nothing(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        return b""

    def _init(self, number: int, body: memoryview) -> bytes:  # noqa: ARG002
        major, _, readahead, offered = struct.unpack_from("<IIII", body)
        if major != 7 or not offered & _MAX_PAGES:
            raise OSError(errno.EPROTO, "")
        flags = offered & (_ASYNC_READ | _ATOMIC_TRUNC | _BIG_WRITES | _MAX_PAGES)
        return _INIT.pack(7, 31, readahead, flags, 16, 12, MOST_BYTES, 1, MOST_BYTES // 4096, 0, 0)


def _text(body: memoryview) -> bytes:
    return bytes(body).partition(b"\0")[0]


def _kept(flags: int) -> int:
    """Flags for the folder behind: it is always written through its page cache, and never appended to twice."""
    return flags & ~(os.O_DIRECT | os.O_APPEND | os.O_NOFOLLOW | os.O_EXCL | os.O_CREAT) | os.O_CLOEXEC


def _attributes(f: os.stat_result) -> bytes:
    times = (int(f.st_atime), int(f.st_mtime), int(f.st_ctime))
    rest = (0, 0, 0, f.st_mode, f.st_nlink, f.st_uid, f.st_gid, 0, 4096, 0)
    return struct.pack("<6Q10I", f.st_ino, f.st_size, f.st_blocks, *times, *rest)


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the mount must not outlive its user
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent unmounts, and that ends this process
    server = Server(int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
    workers = [threading.Thread(target=server.work) for _ in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
