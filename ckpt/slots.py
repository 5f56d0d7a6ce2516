"""The two staging slots of a rank: which one the next save may use, and what a program before left in them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from transom_hpc.ckpt import budget, fence, manifest, shm
from transom_hpc.ckpt.distrust import Distrust
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.orders import Orders
from transom_hpc.ckpt.shm import Folder, Segment

log = logging.getLogger("transom_hpc.ckpt")

SLOTS = 2

COPY = "copy."
"""How the names of segments begin that are kept for another host."""


@dataclass(frozen=True, slots=True)
class Left:
    """A whole segment that an earlier program left.

    Args:
        step: the training step.
        attempt: whose.
        world_size: ranks of that attempt.
        entries: what is in it.
        places: where each begins.
        segment: it.
    """

    step: int
    attempt: str
    world_size: int
    entries: Sequence[Entry]
    places: Sequence[int]
    segment: Segment


def read_left(segment: Segment) -> Left | None:
    """What a segment that is not open yet holds; None where it is not whole."""
    try:
        segment.open()
        header = segment.header()
        if header is None:
            return None
        table: Mapping[str, object] = json.loads(header.table)
        if not segment.path.name.removeprefix(COPY).startswith(str(table["whose"])):
            return None  # another rank's under this one's name
        entries = [manifest.entry_from_json(item) for item in table["entries"]]  # type: ignore[attr-defined]
        return Left(header.step, header.attempt, table["world_size"], entries, table["places"], segment)  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def group(directory: Path) -> str:
    """How the names of all segments begin that have to do with a checkpoint directory."""
    return xxhash.xxh3_64_hexdigest(str(directory.resolve()).encode())[:8]


def prefix(directory: Path, rank: int) -> str:
    """How the names of a rank's segments begin."""
    return f"{group(directory)}-rank-{rank:05d}."


