"""Bytes on their way between the memories of hosts: offered, taken, sent in pieces, and compared on arrival.

One thread makes all calls of the network; it waits for nobody. Who gives no sign for STALL_S is given up, and with it
what was on its way; the memory that the network may still use is kept until it lets go. What is sent, where it goes,
and whether it has arrived as it was is for others to say (Source, Intake).
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transom_hpc.base.clock import Clock
from transom_hpc.ckpt.ring import Post, Request

log = logging.getLogger("transom_hpc.ckpt")

PIECE_BYTES = 4 << 20
"""One transfer of the network."""

WINDOW = 4
"""Pieces on their way at a time."""

WIDTH = 2
"""Segments on their way to one host at a time."""

STALL_S = 10.0
"""Longest time without a sign of the other side."""

_ALL = 1 << 62
_SIGN_S = 1.0
_IDLE_S = 0.02
_BUSY_S = 0.0003

Facts = Mapping[str, Any]


Strips = Sequence[tuple[int, int]]
"""Ranges [begin, end) of bytes, in rising order."""


class Source(Protocol):
    """What is sent."""

    def piece(self, begin: int, end: int) -> memoryview:
        """Some of it; no more than PIECE_BYTES."""

    def lasts(self) -> bool:
        """Whether it is still what it was when the sending began."""


class Intake(Protocol):
    """Where something that arrives is put. Made when it is offered; a thread of its own calls `take_in`."""

    def take_in(self, ready: Callable[[Strips], None], until: Callable[[int], None]) -> None:
        """Make room, call `ready`, and compare what arrives.

        Args:
            ready: says that bytes may come now, and which are wanted.
            until: waits until all that are wanted below a place have arrived; raises where they never will.

        Raises:
            Exception: why it is not taken, or not whole. Nothing of it must be seen then.
        """

    def room(self, begin: int, end: int) -> memoryview:
        """Where these bytes go."""


class GivenUp(Exception):
    """The rest of it will not come."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    number: int
    target: int
    facts: Facts
    source: Source
    over: Callable[[str], None]
    pieces: deque[tuple[int, int]] = field(default_factory=deque)
    still_s: float = 0.0
    requests: deque[Request] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Incoming:
    number: int
    origin: int
    intake: Intake
    wanted: Strips | None = None
    told: bool = False
    pieces: deque[tuple[int, int]] = field(default_factory=deque)
    arrived: int = 0
    still_s: float = 0.0
    sign_s: float = 0.0
    abandoned: str = ""
    result: str | None = None
    requests: deque[tuple[Request, tuple[int, int]]] = field(default_factory=deque)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> None:
        """In a thread of its own."""
        why = ""
        try:
            self.intake.take_in(self._is_ready, self._until)
        except BaseException as error:
            why = str(error) or type(error).__name__
        self.result = why

    def _is_ready(self, strips: Strips) -> None:
        self.pieces.extend(cut(strips))
        self.arrived = self.pieces[0][0] if self.pieces else _ALL
        self.wanted = strips

    def _until(self, place: int) -> None:
        with self.changed:
            while self.arrived < place and not self.abandoned:
                self.changed.wait(1.0)
        if self.arrived < place:
            raise GivenUp(self.abandoned)

    def abandon(self, why: str) -> None:
        """The rest will not come."""
        with self.changed:
            self.abandoned = self.abandoned or why
            self.changed.notify_all()


