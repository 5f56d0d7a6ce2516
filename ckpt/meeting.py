"""How ranks agree without a communication library: small files in a folder that all of them see.

A rank publishes `KIND-RANK.json`, whole or not at all; the others list the folder until it is there. Every wait has a
deadline, and a rank that fails says so, so that the others stop waiting at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import CheckpointError
from transom_hpc.ckpt.files import Files

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.001, 0.05
_WAIT_SHARE = 0.08
"""Between two looks, as a share of the wait until then: no answer is found much later than it took to come."""


class Overdue(CheckpointError):
    """A rank did not answer in time. Facts: kind, ranks, seconds."""


class Abandoned(CheckpointError):
    """Another rank gave up. Facts: rank, reason."""


class LeftOut(Abandoned):
    """Another rank had no slot free: nothing failed, the save is left out. Facts: rank, reason."""


class Meeting(Protocol):
    """What the parts of a save or a restore need of each other."""

    def tell(self, kind: str, value: Any, to: int | None = None) -> None:
        """Publish a value, for everybody or for one rank."""

    def hear(self, kind: str, rank: int, mine: bool = False) -> Any:
        """Wait for the value of one rank (`mine`: the one that it published for this rank).

        Raises:
            Overdue, Abandoned
        """

    def hear_all(self, kind: str) -> list[Any]:
        """Wait for everybody's value, in rank order.

        Raises:
            Overdue, Abandoned
        """

    def said(self, kind: str) -> Any:
        """What this rank has told everybody of this kind, perhaps in an earlier process; None where it has not."""

    def give_up(self, reason: str, left_out: bool = False) -> None:
        """Tell the others not to wait; `left_out` where nothing has failed."""

    def given_up(self) -> Abandoned | None:
        """What another rank that gave up says; None where none did."""

    def beat(self) -> None:
        """Show that a long piece of work goes on: deadlines of those who wait begin anew."""


class Alone:
    """A meeting of one."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}

    def tell(self, kind: str, value: Any, to: int | None = None) -> None:  # noqa: ARG002
        self._told[kind] = value

    def hear(self, kind: str, rank: int, mine: bool = False) -> Any:  # noqa: ARG002
        return self._told[kind]

    def hear_all(self, kind: str) -> list[Any]:
        return [self._told[kind]]

    def said(self, kind: str) -> Any:
        return self._told.get(kind)

    def give_up(self, reason: str, left_out: bool = False) -> None:
        """Nobody waits."""

    def given_up(self) -> Abandoned | None:
        return None

    def beat(self) -> None:
        """Nobody waits."""


class FileMeeting:
    """A meeting through files.

    Args:
        folder: all ranks see it; the first one there makes it.
        rank: this one.
        world_size: how many meet.
        deadline_s: longest wait without any sign from anybody, in seconds.
        about: what the meeting is about, for messages.
        done: tells whether the meeting is over and well when its folder has gone.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        files: Files,
        clock: Clock,
        deadline_s: float,
        about: str,
        done: Callable[[], bool] = lambda: False,
    ) -> None:
        self.folder = folder
        self._rank = rank
        self._world_size = world_size
        self._files = files
        self._clock = clock
        self._deadline_s = deadline_s
        self._about = about
        self._done = done
        self._lock = threading.Lock()
        self._beats = 0
        self._beaten_at = clock.now()

    def tell(self, kind: str, value: Any, to: int | None = None) -> None:
        name = _name(kind, self._rank, to)
        self._files.publish(self.folder / name, json.dumps(value, separators=(",", ":")).encode())

    def hear(self, kind: str, rank: int, mine: bool = False) -> Any:
        name = _name(kind, rank, self._rank if mine else None)
        self._wait(kind, {name: rank})
        return json.loads(self._files.read(self.folder / name))

    def hear_all(self, kind: str) -> list[Any]:
        wanted = {_name(kind, rank, None): rank for rank in range(self._world_size)}
        self._wait(kind, wanted)
        return [json.loads(self._files.read(self.folder / name)) for name in wanted]

    def said(self, kind: str) -> Any:
        path = self.folder / _name(kind, self._rank, None)
        try:
            return json.loads(self._files.read(path)) if self._files.exists(path) else None
        except FileNotFoundError:  # rank 0 has just cleared up
            return None

    def give_up(self, reason: str, left_out: bool = False) -> None:
        self._files.make_dir(self.folder)
        self.tell("failed", {"reason": reason, "left_out": left_out})

    def given_up(self) -> Abandoned | None:
        try:
            said = [name for name in sorted(self._files.names(self.folder)) if name.startswith("failed-")]
        except OSError:
            return None
        return self._reason(said[0]) if said else None

    def beat(self) -> None:
        if self._clock.now() - self._beaten_at < self._deadline_s / 10:
            return
        with self._lock:  # several transfers are in flight, each tells of its progress
            self._beaten_at = self._clock.now()
            before = self.folder / f"beat-{self._rank:05d}.{self._beats}"
            self._beats += 1
            after = before.with_name(f"beat-{self._rank:05d}.{self._beats}")
            if self._beats == 1:
                self._files.publish(after, b"")
            else:
                self._files.rename(before, after)

    def until_gone(self) -> bool:
        """Wait until rank 0 ends the meeting by taking its folder away.

        Returns:
            Whether it ended well.

        Raises:
            Overdue, Abandoned
        """
        return not self._wait("commit", None)

    def _wait(self, kind: str, wanted: dict[str, int] | None) -> bool:
        """Until all wanted files are there (True) or the folder has gone and the meeting ended well (False)."""
        began = self._clock.now()
        end = began + self._deadline_s
        before: set[str] = set()
        while True:
            try:
                there = set(self._files.names(self.folder))
            except FileNotFoundError:
                if self._done():
                    return False
                raise Abandoned(f"{self._about}: rank 0 gave up and cleaned up", rank=0, reason="gone") from None
            if wanted is not None and there.issuperset(wanted):
                return True
            for name in sorted(there):
                if name.startswith("failed-"):
                    raise self._reason(name)
            if there != before:
                before, end = there, self._clock.now() + self._deadline_s
            if self._clock.now() >= end:
                late = sorted(rank for name, rank in (wanted or {"": 0}).items() if name not in there)
                raise Overdue(
                    f"{self._about}: no {kind!r} from rank {', '.join(map(str, late[:8]))} within "
                    f"{self._deadline_s:g} s; is it alive, and did every rank call save?",
                    kind=kind,
                    ranks=late,
                    seconds=self._deadline_s,
                )
            waited = self._clock.now() - began
            self._clock.sleep(min(max(waited * _WAIT_SHARE, _FIRST_WAIT_S), _LONGEST_WAIT_S))

    def _reason(self, name: str) -> Abandoned:
        rank = int(name.removeprefix("failed-").partition(".")[0])
        try:
            said = json.loads(self._files.read(self.folder / name))
            reason, left_out = str(said["reason"]), bool(said["left_out"])
        except (OSError, ValueError, KeyError, TypeError):
            reason, left_out = "unknown", False
        kind = LeftOut if left_out else Abandoned
        return kind(f"{self._about}: rank {rank} gave up: {reason}", rank=rank, reason=reason)


def _name(kind: str, rank: int, to: int | None) -> str:
    return f"{kind}-{rank:05d}.json" if to is None else f"{kind}-{rank:05d}-{to:05d}.json"
