"""Ranks of one host read together: what several of them need is read from the file by one, and handed on in memory.

Each rank tells the others of its host which blocks it needs, and all find the same portions. Who reads a portion puts
it into a slot of its own shared memory; the others copy it from there. Nobody depends on that: whoever copies compares
the checksums itself, and reads from the file what does not come in time, or comes spoilt. So a partner that is slow, or
dead, costs time and reads, and no more.

No two ranks wait for each other for ever: all take portions in the same order, and every wait has a deadline.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import xxhash

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.ckpt import direct, lanes, layout, portions
from transom_hpc.ckpt.board import SKIPPED, Board
from transom_hpc.ckpt.fetch import LANES, Fault, FileTier, Load, move, run
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.portions import Portion
from transom_hpc.ckpt.shm import align

log = logging.getLogger("transom_hpc.ckpt")

SILENT_S = 10.0
"""Longest wait for a rank that shows no sign of going on."""

LONGEST_S = 60.0
"""Longest wait for one portion, or one slot, whatever signs there are."""

SLOTS = 4
"""In which a rank hands on what it reads. Each takes up to a block."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0002, 0.005


@dataclass(frozen=True, slots=True)
class Company:
    """The ranks of one host in one restore.

    Args:
        folder: in memory that all of them see.
        group: how the names of all segments begin that have to do with the checkpoint directory.
        token: of what is being read; nobody else has it.
        rank: this one.
        ranks: all of them, this one too.
    """

    folder: Path
    group: str
    token: str
    rank: int
    ranks: tuple[int, ...]

    def path(self, what: str, rank: int) -> Path:
        """A file of one rank. Hidden: it is no segment."""
        return self.folder / f".{self.group}.{what}-{self.token}-{rank:05d}"


