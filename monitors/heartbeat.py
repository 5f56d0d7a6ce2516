"""The sign of life of one program rank: a small record in shared memory, written at every step.

Owns the layout of TRANSOM_SHM/beat-<rank>. The program writes it, the sidecar of the same host reads it. Imports
nothing heavy, and no fault in here ever ends the program.

The record is protected twice: a sequence number that is odd while a write is under way, as in a seqlock, and a
checksum over all of it, since Python can't order its stores on every processor.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

PHASES = ("starting", "restoring", "training", "saving", "stopping")
"""What a program rank can be doing, in the order of a life; the position is what the record holds."""

_MAGIC = b"TRBEAT02"
_HEAD = struct.Struct("<8sQ")  # magic, sequence number
_BODY = struct.Struct("<IIQ24sBB6xqQddqdqqQ")
_CRC = struct.Struct("<I")
_BODY_AT = _HEAD.size
_CRC_AT = _BODY_AT + _BODY.size
_SIZE = _CRC_AT + _CRC.size
_FILE_BYTES = 256
_HAS_LOSS, _HAS_STEP, _HAS_SAVED, _HAS_BAD = 1, 2, 4, 8
_NAME = re.compile(r"beat-\d{6,}")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a program rank last said of itself.

    Attributes:
        rank: its rank in the program.
        attempt: the attempt that it belongs to, as "A0002-L03".
        pid: its process.
        start_ticks: when the process started, in clock ticks since boot (proc(5), stat field 22); 0 if unknown.
        phase: one of PHASES.
        step: the last step that it finished; None before the first.
        beat_ns: when this was written, CLOCK_MONOTONIC of this host.
        step_s: how long the last step took; None before the second.
        loss: the last loss given, which may be NaN or infinite; None where none was ever given.
        saved_step: the newest step that it knows to be committed; None where there is none.
        stall_s: seconds that saving has held up the program, summed since its start.
        bad_since: where the last loss is NaN or infinite, the first step of which that is so without a finite one
            since; else None.
        bad_count: how many losses have been NaN or infinite since then.
        good_step: the last step whose loss was finite; before there is one, the step that the program began from.
            What was saved at this step or later was never used for a finite loss. None before the first step.
    """

    rank: int
    attempt: str
    pid: int
    start_ticks: int
    phase: str
    step: int | None
    beat_ns: int
    step_s: float | None
    loss: float | None
    saved_step: int | None
    stall_s: float
    bad_since: int | None = None
    bad_count: int = 0
    good_step: int | None = None

    def age_s(self, now_ns: int) -> float:
        """Seconds since it was written.

        Args:
            now_ns: CLOCK_MONOTONIC of the same host.
        """
        return max(0, now_ns - self.beat_ns) / 1e9


