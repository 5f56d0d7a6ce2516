"""Staging: a state's bytes on their way from live tensors to memory that nobody changes.

What the optimizer owns stays as it is until its next step, so it is copied by a thread while the program goes on;
everything else is copied before `begin` returns. The version counter of each tensor, read when the state was walked
and again later, proves that nothing was torn: a tensor that changed in between is an error, never committed. What moves
no counter is guarded by samples (see there).

torch counts a change when the operation ends, so a counter read right after the copy may miss one that is under way.
The reading that counts is therefore taken by the program's own thread when it is next heard of (in the optimizer's
step, in a call of the checkpointer), when whatever it began is over; or GRACE_S later when it is not heard of. Then all
that was put off is also summed once more, live: a program that keeps silent may have changed it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import xxhash

from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import devices, lanes, names
from transom_hpc.ckpt.layout import Entry, blocks
from transom_hpc.ckpt.leaves import changed, copy, in_place, is_here, torn, units
from transom_hpc.ckpt.samples import Samples
from transom_hpc.ckpt.shm import Segment, align
from transom_hpc.ckpt.state import Leaf

GRACE_S = 10.0
"""No single operation on tensors takes as long."""

_AT_ONCE_LANES = 2
_SMALL_BYTES = 1 << 20


class Source(Protocol):
    """Where a save's bytes come from."""

    outline: Sequence[Entry]
    """Everything that is held, without checksums."""

    def data(self, index: int, begin: int, end: int) -> memoryview:
        """Bytes [begin, end) of one entry; waits until they are there.

        Raises:
            SaveError: they never will be.
        """

    def entries(self) -> list[Entry]:
        """Everything that is held, with checksums; waits for them.

        Raises:
            SaveError
        """

    def confirm(self) -> None:
        """Wait until it is certain that nothing was torn. Nothing may be committed before.

        Raises:
            SaveError: something was.
        """


def outline(leaves: Sequence[Leaf]) -> list[Entry]:
    """What is held, before any checksum is known."""
    return [
        Entry(leaf.name, leaf.dtype, leaf.shape, leaf.shape, (0,) * len(leaf.shape), leaf.nbytes, ())
        if leaf.global_shape is None or leaf.start is None
        else Entry(leaf.name, leaf.dtype, leaf.shape, leaf.global_shape, leaf.start, leaf.nbytes, ())
        for leaf in leaves
    ]


def size(leaves: Sequence[Leaf]) -> int:
    """Bytes that the leaves take in a segment, each beginning on a page of its own."""
    return sum(align(leaf.nbytes) for leaf in leaves)


