"""When the next save is due, where nobody said how many steps apart: measured on rank 0, which decides for all.

What was learned is kept beside the checkpoints, so that a restarted program does not begin with a guess.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from transom_hpc.base.clock import Clock
from transom_hpc.ckpt import interval
from transom_hpc.ckpt.files import Files

log = logging.getLogger("transom_hpc.ckpt")

RECORD = ".interval.json"

_NEW_SHARE = 0.3
"""Of the newest measurement in the running mean."""

_TOLD = 1.25
"""The log is told of an interval that differs by this factor from the one before."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What saves take here.

    Args:
        cost_s: for which the program stood still, running mean.
        durable_s: from the start of a save until it was committed, running mean or the newest if that is more.
    """

    cost_s: float
    durable_s: float


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
        self._mean_durable_s = 0.0
        self._last = clock.now()
        self._told_s = 0.0
        self.learned = self._read()
        self.interval_s = interval.LEAST_S
        self._decide()

    def rest(self) -> None:
        """Nothing that was done before now could be lost: the state was just restored."""
        self._last = self._clock.now()

    def due(self, busy: bool) -> bool:
        """Whether it is time for a save.

        Args:
            busy: whether the one before is not durable yet.
        """
        return not busy and self._clock.now() - self._last >= self.interval_s

    def begun(self) -> None:
        """A save begins, or was tried."""
        self._last = self._clock.now()

    def ended(self, cost_s: float, durable_s: float) -> None:
        """A save was committed. Called by the background thread.

        Args:
            cost_s: for which the program stood still for it.
            durable_s: since its start.
        """
        before = self.learned
        if before is not None:
            cost_s = before.cost_s + _NEW_SHARE * (cost_s - before.cost_s)
        mean = self._mean_durable_s or durable_s
        self._mean_durable_s = mean + _NEW_SHARE * (durable_s - mean)
        self.learned = Learned(cost_s, max(durable_s, self._mean_durable_s))  # a disk gets slow at once
        self._decide()
        facts = {**asdict(self.learned), "interval_s": self.interval_s, "mtbf_s": self._mtbf}
        facts = {name: float(f"{value:.4g}") for name, value in facts.items()}
        try:
            told = {**facts, "when": self._clock.wall().isoformat(timespec="seconds")}
            self._files.publish(self._path, json.dumps(told, indent=2).encode() + b"\n")
        except OSError as error:
            log.warning("the interval between saves could not be kept in %s: %s", self._path, error)

    def _decide(self) -> None:
        if self.learned is None:
            return  # the first save comes early, to be measured
        self.interval_s = interval.intervals(self.learned.cost_s, self.learned.durable_s, self._mtbf).disk
        if not self._told_s / _TOLD <= self.interval_s <= self._told_s * _TOLD:
            self._told_s = self.interval_s
            log.info(
                "saves are %.0f s apart from now on: the program stands still for %.3g s, a save takes %.3g s until "
                "it is committed, and a failure is expected every %.3g h",
                self.interval_s,
                self.learned.cost_s,
                self.learned.durable_s,
                self._mtbf / 3600,
            )

    def _read(self) -> Learned | None:
        try:
            facts = json.loads(self._files.read(self._path))
            learned = Learned(float(facts["cost_s"]), float(facts["durable_s"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        sane = 0 <= learned.cost_s < float("inf") and 0 <= learned.durable_s < float("inf")
        return learned if sane else None
