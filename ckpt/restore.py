"""Restoring on one rank: finds the newest checkpoint that all ranks can have, and fills the live state from it.

Every byte that a rank needs is read and compared with its checksum before any of it reaches the live state: arrays that
the state holds already are read into memory of which there is enough before the staging slots are made, and copied from
there when all ranks have agreed; arrays that the state does not hold yet, such as an optimizer's before its first step,
are read straight into their final memory, which nobody sees before the agreement. Where there is no such room, the file
is read twice instead: once to compare, once to fill.

That memory is no slot: shared memory has to be reserved before it is used, which takes half as long as reading as much
from a fast disk, and nothing could be read meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from transom_hpc.base.errors import CorruptCheckpoint, StateError
from transom_hpc.ckpt import catalog, direct, dtypes, fill, kinds, lanes, leaves, names
from transom_hpc.ckpt.catalog import Checkpoint, Fault
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry, blocks
from transom_hpc.ckpt.manifest import Manifest, Stored
from transom_hpc.ckpt.shm import Segment, align
from transom_hpc.ckpt.state import Leaf

if TYPE_CHECKING:
    import torch


LANES = 8
"""Blocks on their way: while some are summed, as many as the disk wants are still being read."""

_CACHED_BYTES = 256 << 10
"""Summed and then copied: less than a core's own cache."""


@dataclass(slots=True)
class Found:
    """What one rank says about one candidate.

    Args:
        faults: bytes that are not those that were written.
        unreadable: why the file could not be read; empty where it could.
        unfit: why the live state can't take it; empty where it can.
        left_out: what does not fit and is not taken, where that is allowed.
    """

    faults: list[str] = field(default_factory=list)
    unreadable: str = ""
    unfit: str = ""
    left_out: str = ""

    @property
    def good(self) -> bool:
        """Whether this rank can restore from it."""
        return not (self.faults or self.unreadable or self.unfit)

    def to_json(self) -> dict[str, Any]:
        """As other ranks read it."""
        return {"faults": self.faults[:20], **{k: getattr(self, k) for k in ("unreadable", "unfit", "left_out")}}


