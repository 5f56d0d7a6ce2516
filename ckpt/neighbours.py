"""What a server does with the other servers of its step while it serves: gives them copies of its segments."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

from transom_hpc.ckpt.cargo import Held, Spoilt
from transom_hpc.ckpt.copies import Copies
from transom_hpc.ckpt.exchange import Exchange
from transom_hpc.ckpt.ring import Peer
from transom_hpc.ckpt.roster import Roster, report
from transom_hpc.ckpt.slots import Left

log = logging.getLogger("transom_hpc.ckpt")


class Neighbours:
    """Sends copies of this host's segments to those that keep them.

    Nobody waits for it: a copy that can't be made is given up and said, and the next save's is tried again.

    Args:
        host: this one.
        peers: all servers, in the order of their numbers.
        roster: who takes part.
        exchange: the way to them.
        copies: what they keep here.
    """

    def __init__(self, host: str, peers: Sequence[Peer], roster: Roster, exchange: Exchange, copies: Copies) -> None:
        self._host = host
        self._exchange = exchange
        self._copies = copies
        numbers = {peer.host: number for number, peer in enumerate(peers)}
        found = roster.holders(peers)
        self._targets = [(name, numbers[name]) for name in found.of.get(host, ()) if name in numbers]
        self._kept_for = {rank for rank, home in enumerate(roster.homes) if host in found.of.get(home, ())}
        self._complaint = found.complaint
        self._lock = threading.Condition()
        self._busy: set[tuple[int, str]] = set()
        self._next: dict[tuple[int, str], Left] = {}
        self._problems: dict[tuple[int, str], str] = {}
        self.sent = 0
        """Copies that have arrived."""

    def start(self) -> None:
        """Say how things are."""
        if self._complaint and self._exchange.rank == 0:
            report("copies", host=self._host, problem=self._complaint)
        if self._targets:
            log.info("copies of this host's memory go to %s", ", ".join(name for name, _ in self._targets))

    def save(self, whose: str, left: Left) -> None:
        """A segment of a rank of this host is whole: copy it. Returns at once."""
        for name, number in self._targets:
            with self._lock:
                if (number, whose) in self._busy:  # one that waits is of an older save: this one takes its place
                    self._next[number, whose] = left
                    continue
                self._busy.add((number, whose))
            self._send(name, number, whose, left)

    def arrived(self, whose: str) -> int:
        """Wait until no copy of a rank's segments is on its way. The exchange gives up what does not move.

        Returns:
            How many hosts have its newest.
        """
        with self._lock:
            self._lock.wait_for(lambda: not any((number, whose) in self._busy for _, number in self._targets))
            return sum((number, whose) not in self._problems for _, number in self._targets)

    def committed(self, whose: str, step: int) -> None:
        """A step is on disk."""
        group = whose.partition("-")[0]
        self._copies.newest[group] = max(step, self._copies.newest.get(group, -1))
        self.tidy()

    def tidy(self) -> None:
        """Drop copies of ranks that are kept here no more."""
        kept = [item.whose for item in self._copies.inventory() if item.copy and item.rank in self._kept_for]
        self._copies.tidy(kept)

    def _send(self, name: str, number: int, whose: str, left: Left) -> None:
        try:
            held = Held(left)
        except Spoilt as error:
            self._over(name, number, whose, left.step, str(error))
            return
        self._exchange.send(number, held.facts("copy"), held, partial(self._over, name, number, whose, left.step))

    def _over(self, name: str, number: int, whose: str, step: int, why: str) -> None:
        problem = f"{name} has no copy of step {step} of {self._host}: {why}" if why else ""
        with self._lock:
            following = self._next.pop((number, whose), None)
            if following is None:
                self._busy.discard((number, whose))
                self._lock.notify_all()
            self.sent += not why
            # Said when it begins and when it is over, not with each save.
            before = bool(self._problems)
            self._problems.pop((number, whose), None)
            if problem:
                self._problems[number, whose] = problem
            said = bool(self._problems) != before
        if said:
            report("copies", host=self._host, problem=problem)
        elif problem:
            log.info("%s", problem)
        if not why:
            log.info("%s has a copy of step %d of %s", name, step, whose)
        if following is not None:
            self._send(name, number, whose, following)