def beat_path(folder: Path, rank: int) -> Path:
    """Where the heartbeat of a rank lies in the job's shared-memory folder of its host."""
    return folder / f"beat-{rank:06d}"


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where unknown. With the pid, it names a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
        return int(text[text.rindex(b")") + 2 :].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


class HeartbeatWriter:
    """Writes the heartbeat of this process.

    A file of an earlier attempt is replaced, not reused: an older program that wakes up late writes into a file
    without a name. Where the file can't be made (no room, no rights), the writer stays silent and `error` says why.

    Args:
        path: the file, see `beat_path`. Its folder is made if missing, with mode 0700.
        rank: rank in the program.
        attempt: the attempt, as "A0002-L03".
    """

    def __init__(self, path: Path, rank: int, attempt: str) -> None:
        self.error: Exception | None = None
        self._map: mmap.mmap | None = None
        self._sequence = 0
        self._rank = rank
        self._attempt = attempt.encode()[:24]
        self._pid = os.getpid()
        self._start = start_ticks(self._pid)
        self._phase = 0
        self._flags = 0
        self._step = 0
        self._step_ns = 0
        self._step_s = math.nan
        self._loss = math.nan
        self._saved_step = -1
        self._stall_s = 0.0
        self._bad_since = 0
        self._bad_count = 0
        self._good_step = -1
        try:
            self._map = _new_map(path)
            self._write(time.monotonic_ns())
        except Exception as error:  # the edge to the user's program, which must go on without us
            self._fail(error)

    def beat(
        self, step: int, *, loss: float | None = None, saved_step: int | None = None, stall_s: float | None = None
    ) -> None:
        """Say that a step is finished.

        Args:
            step: the number of the step.
            loss: its loss; None leaves the one before.
            saved_step: newest committed step known here; None leaves the one before.
            stall_s: seconds that saving held up the program since the last beat.
        """
        if self._map is None:
            return
        try:
            now = time.monotonic_ns()
            step = int(step)
            if self._step_ns and step > self._step:
                self._step_s = (now - self._step_ns) / 1e9 / (step - self._step)
            if not self._flags & _HAS_STEP:
                self._good_step = step - 1
            self._step, self._step_ns = step, now
            self._flags |= _HAS_STEP
            if loss is not None:
                self._judge(step, float(loss))
            if saved_step is not None:
                self._saved_step = int(saved_step)
                self._flags |= _HAS_SAVED
            if stall_s is not None:
                self._stall_s += stall_s
            if self._phase != 4:  # a program that is stopping still finishes its step
                self._phase = 2
            self._write(now)
        except Exception as error:  # the edge to the user's program, which must go on without us
            self._fail(error)

    def _judge(self, step: int, loss: float) -> None:
        self._loss = loss
        self._flags |= _HAS_LOSS
        if math.isfinite(loss):
            self._good_step, self._bad_count = step, 0
            self._flags &= ~_HAS_BAD
            return
        if not self._flags & _HAS_BAD:
            self._bad_since = step
            self._flags |= _HAS_BAD
        self._bad_count += 1

    def phase(self, name: str) -> None:
        """Say what the program is doing now; `beat` sets "training" by itself.

        Args:
            name: one of PHASES.
        """
        if self._map is None:
            return
        try:
            self._phase = PHASES.index(name)
            self._write(time.monotonic_ns())
        except Exception as error:  # the edge to the user's program, which must go on without us
            self._fail(error)

    def close(self) -> None:
        """Stop writing. The file stays, for the sidecar to read; it goes with its folder."""
        shared, self._map = self._map, None
        if shared is not None:
            shared.close()

    def _write(self, now_ns: int) -> None:
        shared = self._map
        assert shared is not None
        sequence = self._sequence + 2
        head = _HEAD.pack(_MAGIC, sequence)
        body = _BODY.pack(
            self._pid,
            self._rank,
            self._start,
            self._attempt,
            self._phase,
            self._flags,
            self._step,
            now_ns,
            self._step_s,
            self._loss,
            self._saved_step,
            self._stall_s,
            self._bad_since,
            self._good_step,
            self._bad_count,
        )
        crc = _CRC.pack(zlib.crc32(body, zlib.crc32(head)))
        shared[:_BODY_AT] = _HEAD.pack(_MAGIC, sequence - 1)
        shared[_BODY_AT:_SIZE] = body + crc
        shared[:_BODY_AT] = head
        self._sequence = sequence

    def _fail(self, error: Exception) -> None:
        self.error = error
        if isinstance(error, OSError):  # no file: nothing to try again. A wrong argument is wrong only once.
            self.close()


def _new_map(path: Path) -> mmap.mmap:
    """Make the file, with its page allocated: a full /dev/shm is an error now, not SIGBUS later."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, bytes(_FILE_BYTES))
        shared = mmap.mmap(fd, _FILE_BYTES)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return shared


def read_heartbeats(folder: Path, attempt: str | None) -> list[Heartbeat]:
    """Read the heartbeats of this host's program ranks, in the order of their ranks.

    Files that are short, torn, not ours (owner, format) or of another attempt are left out.

    Args:
        folder: TRANSOM_SHM.
        attempt: only of this attempt; None for all.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))  # noqa: PTH208 (likewise)
    except OSError:
        return []
    beats = (_read(os.path.join(folder, name)) for name in names)  # noqa: PTH118 (cheaper, and it runs for ever)
    return sorted(
        (beat for beat in beats if beat is not None and attempt in (None, beat.attempt)), key=lambda beat: beat.rank
    )