class Candidate:
    """One checkpoint held against the live state of one rank.

    Args:
        state: the live state.
        rank: this rank.
        world_size: how many there are.
        strict: whether everything must fit.
        unpickle: see Checkpointer.restore.
        room: gives memory for so many bytes, aligned; None where there is none.
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
    ) -> None:
        self._state = state
        self._rank = rank
        self._world_size = world_size
        self._strict = strict
        self._unpickle = unpickle
        self._files = files
        self._room = room
        self._match: fill.Match | None = None
        self._bytes: dict[str, Callable[[int, int], memoryview]] = {}
        self._later: list[tuple[Path, list[Stored]]] = []

    def examine_file(self, checkpoint: Checkpoint) -> Found:
        """Read and compare all that this rank needs of a checkpoint. The live state is not touched."""
        mine = [item for item in checkpoint.manifest.stored if item.rank in (None, self._rank)]
        stored = {item.entry.name: item for item in mine}
        found = Found()
        try:
            documents = self._documents(checkpoint, mine, found)
            if found.good and self._fits(documents, {n: i.entry for n, i in stored.items()}, found, checkpoint):
                self._read(checkpoint, stored, found)
        except OSError as error:
            found.unreadable = f"{checkpoint.path}: {error}"
        return found

    def examine_memory(self, entries: Sequence[Entry], places: Sequence[int], segment: Segment) -> Found:
        """Compare all that is in a segment of this node. The live state is not touched.

        What goes into new arrays is copied in the same pass, while it is in the processor's cache.
        """
        found = Found()
        held = {entry.name: (entry, at) for entry, at in zip(entries, places, strict=True)}
        structure = [pair for pair in held.values() if pair[0].dtype == dtypes.JSON]
        _compare(segment, structure, {}, found)
        if not found.good:
            return found
        documents = {
            name.partition("/")[2]: json.loads(bytes(segment.data(at, at + entry.nbytes)))
            for name, (entry, at) in held.items()
            if entry.dtype == dtypes.JSON
        }
        if not self._fits(documents, {name: entry for name, (entry, _) in held.items()}, found):
            return found
        new = self._new_memory()
        _compare(segment, [pair for pair in held.values() if pair[0].dtype != dtypes.JSON], new, found)
        for name, (entry, at) in held.items():
            whole = new[name] if name in new else segment.data(at, at + entry.nbytes)
            self._bytes[name] = lambda begin, end, whole=whole: whole[begin:end]  # type: ignore[misc]
        return found

    def _new_memory(self) -> dict[str, memoryview]:
        """Memory of arrays that the state does not hold yet, by name: nobody sees it before the agreement."""
        assert self._match is not None
        rooms = {}
        for name, targets in self._match.targets.items():
            fresh = next((t for t in targets if t.fresh), None)
            there = memory(fresh.array) if fresh is not None else None
            if there is not None:
                rooms[name] = there
        return rooms

    def _documents(self, checkpoint: Checkpoint, mine: Sequence[Stored], found: Found) -> dict[str, Any]:
        """The structure, read and compared."""
        read: dict[str, bytearray] = {}
        wanted = [item for item in mine if item.entry.dtype == dtypes.JSON]
        for item in wanted:
            read[item.entry.name] = bytearray(item.entry.nbytes)
        _transfer(self._files, checkpoint.path, wanted, lambda n, b, e: memoryview(read[n])[b:e], found)
        if not found.good:
            return {}
        return {name.partition("/")[2]: json.loads(bytes(data)) for name, data in read.items()}

    def _fits(
        self,
        documents: Mapping[str, Any],
        entries: Mapping[str, Entry],
        found: Found,
        checkpoint: Checkpoint | None = None,
    ) -> bool:
        try:
            match = fill.match(documents, entries, self._state, self._unpickle)
        except StateError as error:
            found.unfit = str(error)
            return False
        problems, advice = match.complain(), "strict=False takes what fits"
        saved = checkpoint.manifest if checkpoint is not None else None
        if saved is not None and (why := homeless(saved, self._rank, self._world_size, match.missing)):
            problems = f"{why}; {problems}" if problems else why
            advice = f"run it on {saved.world_size} ranks; {advice}"
        if problems and self._strict:
            found.unfit = f"the checkpoint does not fit the state: {problems}; {advice}"
            return False
        found.left_out = problems
        self._match = match
        return True

    def _read(self, checkpoint: Checkpoint, stored: Mapping[str, Stored], found: Found) -> None:
        assert self._match is not None
        rooms: dict[str, memoryview] = {
            name: memoryview(bytearray(stored[name].entry.nbytes)) for name in self._match.objects
        }
        rooms |= self._new_memory()
        held = [stored[n] for n in self._match.targets if n not in rooms and stored[n].entry.nbytes]
        spare = self._room(sum(align(item.entry.nbytes) for item in held)) if held else None
        if spare is not None:
            at = 0
            for item in held:
                rooms[item.entry.name] = spare[at : at + item.entry.nbytes]
                at += align(item.entry.nbytes)
        elif held:
            self._later = [(checkpoint.path, held)]
            _transfer(self._files, checkpoint.path, held, None, found)
        direct = [stored[name] for name in rooms]
        _transfer(self._files, checkpoint.path, direct, lambda n, b, e: rooms[n][b:e], found)
        self._bytes = {name: lambda b, e, n=name: rooms[n][b:e] for name in rooms}  # type: ignore[misc]

    def take(self) -> None:
        """Fill the live state. Called when all ranks can.

        Raises:
            CorruptCheckpoint: the bytes changed between the two readings, where there was no room for a segment.
        """
        assert self._match is not None
        match = self._match
        for name in match.objects:
            match.objects[name] = bytes(self._bytes[name](0, 1 << 62))
        for path, items in self._later:
            self._read_again(path, items)
        jobs: list[Callable[[], None]] = []
        for name, targets in match.targets.items():
            if name in self._bytes:
                jobs += [job for target in targets for job in _fill(target, name, self._bytes[name])]
        lanes.run(jobs, 2)
        filled = [t.array for targets in match.targets.values() for t in targets if not t.fresh]
        for tensor in filter(kinds.is_tensor, filled):
            from transom_hpc.ckpt import tensors

            tensors.count_change(tensor)
        match.apply()

    def _read_again(self, path: Path, items: Sequence[Stored]) -> None:
        assert self._match is not None
        found = Found()
        for item in items:
            room = np.empty(item.entry.nbytes, dtype=np.uint8)
            _transfer(self._files, path, [item], lambda _, b, e, room=room: room.data[b:e], found)  # type: ignore[misc]
            if not found.good:
                raise CorruptCheckpoint(f"{path} changed while it was being read: {found.faults[0]}", path=path)
            for target in self._match.targets[item.entry.name]:
                for job in _fill(target, item.entry.name, lambda b, e, room=room: room.data[b:e]):  # type: ignore[misc]
                    job()


def homeless(saved: Manifest, rank: int, world_size: int, missing: Sequence[str]) -> str:
    """What is kept for each rank and can't be given back to as many ranks as there are now. Pure.

    Args:
        saved: what is in the checkpoint.
        rank: this rank.
        world_size: how many there are now.
        missing: places of this rank's state for which the checkpoint has nothing.

    Returns:
        The first such part and both numbers of ranks; empty where everything has its place.
    """
    own = [item for item in saved.stored if item.rank is not None]
    sizes = f"the checkpoint is of {saved.world_size} ranks and here are {world_size}"
    for item in own:
        if item.rank is not None and item.rank >= world_size:
            return f"{names.shown(item.entry.name)} of rank {item.rank} has no rank to go to: {sizes}"
    if own and missing and rank >= saved.world_size:
        part = missing[0].partition(" (")[0]
        return f"{part} is kept for each rank, and there is none for rank {rank}: {sizes}"
    return ""


def _transfer(
    files: Files,
    path: Path,
    items: Sequence[Stored],
    into: Callable[[str, int, int], memoryview] | None,
    found: Found,
) -> None:
    """Read arrays and compare them, several blocks at a time."""
    for name in sorted({item.file for item in items}):
        with direct.Target(files, path / name, os.O_RDONLY) as source:

            def job(item: Stored, index: int, begin: int, end: int, source: direct.Target = source) -> None:
                room = into(item.entry.name, begin, end) if into is not None else None
                faults = catalog.check_block(source, item, index, begin, end, room)
                found.faults.extend(str(fault) for fault in faults)

            wanted = catalog.blocks_of(item for item in items if item.file == name)
            lanes.run([lambda w=w: job(*w) for w in wanted], LANES)  # type: ignore[misc]


def _compare(segment: Segment, held: Sequence[tuple[Entry, int]], into: Mapping[str, memoryview], found: Found) -> None:
    """Compare arrays in a segment with their checksums, and copy those for which there is room.

    Args:
        held: what is in it, and where.
        into: memory of arrays that nobody sees yet, by name.
    """

    def job(entry: Entry, at: int, index: int, begin: int, end: int) -> None:
        data, room = segment.data(at + begin, at + end), into.get(entry.name)
        if room is None:
            digest = xxhash.xxh3_128_hexdigest(data)
        else:
            summed = xxhash.xxh3_128()
            for piece in range(0, end - begin, _CACHED_BYTES):
                stop = min(piece + _CACHED_BYTES, end - begin)
                summed.update(data[piece:stop])
                _move(room[begin:end], data, piece, stop)
            digest = summed.hexdigest()
        if digest != entry.sums[index]:
            found.faults.append(str(Fault(segment.path.name, entry.name, None, at + begin, "the bytes have changed")))

    lanes.run(
        partial(job, entry, at, index, begin, end)
        for entry, at in held
        for index, (begin, end) in enumerate(blocks(entry.nbytes))
    )


def memory(array: torch.Tensor | np.ndarray[Any, Any]) -> memoryview | None:
    """The array's own bytes, to be written to; None where its elements do not lie together in this machine's memory."""
    if array.nbytes == 0 or (isinstance(array, np.ndarray) and not array.flags.writeable):
        return None
    return leaves.in_place(Leaf("", array.detach() if kinds.is_tensor(array) else array, "", (), array.nbytes))


def _fill(target: fill.Target, name: str, data: Callable[[int, int], memoryview]) -> list[Callable[[], None]]:
    """Jobs that put an array's bytes into its place."""
    array = target.array
    if array.nbytes == 0:
        return []
    there = memory(array)
    if there is None:
        return [lambda: _fill_scattered(array, name, data(0, array.nbytes))]
    whole = data(0, array.nbytes)
    if direct.address(there) == direct.address(whole):
        return []
    return [lambda b=b, e=e: _move(there, whole, b, e) for b, e in blocks(array.nbytes)]  # type: ignore[misc]


def _move(there: memoryview, data: memoryview, begin: int, end: int) -> None:
    np.copyto(np.frombuffer(there[begin:end], dtype=np.uint8), np.frombuffer(data[begin:end], dtype=np.uint8))


def _fill_scattered(array: torch.Tensor | np.ndarray[Any, Any], name: str, data: memoryview) -> None:
    flat = np.frombuffer(data, dtype=np.uint8)
    if isinstance(array, np.ndarray):
        np.copyto(array, flat.view(array.dtype).reshape(array.shape))
        return
    from transom_hpc.ckpt import tensors

    tensors.copy_in(array, flat, name)
