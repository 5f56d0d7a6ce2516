"""Who has fallen silent: from the receiver's own monotonic arrival times, and nothing else.

Pure: time is an argument. No time stamp of another node is ever compared. Time in which the receiver itself did not
run (stopped, starved, suspended) does not count against anybody.
"""

from __future__ import annotations


class Arrivals:
    """When each expected peer was last heard.

    Args:
        after_s: a peer not heard for longer than this is silent.
        start_s: nobody who has never been heard is silent before this much time has passed since `now`: it may still
            be starting.
        gap_s: when two calls of `tick` lie further apart, the receiver did not run in between.
        now: the receiver's clock, in seconds.
    """

    def __init__(self, after_s: float, start_s: float, gap_s: float, now: float) -> None:
        self._after_s = after_s
        self._start_until = now + start_s
        self._gap_s = gap_s
        self._tick = now
        self._heard: dict[int, float] = {}  # rank -> time of the last arrival
        self._asked: dict[int, float] = {}  # rank -> since when an arrival is expected

    def expect(self, rank: int, now: float) -> None:
        """Start to wait for a peer; no effect on one that is waited for already."""
        self._asked.setdefault(rank, now)

    def forget(self, rank: int) -> None:
        """Stop waiting for a peer: from now on it is not silent, whatever happens."""
        self._asked.pop(rank, None)

    def heard(self, rank: int, now: float) -> None:
        """Something of this peer has arrived."""
        self._heard[rank] = now

    def tick(self, now: float) -> float:
        """Say that the receiver runs. Call it often, after taking in what has arrived.

        Returns:
            seconds in which it did not run, which have been discounted; 0.0 in the ordinary case.
        """
        gap, self._tick = now - self._tick, now
        if gap <= self._gap_s:
            return 0.0
        if self._tick - gap < self._start_until:
            self._start_until += gap
        for times in (self._heard, self._asked):
            for rank, time in times.items():
                times[rank] = min(now, time + gap)
        return gap

    def expected(self) -> frozenset[int]:
        """The peers that are waited for."""
        return frozenset(self._asked)

    def age(self, rank: int, now: float) -> float | None:
        """Seconds since a peer was heard; None for one that never was."""
        heard = self._heard.get(rank)
        return None if heard is None else now - heard

    def waited(self, rank: int, now: float) -> float:
        """Seconds that a peer is overdue: since it was last heard, or asked, whichever came later."""
        times = [time for time in (self._heard.get(rank), self._asked.get(rank)) if time is not None]
        return now - max(times) if times else 0.0

    def is_heard(self, rank: int, now: float) -> bool:
        """Whether something of this peer arrived within the deadline, expected or not."""
        age = self.age(rank, now)
        return age is not None and age <= self._after_s

    def silent(self, now: float) -> frozenset[int]:
        """The expected peers that have been silent for longer than the deadline."""
        starting = now <= self._start_until
        return frozenset(
            rank
            for rank in self._asked
            if self.waited(rank, now) > self._after_s and (rank in self._heard or not starting)
        )


def blame(
    silent: frozenset[int], named: frozenset[int], others: int, freshest_s: float | None, fresh_s: float
) -> tuple[frozenset[int], bool]:
    """Decide whom the watching rank may name, or whether it is the watching rank that is cut off.

    When everybody falls silent at once, the one thing that they have in common is the listener. Their last arrivals lie
    up to one ping apart, so before naming anybody, somebody else must have been heard a moment ago.

    Args:
        silent: who is silent now.
        named: who has been named already.
        others: how many peers are expected in all.
        freshest_s: seconds since anybody was heard; None if nobody ever was.
        fresh_s: up to this age an arrival proves that the listener hears.

    Returns:
        the peers to name now, and whether the listener must take itself for cut off.
    """
    new = silent - named
    if not new:
        return frozenset(), False
    if len(silent) == others and len(new) >= 2:
        return frozenset(), True
    only_one_left = others - len(named) == 1  # nobody else is left who could be heard
    if only_one_left or (freshest_s is not None and freshest_s <= fresh_s):
        return new, False
    return frozenset(), False