class Slots:
    """Segments of one rank in one folder.

    Args:
        folder: open.
        directory: the checkpoint directory; segments of another one are not ours.
        rank: whose.
        world_size: for the table.
        attempt: this one.
        limit: bytes that both slots together may take; None for none.
        local_ranks: ranks on this node that will ask the same.
    """

    def __init__(
        self,
        folder: Folder,
        directory: Path,
        rank: int,
        world_size: int,
        attempt: str,
        files: Files,
        limit: int | None,
        local_ranks: int,
    ) -> None:
        self._folder = folder
        self.prefix = prefix(directory, rank)
        self._world_size = world_size
        self._attempt = attempt
        self._files = files
        self._limit = limit
        self._local_ranks = local_ranks
        self._lock = threading.Condition()
        self._free = [Segment(self._path(number), files) for number in range(SLOTS)]
        self._taken: dict[Segment, int] = {}
        self._count = itertools.count(1)
        self._busy = 0
        self._preparing = 0

    @property
    def path(self) -> Path:
        """The folder."""
        return self._folder.path

    def _path(self, number: int) -> Path:
        return self._folder.path / f"{self.prefix}{self._attempt}.{number}"

    def take(self, nbytes: int, sparing: bool = False) -> tuple[Segment | None, str]:
        """A slot with room, the one that was used longest ago first. Waits for one that is just being made ready.

        Args:
            nbytes: room that is needed.
            sparing: never the slot that holds the newest whole step.

        Returns:
            The slot; or None and why the memory is not there; or None and an empty text where both are in use.

        Raises:
            OSError: the folder failed otherwise.
        """
        why = ""
        with self._lock:
            while True:
                newest = self._newest() if sparing else None
                for segment in self._free:
                    if segment is newest:
                        why = why or "the other slot holds the newest step"
                        continue
                    why = self._fits(segment, nbytes)
                    if not why:
                        self._free.remove(segment)
                        self._busy += 1
                        self._taken[segment] = next(self._count)
                        return segment, ""
                if not self._preparing:
                    # One slot that fits is enough to go on: wait for it rather than hold the program up.
                    return None, "" if self._busy else why
                self._lock.wait()

    def _newest(self) -> Segment | None:
        """The free slot that holds the newest whole step."""
        held = {segment: segment.header() for segment in self._free if segment.capacity}
        steps = {segment: (head.attempt, head.step) for segment, head in held.items() if head is not None}
        return max(steps, key=steps.__getitem__, default=None)

    def give(self, segment: Segment) -> None:
        """The save that used it is over."""
        with self._lock:
            self._busy -= 1
            self._free.append(segment)
            self._free.sort(key=lambda free: self._taken.get(free, 0))  # one that was begun later may be over first

    def drop(self, segment: Segment) -> None:
        """The save that used it is over, and somebody may still read it: its memory goes when that one lets go."""
        segment.remove()
        self.give(segment)

    def prepare(self, nbytes: int, also: Callable[[Segment], None] = lambda _: None) -> None:
        """Make the memory of all slots ready, as far as it is there.

        Args:
            nbytes: what a save takes.
            also: done with each slot that is ready.
        """
        with self._lock:
            free = list(self._free)
        for segment in free:
            with self._lock:
                if segment not in self._free:
                    continue
                self._free.remove(segment)
                self._preparing += 1
            try:
                if not self._fits(segment, nbytes):
                    segment.populate()
                    also(segment)
            except OSError as error:
                log.warning("staging memory could not be made ready: %s", error)
            finally:
                with self._lock:
                    self._free.append(segment)
                    self._preparing -= 1
                    self._lock.notify_all()

    def allow(self, nbytes: int) -> bool:
        """Whether a slot of this size could be made now, so that other memory may be taken for a moment instead."""
        return shm.HEADER_BYTES + shm.align(nbytes) <= self._room()

    def _fits(self, segment: Segment, nbytes: int) -> str:
        """Make room in a slot, or tell why there is none."""
        need = shm.HEADER_BYTES + shm.align(nbytes)
        grow = need - shm.HEADER_BYTES - segment.capacity
        if grow > 0:
            free = self._room()
            if grow > free:
                return (
                    f"staging takes {need / 1e6:.0f} MB of shared memory and {free / 1e6:.0f} MB may be used"
                    f" (in {self._folder.path})"
                )
        try:
            segment.reserve(nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            return f"staging {need / 1e6:.0f} MB in {self._folder.path}: {error.strerror}"
        return ""

    def table(self, entries: Sequence[Entry], places: Sequence[int]) -> bytes:
        """What a whole segment says it holds."""
        return json.dumps(
            {
                "whose": self.prefix,  # as its name has it too, but a name can be given to another file
                "world_size": self._world_size,
                "entries": [manifest.entry_to_json(entry) for entry in entries],
                "places": list(places),
            },
            separators=(",", ":"),
        ).encode()

    def left(self) -> list[Left]:
        """Whole segments of attempts before this one, newest first."""
        return self._whole(self._before())

    def left_here(self) -> dict[int, list[Left]]:
        """The same of every rank that has any on this node."""
        found = {rank: self._whole(paths) for rank, paths in self._all_before().items()}
        return {rank: left for rank, left in found.items() if left}

    def clear(self) -> None:
        """Remove what attempts before this one left of ranks that there are no more; nobody will adopt it."""
        orders = Orders(self._folder.path, self._files)
        for rank, paths in self._all_before().items():
            for path in paths if rank >= self._world_size else ():
                with contextlib.suppress(OSError):
                    orders.withdraw(f"{path.name}.")
                    self._files.remove(path)

    def forget(self, distrust: Distrust) -> None:
        """Give up this rank's segments of earlier attempts that are not trusted: nobody may ever find them again."""
        orders = Orders(self._folder.path, self._files)
        for left in self._whole(self._before()):
            if distrust.covers(left.step, left.attempt):
                log.warning("step %d in this host's memory is not trusted, and given up", left.step)
                with contextlib.suppress(OSError):
                    orders.withdraw(f"{left.segment.path.name}.")
                    self._files.remove(left.segment.path)

    def _whole(self, paths: Sequence[Path]) -> list[Left]:
        found = [read_left(Segment(path, self._files)) for path in paths]
        left = [item for item in found if item is not None and fence.is_before(item.attempt, self._attempt)]
        return sorted(left, key=lambda item: (item.step, item.attempt), reverse=True)

    def adopt(self, left: Sequence[Left] = ()) -> None:
        """Reuse the memory of earlier attempts: it is warm, and nobody else will.

        Not that which the checkpoint server still writes from: it goes when the server lets go.

        Args:
            left: segments that are mapped already. They become slots as they are: to map as much again takes as long as
                to compare it.
        """
        mapped = {item.segment.path: item.segment for item in left}
        steps = {item.segment: item.step for item in left}
        found = sorted(self._before(), key=lambda path: steps[mapped[path]] if path in mapped else -1)
        orders = Orders(self._folder.path, self._files)
        with self._lock:
            for path in reversed(found):
                empty = next((segment for segment in self._free if segment.capacity == 0), None)
                try:
                    if empty is None or orders.withdraw(f"{path.name}."):
                        self._files.remove(path)
                        continue
                    self._files.rename(path, empty.path)
                    segment = mapped.get(path)
                    if segment is None:
                        empty.open()
                        continue
                    segment.path = empty.path
                    self._free[self._free.index(empty)] = segment
                except (OSError, ValueError):
                    with contextlib.suppress(OSError):
                        self._files.remove(path)
            # What is newest is overwritten last: other hosts may yet need it.
            self._free.sort(key=lambda segment: (segment.capacity == 0, steps.get(segment, -1)))

    def _before(self) -> list[Path]:
        return [
            path
            for path in self._folder.segments(self.prefix)
            if fence.is_before(path.name.removeprefix(self.prefix).rpartition(".")[0], self._attempt)
        ]

    def _all_before(self) -> dict[int, list[Path]]:
        """By rank, segments of attempts before this one."""
        found: dict[int, list[Path]] = {}
        stem = self.prefix.partition("-rank-")[0] + "-rank-"
        for path in self._folder.segments(stem):
            rank, _, rest = path.name.removeprefix(stem).partition(".")
            if rank.isdigit() and fence.is_before(rest.rpartition(".")[0], self._attempt):
                found.setdefault(int(rank), []).append(path)
        return found

    def _room(self) -> int:
        """Bytes by which the slots may grow now."""
        return budget.room(budget.read(self._folder.path), self._local_ranks, self._limit, self._held())

    def _held(self) -> int:
        return sum(path.stat().st_size for path in self._folder.segments(f"{self.prefix}{self._attempt}."))

    def close(self) -> None:
        """Give the memory of this attempt back."""
        with self._lock:
            for segment in self._free:
                segment.let_go()
            self._free.clear()
            Orders(self._folder.path, self._files).withdraw(self.prefix + self._attempt + ".")
            for path in self._folder.segments(self.prefix + self._attempt + "."):
                with contextlib.suppress(OSError):
                    self._files.remove(path)
