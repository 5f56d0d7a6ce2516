"""What rank 0 makes of all readings and of who is heard: the messages of the sidecar.

Pure: time and readings are arguments. Holds the last reading of each rank and what has been said already.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transom_hpc.monitors.heartbeat import PHASES, Heartbeat
from transom_hpc.monitors.reading import Reading
from transom_hpc.monitors.succession import Member, Rules, Standing
from transom_hpc.monitors.verdict import Alone, Behind, Cleared, Message, Progress, Ready, Replaced, Verdict


class Watch:
    """The view of one sidecar rank on all hosts.

    Args:
        host: its own host.
        size: how many sidecars there are.
        hosts: names of the hosts by rank, used for those that never named themselves; may be shorter.
        rules: the times.
        member: who is heard.
        now: the monotonic clock of this rank, in seconds; so are all later ones.
    """

    def __init__(self, host: str, size: int, hosts: Sequence[str], rules: Rules, member: Member, now: float) -> None:
        self._own = host
        self._size = size
        self._hosts = hosts
        self._rules = rules
        self._member = member
        self._begun = now
        self._readings: dict[int, tuple[Reading, float]] = {}  # rank -> last reading, its arrival
        self._ready = False
        self._named: set[int] = set()
        self._gone: set[int] = set()
        self._cut_off_since: float | None = None
        self._alone = False
        self._replaced: set[int] = set()

    def take(self, rank: int, reading: Reading, now: float) -> None:
        """Take in a reading."""
        self._readings[rank] = (reading, now)

    def host(self, rank: int) -> str:
        """The name of a rank's host: what it said itself, what was given, or its number."""
        named = self._member.host(rank)
        if named:
            return named
        return self._hosts[rank] if rank < len(self._hosts) else f"rank {rank}"

    def messages(self, standing: Standing, now: float) -> list[Message]:
        """What is new since the last call, in the order in which it should be said."""
        said: list[Message] = [*self._say_ready(now), *self._say_alone(standing, now)]
        named = set(standing.named)
        for rank in sorted(named - self._named):
            said.append(self._verdict(rank, now))
        for rank in sorted(self._named - named):
            said.append(Cleared(self.host(rank), "silent", f"{self.host(rank)} is heard again"))
        self._named = named
        self._gone = set(standing.silent)
        for rank in standing.spoken_by:
            if rank not in self._replaced:
                self._replaced.add(rank)
                said.append(Replaced(self.host(rank)))
        return said

    def cut_off_for(self, now: float) -> float:
        """Seconds for which this host has taken itself for cut off."""
        return 0.0 if self._cut_off_since is None else now - self._cut_off_since

    def progress(self, now: float) -> Progress:
        """How far the program is, from the readings of all hosts that are heard."""
        current = [(rank, *pair) for rank, pair in sorted(self._readings.items()) if rank not in self._gone]
        rows = [(rank, reading, now - at) for rank, reading, at in current if reading.ranks]
        readings = [reading for _, reading, _ in rows]
        steps = [reading.step_min for reading in readings]
        behind = min(rows, key=lambda row: -1.0 if row[1].step_min is None else row[1].step_min, default=None)
        weights = [(reading.loss, reading.ranks) for reading in readings if reading.loss is not None]
        total = sum(ranks or 0.0 for _, ranks in weights)
        return Progress(
            ranks=int(sum(reading.ranks or 0 for reading in readings)),
            ended=int(sum(reading.ended or 0 for _, reading, _ in current)),
            step_min=_whole(min(step for step in steps if step is not None)) if steps and None not in steps else None,
            step_max=_whole(_top([reading.step_max for reading in readings])),
            age_s=_top([None if row[1].beat_age_s is None else row[1].beat_age_s + row[2] for row in rows]),
            step_s=_top([reading.step_s for reading in readings]),
            loss=sum(loss * (ranks or 0.0) for loss, ranks in weights) / total if total else None,
            bad_losses=int(sum(reading.bad_losses or 0 for reading in readings)),
            bad_since=_whole(_least([reading.bad_since for reading in readings])),
            bad_count=_whole(_least([reading.bad_count for reading in readings])) or 0,
            good_step=_whole(_least([reading.good_step for reading in readings])),
            saved_step=_whole(_top([reading.saved_step for reading in readings])),
            stall_s=_top([reading.stall_s for reading in readings]),
            phase=None if behind is None or behind[1].phase is None else PHASES[int(behind[1].phase)],
            behind=None if behind is None else Behind(self.host_of(behind[1]), int(behind[1].behind_rank or 0)),
            hosts=len({0, *self._member.heard_once()} - self._gone),
        )

    def loss(self, standing: Standing, rank: int, now: float) -> tuple[tuple[str, ...], str]:
        """For the rank that speaks for the job: the hosts that are lost, and the sentence that says why."""
        dead = tuple(self.host(lost) for lost in standing.silent)
        first = standing.silent[0] if standing.silent else 0
        evidence = (
            f"{self.host(first)} (rank {first}) has not been heard for {self._member.waited_s(first, now):.1f} s; "
            f"{standing.followers + 1} of {self._size} hosts hear each other and not it; "
            f"the first of them is {self._own} (rank {rank})"
        )
        return dead, evidence

    @staticmethod
    def host_of(reading: Reading) -> str:
        """The host that a reading is of."""
        return reading.host

    def _say_ready(self, now: float) -> list[Message]:
        if self._ready:
            return []
        heard = {0, *self._member.heard_once()}
        if len(heard) < self._size and now - self._begun < self._rules.start_deadline_s:
            return []
        self._ready = True
        missing = sorted(set(range(self._size)) - heard)
        return [
            Ready(
                tuple(self._own if rank == 0 else self.host(rank) for rank in sorted(heard)),
                tuple(self.host(rank) for rank in missing),
            )
        ]

    def _say_alone(self, standing: Standing, now: float) -> list[Message]:
        said: list[Message] = []
        waited = [self._member.waited_s(rank, now) for rank in standing.silent]
        if standing.alone and not self._alone:
            said.append(Alone(self._size, min(waited, default=0.0)))
        self._alone = standing.alone
        if standing.isolated and self._cut_off_since is None:
            self._cut_off_since = now
            evidence = (
                f"{self._own} has heard none of {len(standing.silent)} other hosts "
                f"for {min(waited, default=0.0):.1f} s; "
                "all of them fell silent at once: it is the one that is cut off"
            )
            said.append(Verdict(self._own, "isolated", "act", evidence, self._figures(0)))
        elif not standing.isolated and self._cut_off_since is not None:
            self._cut_off_since = None
            said.append(Cleared(self._own, "isolated", f"{self._own} hears other hosts again"))
        return said

    def _verdict(self, rank: int, now: float) -> Verdict:
        host = self.host(rank)
        waited = self._member.waited_s(rank, now)
        if rank not in self._member.heard_once():
            evidence = f"{host} (rank {rank} of {self._size}) has never been heard, for {waited:.1f} s"
            return Verdict(host, "missing", "act", evidence)
        last = self._readings.get(rank)
        sample = "no sample was received" if last is None else f"last sample {now - last[1]:.1f} s ago"
        evidence = f"{host} has not been heard for {waited:.1f} s (rank {rank} of {self._size}; {sample})"
        if self._size == 2:
            evidence += "; there is no third host to ask which of the two is cut off"
        return Verdict(host, "silent", "act", evidence, self._figures(rank))

    def _figures(self, rank: int) -> dict[str, float | None]:
        last = self._readings.get(rank)
        return {} if last is None else dict(last[0].figures())


def own_word(beats: Sequence[Heartbeat]) -> Progress:
    """How far the program is, from the heartbeats of one host alone, for when no sidecar speaks.

    Args:
        beats: of one launch; ranks that have taken no step yet are left aside.
    """
    begun = [beat for beat in beats if beat.step is not None]
    if not begun:
        return Progress(0)
    last = min(begun, key=lambda beat: beat.step or 0)
    finite = [beat.loss for beat in begun if beat.loss is not None and math.isfinite(beat.loss)]
    bad = [beat for beat in begun if beat.bad_since is not None]
    return Progress(
        len(begun),
        step_min=last.step,
        step_s=last.step_s,
        loss=sum(finite) / len(finite) if finite else None,
        bad_losses=len(bad),
        bad_since=min((beat.bad_since or 0 for beat in bad), default=None),
        bad_count=min((beat.bad_count for beat in bad), default=0),
        good_step=min((beat.good_step or 0 for beat in bad), default=None),
        saved_step=last.saved_step,
    )


def _top(values: list[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _least(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
