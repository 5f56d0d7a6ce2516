"""Bytes between hosts: pieces, losses, and what is given up; over a network of this process."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from transom_hpc.base.clock import SystemClock
from transom_hpc.ckpt import exchange
from transom_hpc.ckpt.exchange import Exchange, Facts, Intake, Strips, cut
from transom_hpc.ckpt.ring import Request

pytestmark = pytest.mark.timeout(60)


class Wire:
    """A network of servers in one process; `dead` ones neither hear nor answer."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.messages: dict[int, deque[tuple[int, bytes]]] = defaultdict(deque)
        self.sent: dict[tuple[int, int, int], deque[Parcel]] = defaultdict(deque)
        self.dead: set[int] = set()
        self.pieces = 0
        self.flip = 0


class Parcel(Request):
    def __init__(self, data: memoryview | None = None) -> None:
        self.data = data
        self.gone = data is None

    def over(self) -> bool:
        return self.gone


class Arrival(Request):
    def __init__(self, wire: Wire, key: tuple[int, int, int], room: memoryview) -> None:
        self.wire, self.key, self.room, self.there = wire, key, room, False

    def over(self) -> bool:
        with self.wire.lock:
            if not self.there and self.wire.sent[self.key] and not {self.key[0], self.key[1]} & self.wire.dead:
                parcel = self.wire.sent[self.key].popleft()
                assert parcel.data is not None
                assert len(parcel.data) == len(self.room), "both sides cut alike"
                self.room[:] = parcel.data
                self.wire.pieces += 1
                if self.wire.pieces == self.wire.flip:
                    self.room[0] ^= 1
                parcel.gone = self.there = True
        return self.there


class Socket:
    """One server's end of the wire."""

    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        self.wire, self.rank, self.size = wire, rank, size

    def tell(self, target: int, body: bytes) -> Request:
        with self.wire.lock:
            if not {target, self.rank} & self.wire.dead:
                self.wire.messages[target].append((self.rank, body))
        return Parcel()

    def heard(self) -> list[tuple[int, bytes]]:
        with self.wire.lock:
            found = [] if self.rank in self.wire.dead else list(self.wire.messages[self.rank])
            self.wire.messages[self.rank].clear()
        return found

    def send(self, target: int, number: int, data: memoryview) -> Request:
        parcel = Parcel(data)
        with self.wire.lock:
            self.wire.sent[self.rank, target, number].append(parcel)
        return parcel

    def receive(self, source: int, number: int, room: memoryview) -> Request:
        return Arrival(self.wire, (source, self.rank, number), room)


