"""Our checkpointer over one state, measured the same way as the others; alone, and with a checkpoint server."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from checkpointing.background import Under
from checkpointing.state import State, Train
from transom_hpc.ckpt import Checkpointer


class Ours:
    """A checkpointer and the state that it saves.

    Args:
        ckpt: open.
        state: of this rank.
        warm: saves beforehand: then both slots have been used and the next file is laid out, as in a long run.
    """

    def __init__(self, ckpt: Checkpointer, state: State, warm: int = 3) -> None:
        self._ckpt = ckpt
        self._whole = state.whole()
        self._step = 0
        for _ in range(warm):
            self.durable()

    def begin(self) -> Under:
        """Begin a save."""
        self._step += 1
        if not self._ckpt.save(self._step, self._whole):
            raise RuntimeError("the save was not begun")
        return Under(lambda: None, lambda: self._ckpt.wait(0), self.done)  # the optimizer's step waits by itself

    def done(self) -> None:
        """Until it is committed."""
        if not self._ckpt.wait():
            raise RuntimeError("a save failed")

    def durable(self) -> float:
        """Seconds of a whole save."""
        self._step += 1
        before = time.perf_counter()
        self._ckpt.save(self._step, self._whole, block=True)
        return time.perf_counter() - before

    def stall(self, train: Train, products: int) -> float:
        """Seconds that training stands still: in the call, and in the optimizer's step after forward and backward."""
        before = time.perf_counter()
        under = self.begin()
        seconds = time.perf_counter() - before
        train.compute(products)
        seconds += train.step()
        under.done()
        return seconds


@contextlib.contextmanager
def server(shm: Path) -> Iterator[None]:
    """A checkpoint server over a staging folder, as the launcher starts one on each host."""
    argv = [sys.executable, "-m", "transom_hpc.ckpt.server", "--shm", str(shm)]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(
                10
            )  # it waits for those that it serves, and an interrupt may have come before they could leave
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def restore(directory: Path, state: State, shm: Path | None = None) -> float:
    """Seconds of a restore of step 1 or later into a state."""
    with Checkpointer(directory, shm=shm, keep=10) as ckpt:
        before = time.perf_counter()
        step = ckpt.restore(state.whole())
        seconds = time.perf_counter() - before
    if step == 0:
        raise RuntimeError("nothing was restored")
    return seconds
