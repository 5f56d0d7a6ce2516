"""The program's side of the checkpoint server: hands a staged save over, waits for how it ends, and does it itself
where the server does not."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import orders
from transom_hpc.ckpt.bell import Bell
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.orders import Order, Orders, Rank
from transom_hpc.ckpt.shm import Folder

log = logging.getLogger("transom_hpc.ckpt")

SILENT_S = 8.0
"""A server that gives no sign for so long is not waited for. One that died is mostly back within half of that."""

TIDY_S = 30.0
"""Longest wait for the server to remove old checkpoints."""

GATHER_S = 30.0
"""Longest time in which nothing moves while servers bring what other hosts have in memory."""

GATHERING = "TRANSOM_GATHERING"
"""The variable by which a launcher names the launch whose servers do so; there is nothing to wait for without it."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.005, 0.05


class Silent(SaveError):
    """The server holds the save, and does not move: it may still read the segment."""


class Handover:
    """How one rank's saves reach the server.

    Args:
        folder: the staging folder, open.
        rank: the rank, which is shown to live from now on.
    """

    def __init__(self, folder: Folder, rank: Rank, files: Files, clock: Clock) -> None:
        self._orders = Orders(folder.path, files)
        self._server = folder.path / orders.SERVER
        self._clock = clock
        self._files = files
        self._rank = rank
        self._life = self._orders.enter(rank)

    def close(self) -> None:
        """The rank saves no more."""
        self._orders.depart(self._rank, self._life)

    def possible(self) -> bool:
        """Whether a server lives on this node."""
        try:
            return orders.is_held(self._server)
        except OSError:
            return False

    def until_gathered(self, attempt: str) -> bool:
        """Wait until the servers of a launch have brought what this host's ranks need and others have in memory.

        Args:
            attempt: the launch.

        Returns:
            Whether they have; False where nothing moved for GATHER_S. Nothing is brought any more then.
        """
        folder, files = self._orders.folder, self._files
        still_s, before = 0.0, orders.Signs()
        with Bell(folder, self._clock) as bell:
            while still_s < GATHER_S:
                now = orders.signs(folder, files)
                if now.attempt == attempt:
                    if now.over:
                        return True
                    if now != before:
                        before, still_s = now, 0.0
                began = self._clock.now()
                bell.wait(0.1, 0.03)
                still_s += min(0.5, self._clock.now() - began)
        log.warning("what other hosts have in memory is not waited for: nothing moved for %g s", GATHER_S)
        with contextlib.suppress(OSError):
            orders.sign(folder, orders.Signs(attempt, True, 0), files)
        return False

    def restored(self, step: int, source: str) -> None:
        """Leave word of where the state came from, for the launcher. Rank 0 only."""
        with contextlib.suppress(OSError):
            said = json.dumps({"step": step, "source": source}).encode()
            self._files.publish(self._orders.folder / ".restored", said)

    def carry_out(self, order: Order, by_ourselves: Callable[[], None]) -> None:
        """Have a save carried out.

        Args:
            order: it.
            by_ourselves: does it here; called when the server has been silent for too long and nobody works on it.

        Raises:
            Silent: it can't be said what becomes of it.
            OSError, CheckpointError: why it failed, as the server has it, or `by_ourselves`.
        """
        with Bell(self._orders.folder, self._clock) as bell:
            self._orders.leave(order)
            self._wait(order, by_ourselves, bell)

    def _wait(self, order: Order, by_ourselves: Callable[[], None], bell: Bell) -> None:
        pause, still_s, pulse = _FIRST_WAIT_S, 0.0, self._pulse()
        while True:
            over, error = self._orders.answered(order.name)
            if error is not None:
                raise error
            if over:
                return
            # Counted in waits of our own: while this node stands still, both do.
            began = self._clock.now()
            if not bell.wait(_LONGEST_WAIT_S, pause):
                still_s += min(_LONGEST_WAIT_S, self._clock.now() - began)
            pause = min(pause * 1.5, _LONGEST_WAIT_S)
            if pulse != (pulse := self._pulse()):
                still_s = 0.0
            elif still_s >= SILENT_S:
                claim = self._orders.claim(order.name)
                if claim is not None:
                    if order.write:
                        log.warning("the checkpoint server is gone: step %d is saved by the program", order.job.step)
                    try:
                        by_ourselves()
                        return
                    finally:
                        self._orders.forget(order.name)
                        claim.release()
                elif pulse == self._pulse():
                    raise Silent(
                        f"step {order.job.step} was not saved: this host's checkpoint server has given no sign for "
                        f"{SILENT_S:g} s",
                        step=order.job.step,
                    )

    def copies(self, order: Order) -> int:
        """How many other hosts have what was carried out; asked before `finish`."""
        return self._orders.copies(order.name)

    def finish(self, order: Order) -> None:
        """Wait until the server has tidied up behind a save that it has carried out, and forget the order."""
        until = self._clock.now() + TIDY_S
        pause = _FIRST_WAIT_S
        claim = self._orders.claim(order.name)
        while claim is None and self._orders.answered(order.name)[0] and self._clock.now() < until:
            self._clock.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_WAIT_S)
            claim = self._orders.claim(order.name)
        self._orders.forget(order.name)
        if claim is not None:
            claim.release()

    def _pulse(self) -> int:
        try:
            return self._server.stat().st_mtime_ns
        except OSError:
            return 0
