"""Who leads the sidecars, who is cut off, and who speaks for the job when the launcher's host is lost.

Pure: no clock, no MPI; time and messages are arguments. There are no votes to collect and no collective call: every
rank says in each ping whom it follows, and everybody draws the conclusion from what has arrived.

The rules:

1. A rank exchanges pings with the first three ranks that it does not find silent (the deputies) and with its nearest
   neighbour on either side that it does not find silent: thus the loss of all deputies leaves it somebody. Who hears
   nobody asks everybody. Whoever is asked answers. Silent ones are still pinged now and then, so that they are found
   when they come back.
2. A rank follows the lowest rank that it does not find silent, perhaps itself. Who follows itself, leads: it pings
   everybody. As long as rank 0 lives, all follow rank 0.
3. Another leader than rank 0 speaks for the job, once for each loss, when every rank that it hears follows it, and they
   with itself are at least two and at least half of all. One rank that still hears a lower one is enough to wait: then
   the lower one is not dead; and who hears that another has spoken leaves it at that. Exactly half is allowed, so that
   2 of 4 can go on; what is done is done through Slurm, which serves one side only.
4. A rank is cut off when for a time it hears nobody (having asked everybody), or leads fewer than rule 3 asks for. It
   tells those who follow it, and they are cut off with it. With two hosts rank 1 is cut off, and rank 0 goes on.
5. Rank 0 is cut off when at least two others fall silent at once and nobody is left (`detect_silence.blame`).
6. Who leaves says so, and is not missed. When rank 0 leaves, everybody leaves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntFlag

from transom_hpc.monitors.detect_silence import Arrivals, blame
from transom_hpc.monitors.reading import cut_text

DEPUTIES = 3
"""How many of the lowest living ranks everybody keeps in touch with. This many less one may die at the same moment
and the next is known at once; after more it takes a further deadline."""

_PING = struct.Struct("<4sIIHxx64s")
_MAGIC = b"TrP1"
PING_BYTES = _PING.size
"""Size of a ping on the wire."""


class Word(IntFlag):
    """What a ping says beside whom its sender follows."""

    WANTS = 1  # answer me
    LEAVING = 2  # I leave; do not miss me
    ISOLATED = 4  # I take myself and those who follow me for cut off
    SPOKEN = 8  # I have spoken for the job
    HEARS = 16  # I hear the rank that I follow


@dataclass(frozen=True, slots=True)
class Ping:
    """A sign of life between two sidecars.

    Attributes:
        host: the sender's host.
        follows: the rank that the sender follows.
        number: counts the sender's pings.
        words: what else it says.
    """

    host: str
    follows: int
    number: int
    words: Word = field(default=Word(0))


def encode_ping(ping: Ping) -> bytes:
    """Pack a ping into PING_BYTES bytes."""
    return _PING.pack(_MAGIC, ping.follows, ping.number % 2**32, int(ping.words), cut_text(ping.host, 64))


def decode_ping(record: bytes) -> Ping | None:
    """Unpack a ping; None where it is not one of this version."""
    if len(record) != PING_BYTES:
        return None
    magic, follows, number, words, host = _PING.unpack(record)
    if magic != _MAGIC:
        return None
    return Ping(host.rstrip(b"\0").decode(errors="replace"), follows, number, Word(words & 31))


@dataclass(frozen=True, slots=True)
class Rules:
    """Times in seconds.

    Attributes:
        ping_s: between two pings to the same rank.
        silent_after_s: a rank not heard for longer is silent.
        isolated_after_s: a rank without a majority for longer is cut off.
        start_deadline_s: what is allowed for the first sign of a rank.
    """

    ping_s: float
    silent_after_s: float
    isolated_after_s: float
    start_deadline_s: float

    @property
    def fresh_s(self) -> float:
        """Up to this age an arrival proves that the listener hears."""
        return 3 * self.ping_s


@dataclass(frozen=True, slots=True)
class Standing:
    """How things look to one rank at one moment.

    Attributes:
        leader: the rank that it follows.
        silent: the expected ranks that are silent, in order.
        named: those of them that may be named, in order; only rank 0 names.
        followers: how many ranks are heard and follow this one.
        alone: it hears nobody although somebody is expected.
        isolated: it must take itself for cut off.
        speaks: it speaks for the job now; True once for each loss.
        spoken_by: ranks that have said since the last look that they have spoken for the job, in order.
        dismissed: rank 0 has said that it leaves.
        gap_s: seconds in which this rank itself did not run; 0.0 in the ordinary case.
    """

    leader: int
    silent: tuple[int, ...]
    named: tuple[int, ...]
    followers: int
    alone: bool
    isolated: bool
    speaks: bool
    spoken_by: tuple[int, ...]
    dismissed: bool
    gap_s: float


class Member:
    """One rank's view of all sidecars.

    Args:
        rank: its rank.
        size: how many there are.
        rules: the times.
        now: its own monotonic clock, in seconds; so are all later ones.
    """

    def __init__(self, rank: int, size: int, rules: Rules, now: float) -> None:
        self._rank = rank
        self._size = size
        self._rules = rules
        self._arrivals = Arrivals(rules.silent_after_s, rules.start_deadline_s, rules.ping_s, now)
        self._pings: dict[int, Ping] = {}  # rank -> its last ping
        self._left: set[int] = set()
        self._named: frozenset[int] = frozenset()
        self._sent: dict[int, float] = {}
        self._good = now + rules.start_deadline_s  # last moment of good standing (rule 4); ahead until there was one
        self._joined = False
        self._led_since: float | None = now if rank == 0 else None
        self._spoken = False
        self._say_so_until = now - 1.0
        self._spoken_by: set[int] = set()
        self._expect(now)

    def heard(self, source: int, now: float, ping: Ping | None = None) -> None:
        """Take in a message of another rank.

        Args:
            source: the sender's rank.
            now: time of arrival.
            ping: what it said; None for any other message.
        """
        self._arrivals.heard(source, now)
        if ping is not None:
            self._pings[source] = ping
            if Word.SPOKEN in ping.words:  # kept until it is looked at: the next ping may be here already
                self._spoken_by.add(source)
            if Word.LEAVING in ping.words:
                self._left.add(source)
                self._arrivals.forget(source)

    def host(self, rank: int) -> str | None:
        """The host of a rank as it named itself; None as long as it has not."""
        ping = self._pings.get(rank)
        return None if ping is None else ping.host

    def heard_once(self) -> frozenset[int]:
        """The ranks that have pinged at least once."""
        return frozenset(self._pings)

    def waited_s(self, rank: int, now: float) -> float:
        """Seconds that a rank is overdue."""
        return self._arrivals.waited(rank, now)

    def tick(self, now: float) -> Standing:
        """Draw the conclusions. Call it often, after `heard` for all that has arrived."""
        gap = self._arrivals.tick(now)
        if gap and self._led_since is not None:  # it has not listened meanwhile
            self._led_since = min(now, self._led_since + gap)
        self._expect(now)
        silent = self._arrivals.silent(now)
        leader = self._leader(silent)
        if leader == self._rank and self._led_since is None:
            self._led_since = now
        elif leader != self._rank:
            self._led_since, self._spoken = None, False
        if self._spoken:  # and some time longer: a rank that was stopped must find it in what is sent once it is back
            self._say_so_until = now + self._rules.silent_after_s
        return self._conclude(leader, silent, gap, now)

    def targets(self, now: float) -> list[tuple[int, Word]]:
        """Whom to ping now, with what to say; those returned count as pinged.

        Silent ranks get one ping in ten, so that little piles up on the way to the dead.
        """
        wanted = self._arrivals.expected()
        silent = self._arrivals.silent(now)
        asking = {rank for rank, ping in self._pings.items() if Word.WANTS in ping.words}
        answered = {rank for rank in asking - wanted - self._left if self._arrivals.is_heard(rank, now)}
        words = Word.SPOKEN if now <= self._say_so_until else Word(0)
        if self._arrivals.is_heard(self._leader(silent), now):
            words |= Word.HEARS
        due = []
        for rank in sorted(wanted | answered):
            every = self._rules.ping_s * (10 if rank in silent else 1)
            if now - self._sent.get(rank, -every) >= every * 0.99:  # the loop wakes up a little early, too
                self._sent[rank] = now
                due.append((rank, words | (Word.WANTS if rank in wanted else Word(0))))
        return due

    def everybody(self) -> list[int]:
        """All ranks that are in touch with this one, for a last word."""
        return sorted((self._arrivals.expected() | frozenset(self._pings)) - self._left)

    def follows(self, now: float) -> int:
        """The rank that this one follows."""
        return self._leader(self._arrivals.silent(now))

    def _conclude(self, leader: int, silent: frozenset[int], gap: float, now: float) -> Standing:
        heard = {rank: self._pings[rank] for rank in self._pings if self._arrivals.is_heard(rank, now)}
        heard = {rank: ping for rank, ping in heard.items() if rank not in self._left}
        expected = self._arrivals.expected()
        alone = bool(expected) and expected == silent and not heard
        followers = [rank for rank, ping in heard.items() if ping.follows == self._rank]
        isolated = speaks = False
        named: frozenset[int] = frozenset()
        if self._rank == 0:
            isolated, named = self._judge_others(silent, now)
        else:
            isolated, speaks = self._judge_self(leader, followers, heard, now)
        spoken_by, self._spoken_by = self._spoken_by, set()
        return Standing(
            leader=leader,
            silent=tuple(sorted(silent)),
            named=tuple(sorted(named)),
            followers=len(followers),
            alone=alone,
            isolated=isolated,
            speaks=speaks,
            spoken_by=tuple(sorted(spoken_by)),
            dismissed=0 in self._left,
            gap_s=gap,
        )

    def _judge_others(self, silent: frozenset[int], now: float) -> tuple[bool, frozenset[int]]:
        """Rank 0: whom to name (rule 5)."""
        expected = self._arrivals.expected()
        ages = [age for age in (self._arrivals.age(rank, now) for rank in expected) if age is not None]
        freshest = min(ages, default=None)
        self._named &= silent
        new, isolated = blame(silent, self._named, len(expected), freshest, self._rules.fresh_s)
        self._named |= new
        return isolated, self._named

    def _judge_self(self, leader: int, followers: list[int], heard: dict[int, Ping], now: float) -> tuple[bool, bool]:
        """Every other rank: am I cut off, do I speak for the job (rules 3 and 4)."""
        rules = self._rules
        bad_s = now - self._good
        led_s = 0.0 if self._led_since is None else now - self._led_since
        if leader != self._rank:
            ping = heard.get(leader)
            if ping is not None and Word.ISOLATED in ping.words:
                return True, False
            if ping is not None:
                self._stood_well(now - (self._arrivals.age(leader, now) or 0.0))
            return not heard and bad_s > rules.isolated_after_s, False
        if any(ping.follows < self._rank and Word.HEARS in ping.words for ping in heard.values()):
            # somebody hears a lower one: that one lives
            self._stood_well(now)
            return False, False
        group = len(followers) + 1
        if group < 2 or 2 * group < self._size:
            heard_out = not heard or led_s > rules.silent_after_s  # the others may still be looking for a leader
            return heard_out and bad_s > rules.isolated_after_s, False
        self._stood_well(now)
        if any(Word.SPOKEN in ping.words for ping in heard.values()):  # while this one was stopped, perhaps
            self._spoken = True
        settled = len(followers) == len(heard) and led_s >= rules.fresh_s
        speaks, self._spoken = settled and not self._spoken, self._spoken or settled
        return False, speaks

    def _stood_well(self, when: float) -> None:
        self._good = max(self._good, when) if self._joined else when
        self._joined = True

    def _leader(self, silent: frozenset[int]) -> int:
        """The lowest rank that is not silent (rule 2)."""
        for rank in range(self._rank):
            if rank not in silent and rank not in self._left:
                return rank
        return self._rank

    def _expect(self, now: float) -> None:
        """Wait for those that rule 1 names, and for no others; the silent stay in mind until they are heard."""
        silent = self._arrivals.silent(now)
        wanted = self._peers(silent, now)
        for rank in self._arrivals.expected() - wanted - silent:
            self._arrivals.forget(rank)
        for rank in wanted:
            self._arrivals.expect(rank, now)

    def _hears_nobody(self, now: float) -> bool:
        return self._joined and not any(self._arrivals.is_heard(rank, now) for rank in self._pings)

    def _peers(self, silent: frozenset[int], now: float) -> set[int]:
        others = [rank for rank in range(self._size) if rank != self._rank and rank not in self._left]
        if self._leader(silent) == self._rank or self._hears_nobody(now):
            return set(others)
        living = [rank for rank in others if rank not in silent]
        below = [rank for rank in living if rank < self._rank]
        above = [rank for rank in living if rank > self._rank]
        near = [*(below or above)[-1:], *(above or below)[:1]]
        return {*living[:DEPUTIES], *near}