class Sharing:
    """This rank's side.

    Args:
        company: who reads together.
        allow: whether so much shared memory may be taken.
    """

    def __init__(
        self, company: Company, files: Files, allow: Callable[[int], bool], clock: Clock | None = None
    ) -> None:
        self._company = company
        self._files = files
        self._allow = allow
        self._clock = clock or SystemClock()
        self._told = False
        self._name = ""
        self._shape = (0, 0)
        self._mine: Board | None = None
        self._boards: dict[int, Board] = {}
        self._silent: set[int] = set()
        self._slots: list[Portion | None] = [None] * SLOTS
        self._queue: deque[int] = deque()  # portions that this rank is to hand on: slots go to them in their order
        self._lock = threading.Lock()
        self._failed = False
        self.handed_bytes = 0
        """Copied from what others read."""

    def tell(self, needs: Mapping[int, portions.Ranges]) -> None:
        """Tell the others what this rank needs: nothing, where it takes no part. Only the first time counts."""
        if not self._told:
            self._told = True
            serves = bool(needs) and self._allow(SLOTS * layout.BLOCK_BYTES)
            text = json.dumps([serves, {str(part): found for part, found in needs.items()}])
            try:
                self._files.publish(self._company.path("needs", self._company.rank), text.encode())
            except OSError as error:
                log.warning("rank %d reads by itself: %s", self._company.rank, error)

    def fetch(self, tier: FileTier, loads: Sequence[Load], stored: Sequence[Stored]) -> list[Fault] | None:
        """Read, compare and put in place, as fetch.fetch does, together with the others.

        Args:
            tier: the files.
            loads: what this rank needs.
            stored: everything in the files, the same on all ranks.

        Returns:
            The blocks that are not as they were written; None where nothing is shared, and nothing was done.
        """
        numbers = {item.path: number for number, item in enumerate(stored)}
        mine = {numbers[load.item.path]: load for load in loads if load.blocks}
        self.tell({part: portions.ranges(load.blocks) for part, load in mine.items()})
        needs = self._hear()
        if needs is None:
            return None
        parts = {part for _, found in needs.values() for part in found}
        order = sorted(parts, key=lambda part: (stored[part].file, stored[part].offset))
        sizes = {part: stored[part].entry.nbytes for part in order}
        serving = {rank for rank, (serves, _) in needs.items() if serves}
        cut = portions.portions({rank: found for rank, (_, found) in needs.items()}, sizes, serving)
        shared = [portion.end - portion.begin for portion in cut if len(portion.ranks) > 1]
        if not shared:
            return None
        own = [portion for portion in cut if self._company.rank in portion.ranks]
        self._meet(len(cut), align(max(shared)), {rank for portion in own for rank in portion.ranks})
        faults: list[Fault] = []
        try:
            me = self._company.rank
            self._queue.extend(p.number for p in own if p.reader == me and len(p.ranks) > 1)
            lanes.run([partial(self._do, tier, portion, mine[portion.part], faults) for portion in own], LANES)
        finally:
            if self._mine is not None:
                self._mine.leave()
        return sorted(faults, key=lambda fault: (fault.file, fault.offset))

    def close(self) -> None:
        """Remove what this rank made, when nobody needs it any more; also what it made before it was killed once."""
        self._mine, self._boards = None, {}
        mine = f"-{self._company.rank:05d}"
        with contextlib.suppress(OSError):
            for name in self._files.names(self._company.folder):
                if name.startswith(f".{self._company.group}.") and name.removesuffix(".tmp").endswith(mine):
                    self._files.remove(self._company.folder / name)

    def _hear(self) -> dict[int, tuple[bool, dict[int, portions.Ranges]]] | None:
        """What all need; None where somebody does not say so in time."""
        found: dict[int, tuple[bool, dict[int, portions.Ranges]]] = {}
        summed = xxhash.xxh3_64()
        end = self._clock.now() + SILENT_S
        for rank in self._company.ranks:
            path = self._company.path("needs", rank)
            if not self._wait(lambda path=path: self._files.exists(path), lambda: self._clock.now() < end):  # type: ignore[misc]
                log.warning("rank %d reads by itself: it has heard nothing of rank %d", self._company.rank, rank)
                return None
            text = self._files.read(path)
            summed.update(text)
            serves, needs = json.loads(text)
            found[rank] = serves, {int(part): blocks for part, blocks in needs.items()}
        self._name = f"board-{summed.hexdigest()}"  # those that heard something else have other portions
        return found

    def _meet(self, count: int, slot_bytes: int, ranks: set[int]) -> None:
        """Make this rank's board and find those of the others."""
        boards = {r: Board(self._company.path(self._name, r), count, slot_bytes, self._files) for r in ranks}
        mine = boards.pop(self._company.rank)
        try:
            mine.make(SLOTS)
            self._mine = mine
        except OSError as error:
            log.warning("rank %d can't hand on what it reads: %s", self._company.rank, error)
        end = self._clock.now() + SILENT_S
        for rank, board in boards.items():
            path = self._company.path(self._name, rank)
            self._wait(lambda path=path: self._files.exists(path), lambda: self._clock.now() < end)  # type: ignore[misc]
            try:
                board.open()
                self._boards[rank] = board
            except (OSError, ValueError):
                self._give_up(rank)

    def _wait(self, until: Callable[[], bool], as_long_as: Callable[[], bool]) -> bool:
        wait = _FIRST_WAIT_S
        while not until():
            if not as_long_as():
                return until()
            if self._mine is not None:
                self._mine.beat()  # whoever waits for this rank knows that it waits, too, and for how long at most
            self._clock.sleep(wait)
            wait = min(wait * 1.5, _LONGEST_WAIT_S)
        return True

    def _do(self, tier: FileTier, portion: Portion, load: Load, faults: list[Fault]) -> None:
        """One portion."""
        try:
            self._one(tier, portion, load, faults)
        except BaseException:
            self._failed = True  # other lanes may wait for this one
            raise

    def _one(self, tier: FileTier, portion: Portion, load: Load, faults: list[Fault]) -> None:
        number, me, board = portion.number, self._company.rank, self._mine
        if len(portion.ranks) == 1:
            run(tier, load, portion.begin, portion.end, faults)
        elif portion.reader != me:
            if not self._copy(portion, load):
                run(tier, load, portion.begin, portion.end, faults)
        elif board is None or (slot := self._slot(portion, board)) is None:
            if board is not None:
                board.publish(number, SKIPPED)
            run(tier, load, portion.begin, portion.end, faults)
        else:
            through = _Through(tier, board, portion, slot)
            try:
                run(through, load, portion.begin, portion.end, faults)
            finally:
                if not through.whole:
                    board.publish(number, SKIPPED)
        if board is not None:
            board.take(number)

    def _copy(self, portion: Portion, load: Load) -> bool:
        """Take a portion that another one reads.

        Returns:
            Whether it came, as it was written.
        """
        rank = portion.reader
        board = self._boards.get(rank)
        if board is None:
            return False
        there = self._wait(lambda: board.published(portion.number) is not None, self._going_on(rank, board))
        slot = board.published(portion.number)
        if not there or slot is None or slot == SKIPPED:
            return False
        spoilt: list[Fault] = []
        run(_From(board.slot(slot), portion), load, portion.begin, portion.end, spoilt)
        if spoilt:
            return False
        with self._lock:
            self.handed_bytes += portion.end - portion.begin
        return True

    def _going_on(self, rank: int, board: Board) -> Callable[[], bool]:
        """Tells whether a rank is worth waiting for."""
        beats, now = board.beats, self._clock.now()
        silent_at, over_at = now + SILENT_S, now + LONGEST_S

        def going_on() -> bool:
            nonlocal beats, silent_at
            if rank in self._silent or board.left:
                return False
            if board.beats != beats:
                beats, silent_at = board.beats, self._clock.now() + SILENT_S
            if self._clock.now() < min(silent_at, over_at):
                return True
            self._give_up(rank)
            return False

        return going_on

    def _give_up(self, rank: int) -> None:
        if rank not in self._silent:
            self._silent.add(rank)
            log.warning("rank %d does not wait for what rank %d reads any more", self._company.rank, rank)

    def _slot(self, portion: Portion, board: Board) -> int | None:
        """A slot for a portion, when all who need what is in it have that; None where it does not come to it."""
        found: int | None = None
        watched: dict[int, Callable[[], bool]] = {}
        end = self._clock.now() + LONGEST_S

        def free() -> bool:
            nonlocal found
            if self._queue[0] != portion.number:
                return False
            for number, before in enumerate(self._slots):
                if before is None or not self._late(before, board):
                    self._slots[number], found = portion, number
                    return True
            return False

        def worth_it() -> bool:
            late = {rank for before in self._slots if before is not None for rank in self._late(before, board)}
            for rank in late - {self._company.rank}:
                if rank not in watched:
                    watched[rank] = self._going_on(rank, self._boards[rank])
                watched[rank]()  # gives it up when it is silent for too long
            return self._clock.now() < end and not self._failed

        self._wait(free, worth_it)
        self._queue.remove(portion.number)
        return found

    def _late(self, portion: Portion, board: Board) -> list[int]:
        """Who still needs what this rank has read."""
        boards = {rank: board if rank == self._company.rank else self._boards.get(rank) for rank in portion.ranks}
        return [
            rank
            for rank, of in boards.items()
            if of is not None and rank not in self._silent and not of.has_taken(portion.number) and not of.left
        ]


