"""Which parts of a state are on GPUs, and what copies from there: asked without importing torch (see cuda)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from transom_hpc.ckpt import kinds
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.state import Leaf


class Gpu(Protocol):
    """The copies of one save from GPUs; see cuda.Copies."""

    def copy(self, tensor: Any, room: np.ndarray[Any, Any]) -> None:
        """Start one."""

    def hold_program(self) -> None:
        """What the calling thread launches from now on comes after those that were started."""

    def wait(self) -> None:
        """Return when they have arrived."""


def open_gpu(leaves: Sequence[Leaf], segment: Segment) -> Gpu | None:
    """What copies from GPUs; None where nothing is on one."""
    devices = _devices(leaves)
    if not devices:
        return None
    from transom_hpc.ckpt import cuda

    return cuda.Copies(devices, segment)


def pinning(leaves: Sequence[Leaf]) -> Callable[[Segment], None]:
    """What makes a segment ready for copies from GPUs; nothing where nothing is on one."""
    devices = sorted(_devices(leaves), key=str)
    if not devices:
        return lambda _: None
    from transom_hpc.ckpt import cuda

    return partial(cuda.pin, device=devices[0])


def settle(leaves: Sequence[Leaf]) -> None:
    """Wait for what the calling thread has launched on GPUs, so that other threads may read their memory."""
    devices = _devices(leaves)
    if devices:
        from transom_hpc.ckpt import cuda

        cuda.settle(devices)


def on_gpu(leaf: Leaf) -> bool:
    """Whether the leaf is copied from a GPU in the background. What is on other devices is copied with a wait."""
    return kinds.is_tensor(leaf.source) and leaf.source.is_cuda


def _devices(leaves: Sequence[Leaf]) -> set[Any]:
    return {leaf.source.device for leaf in leaves if on_gpu(leaf)}  # type: ignore[union-attr]
