"""The journal: what happened to a run, one JSON object a line, one file a writer, append only.

A line is flushed and fsynced before append returns. The last line of a file may be torn by a crash: a reader leaves it
out. Two nodes never write one file (appends by two are not atomic on NFS or Lustre).
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transom_hpc.base.atomic import fsync_dir
from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.base.errors import RunDirError, TransomError
from transom_hpc.tol.attempt import Attempt

_MOST_OWED = 2000


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal.

    Args:
        attempt: the attempt that it belongs to.
        order: position in its writer's file, from 0.
        time: ISO date and time in UTC, for people; never used for order.
        host: the writer's host.
        kind: what happened, one of the kinds in docs/architecture.md.
        facts: the rest of the line.
    """

    attempt: Attempt
    order: int
    time: str
    host: str
    kind: str
    facts: dict[str, Any] = field(default_factory=dict)


class Journal:
    """One writer's file.

    Args:
        folder: RUN/journal.
        number: the attempt's number.
        host: the writer's host.
        clock: for the time stamps.

    Raises:
        RunDirError: the file can't be made.
    """

    def __init__(self, folder: Path, number: int, host: str, clock: Clock | None = None) -> None:
        self.path = folder / f"A{number:04d}-{host}.jsonl"
        self._host = host
        self._owed: list[bytes] = []  # lines that could not be written yet
        self._clock = clock or SystemClock()
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            fsync_dir(folder)
            # A torn last line of an earlier life must not swallow our first one.
            if os.fstat(self._fd).st_size:
                os.write(self._fd, b"\n")
        except OSError as error:
            raise RunDirError(f"can't write the journal {self.path}: {error.strerror}", path=self.path) from error

    def append(self, attempt: Attempt, kind: str, **facts: Any) -> None:
        """Write one line, durably, and those before it that could not be written then.

        Raises:
            OSError: it is not on disk for certain (a full disk, a file system that does not answer). It is kept, and
                written with the next one; of more than a few thousand, the newest.
        """
        line = {"time": self._clock.wall().isoformat(timespec="milliseconds"), "attempt": str(attempt), "kind": kind}
        data = json.dumps({**line, "host": self._host, **facts}, default=str).encode() + b"\n"
        self._owed = [*self._owed[-_MOST_OWED:], data]
        before = os.fstat(self._fd).st_size
        try:
            view = memoryview(b"".join(self._owed))
            while view:
                view = view[os.write(self._fd, view) :]
            os.fsync(self._fd)
        except OSError:
            with suppress(OSError):  # what was written of it would be there twice
                os.ftruncate(self._fd, before)
            if self._owed[0] != b"\n":
                self._owed.insert(0, b"\n")  # where that failed, a torn end must not swallow the line after it
            raise
        self._owed = []

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # some file systems find only now that there was no room
            os.close(self._fd)


def _read_file(path: Path) -> list[Entry]:
    entries: list[Entry] = []
    lines = path.read_bytes().split(b"\n")
    for raw in lines[:-1]:  # what follows the last newline is torn, or nothing
        try:
            line = json.loads(raw)
            attempt = Attempt.parse(line.pop("attempt"))
            entry = Entry(attempt, len(entries), line.pop("time"), line.pop("host"), line.pop("kind"), line)
        except (ValueError, KeyError, TypeError, AttributeError, TransomError):
            continue  # a line torn in the middle by a crash of an earlier writer, or an empty one
        entries.append(entry)
    return entries


def read_journal(folder: Path) -> list[Entry]:
    """All entries of a run, in order of attempt; within an attempt file by file, each in its own order.

    Raises:
        RunDirError: the folder can't be read.
    """
    entries: list[Entry] = []
    try:
        for path in sorted(folder.glob("A*.jsonl")):
            entries.extend(_read_file(path))
    except OSError as error:
        raise RunDirError(f"can't read the journal in {folder}: {error.strerror}", path=folder) from error
    return sorted(entries, key=lambda entry: entry.attempt.number)


def newer_than(folder: Path, number: int) -> bool:
    """Whether an attempt after this one has begun, as far as the folder can be read."""
    try:
        return _path(folder, number + 1).exists()
    except OSError:
        return False


def begun_after(folder: Path, number: int) -> bool:
    """Whether the launcher of an attempt after this one has begun to write, as far as the folder can be read."""
    try:
        return any(int(path.name[1:5]) > number for path in folder.glob("A[0-9][0-9][0-9][0-9]-*.jsonl"))
    except OSError:
        return False


def claim_number(folder: Path) -> int:
    """Take the next attempt number of a run; two claimants never get the same one.

    Raises:
        RunDirError: the folder can't be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = max((int(path.name[1:5]) for path in folder.glob("A[0-9][0-9][0-9][0-9]*")), default=0) + 1
        while not _claim(folder, number):
            number += 1
        return number
    except OSError as error:
        raise RunDirError(f"can't write in the run directory {folder.parent}: {error.strerror}", path=folder) from error


def claim_exactly(folder: Path, number: int, who: str = "") -> bool:
    """Take this attempt number of a run, if nobody else has it.

    Args:
        folder: RUN/journal.
        number: the number.
        who: names the claimant: who has claimed it before may claim it again.

    Raises:
        RunDirError: the folder can't be written.
    """
    try:
        return _claim(folder, number, who) or bool(who and _path(folder, number).read_text() == who)
    except OSError as error:
        raise RunDirError(f"can't write in the run directory {folder.parent}: {error.strerror}", path=folder) from error


def _claim(folder: Path, number: int, who: str = "") -> bool:
    try:
        fd = os.open(_path(folder, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(fd, who.encode())
    finally:
        os.close(fd)
    fsync_dir(folder)
    return True


def _path(folder: Path, number: int) -> Path:
    return folder / f"A{number:04d}.claim"
