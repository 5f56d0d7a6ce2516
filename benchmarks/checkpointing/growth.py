"""What saving takes of memory beyond the two staging slots, and whether that grows from save to save."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil

from checkpointing.figures import Bar, Figure, figure, growth
from checkpointing.ground import Ground
from checkpointing.scale import Scale, say
from checkpointing.state import State
from transom_hpc.ckpt import Checkpointer

_PART = "memory, one rank"
_SAMPLE_S = 0.005
_MB = 1e6
_WARM = 10
"""Saves beforehand, in which both slots come into use and the interpreter's heap finds its size."""


class _Watch:
    """The most private memory of this process and its children, sampled while saves run."""

    def __init__(self) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.most = max(self.most, private())


def private() -> int:
    """Bytes of memory that only this process or its children have: neither shared memory nor mapped files."""
    own = psutil.Process()
    found = 0
    for process in (own, *own.children(recursive=True)):
        try:
            facts = process.memory_info()
        except psutil.Error:
            continue
        found += facts.rss - facts.shared
    return found


def measure(scale: Scale, ground: Ground) -> list[Figure]:
    """Private memory over many saves, in a process that does nothing else."""
    state = State(scale.elements)
    shm = ground.memory()
    saves: list[float] = []
    with Checkpointer(ground.fresh(), keep=1, shm=shm, on_save_error="raise") as ckpt:
        before = private()  # the state and the libraries; not yet h5py, which saving needs
        with _Watch() as watch:
            for step in range(1, scale.saves + _WARM + 1):
                if step % 10 == 0:
                    say(f"memory, save {step} of {scale.saves + _WARM}")
                ckpt.save(step, state.whole())
                state.optimizer.step()
                ckpt.wait()
                if step > _WARM:
                    saves.append(private() / 1e3)
        slots = _shared(shm)
    beyond = (watch.most - before) / _MB
    over = (slots - 2 * state.nbytes) / _MB
    return [
        figure(_PART, "private, at most, beyond the slots", [beyond], "MB", Bar(64, False), "two slots"),
        figure(_PART, "slots beyond twice the state", [over], "MB", Bar(64, False), "two slots"),
        figure(_PART, "growth a save", growth(saves), "kB", Bar(0, False), "two slots"),
    ]


def _shared(shm: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in shm.rglob("*") if file.is_file())
