"""When the next save is due, where nobody said how many steps apart: measured on rank 0, which decides for all.

There are two kinds: those that are written, and, between them, those that stay in memory. The former come first.

What was learned is kept beside the checkpoints, so that a restarted program does not begin with a guess.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path

from transom_hpc.base.clock import Clock
from transom_hpc.ckpt import interval
from transom_hpc.ckpt.files import Files

log = logging.getLogger("transom_hpc.ckpt")

RECORD = ".interval.json"

_NEW_SHARE = 0.3
"""Of the newest measurement in the running mean."""

_WITHOUT = 3
"""After so many saves that are written without one that is not, files are as frequent as without memory."""

_TOLD = 1.25
"""The log is told of an interval that differs by this factor from the one before."""


class Wish(IntEnum):
    """What a rank wants to be done at a step. The largest one is what all ranks do."""

    NOTHING = 0
    KEEP = 1
    """A save that stays in memory."""
    NOT_YET = 2
    """None that stays in memory: this rank is not done with the save before."""
    WRITE = 3
    """A save that is written."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What saves take here.

    Args:
        cost_s: for which the program stood still, running mean.
        durable_s: from the start of a save until it was committed, running mean or the newest if that is more.
        copied_s: from the start of a save that is not written until it is in memory wherever it is to be, as above;
            None as long as there was none.
        neighbours: whether other hosts keep copies.
    """

    cost_s: float
    durable_s: float
    copied_s: float | None = None
    neighbours: bool = False


class Pace:
    """The interval of one run. Rank 0's is the one that counts.

    Args:
        directory: that holds the checkpoints.
        mtbf: mean time between failures, in seconds.
    """

    def __init__(self, directory: Path, mtbf: float, files: Files, clock: Clock) -> None:
        self._path = directory / RECORD
        self._mtbf = mtbf
        self._files = files
        self._clock = clock
        self._mean_durable_s = self._mean_copied_s = 0.0
        self._lock = threading.Lock()
        self._last = self._last_kept = clock.now()
        self._without = 0
        self._told_s = 0.0
        self.learned = self._read()
        self.interval_s = interval.LEAST_S
        self.memory_s = interval.LEAST_S
        self._decide()

    def rest(self, written: bool) -> None:
        """The state was just restored.

        Args:
            written: whether from a step that is on disk: nothing that was done before now could be lost. Else a save
                that is written is due at once.
        """
        self._last_kept = self._clock.now()
        self._last = self._last_kept if written else -math.inf

    def due(self, busy: bool) -> bool:
        """Whether it is time for a save that is written.

        Args:
            busy: whether the one before is not durable yet.
        """
        return not busy and self._clock.now() - self._last >= self.interval_s

    def due_in_memory(self) -> bool:
        """Whether it is time for a save that is not written. Not where one that is will be due soon: what is not over
        by then would be in its way, and is hardly worth it."""
        if self.learned is None:
            return False  # the first save is one that is written
        now = self._clock.now()
        left_s = self._last + self.interval_s - now
        return now - max(self._last, self._last_kept) >= self.memory_s and left_s >= self.memory_s / 2

    def begun(self) -> None:
        """A save that is written begins, or was tried."""
        self._last = self._clock.now()

    def begun_in_memory(self) -> None:
        """A save that is not written begins, or was tried."""
        self._last_kept = self._clock.now()

    def ended(self, cost_s: float, durable_s: float) -> None:
        """A save was committed. Called by the background thread.

        Args:
            cost_s: for which the program stood still for it.
            durable_s: since its start.
        """
        with self._lock:
            before = self.learned
            self._without += 1
            mean = self._mean_durable_s or durable_s
            self._mean_durable_s = mean + _NEW_SHARE * (durable_s - mean)
            longest = max(durable_s, self._mean_durable_s)  # a disk gets slow at once
            if before is None:
                self._learn(Learned(cost_s, longest))
            else:
                self._learn(replace(before, cost_s=_mean(before.cost_s, cost_s), durable_s=longest))

    def copied(self, cost_s: float, copied_s: float, neighbours: bool) -> None:
        """A save that is not written is in memory wherever it is to be. Called by the background thread.

        Args:
            cost_s: for which the program stood still for it.
            copied_s: since its start.
            neighbours: whether another host has it.
        """
        with self._lock:
            before = self.learned
            if before is None:
                return
            self._without = 0
            mean = self._mean_copied_s or copied_s
            self._mean_copied_s = mean + _NEW_SHARE * (copied_s - mean)
            longest = max(copied_s, self._mean_copied_s)
            self._learn(Learned(_mean(before.cost_s, cost_s), before.durable_s, longest, neighbours))

    def _learn(self, learned: Learned) -> None:
        self.learned = learned
        self._decide()
        facts = {**asdict(learned), "interval_s": self.interval_s, "memory_s": self.memory_s, "mtbf_s": self._mtbf}
        facts = {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in facts.items()
            if value is not None
        }
        try:
            told = {**facts, "when": self._clock.wall().isoformat(timespec="seconds")}
            self._files.publish(self._path, json.dumps(told, indent=2).encode() + b"\n")
        except OSError as error:
            log.warning("the interval between saves could not be kept in %s: %s", self._path, error)

    def _decide(self) -> None:
        known = self.learned
        if known is None:
            return  # the first save comes early, to be measured
        copied_s = known.copied_s if self._without < _WITHOUT else None
        found = interval.intervals(known.cost_s, known.durable_s, self._mtbf, copied_s, known.neighbours)
        self.interval_s = found.disk
        if copied_s is not None:
            self.memory_s = found.memory
        else:  # the first one that is not written comes early too
            self.memory_s = max(interval.LEAST_S, known.cost_s / interval.MOST_OVERHEAD)
        if not self._told_s / _TOLD <= self.interval_s <= self._told_s * _TOLD:
            self._told_s = self.interval_s
            log.info(
                "saves are %.0f s apart from now on: the program stands still for %.3g s, a save takes %.3g s until "
                "it is committed, and a failure is expected every %.3g h%s",
                self.interval_s,
                known.cost_s,
                known.durable_s,
                self._mtbf / 3600,
                f"; in memory they are {self.memory_s:.0f} s apart" if self.memory_s < self.interval_s else "",
            )

    def _read(self) -> Learned | None:
        try:
            facts = json.loads(self._files.read(self._path))
            copied = facts.get("copied_s")
            learned = Learned(
                float(facts["cost_s"]),
                float(facts["durable_s"]),
                None if copied is None else float(copied),
                bool(facts.get("neighbours", False)),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        times = (learned.cost_s, learned.durable_s, learned.copied_s or 0.0)
        return learned if all(0 <= seconds < math.inf for seconds in times) else None


def _mean(before: float, new: float) -> float:
    return before + _NEW_SHARE * (new - before)