class Staged:
    """A save that goes through a segment.

    Args:
        leaves: what to copy.
        segment: with room for all of it.
        step: for messages.
        whole: called with the entries and their places when all bytes are there and summed.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        segment: Segment,
        step: int,
        whole: Callable[[list[Entry], list[int], int], None],
    ) -> None:
        self.outline: Sequence[Entry] = outline(leaves)
        self.changed: set[str] = set()
        self._leaves = list(leaves)
        self._segment = segment
        self._step = step
        self._whole = whole
        self._places: list[int] = []
        at = 0
        for leaf in leaves:
            self._places.append(at)
            at += align(leaf.nbytes)
        self._used = at
        self._state = threading.Condition()
        self._left: list[int] = [0] * len(leaves)
        self._samples: dict[int, Samples] = {}
        self._lazy_left = 0
        self._gpu: devices.Gpu | None = None
        self._in_flight: deque[int] = deque()  # copies from a GPU that were started
        self._waiting: deque[tuple[int, tuple[int, int] | None]] = deque()
        self._error: SaveError | None = None
        self._entries: list[Entry] | None = None
        self._checked = threading.Event()
        self._settled = threading.Event()

    def begin(self) -> None:
        """Copy what may change at any time. What is left is for `background`, and for `copied` when that is late."""
        self._segment.forget()
        self._gpu = devices.open_gpu(self._leaves, self._segment)
        now: list[Callable[[], None]] = []
        for index, leaf in enumerate(self._leaves):
            if leaf.nbytes == 0:
                continue
            self._left[index] = 1
            if leaf.lazy:
                self._samples[index] = Samples(leaf)
                self._waiting.append((index, None))
            elif leaf.nbytes <= _SMALL_BYTES or devices.on_gpu(leaf):
                self._copy(index, (0, leaf.nbytes))
            else:
                cut = units(leaf)
                self._left[index] = len(cut)
                now += [partial(self._copy, index, unit) for unit in cut]
        self._lazy_left = len(self._waiting)
        if not self._waiting:
            self._checked.set()
        if now:
            lanes.run(now, _AT_ONCE_LANES)
        if self._gpu is not None:
            self._gpu.hold_program()

    def copied(self) -> None:
        """Help to copy what is left, and wait until nothing is. Called before the optimizer changes anything, by the
        thread that does; what it launches on a GPU from now on comes after the copies from there."""
        self._copy_rest()
        if self._gpu is not None:
            self._gpu.hold_program()

    def _copy_rest(self) -> None:
        if self._lazy_left == 0:
            return
        self._help()
        with self._state:
            self._state.wait_for(lambda: self._lazy_left == 0)

    def _arrive(self) -> None:
        """Wait for the GPU, so that what was copied from there may be read."""
        if self._gpu is None:
            return
        self._gpu.wait()
        with self._state:
            for index in self._in_flight:
                self._left[index] = 0
            self._state.notify_all()

    def check(self) -> None:
        """Read the versions that count. By the thread that changes the tensors, when everything is copied."""
        if self._checked.is_set():
            return
        for leaf in self._leaves:
            why = torn(leaf) if leaf.lazy else ""
            if why:
                self.changed.add(leaf.name)
                self._fail(why, None)
        self._checked.set()

    def distrust(self, why: str) -> None:
        """Fail the save, unless it was found to be right already."""
        if not self._checked.is_set():
            self._fail(why, None)

    def background(self) -> None:
        """Copy what was put off, then sum everything. Runs in a thread of its own, once."""
        try:
            self._copy_rest()
            self._arrive()
            entries = (
                [self._summed(index, entry) for index, entry in enumerate(self.outline)] if not self._error else []
            )
            with self._state:
                self._entries = entries
                self._state.notify_all()
            if not self._checked.wait(GRACE_S):
                self._compare(entries)
                self.check()
            if self._error is None:
                self._whole(entries, self._places, self._used)
        except BaseException as error:  # the writer must hear of it, whatever it is
            self._fail(f"copying failed: {type(error).__name__}: {error}", error)
        finally:
            self._settled.set()

    def _compare(self, entries: Sequence[Entry]) -> None:
        """Sum what was put off once more, live. What changes after the program was heard of has a right to."""
        for index, entry in enumerate(entries):
            leaf = self._leaves[index]
            if not leaf.lazy or not is_here(leaf):
                continue
            there = in_place(leaf)
            if there is None:
                room = np.empty(leaf.nbytes, dtype=np.uint8)
                copy(leaf, 0, leaf.nbytes, room)
                there = room.data
            for (begin, end), wanted in zip(blocks(entry.nbytes), entry.sums, strict=True):
                if self._checked.is_set():
                    return
                if xxhash.xxh3_128_hexdigest(there[begin:end]) != wanted and not self._checked.is_set():
                    self.changed.add(leaf.name)
                    self._fail(changed(leaf), None)
                    return

    def confirm(self) -> None:
        self._settled.wait()
        with self._state:
            self._raise()

    def settled(self) -> None:
        """Wait until nothing writes to the segment any more."""
        self._settled.wait()

    def data(self, index: int, begin: int, end: int) -> memoryview:
        with self._state:
            self._state.wait_for(lambda: self._left[index] == 0 or self._error is not None)
            self._raise()
        return self._segment.data(self._places[index] + begin, self._places[index] + end)

    def entries(self) -> list[Entry]:
        with self._state:
            self._state.wait_for(lambda: self._entries is not None or self._error is not None)
            self._raise()
            assert self._entries is not None
            return self._entries

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _summed(self, index: int, entry: Entry) -> Entry:
        at = self._places[index]
        sums = tuple(xxhash.xxh3_128_hexdigest(self._segment.data(at + b, at + e)) for b, e in blocks(entry.nbytes))
        return Entry(entry.name, entry.dtype, entry.shape, entry.global_shape, entry.start, entry.nbytes, sums)

    def _help(self) -> None:
        while True:
            try:
                index, unit = self._waiting.popleft()
            except IndexError:
                return
            if unit is None:  # cut when its turn comes: cutting all takes longer than a save may
                cut = units(self._leaves[index])
                unit = cut[0]
                if len(cut) > 1:
                    with self._state:
                        self._left[index] = len(cut)
                        self._lazy_left += len(cut) - 1
                    self._waiting.extendleft((index, other) for other in reversed(cut[1:]))
            try:
                self._copy(index, unit)
            finally:
                with self._state:
                    self._lazy_left -= 1
                    if self._lazy_left == 0:
                        self._state.notify_all()

    def _copy(self, index: int, unit: tuple[int, int]) -> None:
        leaf = self._leaves[index]
        begin, end = unit
        samples = self._samples.get(index)
        if samples is not None and samples.moved():
            self.changed.add(leaf.name)
            self._fail(changed(leaf), None)
            return
        try:
            at = self._places[index]
            room = self._segment.array(at + begin, at + end)
            if self._gpu is not None and devices.on_gpu(leaf):
                self._gpu.copy(leaf.source, room)
                self._in_flight.append(index)
                return
            copy(leaf, begin, end, room)
        except Exception as error:  # told to whoever waits for the bytes
            self._fail(f"{names.shown(leaf.name)} can't be copied: {type(error).__name__}: {error}", error)
            return
        why = changed(leaf) if samples is not None and samples.changed(begin, end) else ""
        with self._state:
            self._left[index] -= 1
            if self._left[index] and not why:
                return
        why = why or torn(leaf)
        if why:
            self.changed.add(leaf.name)
            self._fail(why, None)
        with self._state:
            self._state.notify_all()

    def _fail(self, why: str, cause: BaseException | None) -> None:
        with self._state:
            if self._error is None:
                self._error = SaveError(f"step {self._step} was not saved: {why}", step=self._step)
                self._error.__cause__ = cause
            self._state.notify_all()


class Straight:
    """A save that goes from the live tensors straight to the file, while the program waits.

    For states that do not fit into shared memory. Nothing is held twice but one array at a time where its elements do
    not lie together.
    """

    def __init__(self, leaves: Sequence[Leaf], step: int) -> None:
        self.outline: Sequence[Entry] = outline(leaves)
        self._leaves = list(leaves)
        devices.settle(leaves)
        self._step = step
        self._together: tuple[int, memoryview] | None = None
        self._lock = threading.Lock()

    def data(self, index: int, begin: int, end: int) -> memoryview:
        return self._whole(index)[begin:end]

    def entries(self) -> list[Entry]:
        entries = []
        for index, e in enumerate(self.outline):
            whole = self._whole(index) if e.nbytes else memoryview(b"")
            sums = tuple(xxhash.xxh3_128_hexdigest(whole[begin:end]) for begin, end in blocks(e.nbytes))
            entries.append(Entry(e.name, e.dtype, e.shape, e.global_shape, e.start, e.nbytes, sums))
            why = torn(self._leaves[index])
            if why:
                raise SaveError(f"step {self._step} was not saved: {why}", step=self._step)
        return entries

    def confirm(self) -> None:
        """The program waits, so nothing changes meanwhile."""

    def _whole(self, index: int) -> memoryview:
        leaf = self._leaves[index]
        there = in_place(leaf)
        if there is not None:
            return there
        with self._lock:
            if self._together is None or self._together[0] != index:
                room = np.empty(leaf.nbytes, dtype=np.uint8)
                copy(leaf, 0, leaf.nbytes, room)
                self._together = (index, room.data)
            return self._together[1]
