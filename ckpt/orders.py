"""What a program asks of its node's checkpoint server: small files in the shared memory of both, which outlive both.

::

    .server                   locked by the server as long as it lives, and touched by it twice a second
    .rank.PREFIX ATTEMPT      locked by a rank's program as long as it lives
    .order.SEGMENT.SERIAL     a save whose bytes are whole in that segment, to be written or only to be copied to
                              other hosts; locked by whoever works on it
    .answer.SEGMENT.SERIAL    how it ended
    .gathered                 for which launch the servers bring each host what its ranks need, and how far they are

A lock is the kernel's (flock): it is let go by death, however it comes, so that an order is never worked on twice, and
is taken up again when the one that worked on it has died.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transom_hpc.base.errors import CheckpointError, SaveError
from transom_hpc.ckpt.commit import Job
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.meeting import Abandoned, LeftOut
from transom_hpc.ckpt.retention import Keep
from transom_hpc.ckpt.writers import Asked

SERVER = ".server"
GATHERED = ".gathered"
_ORDER, _ANSWER, _RANK = ".order.", ".answer.", ".rank."


@dataclass(frozen=True, slots=True)
class Order:
    """A save that is to be carried out.

    Args:
        job: what it is.
        segment: name of the segment that holds its bytes, whole.
        keep: what is kept of what is committed.
        align_bytes, count: of the data files (see Blanks).
        writer: which writer was asked for.
        write: whether it is to be written; else it is only copied to other hosts' memory.
    """

    job: Job
    segment: str
    keep: Keep
    align_bytes: int
    count: int
    writer: Asked
    write: bool = True

    @property
    def name(self) -> str:
        """What tells it from all others of this node."""
        return f"{self.segment}.{self.job.serial}"


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank whose program lives, or has lived, on this node.

    Args:
        prefix: how the names of its segments begin.
    """

    directory: Path
    rank: int
    world_size: int
    attempt: str
    prefix: str


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on an order, held by this process until `release`."""

    fd: int
    order: bytes

    def release(self) -> None:
        """Let go."""
        os.close(self.fd)


class Orders:
    """The orders in one folder.

    Args:
        folder: the staging folder.
        files: the hand on the file system.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder = folder
        self._files = files

    def leave(self, order: Order) -> None:
        """Have an order carried out."""
        value = asdict(order)
        value["job"]["directory"] = str(order.job.directory)
        self._files.publish(self.folder / f"{_ORDER}{order.name}", json.dumps(value).encode())

    def waiting(self) -> list[str]:
        """Names of the orders that have no answer yet."""
        answered = set(self._named("", (_ANSWER,)))
        return [name for name in self._named("", (_ORDER,)) if name not in answered]

    def of(self, prefix: str) -> list[str]:
        """Names of the orders of segments whose names begin so."""
        return self._named(prefix, (_ORDER,))

    def claim(self, name: str) -> Claim | None:
        """Take an order, unless somebody works on it, or it has gone."""
        path = self.folder / f"{_ORDER}{name}"
        try:
            fd = self._files.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            if _lock(fd) and os.fstat(fd).st_nlink:
                return Claim(fd, self._files.read(path))
        except OSError:
            pass
        os.close(fd)
        return None

    def answer(self, name: str, error: BaseException | None, copies: int = 0) -> None:
        """Tell how an order ended, and for one that is not written how many other hosts have it."""
        said = json.dumps({**_facts(error), "copies": copies})
        self._files.publish(self.folder / f"{_ANSWER}{name}", said.encode())

    def answered(self, name: str) -> tuple[bool, BaseException | None]:
        """Whether an order has ended, and what kept it from ending well."""
        try:
            return True, _error(json.loads(self._files.read(self.folder / f"{_ANSWER}{name}")))
        except FileNotFoundError:
            return False, None

    def copies(self, name: str) -> int:
        """How many other hosts have what was ordered, as it was answered; 0 where it was not."""
        try:
            return int(json.loads(self._files.read(self.folder / f"{_ANSWER}{name}"))["copies"])
        except FileNotFoundError:
            return 0

    def forget(self, name: str) -> None:
        """Remove an order, and its answer."""
        for kind in (_ORDER, _ANSWER):
            self._files.remove(self.folder / f"{kind}{name}")

    def withdraw(self, prefix: str) -> set[str]:
        """Remove the orders of segments whose names begin so, but for those that somebody works on.

        Returns:
            Names of the segments that somebody works on.
        """
        held = set()
        for name in self._named(prefix, (_ORDER, _ANSWER)):
            claim = self.claim(name)
            if claim is None and self._files.exists(self.folder / f"{_ORDER}{name}"):
                held.add(name.rpartition(".")[0])
                continue
            self.forget(name)
            if claim is not None:
                claim.release()
        return held

    def enter(self, rank: Rank) -> int:
        """Show that a rank's program lives, as long as it does; forget those that had its place before.

        Returns:
            What `depart` wants.
        """
        path = self.folder / f"{_RANK}{rank.prefix}{rank.attempt}"
        for name in self._named(rank.prefix, (_RANK,)):
            if name.removeprefix(rank.prefix) < rank.attempt:
                self._files.remove(self.folder / f"{_RANK}{name}")
        # Locked before it has its name: nobody sees it without a lock but when its program is dead.
        new = path.with_name(f".new{path.name}")
        fd = self._files.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, json.dumps({**asdict(rank), "directory": str(rank.directory)}).encode())
        self._files.rename(new, path)
        return fd

    def depart(self, rank: Rank, fd: int) -> None:
        """The rank has nothing more to save."""
        self._files.remove(self.folder / f"{_RANK}{rank.prefix}{rank.attempt}")
        os.close(fd)

    def ranks(self) -> list[tuple[Rank, bool]]:
        """The ranks that have not departed, and whether the program of each lives."""
        found = []
        for name in self._named("", (_RANK,)):
            path = self.folder / f"{_RANK}{name}"
            try:
                alive = is_held(path)
                value = json.loads(self._files.read(path))
            except (OSError, ValueError):
                continue
            found.append((Rank(**{**value, "directory": Path(value["directory"])}), alive))
        return found

    def _named(self, prefix: str, kinds: Iterable[str]) -> list[str]:
        try:
            found = self._files.names(self.folder)
        except FileNotFoundError:
            return []
        return sorted({n.removeprefix(kind) for kind in kinds for n in found if n.startswith(f"{kind}{prefix}")})


