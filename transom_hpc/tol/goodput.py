"""Where a run's time went. Pure: the journal's entries in, seconds out.

Times are those that were written for people, by hosts whose clocks may differ. An estimate may use them; no decision
rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from transom_hpc.tol.events import Ending
from transom_hpc.tol.journal import Entry


@dataclass(frozen=True, slots=True)
class Goodput:
    """Where a run's time went, in seconds; all but the last add up to the wall time.

    Args:
        training_s: took steps that had not been taken before.
        saving_s: took steps, and stood still for a save.
        redoing_s: took steps that had been taken before, and were lost.
        detecting_s: from the last sign of a program that failed to the decision what to do.
        restarting_s: from then, or from the job's start, to the first step.
        pausing_s: waited before another start for the same cause.
        waiting_s: was in Slurm's queue, or ended by Slurm and not yet started again.
        stopping_s: had been asked to stop, and saved and left.
        over_s: had ended for good, or was stopped by a person, and then submitted again: no part of the wall time.
    """

    training_s: float = 0.0
    saving_s: float = 0.0
    redoing_s: float = 0.0
    detecting_s: float = 0.0
    restarting_s: float = 0.0
    pausing_s: float = 0.0
    waiting_s: float = 0.0
    stopping_s: float = 0.0
    over_s: float = 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """What the wall time is made of: seconds by word, as "training"."""
        names = (field.name for field in fields(self) if field.name != "over_s")
        return {name.removesuffix("_s"): getattr(self, name) for name in names}

    @property
    def wall_s(self) -> float:
        """Seconds from the submission, or the first start, to the last entry."""
        return math.fsum(self.seconds.values())

    @property
    def goodput(self) -> float | None:
        """Part of the wall time that was training, from 0 to 1; None where nothing has happened yet."""
        return self.training_s / self.wall_s if self.wall_s else None

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the wall time by word; they add up to 1, or are all 0 where nothing has happened yet."""
        wall_s = self.wall_s
        return {word: seconds / wall_s if wall_s else 0.0 for word, seconds in self.seconds.items()}


_AFTER = {
    "start": "restarting",
    "launch": "restarting",
    "running": "training",
    "progress": "training",
    "restart": "restarting",
    "pause": "pausing",
    "request": "stopping",
    "stop asked": "stopping",
    "gave up": "stopping",
    "standing by": "detecting",
    "stopped": "waiting",
    "follow-up": "waiting",
}
"""What a run does after an entry; one of another kind changes nothing."""
_LEAVE_STOPPING = frozenset(("start", "launch", "standing by", "stopped", "follow-up"))
_LEAVE_WAITING = frozenset(("start", "launch", "running", "progress"))
_FAILED = frozenset(("restart", "gave up", "standing by", "stopped"))
_FOR_GOOD = frozenset((Ending.WELL, Ending.BADLY, Ending.STOPPED))


def goodput(entries: Sequence[Entry], submitted: datetime | None = None) -> Goodput:
    """Where a run's time went, up to its last entry.

    Args:
        entries: of its journal, as read_journal gives them. Those that are damaged are passed over.
        submitted: when it was submitted last; None where that is not known. It tells how long the run was in the queue
            before it was started, if it had not been started or was over then.
    """
    folding = _Folding()
    queued = None if submitted is None else submitted.timestamp()
    for when, entry in _timeline(entries):
        if queued is not None and queued <= when:
            folding.queued(queued)
            queued = None
        folding.take(when, entry)
    return folding.result()


