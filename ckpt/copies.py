"""The segments of a host as the servers give them to each other: what there is, what is sent, and where copies of other
hosts' segments are put.

A copy lies beside the segments of this host's own ranks, in the same form, as `copy.` and the name that its rank's
segments begin with. There are two of each rank at most: the one before stays until the new one is whole, every block of
it compared with its sum. Memory is asked for before it is used, and what this host's ranks will need is left to them.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import xxhash

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import budget, fence, lanes, manifest, replicas, shm
from transom_hpc.ckpt.exchange import Facts, Intake, Source, Strips
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry, blocks
from transom_hpc.ckpt.replicas import Item
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.slots import COPY, SLOTS, Left, read_left

_NAME = re.compile(r"(?P<copy>copy\.)?(?P<whose>[0-9a-f]{8}-rank-(?P<rank>\d{5,})\.).+")
COPIES = 2
GATHERED = ".copy"
"""How the names of segments end that another host gave back."""


class Spoilt(Exception):
    """A segment is not what its sums say."""


class Held(Source):
    """A whole segment of this host, to be sent.

    Args:
        left: it.

    Raises:
        Spoilt: it is not whole any more.
    """

    def __init__(self, left: Left) -> None:
        header = left.segment.header()
        self._mark = left.segment.mark()
        if header is None:
            raise Spoilt(f"{left.segment.path.name} is not whole any more")
        self._left = left
        self._header = header

    def facts(self, purpose: str) -> Facts:
        """What is told when it is offered."""
        left, table = self._left, self._header.table
        return {
            "purpose": purpose,
            "whose": json.loads(table)["whose"],
            "step": left.step,
            "attempt": left.attempt,
            "used": self._header.used,
            "table": table.decode(),
        }

    def piece(self, begin: int, end: int) -> memoryview:
        return self._left.segment.data(begin, end)

    def lasts(self) -> bool:
        return self._left.segment.mark() == self._mark


class Arriving(Intake):
    """A segment that is coming, into a file that is seen when it is whole.

    Args:
        facts: of the offer.
        place: gives a segment with so much room; in the intake's own thread.
        over: called with the segment, None where there was no room, and whether it is whole.
    """

    def __init__(
        self, facts: Facts, place: Callable[[int], Segment], over: Callable[[Segment | None, bool], None]
    ) -> None:
        self._step, self._attempt, self._used = int(facts["step"]), str(facts["attempt"]), int(facts["used"])
        fence.check_name(self._attempt)  # it becomes part of the name of a file
        self._table = str(facts["table"]).encode()
        told = json.loads(self._table)
        entries = [manifest.entry_from_json(item) for item in told["entries"]]
        self._held = sorted(zip(entries, told["places"], strict=True), key=lambda pair: pair[1])
        ends = [at + entry.nbytes for entry, at in self._held]
        begins = [at for _, at in self._held]
        fits = all(end <= begin for end, begin in zip(ends, [*begins[1:], self._used], strict=True))
        if told["whose"] != facts["whose"] or not fits or min(begins, default=0) < 0:
            raise Spoilt("its table is none")
        self._place = place
        self._over = over
        self._segment: Segment | None = None

    def room(self, begin: int, end: int) -> memoryview:
        assert self._segment is not None
        return self._segment.data(begin, end)

    def take_in(self, ready: Callable[[Strips], None], until: Callable[[int], None]) -> None:
        whole = False
        try:
            segment = self._segment = self._place(self._used + shm.align(len(self._table)))
            segment.forget()
            ready([(at, at + entry.nbytes) for entry, at in self._held if entry.nbytes])
            for entry, at in self._held:
                for index, (begin, end) in enumerate(blocks(entry.nbytes)):
                    until(at + end)
                    _compare(segment, entry, at, index, begin, end)
            segment.declare_whole(self._step, self._attempt, self._used, self._table)
            whole = True
        finally:
            self._over(self._segment, whole)


def _compare(segment: Segment, entry: Entry, at: int, index: int, begin: int, end: int) -> None:
    if xxhash.xxh3_128_hexdigest(segment.data(at + begin, at + end)) != entry.sums[index]:
        raise Spoilt(f"{entry.name} from byte {begin} on is not what its sum says")


def compare(left: Left) -> None:
    """Compare all of a segment with its sums.

    Raises:
        Spoilt: it is not what they say.
    """
    lanes.run(
        partial(_compare, left.segment, entry, at, index, begin, end)
        for entry, at in zip(left.entries, left.places, strict=True)
        for index, (begin, end) in enumerate(blocks(entry.nbytes))
    )


class Copies:
    """The segments in one staging folder.

    Args:
        folder: it.
        host: this host.
        limit: bytes that all segments of the host may take together; None for what the host has.
        ranks: that run on this host.
        files: the hand on the file system.
    """

    def __init__(self, folder: Path, host: str, limit: int | None, ranks: int, files: Files) -> None:
        self._ranks = ranks
        self._folder = folder
        self._host = host
        self._limit = limit
        self._files = files
        self._lock = threading.Lock()
        self._room_lock = threading.Lock()
        self._coming: set[str] = set()
        self._segments: dict[Path, Segment] = {}  # mapped for good: to map as much again takes long
        self.newest: dict[str, int] = {}
        """For each group, the newest step that is safe elsewhere or has come here as a whole copy."""

    def inventory(self) -> list[Item]:
        """What there is, whole."""
        return [item for item, _ in self._whole()]

    def find(self, name: str, step: int, attempt: str) -> Left | None:
        """A whole segment by its name, if it still is the one that is meant."""
        left = read_left(Segment(self._folder / name, self._files))
        return left if left is not None and (left.step, left.attempt) == (step, attempt) else None

    def accept(self, facts: Facts) -> Intake | str:
        """What to do with an offer: see Exchange."""
        whose = str(facts["whose"])
        match = _NAME.fullmatch(f"{whose}x")
        if match is None or match["copy"]:
            return "it has no name"
        with self._lock:
            if whose in self._coming:
                return "another one of this rank is still coming"
            for item, _ in self._whole((whose, COPY + whose)):
                of_use = item.copy == (facts["purpose"] == "copy")
                if of_use and (item.whose, item.step, item.attempt) == (whose, facts["step"], facts["attempt"]):
                    return ""
            give_back = facts["purpose"] != "copy"

            def place(nbytes: int) -> Segment:
                return (
                    self._place_back(whose, str(facts["attempt"]), nbytes) if give_back else self._place(whose, nbytes)
                )

            def over(segment: Segment | None, whole: bool) -> None:
                self._arrived(whose, int(facts["step"]), segment, whole)

            try:
                intake = Arriving(facts, place, over)
            except (Spoilt, UsageError, ValueError, KeyError, TypeError) as error:
                return f"it can't be taken: {error}"
            self._coming.add(whose)
            return intake

    def give_back(self, item: Item) -> None:
        """A copy becomes what its own rank left, as that rank will run here.

        Raises:
            Spoilt: it is none, or not what its sums say; it is gone then.
            OSError
        """
        path = self._folder / item.name
        left = self.find(item.name, item.step, item.attempt)
        try:
            if left is None:
                raise Spoilt(f"{item.name} is not whole any more")
            compare(left)
        except Spoilt:
            self.drop([item])
            raise
        self._files.rename(path, self._folder / f"{item.whose}{item.attempt}{GATHERED}")
        with self._lock:
            self._segments.pop(path, None)

    def drop(self, items: Iterable[Item]) -> None:
        """Give the memory of these back."""
        for item in items:
            with self._lock:
                self._segments.pop(self._folder / item.name, None)
            with contextlib.suppress(OSError):
                self._files.remove(self._folder / item.name)

    def tidy(self, kept_for: Iterable[str]) -> None:
        """Drop copies of ranks of which no copies are kept here any more, when they are of no use."""
        mine, kept = self.inventory(), list(kept_for)
        for group, newest in list(self.newest.items()):
            self.drop(replicas.superfluous([item for item in mine if item.group == group], kept, newest))

    def _whole(self, prefixes: tuple[str, ...] = ("",)) -> list[tuple[Item, Left]]:
        try:
            names = sorted(name for name in self._files.names(self._folder) if name.startswith(prefixes))
        except OSError:
            return []
        found = []
        for name in names:
            match = _NAME.fullmatch(name)
            left = read_left(Segment(self._folder / name, self._files)) if match else None
            if match is not None and left is not None:
                item = Item(
                    host=self._host,
                    name=name,
                    whose=match["whose"],
                    rank=int(match["rank"]),
                    world_size=left.world_size,
                    step=left.step,
                    attempt=left.attempt,
                    copy=bool(match["copy"]),
                )
                found.append((item, left))
        return found

    def _place(self, whose: str, nbytes: int) -> Segment:
        """The file for a new copy: never the newest that is whole. No two ask for the same rank at a time."""
        ages = []
        for path in (self._folder / f"{COPY}{whose}{number}" for number in range(COPIES)):
            left = read_left(Segment(path, self._files))
            there = self._files.exists(path)
            ages.append(((left.attempt, left.step) if left is not None else ("", -1), not there, path))
        path = min(ages)[2]
        with self._lock:
            segment = self._segments.setdefault(path, Segment(path, self._files))
        self._reserve(segment, nbytes)
        return segment

    def _place_back(self, whose: str, attempt: str, nbytes: int) -> Segment:
        segment = Segment(self._folder / f"{whose}{attempt}{GATHERED}", self._files)
        self._reserve(segment, nbytes)
        return segment

    def _reserve(self, segment: Segment, nbytes: int) -> None:
        """Room in a segment. One at a time, so that no two count on the same memory; it may take seconds.

        Raises:
            MemoryError: there is none.
        """
        need = shm.HEADER_BYTES + shm.align(nbytes)
        with self._room_lock:
            if not self._files.exists(self._folder / ".lives"):
                raise MemoryError("this host leaves")  # a folder that was given back must not come into being again
            there = self._files.size(segment.path) if self._files.exists(segment.path) else 0
            room = self._room(need)
            if need - there > room:
                raise MemoryError(
                    f"it takes {need / 1e6:.0f} MB of memory and {room / 1e6:.0f} MB may be used for copies"
                )
            try:
                segment.reserve(nbytes)
            except OSError as error:
                if not there:
                    self._files.remove(segment.path)
                raise MemoryError(f"{need / 1e6:.0f} MB of memory: {error.strerror}") from error

    def _room(self, likely: int) -> int:
        own: dict[str, list[int]] = {}
        copies = 0
        for name in self._files.names(self._folder):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            with contextlib.suppress(OSError):
                size = self._files.size(self._folder / name)
                if match["copy"]:
                    copies += size
                else:
                    own.setdefault(match["whose"], []).append(size)
        free = max(0, budget.read(self._folder).free_bytes - budget.MARGIN_BYTES)
        return replicas.room(free, self._limit, own, copies, self._ranks, SLOTS, likely)

    def _arrived(self, whose: str, step: int, segment: Segment | None, whole: bool) -> None:
        with self._lock:
            self._coming.discard(whose)
            if segment is None:
                return
            if not whole:  # bytes that are still on their way must not meet what comes next
                self._segments.pop(segment.path, None)
                segment.remove()
            elif segment.path.name.startswith(COPY):
                group = whose.partition("-")[0]
                self.newest[group] = max(step, self.newest.get(group, -1))
