"""How far the program is: from the sidecar's word, or without it from the heartbeats on this host.

It keeps the journal's entries of progress, and knows when the program has stopped making any.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transom_hpc.base.clock import Clock
from transom_hpc.monitors.heartbeat import read_heartbeats
from transom_hpc.monitors.verdict import Progress as Word
from transom_hpc.monitors.watch import own_word
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.divergence import Losses
from transom_hpc.tol.events import Diverged, Event, Hung, Progress
from transom_hpc.tol.hang import HangWatch

_EVERY_S = 10.0
_DEAF_S = 5.0  # without a word from the sidecar for so long, this host's heartbeats are read directly


class Pace:
    """The progress of one launch.

    Args:
        shm: the job's folder in this host's shared memory.
        attempt: the launch.
        watch: its limits.
        strict: whether a program that has given no sign of life is judged too.
        losses: judges the losses.
        committed: finds the newest committed step.
        record: writes into the journal: record(kind, **facts).
        clock: time.
    """

    def __init__(
        self,
        shm: Path,
        attempt: Attempt,
        watch: HangWatch,
        strict: bool,
        losses: Losses,
        committed: Callable[[], int],
        record: Callable[..., None],
        clock: Clock,
    ) -> None:
        self._shm = shm
        self._attempt = attempt
        self._watch = watch
        self._strict = strict
        self._losses = losses
        self._committed = committed
        self._record = record
        self._clock = clock
        self._heard = clock.now()
        self._written = float("-inf")

    def heard(self) -> None:
        """The sidecar has said something."""
        self._heard = self._clock.now()

    def take(self, word: Word) -> list[Event]:
        """Take in what the sidecar says of the program; the events that follow."""
        now = self._clock.now()
        events: list[Event] = []
        if word.step_min:
            first, saved = not self._watch.step, word.saved_step or 0
            self._watch = self._watch.seen(word.step_min, now)
            if first:
                self._record("running", step=word.step_min)
            if now - self._written >= _EVERY_S:
                self._written = now
                facts = {"step_s": word.step_s, "loss": word.loss, "stall_s": word.stall_s}
                self._record("progress", step=word.step_min, committed=saved, **facts)
            events.append(Progress(word.step_min, saved))
        found = self._losses.take(word)
        if found is not None:
            self._record("loss", problem=found.kind, evidence=found.evidence, before=found.before, acts=found.act)
            if found.act:
                events.append(Diverged(found.evidence, self._committed(), found.before))
        # A program without heartbeats is not ours to judge, unless its user has set it a deadline.
        if (word.ranks or self._strict) and self._watch.hung(now):
            pause = now - self._watch.since
            where = f"after step {self._watch.step}" if self._watch.step else "before the first step"
            evidence = f"no step for {pause:.0f} s {where}; {self._watch.allowed_s():.0f} s are allowed"
            events.append(Hung(evidence, self._committed()))
        return events

    def look(self) -> list[Event]:
        """Where the sidecar has been silent for a while, see for ourselves."""
        if self._clock.now() - self._heard <= _DEAF_S:
            return []
        self.heard()
        return self.take(self._own_word())

    def last_look(self) -> list[Event]:
        """After the program's end: how far it came."""
        self._written = float("-inf")
        return [event for event in self.take(self._own_word()) if isinstance(event, Progress)]

    def _own_word(self) -> Word:
        return own_word(read_heartbeats(self._shm, str(self._attempt)))
