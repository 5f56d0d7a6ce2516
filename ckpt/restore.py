"""Restoring on one rank: holds what is stored against the live state, and fills the live state from it.

Every byte that a rank needs is read and compared with its checksum before any of it reaches the live state: what goes
into arrays that the state holds already is read into memory of which there is enough before the staging slots are made,
and copied from there when all ranks have agreed; arrays that the state does not hold yet, such as an optimizer's before
its first step, are read straight into their final memory, which nobody sees before the agreement. Where there is no
such room, the file is read twice instead: once to compare, once to fill, one array after the other.

That memory is no slot: shared memory has to be reserved before it is used, which takes half as long as reading as much
from a fast disk, and nothing could be read meanwhile.

A rank reads only the blocks that have something of what it wants, however an array was cut when it was saved.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from transom_hpc.base.errors import CorruptCheckpoint, StateError
from transom_hpc.ckpt import fill, kinds, lanes, supply
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.fetch import FileTier, Load, MemoryTier, Tier, everything, fetch
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.manifest import Stored
from transom_hpc.ckpt.sharing import Sharing
from transom_hpc.ckpt.shm import Segment, align
from transom_hpc.ckpt.stock import Stock, homeless
from transom_hpc.ckpt.supply import Want

log = logging.getLogger("transom_hpc.ckpt")

Opened = Callable[[Sequence[Stored]], AbstractContextManager[Tier]]
"""Opens the place from which stored things are read."""


@dataclass(slots=True)
class Found:
    """What one rank says about one candidate.

    Args:
        faults: bytes that are not those that were written.
        unreadable: why it could not be read; empty where it could.
        unfit: why the live state can't take it; empty where it can.
        left_out: what does not fit and is not taken, where that is allowed.
        extra: places that are stored and that the live state of this rank does not have; others may.
        looked: whether this rank has looked at what all ranks saved, so that `extra` is all of it.
        strict: whether everything must fit.
        borrowed: whether it is taken from segments of other ranks.
    """

    faults: list[str] = field(default_factory=list)
    unreadable: str = ""
    unfit: str = ""
    left_out: str = ""
    extra: list[str] = field(default_factory=list)
    looked: bool = False
    strict: bool = True
    borrowed: bool = False

    @property
    def good(self) -> bool:
        """Whether this rank can restore from it."""
        return not (self.faults or self.unreadable or self.unfit)

    def to_json(self) -> dict[str, Any]:
        """As other ranks read it."""
        kinds = ("unreadable", "unfit", "left_out", "extra", "looked", "strict", "borrowed")
        return {"faults": self.faults[:20], **{kind: getattr(self, kind) for kind in kinds}}


class Candidate:
    """One checkpoint held against the live state of one rank.

    Args:
        state: the live state.
        rank: this rank.
        world_size: how many there are.
        strict: whether everything must fit.
        unpickle: see Checkpointer.restore.
        room: gives memory for so many bytes, aligned; None where there is none.
        sharing: with the other ranks of this host, of what is read from files; None where this rank reads by itself.
    """

    def __init__(
        self,
        state: Any,
        rank: int,
        world_size: int,
        strict: bool,
        unpickle: bool,
        files: Files,
        room: Callable[[int], memoryview | None],
        sharing: Sharing | None = None,
    ) -> None:
        self._state = state
        self._rank = rank
        self._world_size = world_size
        self._strict = strict
        self._unpickle = unpickle
        self._files = files
        self._room = room
        self._sharing = sharing
        self._stored: Sequence[Stored] = ()
        self._stock = Stock((), rank, world_size)
        self._match = fill.Match()
        self._wants: list[Want] = []
        self._open: Opened | None = None
        self._in_memory = False
        self._where = ""
        self.needed_bytes = 0
        """Of what this rank wants."""
        self.read_bytes = 0
        """Read by this rank: from files, or compared in memory."""
        self.handed_bytes = 0
        """Of files, that others of its host have read for it."""

    def examine_file(self, checkpoint: Checkpoint) -> Found:
        """Read and compare all that this rank needs of a checkpoint. The live state is not touched."""
        saved = checkpoint.manifest
        self._where = str(checkpoint.path)
        self._stored = saved.stored
        self._open = lambda items: FileTier(self._files, checkpoint.path, (item.file for item in items))
        return self._examine(Stock(saved.stored, self._rank, saved.world_size), complete=True)

    def examine_memory(
        self, stored: Sequence[Stored], segments: Mapping[str, Segment], world_size: int, complete: bool
    ) -> Found:
        """Compare all that this rank needs of segments on this host. The live state is not touched.

        What goes into new arrays is copied in the same pass, while it is in the processor's cache.

        Args:
            stored: what is in them; `file` is the segment's name.
            segments: by name.
            world_size: ranks that saved them.
            complete: whether these are the segments of all of them.
        """
        self._where, self._in_memory = "memory", True
        self._open = lambda _: nullcontext(MemoryTier(segments))
        return self._examine(Stock(stored, self._rank, world_size), complete)

    def _examine(self, stock: Stock, complete: bool) -> Found:
        self._stock = stock
        found = Found(strict=self._strict)
        try:
            if self._fits(complete, found):
                self._read(found)
        except OSError as error:
            found.unreadable = f"{self._where}: {error}"
        return found

    def _fits(self, complete: bool, found: Found) -> bool:
        stock = self._stock
        own = self._documents(stock.documents, found)
        differs = stock.world_size != self._world_size
        others: list[dict[str, Any]] = []
        found.looked = complete and not stock.others
        if not found.good:
            return False
        try:
            match = fill.match(own, stock.entries, self._state, self._unpickle)
            if stock.others and (differs or match.complain()):
                others = [self._documents(items, found) for items in _by_rank(stock.others)]
                found.looked = complete
                match = fill.match(own, stock.entries, self._state, self._unpickle, others)
        except StateError as error:
            found.unfit = str(error)
            return False
        if not found.good:
            return False
        wanted = supply.wants(stock, match)
        found.extra = sorted({*match.extra, *match.elsewhere}) if found.looked else []
        problems = [match.complain(extras=not found.looked), *wanted.gaps]
        advice = "strict=False takes what fits"
        if differs:
            unlike = {
                key: [documents[key] for documents in (own, *others) if key in documents] for key in _keys(others)
            }
            if why := homeless(stock, self._world_size, unlike, match.missing):
                problems.insert(0, why)
                advice = f"run it on {stock.world_size} ranks; {advice}"
        said = "; ".join(filter(None, problems))
        if said and (self._strict or wanted.void):
            found.unfit = f"the checkpoint does not fit the state: {said}; {advice}"
            return False
        if wanted.gaps and self._in_memory:
            found.unreadable = said  # the file has what the memory of this host has not
            return False
        found.left_out = said
        self._match, self._wants = match, wanted.wants
        if wanted.overlaps:
            log.warning(
                "%d arrays have parts that overlap, or that ranks held differently; the lowest rank's is taken where "
                "this rank has none of its own: %s",
                len(wanted.overlaps),
                ", ".join(wanted.overlaps[:4]),
            )
        return True

    def _documents(self, items: Sequence[Stored], found: Found) -> dict[str, Any]:
        """Structure, read and compared, by outermost key."""
        read = {item.entry.name: bytearray(item.entry.nbytes) for item in items}
        loads = [everything(item, memoryview(read[item.entry.name])) for item in items]
        self._fetch(items, loads, found)
        if not found.good:
            return {}
        return {name.partition("/")[2]: json.loads(bytes(data)) for name, data in read.items()}

    def _fetch(self, items: Sequence[Stored], loads: Sequence[Load], found: Found, compare: bool = True) -> None:
        assert self._open is not None
        with self._open(items) as tier:
            found.faults += [str(fault) for fault in fetch(tier, loads, compare)]
            self._count(tier, loads if compare else ())

    def _fetch_together(self, loads: Sequence[Load], found: Found) -> None:
        """With the other ranks of this host, if there are any."""
        sharing = self._sharing
        if sharing is None or self._in_memory:
            self._fetch([load.item for load in loads], loads, found)
            return
        with FileTier(self._files, Path(self._where), (load.item.file for load in loads)) as tier:
            faults = sharing.fetch(tier, loads, self._stored)
            if faults is None:
                faults = fetch(tier, loads)
            found.faults += [str(fault) for fault in faults]
            self._count(tier, loads)
        self.handed_bytes = sharing.handed_bytes

    def _count(self, tier: Tier, loads: Sequence[Load]) -> None:
        self.read_bytes += tier.read_bytes if isinstance(tier, FileTier) else sum(load.nbytes for load in loads)

    def _read(self, found: Found) -> None:
        """Read what is wanted, as far as there is room for it, and compare all of it."""
        self.needed_bytes = sum(want.nbytes for want in self._wants)
        for want in self._wants:
            fresh = want.fresh
            if fresh is not None:
                want.room = supply.memory(fresh.array)
            elif not want.targets:
                want.room = memoryview(bytearray(want.nbytes))
        held = [want for want in self._wants if want.room is None] if not self._in_memory else []
        spare = self._room(sum(align(want.nbytes) for want in held)) if held else None
        at = 0
        for want in held:
            if spare is not None:
                want.room = spare[at : at + want.nbytes]
                at += align(want.nbytes)
        self._fetch_together(supply.loads(self._stock, self._wants), found)

    def take(self) -> None:
        """Fill the live state. Called when all ranks can.

        Raises:
            CorruptCheckpoint: the bytes changed between the two readings, where there was no room for all of them.
        """
        jobs: list[Callable[[], None]] = []
        for want in self._wants:
            if want.room is None:
                jobs += self._take_later(want)
            elif want.name in self._match.objects:
                self._match.objects[want.name] = bytes(want.room)
            else:
                jobs += [job for t in want.targets for job in supply.fill_in(t, want.name, want.room)]
        lanes.run(jobs, 2)
        filled = [t.array for targets in self._match.targets.values() for t in targets if not t.fresh]
        for tensor in filter(kinds.is_tensor, filled):
            from transom_hpc.ckpt import tensors

            tensors.count_change(tensor)
        self._match.apply()

    def _take_later(self, want: Want) -> list[Callable[[], None]]:
        """Fill from memory, whose bytes were compared where they are; or from the file, once more."""
        whole = supply.together(self._stock, want) if self._in_memory else None
        if whole is not None:
            assert self._open is not None
            with self._open([whole[0]]) as tier:
                data = tier.fetch(*whole, None)
            return [job for target in want.targets for job in supply.fill_in(target, want.name, data)]
        there = supply.memory(want.targets[0].array) if self._in_memory else None
        want.room = there if there is not None else np.empty(want.nbytes, dtype=np.uint8).data
        found = Found()
        loads = supply.loads(self._stock, [want])
        self._fetch([load.item for load in loads], loads, found, compare=not self._in_memory)
        if not found.good:
            path = self._where
            raise CorruptCheckpoint(f"{path} changed while it was being read: {found.faults[0]}", path=path)
        for target in want.targets:
            for job in supply.fill_in(target, want.name, want.room):
                job()
        want.room = None
        return []


def _by_rank(documents: Sequence[Stored]) -> list[list[Stored]]:
    """Those of each rank, in rank order; what several have counts for the lowest."""
    found: dict[int, list[Stored]] = {}
    for item in documents:
        found.setdefault(item.lowest, []).append(item)
    return list(found.values())


def _keys(others: Sequence[Mapping[str, Any]]) -> set[str]:
    return {key for documents in others for key in documents}
