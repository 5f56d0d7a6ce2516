"""Who writes to a checkpoint directory at present: the file `.writer`, so that a second program is refused by name.

No lock, since locks on shared file systems are off or lie. The file says which process has the directory, and every few
seconds that process changes a number in it. Whether its owner lives is asked of the kernel where it can be (the same
boot of the same host: the process with that number and start time), and else seen from the number, on the newcomer's
own clock: one that stands still for WATCH_S belongs to nobody. A mistake costs a clear error, never a checkpoint: what
is committed is guarded by `fence`, whose newest attempt is the only one that may commit or delete.

The number is written through the descriptor that the file was made with, so that a program which lost the directory
never writes into the file of the one that has it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import CheckpointError
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.shm import boot_id

log = logging.getLogger("transom_hpc.ckpt")

FILE = ".writer"
ASIDE = ".writer."
"""How the names begin under which a dead program's file is taken away."""

BEAT_S = 5.0
WATCH_S = 30.0
"""Six beats: a program that stands still as long loses the directory, and can't commit any more."""

_UNREADABLE_S = 2.0
"""The same for a file without a name in it: its owner writes that at once, or died in between."""

_LOOK_S = 1.0
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that has a directory.

    Args:
        host, boot: the machine, and its present life.
        space: the pid namespace, without which a process id means nothing.
        pid, started: the process, and when it began in the kernel's own count.
        uid: whose it is.
        job: cluster and number of its Slurm job; empty outside one.
        attempt: its name.
        since: date and time in UTC, for people.
    """

    host: str
    boot: str
    space: str
    pid: int
    started: str
    uid: int
    job: str
    attempt: str
    since: str

    @property
    def process(self) -> tuple[str, str, int, str]:
        """What tells this process from every other one."""
        return (self.boot, self.space, self.pid, self.started)

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        return f"host {self.host}, pid {self.pid}{job}, attempt {self.attempt}, since {self.since}"


class Standing(Enum):
    """What is known of the process that has the directory."""

    OVER = "over"
    ALIVE = "alive"
    UNKNOWN = "unknown"


def judge(holder: Holder | None, me: Holder, alive: bool) -> Standing:
    """Whether a directory may be taken over. Pure.

    Args:
        holder: who has it; None where the file can't be read.
        me: who wants it.
        alive: whether there is a process like the holder on this host. Counts only where such a thing can be seen.
    """
    if holder is None:
        return Standing.UNKNOWN
    if holder.process == me.process:
        return Standing.OVER  # the same program once more: the fence knows the order
    if holder.boot and (holder.boot, holder.space) == (me.boot, me.space):
        return Standing.ALIVE if alive else Standing.OVER
    if holder.job and holder.job == me.job:
        return Standing.OVER  # the same job on other hosts: an attempt before this one
    return Standing.UNKNOWN


def this_process(attempt: str, since: str, environment: Mapping[str, str]) -> Holder:
    """This process, as it writes itself down."""
    job, cluster = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_CLUSTER_NAME", "")
    return Holder(
        host=socket.gethostname(),
        boot=boot_id(),
        space=_space(),
        pid=os.getpid(),
        started=_started(os.getpid()),
        uid=os.getuid(),
        job=f"{cluster}:{job}" if job and cluster else job,
        attempt=attempt,
        since=since,
    )


def this_start() -> str:
    """A text that no other process, here or elsewhere, has."""
    return f"{boot_id()}/{_space()}/{os.getpid()}/{_started(os.getpid())}/{socket.gethostname()}"


def is_alive(holder: Holder, proc: Path = Path("/proc")) -> bool:
    """Whether that process is there. Only on its own host, in its own pid namespace."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's, which /proc may hide: that there is one is all that can be known
    try:
        state, started = _facts(proc / str(holder.pid) / "stat")
    except OSError:
        return True
    return state not in ("Z", "X") and (not holder.started or started == holder.started)


def _facts(path: Path) -> tuple[str, str]:
    """State and start time of a process (proc(5))."""
    fields = path.read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _started(pid: int) -> str:
    try:
        return _facts(Path(f"/proc/{pid}/stat"))[1]
    except (OSError, IndexError):
        return ""


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115  (a text, not a path)
    except OSError:
        return ""