@dataclass(frozen=True, slots=True)
class Signs:
    """How far a gathering is (see gathering).

    Args:
        attempt: the launch; empty where there was none.
        over: nothing more is brought.
        number: changes while something moves.
    """

    attempt: str = ""
    over: bool = False
    number: int = 0


def sign(folder: Path, signs: Signs, files: Files) -> None:
    """Show how far a gathering is."""
    files.publish(folder / GATHERED, json.dumps(asdict(signs)).encode())


def signs(folder: Path, files: Files) -> Signs:
    """How far a gathering is."""
    try:
        return Signs(**json.loads(files.read(folder / GATHERED)))
    except (OSError, ValueError, TypeError):
        return Signs()


def decode(data: bytes) -> Order:
    """The order that the bytes stand for.

    Raises:
        ValueError, KeyError, TypeError: they stand for none.
    """
    value = json.loads(data)
    job = Job(**{**value["job"], "directory": Path(value["job"]["directory"])})
    return Order(**{**value, "job": job, "keep": Keep(**value["keep"])})


def hold(path: Path, files: Files) -> int | None:
    """Lock a file, made if need be, for as long as this process lives; None where another one holds it."""
    fd = files.open(path, os.O_RDWR | os.O_CREAT)
    if _lock(fd):
        return fd
    os.close(fd)
    return None


def is_held(path: Path) -> bool:
    """Whether a process that lives holds a file.

    Raises:
        OSError: there is no such file, among others.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return not _lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _lock(fd: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True


def _facts(error: BaseException | None) -> dict[str, Any]:
    match error:
        case None:
            return {"kind": "done"}
        case LeftOut() | Abandoned():
            kind = "left out" if isinstance(error, LeftOut) else "abandoned"
            return {"kind": kind, "text": str(error), "rank": error.facts.get("rank"), "reason": str(error)}
        case OSError() if error.errno:
            about = None if error.filename is None else str(error.filename)
            return {"kind": "system", "errno": error.errno, "text": error.strerror, "about": about}
        case SaveError():
            return {"kind": "save", "text": str(error)}
        case CheckpointError():
            return {"kind": "other", "text": str(error)}
    return {"kind": "other", "text": f"{type(error).__name__}: {error}"}


def _error(facts: dict[str, Any]) -> BaseException | None:
    match facts["kind"]:
        case "done":
            return None
        case "left out" | "abandoned":
            kind = LeftOut if facts["kind"] == "left out" else Abandoned
            return kind(facts["text"], rank=facts["rank"], reason=facts["reason"])
        case "system":
            return OSError(facts["errno"], facts["text"], facts["about"])
        case "save":
            return SaveError(facts["text"])
    return CheckpointError(facts["text"])
