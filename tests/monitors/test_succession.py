"""Whom the ranks follow, who is cut off and who speaks, on a simulated network with a clock that stands still."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transom_hpc.monitors.succession import Member, Ping, Rules, Standing, Word, decode_ping, encode_ping

RULES = Rules(ping_s=0.1, silent_after_s=1.0, isolated_after_s=2.0, start_deadline_s=2.0)


@dataclass
class Network:
    """Ranks that tick every 40 ms, and messages that take up to 60 ms."""

    size: int
    seed: int = 0
    now: float = 100.0
    dead: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    islands: list[set[int]] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    spoke: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    isolated: set[int] = field(default_factory=set)
    named: set[int] = field(default_factory=set)
    standings: dict[int, Standing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.members = {rank: Member(rank, self.size, RULES, self.now) for rank in range(self.size)}
        self.wire: list[tuple[float, int, int, Ping]] = []

    def reach(self, a: int, b: int) -> bool:
        return not self.islands or any(a in island and b in island for island in self.islands)

    def running(self) -> list[int]:
        gone = self.dead | self.left | self.isolated
        return [rank for rank in range(self.size) if rank not in gone and rank not in self.stopped]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.04
            self.deliver()
            for rank in self.running():
                self.tick(rank)

    def deliver(self) -> None:
        later = []
        for due, source, target, ping in sorted(self.wire, key=lambda item: item[0]):
            if due > self.now or target in self.stopped:
                later.append((due, source, target, ping))
            elif target in self.running():
                self.members[target].heard(source, self.now, ping)
        self.wire = later

    def post(self, source: int, target: int, ping: Ping) -> None:
        if target not in self.dead and self.reach(source, target):
            self.wire.append((self.now + self.random.uniform(0.0, 0.06), source, target, ping))

    def tick(self, rank: int) -> None:
        member = self.members[rank]
        standing = self.standings[rank] = member.tick(self.now)
        if standing.speaks:
            self.spoke.append((rank, standing.silent))
        if rank == 0:
            self.named |= set(standing.named)
        if standing.dismissed:
            self.left.add(rank)
            return
        if standing.isolated and rank:
            self.isolated.add(rank)
            for target in member.everybody():
                self.post(rank, target, Ping(f"n{rank}", standing.leader, 0, Word.ISOLATED))
            return
        for target, words in member.targets(self.now):
            self.post(rank, target, Ping(f"n{rank}", standing.leader, 0, words))

    def leave(self, rank: int) -> None:
        for target in self.members[rank].everybody():
            self.post(rank, target, Ping(f"n{rank}", self.members[rank].follows(self.now), 0, Word.LEAVING))
        self.left.add(rank)


def settled(size: int, seed: int = 0) -> Network:
    network = Network(size, seed)
    network.run(1.0)
    assert all(standing.leader == 0 and not standing.silent for standing in network.standings.values())
    return network


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20])
def test_nobody_is_blamed_while_all_live(size: int) -> None:
    network = settled(size)
    network.run(20.0)
    assert not network.named
    assert not network.spoke
    assert not network.isolated


@pytest.mark.parametrize("size", [2, 3, 4, 7, 20])
def test_a_dead_host_is_named_in_time_and_alone(size: int) -> None:
    network = settled(size)
    network.dead = {size - 1}
    network.run(1.0 + 0.1 + 0.1)
    assert network.named == {size - 1}
    network.run(10.0)
    assert network.named == {size - 1}
    assert not network.spoke
    assert not network.isolated


@pytest.mark.parametrize(("size", "dead", "speaker"), [(3, {0}, 1), (4, {0}, 1), (4, {0, 1}, 2), (5, {0, 1}, 2)])
def test_the_lowest_survivor_speaks_once_when_the_first_hosts_die(size: int, dead: set[int], speaker: int) -> None:
    network = settled(size)
    network.dead = dead
    network.run(2.0)  # one deadline, and the time to settle
    assert network.spoke == [(speaker, tuple(sorted(dead)))]
    network.run(20.0)
    assert len(network.spoke) == 1
    assert not network.isolated


def test_the_next_speaks_when_the_speaker_dies_too() -> None:
    network = settled(6)
    network.dead = {0}
    network.run(3.0)
    network.dead = {0, 1}
    network.run(3.0)
    assert [rank for rank, _ in network.spoke] == [1, 2]


def test_each_loss_is_spoken_for() -> None:
    network = settled(4)
    for _ in range(2):
        network.stopped = {0}
        network.run(5.0)
        network.stopped = set()
        network.run(5.0)
    assert [rank for rank, _ in network.spoke] == [1, 1]


def leads_alone(member: Member, now: float, followers: dict[int, int]) -> float | None:
    """Let a rank hear only these, each following whom it says, for five seconds; when does it speak?"""
    until = now + 5.0
    while now < until:
        now += 0.04
        for rank, follows in followers.items():
            member.heard(rank, now, Ping(f"n{rank}", follows, 1))
        if member.tick(now).speaks:
            return now
    return None


def test_a_new_leader_listens_before_it_speaks() -> None:
    when = leads_alone(Member(1, 5, RULES, 0.0), 0.0, {2: 1, 3: 1})
    assert when is not None
    assert when == pytest.approx(RULES.start_deadline_s + RULES.fresh_s, abs=0.1)
    assert leads_alone(Member(1, 5, RULES, 0.0), 0.0, {2: 1, 3: 1, 4: 2}) is None


def test_a_leader_that_was_stopped_listens_again_before_it_speaks() -> None:
    member = Member(1, 5, RULES, 0.0)
    now = 0.0
    while now < RULES.start_deadline_s + 0.15:
        now += 0.04
        for rank in (2, 3):
            member.heard(rank, now, Ping(f"n{rank}", 1, 1))
        assert not member.tick(now).speaks
    when = leads_alone(member, 30.0, {2: 1, 3: 1})
    assert when is not None
    assert when > 30.0 + RULES.fresh_s / 2


def test_who_wakes_up_when_another_has_spoken_does_not_speak_again() -> None:
    network = settled(5)
    network.dead = {0}
    while network.standings[1].leader != 1:
        network.run(0.04)
    network.stopped = {1}
    network.run(6.0)
    assert [rank for rank, _ in network.spoke] == [2]
    network.stopped = set()
    network.run(6.0)
    assert [rank for rank, _ in network.spoke] == [2]
    assert network.standings[3].leader == 1


def test_who_has_lost_all_that_it_knows_asks_everybody() -> None:
    """Of all that rank 20 would ask first, second and third, nobody lives; half of all do."""
    network = settled(30)
    network.dead = {*range(9), 17, 18, 19, 21, 22, 23}
    network.run(8.0)
    assert [rank for rank, _ in network.spoke] == [9]
    assert not network.isolated


def test_the_loss_of_all_deputies_does_not_make_everybody_ask_everybody() -> None:
    network = settled(20)
    network.dead = {0, 1, 2}
    most = 0
    for _ in range(100):
        network.run(0.04)
        followers = [rank for rank in network.running() if network.standings[rank].leader != rank]
        most = max(most, *(len(network.members[rank]._arrivals.expected()) for rank in followers))
    assert most <= 10
    assert [rank for rank, _ in network.spoke] == [3]


def test_time_in_which_it_was_stopped_does_not_make_a_rank_cut_off() -> None:
    member = Member(3, 5, RULES, 0.0)
    now = 0.0

    def isolated_at(until: float, words: bool) -> float | None:
        nonlocal now
        while now < until:
            now += 0.04
            for rank in (0, 1, 2, 4) if words else ():
                member.heard(rank, now, Ping(f"n{rank}", 0, 1, Word.HEARS))
            if member.tick(now).isolated:
                return now
        return None

    assert isolated_at(10.0, words=True) is None
    assert isolated_at(10.5, words=False) is None
    now = 40.0
    when = isolated_at(50.0, words=False)
    assert when is not None
    assert when == pytest.approx(40.0 + RULES.isolated_after_s - 0.5, abs=0.15)


def test_more_than_the_deputies_may_die_at_once() -> None:
    network = settled(12)
    network.dead = {0, 1, 2, 3, 4}
    network.run(4.0)
    assert [rank for rank, _ in network.spoke] == [5]
    assert not network.isolated


def test_with_two_hosts_the_other_is_cut_off_and_the_first_goes_on() -> None:
    network = settled(2)
    network.islands = [{0}, {1}]
    network.run(5.0)
    assert network.isolated == {1}
    assert network.named == {1}
    assert not network.standings[0].isolated


def test_a_host_that_is_cut_off_stops_its_program_and_speaks_for_nobody() -> None:
    network = settled(5)
    network.islands = [{0, 1, 2, 4}, {3}]
    network.run(2.5)
    assert network.isolated == {3}
    assert network.named == {3}
    assert not network.spoke


def test_rank_0_cut_off_names_nobody_but_itself() -> None:
    network = settled(5)
    network.islands = [{0}, {1, 2, 3, 4}]
    network.run(4.0)
    assert network.standings[0].isolated
    assert not network.named
    assert network.spoke == [(1, (0,))]
    assert not network.isolated


def test_a_minority_is_cut_off_as_a_whole() -> None:
    network = settled(7)
    network.islands = [{0, 1, 2, 3, 4}, {5, 6}]
    network.run(3.5)
    assert network.isolated == {5, 6}
    assert not network.spoke


def test_one_rank_that_hears_the_leader_keeps_the_others_from_speaking() -> None:
    """Rank 1 and rank 0 do not hear each other; all others hear both."""
    network = settled(5)
    network.islands = [{0, 2, 3, 4}, {1, 2, 3, 4}]
    network.run(10.0)
    assert not network.spoke
    assert not network.isolated
    assert network.named == {1}


@pytest.mark.parametrize("stopped", [{0}, {2}, {1, 2}, {0, 1}])
def test_who_was_stopped_accuses_nobody_when_it_runs_again(stopped: set[int]) -> None:
    network = settled(5)
    network.stopped = set(stopped)
    network.run(30.0)
    named = set(network.named)
    assert named == (set() if 0 in stopped else stopped)
    spoke = list(network.spoke)
    network.stopped = set()
    network.run(5.0)
    assert network.named == named
    assert network.spoke == spoke
    assert not network.isolated
    assert all(not standing.silent and standing.leader == 0 for standing in network.standings.values())


def test_rank_0_learns_that_another_has_spoken() -> None:
    network = settled(4)
    network.stopped = {0}
    network.run(5.0)
    network.stopped = set()
    network.deliver()
    standing = network.members[0].tick(network.now)
    assert network.spoke == [(1, (0,))]
    network.members[1].heard(0, network.now, Ping("n0", 0, 1, Word.WANTS))
    network.members[1].tick(network.now)
    words = dict(network.members[1].targets(network.now + RULES.ping_s))
    assert Word.SPOKEN in words[0]  # still said while it follows again: what was sent before may not have got through
    assert network.members[1].follows(network.now) == 0
    assert standing.spoken_by == (1,)
    assert network.members[0].tick(network.now).spoken_by == ()


def test_a_word_is_not_lost_when_the_next_ping_comes_with_it() -> None:
    member = settled(3).members[0]
    member.heard(1, 200.0, Ping("n1", 1, 7, Word.SPOKEN))
    member.heard(1, 200.0, Ping("n1", 0, 8))
    assert member.tick(200.0).spoken_by == (1,)


def test_when_rank_0_leaves_everybody_leaves_and_nobody_speaks() -> None:
    network = settled(4)
    network.leave(0)
    network.run(1.0)
    assert network.left == {0, 1, 2, 3}
    assert not network.spoke


def test_who_leaves_is_not_missed() -> None:
    network = settled(4)
    network.leave(2)
    network.run(10.0)
    assert not network.named
    assert not network.isolated


def test_a_rank_that_starts_late_has_the_start_deadline() -> None:
    network = Network(3)
    network.stopped = {2}
    network.run(1.8)
    assert not network.named
    network.run(0.5)
    assert network.named == {2}


def test_few_messages_go_to_the_silent() -> None:
    network = settled(3)
    network.dead = {2}
    network.run(3.0)
    sent = 0
    for _ in range(250):
        network.now += 0.04
        network.deliver()
        for rank in (0, 1):
            member = network.members[rank]
            member.tick(network.now)
            for target, words in member.targets(network.now):
                sent += target == 2 and rank == 0
                network.post(rank, target, Ping("", 0, 0, words))
    assert 5 <= sent <= 15  # ten seconds, one ping in ten


@settings(max_examples=25, deadline=None)
@given(size=st.integers(3, 9), seed=st.integers(0, 2**20), data=st.data())
def test_any_crash_has_at_most_one_speaker_and_no_innocent(size: int, seed: int, data: st.DataObject) -> None:
    dead = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    network = settled(size, seed)
    network.dead = set(dead)
    network.run(14.0)
    living = sorted(set(range(size)) - dead)
    assert network.named <= dead
    assert all(set(silent) <= dead for _, silent in network.spoke)
    majority = 2 * len(living) >= size and len(living) >= 2
    if 0 in dead:
        assert [rank for rank, _ in network.spoke] == (living[:1] if majority else [])
        assert network.isolated == (set() if majority else set(living))
    else:
        assert not network.spoke
        assert not network.isolated
        everybody_else = len(dead) == size - 1
        assert network.named == (set() if everybody_else and size > 2 else dead)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(3, 8), seed=st.integers(0, 2**20), data=st.data())
def test_of_two_halves_only_one_speaks_and_the_smaller_one_stops(size: int, seed: int, data: st.DataObject) -> None:
    away = data.draw(st.sets(st.integers(1, size - 1), min_size=1, max_size=size - 1))
    network = settled(size, seed)
    network.islands = [set(range(size)) - away, away]
    network.run(14.0)
    if 2 * len(away) >= size and len(away) >= 2:
        assert [rank for rank, _ in network.spoke] == [min(away)]
        assert not network.isolated
    else:
        assert not network.spoke
        assert network.isolated == away


@given(
    host=st.text(max_size=20),
    follows=st.integers(0, 2**32 - 1),
    number=st.integers(0, 2**32 - 1),
    words=st.integers(0, 31),
)
def test_a_ping_survives_the_wire(host: str, follows: int, number: int, words: int) -> None:
    ping = Ping(host.replace("\0", ""), follows, number, Word(words))
    whole = decode_ping(encode_ping(ping))
    assert whole is not None
    if len(ping.host.encode(errors="replace")) <= 64 and ping.host.isprintable():
        assert whole == ping


@given(st.binary(max_size=120))
def test_foreign_bytes_are_no_ping(record: bytes) -> None:
    assert decode_ping(record) is None