class _Through:
    """Reads a portion into a slot, and says when it is there."""

    lanes = LANES
    step = PIECE_BYTES

    def __init__(self, tier: FileTier, board: Board, portion: Portion, slot: int) -> None:
        self._tier, self._board, self._portion, self._slot = tier, board, portion, slot
        self.whole = False

    def fetch(self, item: Stored, begin: int, end: int, into: memoryview | None) -> memoryview:  # noqa: ARG002
        """See fetch.Tier."""
        at = begin - self._portion.begin
        data = self._tier.fetch(item, begin, end, self._board.slot(self._slot)[at : at + align(end - begin)])
        if end == self._portion.end and len(data) == end - begin:
            self.whole = True
            self._board.publish(self._portion.number, self._slot)
        return data


class _From:
    """Copies a portion from another rank's slot, before anything is done with it."""

    lanes = LANES
    step = PIECE_BYTES

    def __init__(self, slot: memoryview, portion: Portion) -> None:
        self._slot, self._portion = slot, portion

    def fetch(self, item: Stored, begin: int, end: int, into: memoryview | None) -> memoryview:  # noqa: ARG002
        """See fetch.Tier."""
        room = (into if into is not None else direct.buffer())[: end - begin]
        move(room, self._slot[begin - self._portion.begin : end - self._portion.begin])
        return room