class _Folding:
    """A breakdown under way."""

    def __init__(self) -> None:
        self._seconds = dict.fromkeys((field.name.removesuffix("_s") for field in fields(Goodput)), 0.0)
        self._doing = ""  # nothing before the first entry
        self._now = -math.inf
        self._unheard_s = 0.0  # of training, since the last sign of the program
        self._reached = 0.0  # step, by launches before this one
        self._known_step_s: float | None = None
        self._begin()

    def _begin(self) -> None:
        """A new launch."""
        self._trained_s = 0.0
        self._stall_s = 0.0
        self._step_s: float | None = None
        self._first: float | None = None
        self._last = 0.0
        self._told = 0.0

    def queued(self, when: float) -> None:
        """It was submitted."""
        if self._doing in ("", "over"):
            self._pass(when)
            self._doing = "waiting"

    def take(self, when: float, entry: Entry) -> None:
        """Take in the next entry, written at this time."""
        kind, facts = entry.kind, entry.facts
        if kind == "start" and self._doing not in ("", "waiting", "over"):
            # The launcher before left no word: another one has noticed, or Slurm has, and put the job into the queue.
            self._doing = "detecting" if facts.get("succeeds") else "waiting"
        self._pass(when)
        if kind in ("start", "launch"):
            self._settle()
        if kind in ("running", "progress"):
            self._sign(facts)
        elif kind in _FAILED:
            self._told = max(self._told, _number(facts.get("step")) or 0.0)
            if self._doing == "training":
                self._seconds["detecting"] += self._unheard_s
                self._trained_s -= self._unheard_s
                self._unheard_s = 0.0
        self._doing = self._next(kind, facts)

    def _next(self, kind: str, facts: Mapping[str, Any]) -> str:
        if kind == "end":
            return "over" if facts.get("ending") in tuple(_FOR_GOOD) else "waiting"
        if kind == "requeued":
            return "waiting" if facts.get("ok") is True else self._doing
        held = (self._doing == "stopping" and kind not in _LEAVE_STOPPING) or (
            self._doing in ("waiting", "over") and kind not in _LEAVE_WAITING
        )
        return self._doing if held else _AFTER.get(kind, self._doing)

    def _pass(self, when: float) -> None:
        """Time goes on to then, as before."""
        if self._doing and when > self._now:
            spent = when - self._now
            if self._doing == "training":
                self._trained_s += spent
                self._unheard_s += spent
            else:
                self._seconds[self._doing] += spent
        self._now = max(self._now, when)

    def _sign(self, facts: Mapping[str, Any]) -> None:
        self._unheard_s = 0.0
        step = _number(facts.get("step"))
        if step is not None and self._doing == "stopping":
            self._told = max(self._told, step)
        elif step is not None:
            self._first = step if self._first is None else self._first
            self._last = max(self._last, step)
        if self._doing == "training":  # what a save takes at the end is a part of stopping
            self._stall_s = _number(facts.get("stall_s")) or self._stall_s
            self._step_s = _number(facts.get("step_s")) or self._step_s

    def _settle(self) -> None:
        """The launch is over: what of its steps was training?"""
        left_s = max(0.0, self._trained_s)
        saving_s = min(left_s, self._stall_s)
        left_s -= saving_s
        self._known_step_s = self._step_s or self._known_step_s
        redoing_s = 0.0
        if self._first is not None:
            # The first step's time is in restarting, which ends with it.
            again = max(0.0, min(self._last, self._reached) - self._first)
            step_s = self._known_step_s or left_s / max(1.0, self._last - self._first)
            redoing_s = min(left_s, again * step_s)
        self._seconds["saving"] += saving_s
        self._seconds["redoing"] += redoing_s
        self._seconds["training"] += left_s - redoing_s
        self._reached = max(self._reached, self._last, self._told)
        self._unheard_s = 0.0
        self._begin()

    def result(self) -> Goodput:
        """All of it."""
        self._settle()
        return Goodput(**{f"{word}_s": seconds for word, seconds in self._seconds.items()})


def _timeline(entries: Sequence[Entry]) -> list[tuple[float, Entry]]:
    """Entries with their times in seconds, which go back only where another attempt begins.

    Attempts come one after the other. A launcher that another one has taken over from may go on to write, as that it
    stands by and has ended: that is no part of the run any more.
    """
    attempts: dict[int, list[tuple[float, Entry]]] = {}
    clocks: dict[tuple[int, str], float] = {}
    for entry in entries:
        when = seconds(entry.time)
        if when is None or not isinstance(entry.kind, str):
            continue
        writer = (entry.attempt.number, str(entry.host))
        clocks[writer] = when = max(when, clocks.get(writer, -math.inf))
        attempts.setdefault(entry.attempt.number, []).append((when, entry))
    line: list[tuple[float, Entry]] = []
    numbers = sorted(attempts)
    for at, number in enumerate(numbers):
        found = sorted(attempts[number], key=lambda item: item[0])
        for following in numbers[at + 1 : at + 2]:
            then = _begun(attempts[following])
            if then >= found[0][0]:
                found = [item for item in found if item[0] <= then]
        line += found
    return line


def _begun(found: Sequence[tuple[float, Entry]]) -> float:
    return min((when for when, entry in found if entry.kind == "start"), default=min(when for when, _ in found))


def seconds(time: str) -> float | None:
    """A time stamp in seconds since 1970; None where it can't be read. One without a time zone is UTC."""
    with suppress(ValueError, TypeError, OverflowError):
        when = datetime.fromisoformat(time)
        return (when if when.tzinfo else when.replace(tzinfo=timezone.utc)).timestamp()
    return None


def _number(value: object) -> float | None:
    """A fact that is to be a number and not negative."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            number = float(value)
            return number if 0 <= number < math.inf else None
    return None