class Claim:
    """A program's hold on a directory. Rank 0 only.

    Args:
        directory: that holds the checkpoints.
        me: this process.
        beat_s: seconds between two beats.
        watch_s: how long the beat of a program on another host must stand still.
    """

    def __init__(
        self,
        directory: Path,
        me: Holder,
        files: Files,
        clock: Clock,
        beat_s: float = BEAT_S,
        watch_s: float = WATCH_S,
    ) -> None:
        self._path = directory / FILE
        self._me = me
        self._files = files
        self._clock = clock
        self._beat_s = beat_s
        self._watch_s = watch_s
        self._end: weakref.finalize[..., Claim] | None = None

    def take(self, insist: bool = False) -> None:
        """Have the directory from now on.

        Args:
            insist: whether it is certain that no other program may have it, as a launcher's journal tells.

        Raises:
            CheckpointError: another program has it. Facts: path, holder.
        """
        for _ in range(_TRIES):
            there = self._look()
            if there is None:
                if self._make():
                    return
                continue
            holder = _parse(there)
            standing = judge(holder, self._me, holder is not None and is_alive(holder))
            if insist:
                standing = Standing.OVER
            if standing is Standing.UNKNOWN:
                standing = self._watch(there, holder)
            if standing is Standing.ALIVE:
                raise self._refusal(holder)
            self._take_away(there)
        raise CheckpointError(
            f"{self._path.parent}: several programs begin to write here at the same time; start one",
            path=self._path.parent,
        )

    def release(self) -> None:
        """Let go: the next program need not ask. Doing it again does nothing."""
        if self._end is not None:
            self._end()

    def _look(self) -> bytes | None:
        try:
            return self._files.read(self._path)
        except FileNotFoundError:
            return None

    def _make(self) -> bool:
        """Write the file; False where somebody else was first."""
        text = json.dumps(asdict(self._me), separators=(",", ":")).encode() + b"\n"
        try:
            fd = self._files.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        try:
            _write(self._files, fd, text + b"%012d\n" % 0, 0)
            self._files.fsync(fd)
        except OSError as error:  # no reason to end a program
            log.info("%s: %s", self._path, error)
        stop = threading.Event()
        beats = threading.Thread(
            target=_beats, args=(self._files, fd, len(text), self._beat_s, stop), name="transom-beat", daemon=True
        )
        beats.start()
        self._end = weakref.finalize(self, _release, self._files, self._path, fd, stop, beats, os.getpid())
        return True

    def _watch(self, there: bytes, holder: Holder | None) -> Standing:
        """See whether the number moves. Nothing else can be known of a process on another host."""
        watch_s = self._watch_s
        if holder is None:
            watch_s = min(watch_s, _UNREADABLE_S)
        else:
            log.warning(
                "%s says that a program writes there: %s; waiting %.0f s to see whether it lives",
                self._path,
                holder,
                watch_s,
            )
        end = self._clock.now() + watch_s
        while self._clock.now() < end:
            self._clock.sleep(min(_LOOK_S, watch_s / 4))
            now = self._look()
            if now is None:
                return Standing.OVER
            if now != there:
                return Standing.ALIVE
        return Standing.OVER

    def _take_away(self, there: bytes) -> None:
        """Remove a dead program's file, and only that: another newcomer may have been here meanwhile."""
        aside = self._path.with_name(f"{ASIDE}{self._me.host}.{os.getpid()}")
        try:
            self._files.rename(self._path, aside)
        except FileNotFoundError:
            return
        if self._files.read(aside).partition(b"\n")[0] != there.partition(b"\n")[0]:
            self._files.rename(aside, self._path)
        else:
            self._files.remove(aside)

    def _refusal(self, holder: Holder | None) -> CheckpointError:
        who = str(holder) if holder is not None else "a program that does not say its name"
        return CheckpointError(
            f"another program writes to {self._path.parent}: {who}; end it, or use another directory. If it is "
            f"certainly gone, remove {self._path}",
            path=self._path.parent,
            holder=who,
        )


def _parse(text: bytes) -> Holder | None:
    try:
        return Holder(**json.loads(text.partition(b"\n")[0]))
    except (ValueError, TypeError):
        return None


def _write(files: Files, fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        sent = files.pwrite(fd, view, offset)
        view, offset = view[sent:], offset + sent


def _beats(files: Files, fd: int, offset: int, every_s: float, stop: threading.Event) -> None:
    """A background thread's whole life. A file system that does not answer costs a beat, never the program."""
    number = 0
    while not stop.wait(every_s):
        number += 1
        try:
            _write(files, fd, b"%012d\n" % number, offset)
            files.fsync(fd)
        except OSError as error:
            log.debug("beat %d: %s", number, error)


def _release(files: Files, path: Path, fd: int, stop: threading.Event, beats: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the directory is its parent's
    stop.set()
    try:
        facts = os.fstat(fd)
        there = path.stat()
        if (facts.st_ino, facts.st_dev) == (there.st_ino, there.st_dev):
            files.remove(path)
    except OSError as error:
        log.debug("%s: %s", path, error)
    beats.join(1.0)
    if not beats.is_alive():  # else it is in a call on this descriptor that does not return
        files.close(fd)