class Exchange:
    """The exchange of one server with the others of its step.

    Args:
        post: the network.
        clock: for the deadlines.
        accept: what to do with an offer, from whom and what: where to put it, or why it is not taken (empty: it is here
            already).
    """

    def __init__(self, post: Post, clock: Clock, accept: Callable[[int, Facts], Intake | str]) -> None:
        self._post = post
        self._clock = clock
        self._accept = accept
        self._asked: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._boxes: dict[str, queue.SimpleQueue[tuple[int, Any]]] = defaultdict(queue.SimpleQueue)
        self._number = 0
        self._waiting: dict[int, deque[_Outgoing]] = defaultdict(deque)
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._kept: list[tuple[Request, object]] = []
        self._then = clock.now()
        self._closed = False
        self.received = 0
        """Bytes that have come over the network."""
        self._thread = threading.Thread(target=self._run, name="transom-exchange", daemon=True)

    @property
    def rank(self) -> int:
        """This server."""
        return self._post.rank

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what is on its way is left."""
        self._closed = True
        self._wake.set()
        self._thread.join(5.0)

    def send(self, target: int, facts: Facts, source: Source, over: Callable[[str], None]) -> None:
        """Have something sent.

        Args:
            target: to whom.
            facts: what `accept` is told there.
            over: called once, in the exchange's thread: with an empty text where it has arrived whole, else why not.
        """

        def begin() -> None:
            self._number += 1
            self._waiting[target].append(_Outgoing(self._number, target, facts, source, over))

        self._ask(begin)

    def tell(self, target: int, kind: str, said: Any) -> None:
        """Send a message; it waits in the box of this kind there."""
        body = json.dumps({"kind": "box", "box": kind, "said": said}, separators=(",", ":")).encode()
        self._ask(lambda: self._put(target, body))

    def box(self, kind: str) -> queue.SimpleQueue[tuple[int, Any]]:
        """Where the messages of this kind come: from whom, and what."""
        return self._boxes[kind]

    def _ask(self, what: Callable[[], None]) -> None:
        self._asked.put(what)
        self._wake.set()

    # ------------------------------------------------------------------ the exchange's thread

    def _run(self) -> None:
        while not self._closed:
            try:
                busy = self._turn()
            except Exception:  # nothing of this may end saving
                log.exception("the exchange between servers")
                busy = False
            self._wake.wait(_BUSY_S if busy else _IDLE_S)
            self._wake.clear()

    def _turn(self) -> bool:
        # Time in which this host stood still counts against nobody.
        passed = min(0.5, self._clock.now() - self._then)
        self._then = self._clock.now()
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()()
        for origin, body in self._post.heard():
            try:
                self._hear(origin, json.loads(body))
            except (ValueError, KeyError, TypeError):  # one bad message must not end all sending
                log.exception("a message of server %d", origin)
        for target, waiting in self._waiting.items():
            under_way = sum(1 for one in self._outgoing.values() if one.target == target)
            while waiting and under_way < WIDTH:
                self._offer(waiting.popleft())
                under_way += 1
        for one in list(self._outgoing.values()):
            self._go_on_sending(one, passed)
        for other in list(self._incoming.values()):
            self._go_on_receiving(other, passed)
        self._kept = [(request, thing) for request, thing in self._kept if not _is_over(request)]
        return bool(self._outgoing or self._incoming)

    def _put(self, target: int, body: bytes) -> None:
        self._kept.append((self._post.tell(target, body), body))

    def _say(self, target: int, kind: str, number: int, **facts: Any) -> None:
        self._put(target, json.dumps({"kind": kind, "number": number, **facts}, separators=(",", ":")).encode())

    def _hear(self, origin: int, said: dict[str, Any]) -> None:
        kind, number = said["kind"], said.get("number", 0)
        if kind == "box":
            self._boxes[said["box"]].put((origin, said["said"]))
        elif kind == "offer":
            self._hear_offer(origin, number, said["facts"])
        elif kind == "void":
            if (other := self._incoming.get((origin, number))) is not None:
                other.abandon(said["why"])
        elif (one := self._outgoing.get(number)) is not None and one.target == origin:
            one.still_s = 0.0
            if kind == "take":
                one.pieces.extend(cut(said["strips"]))
            elif kind == "got":
                self._end(one, said["why"])

    def _hear_offer(self, origin: int, number: int, facts: Facts) -> None:
        answer = self._accept(origin, facts)
        if isinstance(answer, str):
            self._say(origin, "got", number, why=answer)
            return
        other = _Incoming(number, origin, answer)
        self._incoming[origin, number] = other
        threading.Thread(target=other.run, name="transom-intake", daemon=True).start()

    def _offer(self, one: _Outgoing) -> None:
        if not one.source.lasts():
            one.over("it has gone")
            return
        self._outgoing[one.number] = one
        self._say(one.target, "offer", one.number, facts=dict(one.facts))

    def _go_on_sending(self, one: _Outgoing, passed: float) -> None:
        one.still_s += passed
        try:
            while one.requests and one.requests[0].over():
                one.requests.popleft()
                one.still_s = 0.0
            while one.pieces and len(one.requests) < WINDOW:
                if not one.source.lasts():
                    self._give_up(one, "it was changed before it was sent: saves come faster than copies")
                    return
                one.requests.append(self._post.send(one.target, one.number, one.source.piece(*one.pieces.popleft())))
        except ConnectionError as error:
            self._give_up(one, str(error))
            return
        if one.still_s > STALL_S:
            self._give_up(one, f"no sign for {STALL_S:g} s")

    def _give_up(self, one: _Outgoing, why: str) -> None:
        self._say(one.target, "void", one.number, why=why)
        self._end(one, why)

    def _end(self, one: _Outgoing, why: str) -> None:
        self._outgoing.pop(one.number, None)
        self._kept += [(request, one.source) for request in one.requests]
        one.over(why)

    def _go_on_receiving(self, other: _Incoming, passed: float) -> None:
        other.still_s += passed
        other.sign_s += passed
        try:
            while other.requests and other.requests[0][0].over():
                _, (begin, end) = other.requests.popleft()
                self.received += end - begin
                other.still_s = 0.0
                last = not other.requests and not other.pieces
                following = other.requests[0][1] if other.requests else (other.pieces[0] if other.pieces else (0, 0))
                with other.changed:
                    other.arrived = _ALL if last else following[0]
                    other.changed.notify_all()
        except ConnectionError as error:
            other.abandon(str(error))
        if other.result is not None:
            del self._incoming[other.origin, other.number]
            self._kept += [(request, other.intake) for request, _ in other.requests]
            self._say(other.origin, "got", other.number, why=other.result)
            return
        if other.abandoned:
            return  # its thread is about to see that
        if other.wanted is not None and not other.told:
            other.told, other.still_s = True, 0.0
            self._say(other.origin, "take", other.number, strips=other.wanted)
        while other.told and other.pieces and len(other.requests) < WINDOW:
            piece = other.pieces.popleft()
            room = other.intake.room(*piece)
            other.requests.append((self._post.receive(other.origin, other.number, room), piece))
        if other.sign_s >= _SIGN_S:
            other.sign_s = 0.0
            self._say(other.origin, "still", other.number)
        if other.told and other.arrived < _ALL and other.still_s > STALL_S:
            other.abandon(f"no sign for {STALL_S:g} s")


def cut(strips: Strips) -> list[tuple[int, int]]:
    """The pieces that strips are sent in. Pure; both sides cut alike."""
    return [(at, min(at + PIECE_BYTES, end)) for begin, end in strips for at in range(begin, end, PIECE_BYTES)]


def _is_over(request: Request) -> bool:
    try:
        return request.over()
    except ConnectionError:
        return True
