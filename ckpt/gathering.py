"""What the servers of a new launch do first: bring each host the segments of the ranks that will run there.

The server with number 0 hears what all have, decides (see replicas), and tells all; each sends what it is told to send
and reports what came; where something was spoilt, it is decided anew without that. Who waits gives up when it hears
nothing for SILENT_S: what was not brought is then read from a file.
How far it is stands in a file of the staging folder (see orders), for which the program of the launch waits.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import CheckpointError
from transom_hpc.ckpt import catalog, orders, replicas, slots
from transom_hpc.ckpt.cargo import Held, Spoilt, compare
from transom_hpc.ckpt.copies import Copies
from transom_hpc.ckpt.exchange import Exchange
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.replicas import Gathering, Item
from transom_hpc.ckpt.ring import Peer
from transom_hpc.ckpt.roster import Roster, report

log = logging.getLogger("transom_hpc.ckpt")

SILENT_S = 15.0
"""Longest time without a word of another server."""

_ROUNDS = 4
_SIGN_S = 0.5


@dataclass(slots=True)
class _Result:
    """What a server reports of a round.

    Args:
        spoilt: segments that can't be had, by host and name, and why.
        bytes: what has come over the network so far.
        moved: how many segments have come.
    """

    spoilt: dict[str, str] = field(default_factory=dict)
    bytes: int = 0
    moved: int = 0


class Gatherer:
    """One gathering, on one server.

    Args:
        host: this one.
        peers: all servers, in the order of their numbers.
        roster: who takes part.
        exchange: the way to them.
        copies: the segments of this host.
        folder: the staging folder.
    """

    def __init__(
        self,
        host: str,
        peers: Sequence[Peer],
        roster: Roster,
        exchange: Exchange,
        copies: Copies,
        folder: Path,
        files: Files,
        clock: Clock,
    ) -> None:
        self._host = host
        self._numbers = {peer.host: number for number, peer in enumerate(peers)}
        self._hosts = [peer.host for peer in peers]
        self._roster = roster
        self._exchange = exchange
        self._copies = copies
        self._folder = folder
        self._files = files
        self._clock = clock
        self._signs = 0
        self._told_at = clock.now()

    def run(self) -> None:
        """Gather. All servers must call it; it returns when it is over, well or not."""
        began = self._clock.now()
        try:
            before = orders.signs(self._folder, self._files)
            done = before.over and before.attempt == self._roster.attempt
            items = [] if done else self._trusted(self._copies.inventory())
            for item in items:
                log.info("in memory here: step %d of rank %d, %s", item.step, item.rank, item.name)
            self._exchange.tell(0, "inventory", {"done": done, "items": [asdict(item) for item in items]})
            if self._exchange.rank == 0:
                self._lead(began)
            self._follow()
        except TimeoutError as error:
            log.warning("what other hosts have in memory was not gathered: %s", error)
        except Exception:  # the edge of this thread: the program must not wait because of it
            log.exception("what other hosts have in memory was not gathered")
        self._sign(True)

    def _trusted(self, items: Sequence[Item]) -> list[Item]:
        """What may be restored; the rest is given up."""
        bad = [item for item in items if self._roster.distrust.covers(item.step, item.attempt)]
        for item in bad:
            log.warning("step %d of rank %d in memory is not trusted, and given up", item.step, item.rank)
        self._copies.drop(bad)
        return [item for item in items if item not in bad]

    # ------------------------------------------------------------------ server 0

    def _lead(self, began: float) -> None:
        """Decide, in a thread of its own, so that this server follows as the others do."""
        threading.Thread(target=self._decide, args=(began,), name="transom-gather", daemon=True).start()

    def _decide(self, began: float) -> None:
        try:
            heard = self._collect("inventory", list(self._numbers.values()))
            over: dict[str, Any] = {"steps": [], "lost": []}
            if not any(said["done"] for said in heard.values()):
                items = [Item(**item) for said in heard.values() for item in said["items"]]
                over = self._rounds(items, list(heard))
            for number in self._numbers.values():
                self._exchange.tell(number, "plan", {"over": True})
            if over["steps"] or over["lost"]:
                report("gathered", seconds=round(self._clock.now() - began, 3), **over)
        except TimeoutError as error:
            log.warning("what other hosts have in memory was not gathered: %s", error)
            for number in self._numbers.values():
                self._exchange.tell(number, "plan", {"over": True})

    def _rounds(self, items: list[Item], servers: Sequence[int]) -> dict[str, Any]:
        floors = self._floors()
        moved = nbytes = 0
        spoilt: dict[str, str] = {}
        found = Gathering((), {}, {})
        for _ in range(_ROUNDS):
            found = replicas.gather(items, self._roster.homes, floors)
            if not found.moves:
                break
            moves = [{"item": asdict(move.item), "target": move.target} for move in found.moves]
            for target in servers:
                self._exchange.tell(target, "plan", {"moves": moves})
            results = [_Result(**said) for said in self._collect("moved", servers).values()]
            moved += sum(result.moved for result in results)
            nbytes += sum(result.bytes for result in results)
            bad = {place: why for result in results for place, why in result.spoilt.items()}
            if not bad:
                break
            spoilt |= bad
            items = [item for item in items if f"{item.host}/{item.name}" not in bad]
            found = Gathering((), {}, found.lost)
        return {
            "steps": sorted(set(found.steps.values())),
            "lost": sorted(found.lost.values()),
            "moved": moved,
            "bytes": nbytes,
            "spoilt": spoilt,
        }

    def _floors(self) -> Mapping[str, int]:
        """The newest step that is committed: a file of it is better than older memory."""
        directory = self._roster.directory
        with contextlib.suppress(OSError):
            for step, path in reversed(catalog.folders(directory, self._files) if directory is not None else ()):
                with contextlib.suppress(CheckpointError):
                    found = catalog.read_checkpoint(path, self._files)
                    assert directory is not None
                    if not self._roster.distrust.covers(step, found.manifest.attempt):
                        return {slots.group(directory): step}
        return {}

    def _collect(self, kind: str, servers: Sequence[int]) -> dict[int, Any]:
        """What each server has to say.

        Raises:
            TimeoutError: some have said nothing for too long.
        """
        box, signs = self._exchange.box(kind), self._exchange.box("sign")
        heard: dict[int, Any] = {}
        silent = dict.fromkeys(servers, 0.0)
        then = self._clock.now()
        while len(heard) < len(silent):
            with contextlib.suppress(queue.Empty):
                origin, said = box.get(timeout=0.05)
                heard[origin] = said
            with contextlib.suppress(queue.Empty):
                while True:
                    silent.update({signs.get_nowait()[0]: 0.0})
            passed, then = min(0.5, self._clock.now() - then), self._clock.now()
            for number in silent.keys() - heard.keys():
                silent[number] += passed
            late = [self._hosts[number] for number in silent.keys() - heard.keys() if silent[number] > SILENT_S]
            if late and kind == "inventory":
                log.warning("no word from the checkpoint server of %s", ", ".join(late))
                return heard
            if late:
                raise TimeoutError(f"no word from the checkpoint server of {', '.join(late)}")
            if self._clock.now() - self._told_at > _SIGN_S:
                self._told_at = self._clock.now()
                for number in silent:
                    self._exchange.tell(number, "plan", {})
        return heard

    # ------------------------------------------------------------------ all

    def _follow(self) -> None:
        box = self._exchange.box("plan")
        silent_s = 0.0
        then = signed = self._clock.now()
        while True:
            said: dict[str, Any] | None = None
            with contextlib.suppress(queue.Empty):
                said = box.get(timeout=0.05)[1]
                silent_s = 0.0
            if said is not None and "over" in said:
                return
            if said is not None and "moves" in said:
                self._exchange.tell(0, "moved", asdict(self._move(said["moves"])))
            passed, then = min(0.5, self._clock.now() - then), self._clock.now()
            silent_s += passed
            if then - signed > _SIGN_S:
                signed = then
                self._sign(False)
            if silent_s > SILENT_S:
                raise TimeoutError(f"no word from the checkpoint server of {self._hosts[0]}")

    def _move(self, moves: Sequence[dict[str, Any]]) -> _Result:
        """Do this host's part of a round; returns when it is done, or has failed."""
        result = _Result()
        waiting: set[str] = set()
        lock = threading.Condition()

        def over(place: str, why: str, nbytes: int = 0) -> None:
            with lock:
                waiting.discard(place)
                if why:
                    result.spoilt[place] = why
                else:
                    result.moved += 1
                    result.bytes += nbytes
                lock.notify_all()

        for move in moves:
            item = Item(**move["item"])
            place = f"{item.host}/{item.name}"
            if item.host != self._host:
                continue
            if move["target"] == self._host:
                try:
                    self._copies.give_back(item)
                    over(place, "")
                except (Spoilt, OSError) as error:
                    log.warning("%s of step %d is dropped: %s", item.name, item.step, error)
                    over(place, str(error))
                continue
            left = self._copies.find(item.name, item.step, item.attempt)
            if left is None:
                over(place, "it has gone")
                continue
            try:
                held = Held(left)
            except Spoilt as error:
                over(place, str(error))
                continue
            with lock:
                waiting.add(place)
            nbytes = sum(entry.nbytes for entry in left.entries)
            self._exchange.send(
                self._numbers[move["target"]],
                held.facts("return"),
                held,
                lambda why, place=place, nbytes=nbytes: over(place, why, nbytes),  # type: ignore[misc]
            )
        with lock:
            while waiting:
                lock.wait(_SIGN_S)
                self._exchange.tell(0, "sign", None)
                self._sign(False)
        for place in result.spoilt:
            bad = [item for item in self._copies.inventory() if f"{item.host}/{item.name}" == place and item.copy]
            self._drop_if_spoilt(bad)
        return result

    def _drop_if_spoilt(self, items: Sequence[Item]) -> None:
        """A copy that is not what its sums say is good for nothing; one that only did not get there is kept."""
        for item in items:
            left = self._copies.find(item.name, item.step, item.attempt)
            try:
                if left is not None:
                    compare(left)
            except Spoilt as error:
                log.warning("%s of step %d is dropped: %s", item.name, item.step, error)
                self._copies.drop([item])

    def _sign(self, over: bool) -> None:
        """Show this host's program how far it is.

        Raises:
            TimeoutError: it has not waited.
        """
        self._signs += 1
        there = orders.signs(self._folder, self._files)
        if there.attempt == self._roster.attempt and there.over:
            if over:
                return
            raise TimeoutError("the program has gone on without")
        with contextlib.suppress(OSError):
            orders.sign(self._folder, orders.Signs(self._roster.attempt, over, self._signs), self._files)
