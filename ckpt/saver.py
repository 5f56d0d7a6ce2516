"""The background of saving: stages states into slots, and has them written and committed one after the other: by the
node's checkpoint server where one lives, else here. Some are not written: they stay in their slot, and the server
copies them to neighbours.

Knows nothing of policies: what fails is kept until someone asks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import CheckpointError
from transom_hpc.ckpt import commit, devices, housekeeping, staging
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.commit import Job
from transom_hpc.ckpt.errand import Errands
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.handover import Handover, Silent
from transom_hpc.ckpt.layout import Entry, block_count
from transom_hpc.ckpt.orders import Order
from transom_hpc.ckpt.retention import Keep
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.slots import Slots
from transom_hpc.ckpt.state import Leaf
from transom_hpc.ckpt.writers import Writers

log = logging.getLogger("transom_hpc.ckpt")

KEPT_S = 2.0
"""Longest wait for a save that is not written: of one that is and needs its slot, and at the end."""


@dataclass(slots=True, eq=False)
class Save:
    """A save on its way, to files or only to memory.

    Args:
        job: what it is.
        source: where its bytes come from.
        segment: the slot that it uses; None where it is written straight from the live tensors.
        began_s: when it was begun, on the clock.
        done: set when it is committed or has failed.
        ended_s: when that was.
        cost_s: how long the program stood still for it, as far as it has got.
        error: why it failed.
        whole: whether all its bytes are in memory, once it is over.
        copies: how many other hosts have it, where it is not written.
    """

    job: Job
    source: staging.Source
    segment: Segment | None
    began_s: float
    done: threading.Event = field(default_factory=threading.Event)
    ended_s: float = 0.0
    cost_s: float = 0.0
    error: BaseException | None = None
    whole: bool = False
    copies: int = 0

    def is_whole(self) -> bool:
        """Whether all its bytes lie in a segment, proven not to be torn; waits until that is known."""
        if self.segment is None or not isinstance(self.source, staging.Staged):
            return False
        self.source.settled()
        return self.segment.header() is not None


class Saver:
    """The saves of one rank.

    Args:
        slots: where to stage.
        writers: put bytes into the files.
        blanks: makes them.
        keep: what is kept of what is committed.
        handover: the way to the server.
        say: tells the program's user something, once.
    """

    def __init__(
        self,
        slots: Slots,
        writers: Writers,
        blanks: Blanks,
        fence: Fence,
        files: Files,
        clock: Clock,
        keep: Keep,
        handover: Handover,
        say: Callable[[str], None],
    ) -> None:
        self._slots = slots
        self._writers = writers
        self._blanks = blanks
        self._fence = fence
        self._files = files
        self._clock = clock
        self._keep = keep
        self._handover = handover
        self._say = say
        self._saving = Errands("transom-save")
        self._keeping = Errands("transom-keep")  # apart, so that nothing that is to be written waits for a neighbour
        self._staging = Errands("transom-copy")
        self._copying: Save | None = None
        self._restless: set[str] = set()
        self._closed = False
        self.tries = 0
        """Saves of any kind that were tried."""
        self._latest: Save | None = None
        self.newest: Save | None = None
        """Of those that are written."""
        self.kept: Save | None = None
        """The newest of those that are not."""
        self.failed: deque[Save] = deque()
        self.last_step: int | None = None

    def tried(self) -> None:
        """A save is tried: until one is begun, what memory holds is not what it is to hold."""
        self.tries += 1
        self._latest = None

    def ready(self) -> bool:
        """Whether a save may be begun that is not written: it takes the place of the older of two steps, so the newer
        one must be whole, and nothing may be under way."""
        return not self.tries or (
            self._latest is not None
            and self._latest.whole
            and all(save is None or save.done.is_set() for save in (self.newest, self.kept))
        )

    def begin(self, job: Job, leaves: Sequence[Leaf]) -> Save | None:
        """Stage a state and have it written.

        Returns:
            The save, which is over already where there was no room to stage it; None where both slots are in use.

        Raises:
            OSError: the staging folder failed.
        """
        began_s = self._clock.now()
        nbytes = self._ahead_of(leaves)
        segment, why = self._slots.take(nbytes)
        if segment is None and not why and self.kept is not None and self.kept.done.wait(KEPT_S):
            segment, why = self._slots.take(nbytes)  # what is not written makes way
        if segment is None and not why:
            return None
        if segment is None:
            self._say(f"{why}; saves are written straight from the live tensors, and the program waits for them")
            save = Save(job, staging.Straight(leaves, job.step), None, began_s)
            self._enqueue(save)
            save.done.wait()
            return save
        save = self._stage(job, leaves, segment, began_s)
        self._enqueue(save)
        return save

    def keep(self, job: Job, leaves: Sequence[Leaf]) -> Save | None:
        """Stage a state that is not written: it stays in its slot, and neighbours get copies.

        Returns:
            The save; None where no slot can be had but the one with the newest step.

        Raises:
            OSError: the staging folder failed.
        """
        began_s = self._clock.now()
        segment, why = self._slots.take(self._ahead_of(leaves), sparing=True)
        if segment is None:
            log.debug("step %d is not kept: %s", job.step, why or "both slots are in use")
            return None
        save = self._stage(job, leaves, segment, began_s)
        self.kept = self._latest = save
        self._keeping.send(partial(self._run_kept, save))
        return save

    def _ahead_of(self, leaves: Sequence[Leaf]) -> int:
        """What comes before staging; returns the bytes that a slot is to have."""
        self.before_update()
        for leaf in leaves:
            if leaf.name in self._restless:
                leaf.lazy = False
        return staging.size(leaves) + _table_bytes(leaves)

    def _stage(self, job: Job, leaves: Sequence[Leaf], segment: Segment, began_s: float) -> Save:
        try:
            staged = staging.Staged(leaves, segment, job.step, self._declare(segment, job))
            staged.begin()
        except BaseException:
            self._slots.give(segment)
            raise
        self._copying = save = Save(job, staged, segment, began_s)
        self._staging.send(staged.background)
        return save

    def prepare(self, leaves: Sequence[Leaf]) -> None:
        """Have the slots made ready in the background for a state like this: memory that is touched for the first time
        is many times slower than the copy into it."""
        nbytes = staging.size(leaves) + _table_bytes(leaves)
        pin = devices.pinning(leaves)
        self._staging.send(lambda: self._slots.prepare(nbytes, pin))

    def before_update(self) -> None:
        """Return when everything that was put off is copied. Called before an optimizer changes anything, and whenever
        the program is heard of."""
        save = self._copying
        if save is not None and isinstance(save.source, staging.Staged):
            began_s = self._clock.now()
            save.source.copied()
            save.source.check()  # whichever thread it is (backward passes have some of their own), it is to change all
            self._copying = None
            save.cost_s += self._clock.now() - began_s

    def later(self, job: Callable[[], None]) -> None:
        """Have something small done in the background."""
        self._staging.send(job)

    def distrust(self, why: str) -> None:
        """What is being copied may have been changed: that save fails."""
        if self._copying is not None and isinstance(self._copying.source, staging.Staged):
            self._copying.source.distrust(why)

    def idle(self, timeout_s: float | None = None) -> bool:
        """Wait until nothing that is written is under way. Every part of a save has a deadline of its own.

        Returns:
            Whether it came to that within the time.
        """
        self.before_update()
        return self._saving.idle(timeout_s)

    def close(self, timeout_s: float | None) -> None:
        """Wait until nothing is under way, and let go of the state. Closing again does not wait again."""
        if self._closed:
            return
        self._closed = True
        self.before_update()
        if self._saving.close(timeout_s):
            self._keeping.close(KEPT_S if timeout_s is None else min(timeout_s, KEPT_S))
            self._staging.close(timeout_s)
            if self.newest is not None and self.newest.job.rank == 0:
                sweep(self.newest.job, self._files)

    def _declare(self, segment: Segment, job: Job) -> Callable[[list[Entry], list[int], int], None]:
        def whole(entries: list[Entry], places: list[int], used: int) -> None:
            segment.declare_whole(job.step, job.attempt, used, self._slots.table(entries, places))

        return whole

    def _enqueue(self, save: Save) -> None:
        self.newest = self._latest = save
        self._saving.send(partial(self._run, save))

    def _run(self, save: Save) -> None:
        """One save, in the background thread."""
        order: Order | None = None
        try:
            # A server that has just died is not waited for; one that dies now is, as the order is left then.
            if self._handover.possible() and save.is_whole():
                assert save.segment is not None
                order = self._order(save.job, save.segment)
                self._handover.carry_out(order, partial(self._commit, save))
            else:
                self._commit(save)
            self.last_step = save.job.step
        except BaseException as error:  # kept for the next call, which reports it by policy
            if isinstance(error, Silent):
                self._abandon(save, error)
            save.error = error
            self.failed.append(save)
            log.info("step %d was not saved: %s", save.job.step, error)
        finally:
            self._end(save)
        if order is not None:
            self._handover.finish(order)
        elif save.error is None and save.job.rank == 0:
            tidy(save.job, self._keep, self._fence, self._files)

    def _run_kept(self, save: Save) -> None:
        """One save that is not written, in its background thread. Nobody is told when it fails: what is written counts,
        and the next one may be better."""
        order: Order | None = None
        try:
            if save.is_whole() and self._handover.possible():
                assert save.segment is not None
                order = self._order(save.job, save.segment, False)
                self._handover.carry_out(order, lambda: None)  # a server that is gone makes no copy
                save.copies = self._handover.copies(order)
            save.source.confirm()
        except BaseException as error:  # in a thread of its own, whose edge this is
            if isinstance(error, Silent):
                self._drop(save)
            save.error = error
            log.debug("step %d is not kept: %s", save.job.step, error)
        finally:
            self._end(save)
        if order is not None:
            self._handover.finish(order)

    def _order(self, job: Job, segment: Segment, write: bool = True) -> Order:
        blanks = self._blanks
        return Order(job, segment.path.name, self._keep, blanks.align_bytes, blanks.count, self._writers.asked, write)

    def _commit(self, save: Save) -> None:
        commit.commit(save.job, save.source, self._writers, self._blanks, self._fence, self._files, self._clock)

    def _abandon(self, save: Save, error: Silent) -> None:
        """The other ranks need not wait, and what the server may still read must not change."""
        self._drop(save)
        try:
            commit.meet(save.job, self._files, self._clock).give_up(str(error))
        except OSError as told:
            log.warning("other ranks could not be told that %s: %s", error, told)

    def _drop(self, save: Save) -> None:
        assert save.segment is not None
        self._slots.drop(save.segment)
        save.segment = None

    def _end(self, save: Save) -> None:
        """A save is over, well or not. Its slot may be used again when nothing copies into it any more."""
        if isinstance(save.source, staging.Staged):
            save.source.settled()
            # What the program changes by itself is not put off another time.
            self._restless |= save.source.changed
        if save.segment is not None:
            save.whole = save.segment.header() is not None
            self._slots.give(save.segment)
        save.ended_s = self._clock.now()
        save.done.set()


def tidy(job: Job, keep: Keep, fence: Fence, files: Files) -> None:
    """Remove what is superfluous after a commit. Rank 0 only."""
    try:
        housekeeping.retain(job.directory, keep, fence, job.serial, files)
        housekeeping.clean_own(job.directory, job.attempt, job.serial, files)
    except (OSError, CheckpointError) as error:
        log.warning("old checkpoints were not removed: %s", error)


def sweep(job: Job, files: Files) -> None:
    """Remove what was deleted and kept for the next save: there is none. Rank 0 only."""
    try:
        for gone in housekeeping.trash(job.directory, job.attempt, files):
            files.remove(gone)
    except OSError as error:
        log.warning("a deleted checkpoint was not removed: %s", error)


def _table_bytes(leaves: Sequence[Leaf]) -> int:
    """Room for the table behind the arrays: generous, since a segment without it is lost to the next program."""
    return 4096 + sum(500 + 2 * len(leaf.name) + 40 * block_count(leaf.nbytes) for leaf in leaves)
