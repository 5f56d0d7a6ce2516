"""The segments of a host as the servers give them to each other: what there is, what is sent, and where copies of other
hosts' segments are put.

A copy lies beside the segments of this host's own ranks, in the same form, as `copy.` and the name that its rank's
segments begin with. There are two of each rank at most: the one before stays until the new one is whole, every block of
it compared with its sum. Memory is asked for before it is used, and what this host's ranks will need is left to them.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import budget, replicas, shm
from transom_hpc.ckpt.cargo import Arriving, Spoilt, compare
from transom_hpc.ckpt.exchange import Facts, Intake
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.replicas import Item
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.slots import COPY, SLOTS, Left, read_left

_NAME = re.compile(r"(?P<copy>copy\.)?(?P<whose>[0-9a-f]{8}-rank-(?P<rank>\d{5,})\.).+")
COPIES = 2
GATHERED = ".copy"
"""How the names of segments end that another host gave back."""


LEND_S = 2.0
"""Longest wait for the saves of this host's own ranks."""

LENT_BYTES = 4096
"""Less than that is not worth a look."""


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
        self._hope: dict[str, bool] = {}
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

            def lend(entries: Sequence[Entry]) -> Mapping[int, memoryview]:
                return {} if give_back else self._lend(whose, int(facts["step"]), str(facts["attempt"]), entries)

            def over(segment: Segment | None, whole: bool) -> None:
                self._arrived(whose, int(facts["step"]), segment, whole)

            try:
                intake = Arriving(facts, place, lend, over)
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
                elif size:  # else it is just being made
                    own.setdefault(match["whose"], []).append(size)
        free = max(0, budget.read(self._folder).free_bytes - budget.MARGIN_BYTES)
        return replicas.room(free, self._limit, own, copies, self._ranks, SLOTS, likely)

    def _lend(self, whose: str, step: int, attempt: str, entries: Sequence[Entry]) -> Mapping[int, memoryview]:
        """What a rank of this host has saved alike in the same step, as ranks that hold replicas do: it need not come
        over the network. Its own save may be a moment late; that is waited for as long as there is hope of any."""
        group = whose.partition("-")[0]
        until = time.monotonic() + (LEND_S if self._hope.get(group, True) else 0.0)
        while True:
            own = [
                left
                for item, left in self._whole((group,))
                if (item.step, item.attempt) == (step, attempt) and item.whose != whose
            ]
            if len(own) >= self._ranks or time.monotonic() >= until:
                break
            time.sleep(0.02)
        there = {
            (entry.name, entry.dtype, entry.nbytes, entry.sums): left.segment.data(at, at + entry.nbytes)
            for left in own
            for entry, at in zip(left.entries, left.places, strict=True)
            if entry.nbytes >= LENT_BYTES
        }
        found = {
            index: there[key]
            for index, entry in enumerate(entries)
            if (key := (entry.name, entry.dtype, entry.nbytes, entry.sums)) in there
        }
        if own:
            self._hope[group] = bool(found)
        return found

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