def _read(path: str) -> Heartbeat | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_uid != os.getuid():
            return None
        for _ in range(8):  # a write takes about a microsecond: a second look nearly always finds it whole
            beat = parse_heartbeat(os.pread(fd, _SIZE, 0))
            if beat is not None:
                return beat
        return None
    except OSError:
        return None
    finally:
        os.close(fd)


def parse_heartbeat(record: bytes) -> Heartbeat | None:
    """Make sense of the bytes of a heartbeat file; None where they are short, foreign or torn."""
    if len(record) < _SIZE or not record.startswith(_MAGIC):
        return None
    sequence = _HEAD.unpack_from(record)[1]
    if sequence % 2 or _CRC.unpack_from(record, _CRC_AT)[0] != zlib.crc32(record[:_CRC_AT]):
        return None
    body = _BODY.unpack_from(record, _BODY_AT)
    pid, rank, start, attempt, phase, flags, step, beat_ns, step_s, loss, saved_step, stall_s = body[:12]
    bad_since, good_step, bad_count = body[12:]
    if phase >= len(PHASES):
        return None
    return Heartbeat(
        rank=rank,
        attempt=attempt.rstrip(b"\0").decode(errors="replace"),
        pid=pid,
        start_ticks=start,
        phase=PHASES[phase],
        step=step if flags & _HAS_STEP else None,
        beat_ns=beat_ns,
        step_s=None if math.isnan(step_s) else step_s,
        loss=loss if flags & _HAS_LOSS else None,
        saved_step=saved_step if flags & _HAS_SAVED else None,
        stall_s=stall_s,
        bad_since=bad_since if flags & _HAS_BAD else None,
        bad_count=bad_count,
        good_step=good_step if flags & _HAS_STEP else None,
    )


def summarise(beats: Iterable[Heartbeat], running: Callable[[int, int], bool], now_ns: int) -> dict[str, float | None]:
    """Fold the heartbeats of a host into the figures of its sample; see `transom_hpc.monitors.reading`.

    Ranks whose process has ended are only counted: their last word does not grow old.

    Args:
        beats: the heartbeats of one attempt on this host.
        running: whether a process of this pid and start still runs.
        now_ns: CLOCK_MONOTONIC of this host.
    """
    beats = list(beats)
    living = [beat for beat in beats if running(beat.pid, beat.start_ticks)]
    figures: dict[str, float | None] = {"ranks": float(len(living)), "ended": float(len(beats) - len(living))}
    if not living:
        return figures
    behind = min(living, key=lambda beat: (-1 if beat.step is None else beat.step, beat.beat_ns))
    steps = [beat.step for beat in living if beat.step is not None]
    losses = [beat.loss for beat in living if beat.loss is not None]
    finite = [loss for loss in losses if math.isfinite(loss)]
    bad = [beat for beat in living if beat.bad_since is not None]
    durations = [beat.step_s for beat in living if beat.step_s is not None]
    saved = [beat.saved_step for beat in living if beat.saved_step is not None]
    figures |= {
        "step_min": float(behind.step) if behind.step is not None else None,
        "step_max": float(max(steps)) if steps else None,
        "behind_rank": float(behind.rank),
        "phase": float(PHASES.index(behind.phase)),
        "step_s": max(durations) if durations else None,
        "loss": sum(finite) / len(finite) if finite else None,
        "bad_losses": float(len(losses) - len(finite)),
        "bad_since": min((float(beat.bad_since or 0) for beat in bad), default=None),
        "bad_count": min((float(beat.bad_count) for beat in bad), default=None),
        "good_step": min((float(beat.good_step or 0) for beat in bad), default=None),
        "saved_step": float(max(saved)) if saved else None,
        "stall_s": max(beat.stall_s for beat in living),
        "beat_age_s": max(beat.age_s(now_ns) for beat in living),
    }
    return figures