class Bytes:
    """A source of bytes; `changed` when they are others."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.asked: list[tuple[int, int]] = []
        self.changed: Callable[[], bool] = lambda: False

    def piece(self, begin: int, end: int) -> memoryview:
        self.asked.append((begin, end))
        return self.data[begin:end]

    def lasts(self) -> bool:
        return not self.changed()


class Room:
    """Where they arrive."""

    def __init__(self, nbytes: int, strips: Strips) -> None:
        self.memory = bytearray(nbytes)
        self.strips = strips
        self.why = ""
        self.refused = ""
        self.steps: list[int] = []

    def room(self, begin: int, end: int) -> memoryview:
        return memoryview(self.memory)[begin:end]

    def take_in(self, ready: Callable[[Strips], None], until: Callable[[int], None]) -> None:
        if self.refused:
            raise MemoryError(self.refused)
        try:
            ready(self.strips)
            for _, end in self.strips:
                until(end)
                self.steps.append(end)
        except BaseException as error:
            self.why = str(error)
            raise


class Stage:
    def __init__(self) -> None:
        self.wire = Wire()
        self.rooms: dict[str, Intake | str] = {}
        self.ends: list[str] = []
        self.over = threading.Event()
        self.exchanges = [Exchange(Socket(self.wire, rank, 3), SystemClock(), self.accept) for rank in range(3)]
        for one in self.exchanges:
            one.start()

    def accept(self, _: int, facts: Facts) -> Intake | str:
        return self.rooms[facts["name"]]

    def send(self, target: int, name: str, source: Bytes) -> None:
        def over(why: str) -> None:
            self.ends.append(why)
            self.over.set()

        self.exchanges[0].send(target, {"name": name}, source, over)

    def wait(self, seconds: float = 10) -> str:
        assert self.over.wait(seconds)
        self.over.clear()
        return self.ends[-1]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(exchange, "PIECE_BYTES", 1000)
    monkeypatch.setattr(exchange, "STALL_S", 0.6)
    monkeypatch.setattr(exchange, "_SIGN_S", 0.1)
    found = Stage()
    yield found
    for one in found.exchanges:
        one.close()


DATA = np.random.default_rng(1).bytes(25_001)


def test_pieces() -> None:
    size = exchange.PIECE_BYTES
    assert cut([(0, 0), (5, size + 6), (2 * size, 2 * size + 1)]) == [
        (5, size + 5),
        (size + 5, size + 6),
        (2 * size, 2 * size + 1),
    ]
    assert size <= 64 << 20, "far below what MPI counts in"


def test_it_arrives(stage: Stage) -> None:
    room = stage.rooms["x"] = Room(len(DATA), [(0, 10_500), (12_000, len(DATA))])
    source = Bytes(DATA)
    stage.send(1, "x", source)
    assert stage.wait() == ""
    assert room.memory[:10_500] == DATA[:10_500]
    assert room.memory[12_000:] == DATA[12_000:]
    assert not any(room.memory[10_500:12_000]), "what is not wanted is not sent"
    assert max(end - begin for begin, end in source.asked) == 1000
    assert stage.exchanges[1].received == len(DATA) - 1500
    assert room.steps == [10_500, len(DATA)]


def test_nothing_at_all(stage: Stage) -> None:
    stage.rooms["x"] = Room(0, [])
    stage.send(1, "x", Bytes(b""))
    assert stage.wait() == ""


def test_refused_or_there_already(stage: Stage) -> None:
    stage.rooms |= {"no": "no room", "there": ""}
    room = stage.rooms["late"] = Room(10, [(0, 10)])
    room.refused = "it takes 5 MB"
    for name, why in (("no", "no room"), ("there", ""), ("late", "it takes 5 MB")):
        stage.send(1, name, Bytes(DATA))
        assert stage.wait() == why


def test_several_at_once(stage: Stage) -> None:
    for number in range(7):
        stage.rooms[str(number)] = Room(len(DATA), [(0, len(DATA))])
        stage.send(1 + number % 2, str(number), Bytes(DATA))
    end = time.monotonic() + 10
    while len(stage.ends) < 7 and time.monotonic() < end:
        time.sleep(0.01)
    assert stage.ends == [""] * 7
    assert all(bytes(room.memory) == DATA for room in stage.rooms.values())  # type: ignore[union-attr]


def test_a_dead_host_is_given_up_and_the_next_one_is_not(stage: Stage) -> None:
    stage.wire.dead.add(1)
    stage.rooms["x"] = Room(len(DATA), [(0, len(DATA))])
    began = time.monotonic()
    stage.send(1, "x", Bytes(DATA))
    assert stage.wait() == "no sign for 0.6 s"
    assert time.monotonic() - began < 3
    stage.send(2, "x", Bytes(DATA))
    assert stage.wait() == ""


def test_a_host_that_dies_in_the_middle(stage: Stage) -> None:
    """Both sides give it up."""
    room = stage.rooms["x"] = Room(len(DATA), [(0, len(DATA))])
    source = Bytes(DATA)

    def die() -> bool:
        if stage.wire.pieces >= 5:
            stage.wire.dead.add(0)
        return False

    source.changed = die
    stage.send(1, "x", source)
    assert stage.wait() == "no sign for 0.6 s"
    end = time.monotonic() + 5
    while not room.why and time.monotonic() < end:
        time.sleep(0.01)
    assert room.why == "no sign for 0.6 s"


def test_a_source_that_changes_is_not_sent_on(stage: Stage) -> None:
    room = stage.rooms["x"] = Room(len(DATA), [(0, len(DATA))])
    source = Bytes(DATA)
    source.changed = lambda: stage.wire.pieces >= 5
    stage.send(1, "x", source)
    assert stage.wait() == "it was changed before it was sent: saves come faster than copies"
    end = time.monotonic() + 5
    while not room.why and time.monotonic() < end:
        time.sleep(0.01)
    assert room.why.startswith("it was changed")
    stage.send(1, "x", source)
    assert stage.wait() == "it has gone"


def test_slow_preparation_is_waited_for(stage: Stage) -> None:
    """Memory that takes longer to reserve than a dead host is waited for."""

    class Slow(Room):
        def take_in(self, ready: Callable[[Strips], None], until: Callable[[int], None]) -> None:
            time.sleep(1.2)
            super().take_in(ready, until)

    stage.rooms["x"] = Slow(len(DATA), [(0, len(DATA))])
    stage.send(1, "x", Bytes(DATA))
    assert stage.wait() == ""


def test_messages(stage: Stage) -> None:
    said: Any = {"items": ["x" * 100_000]}
    stage.exchanges[0].tell(2, "inventory", said)
    assert stage.exchanges[2].box("inventory").get(timeout=5) == (0, said)


def test_a_message_that_is_none_ends_nothing(stage: Stage) -> None:
    with stage.wire.lock:
        stage.wire.messages[1].append((0, b"no json"))
    time.sleep(0.1)
    stage.rooms["x"] = Room(len(DATA), [(0, len(DATA))])
    stage.send(1, "x", Bytes(DATA))
    assert stage.wait() == ""
