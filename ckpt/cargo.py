"""A segment on its way from one host's memory to another's: read where it is whole, and put where it is seen when it
is whole, every block of it compared with its sum."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import xxhash

from transom_hpc.ckpt import fence, lanes, manifest, shm
from transom_hpc.ckpt.exchange import Facts, Intake, Source, Strips
from transom_hpc.ckpt.layout import Entry, blocks
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.slots import Left


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
        lend: gives the bytes of those entries that this host has anyway, by their index.
        over: called with the segment, None where there was no room, and whether it is whole.
    """

    def __init__(
        self,
        facts: Facts,
        place: Callable[[int], Segment],
        lend: Callable[[Sequence[Entry]], Mapping[int, memoryview]],
        over: Callable[[Segment | None, bool], None],
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
        self._lend = lend
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
            lent = self._lend([entry for entry, _ in self._held])
            ready([(at, at + e.nbytes) for i, (e, at) in enumerate(self._held) if e.nbytes and i not in lent])
            for index, data in lent.items():
                at = self._held[index][1]
                np.copyto(segment.array(at, at + len(data)), np.frombuffer(data, dtype=np.uint8))
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
