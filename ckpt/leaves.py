"""What is done with one leaf of a state: finding its bytes, copying them, telling that it was changed."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from transom_hpc.ckpt import dtypes, kinds, names
from transom_hpc.ckpt.layout import cuts
from transom_hpc.ckpt.state import Leaf


def torn(leaf: Leaf) -> str:
    """Why the copy may be a mixture of old and new; empty where it is not."""
    if leaf.version is None or not kinds.is_tensor(leaf.source):
        return ""
    now = leaf.source._version if leaf.counted is None else leaf.source._version + leaf.counted._version
    return "" if now == leaf.version else changed(leaf)


def changed(leaf: Leaf) -> str:
    place = names.shown(leaf.name)
    if isinstance(leaf.source, np.ndarray):
        return f"{place} was changed while it was being copied; call before_update() before each change"
    return f"{place} was changed while it was being copied; change it before step(), or in the optimizer's step"


def is_here(leaf: Leaf) -> bool:
    """Whether its bytes are in this machine's memory."""
    return not kinds.is_tensor(leaf.source) or leaf.source.is_cpu


def units(leaf: Leaf) -> list[tuple[int, int]]:
    if leaf.nbytes == 0:
        return []
    return cuts(leaf.nbytes) if in_place(leaf) is not None else [(0, leaf.nbytes)]


def in_place(leaf: Leaf) -> memoryview | None:
    """The leaf's own bytes where they lie together in this machine's memory as they will be stored."""
    source = leaf.source
    if isinstance(source, bytes):
        return memoryview(source)
    if isinstance(source, np.ndarray):
        if not source.flags.c_contiguous or leaf.nbytes == 0:
            return None
        return _memory(source.__array_interface__["data"][0], leaf.nbytes)
    plain = source.is_cpu and source.is_contiguous() and not source.is_conj() and not source.is_neg()
    return _memory(source.data_ptr(), leaf.nbytes) if plain and leaf.nbytes and source.data_ptr() else None


def _memory(pointer: int, nbytes: int) -> memoryview:
    return memoryview(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer)).data)


def copy(leaf: Leaf, begin: int, end: int, into: np.ndarray[Any, Any]) -> None:
    """Copy bytes [begin, end) of a leaf; the whole of it where its elements do not lie together."""
    there = in_place(leaf)
    if there is not None:
        ctypes.memmove(
            into.__array_interface__["data"][0],
            np.frombuffer(there, dtype=np.uint8).__array_interface__["data"][0] + begin,
            end - begin,
        )
    elif isinstance(leaf.source, np.ndarray):
        view = into.view(dtypes.numpy_dtype(leaf.dtype)).reshape(leaf.shape)
        np.copyto(view, leaf.source)
    elif kinds.is_tensor(leaf.source):
        from transom_hpc.ckpt import tensors

        tensors.copy_out(leaf.source, into)
