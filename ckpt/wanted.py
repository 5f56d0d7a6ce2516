"""Where the bytes of stored arrays go: into live ones that are alike, or into new ones in their image.

What is live may be a part of an array that ranks hold together (a Block, a DTensor); then only that part is wanted,
whatever parts the array was stored in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from transom_hpc.ckpt import dtypes, kinds, names
from transom_hpc.ckpt.block import Block, block_of
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.nodes import Node

if TYPE_CHECKING:
    import torch

    from transom_hpc.ckpt.fill import Match

ABSENT: Any = object()
"""Stands for what the live state does not have."""

Ready = Callable[[], Any]
"""Gives the value of one place of the state, once the bytes are there."""


@dataclass(slots=True)
class Target:
    """An array that wants the bytes of a stored one.

    Args:
        array: the live tensor or array, or a new one.
            Never a DTensor: of one it is what this rank holds.
        fresh: whether it is new, so that bytes may be put in before they are verified.
        start, shape: which box of the whole stored array it wants; shape is the array's own.
    """

    array: torch.Tensor | np.ndarray[Any, Any]
    fresh: bool
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """Stands in a live state for what is not there yet, and says what it will look like.

    Args:
        of: an array; a new one will be the same part of its whole, on the same mesh.
    """

    of: Any


class Arrays:
    """Finds a place for each stored array.

    Args:
        entries: what is stored, by name, each as a whole.
        found: where it is written what is wanted, and what does not fit.
    """

    def __init__(self, entries: Mapping[str, Entry], found: Match) -> None:
        self.entries = entries
        self._found = found
        self._built: dict[Any, torch.Tensor | np.ndarray[Any, Any]] = {}

    def place(self, node: Node, live: Any, parts: tuple[str, ...], how: str) -> Ready:
        """Hold one against what is live at its place; `how` as in fill."""
        kind, name = node[0], node[1]
        entry = self.entries.get(name)
        if entry is None:
            self._found.missing.append(f"{names.place(parts)} (its bytes belong to another rank)")
            return lambda: live
        if kind in ("longbytes", "longbytearray"):
            whole = self._new(entry)
            return lambda: (bytes if kind == "longbytes" else bytearray)(np.asarray(whole).tobytes())
        image = live.of if isinstance(live, Image) else live
        here = block_of(image)
        other = "" if live is not image else _difference(entry, live, here)
        if how != "build" and live is image and here is not None and not other:
            if kinds.is_tensor(here.array) or here.array.flags.writeable:
                target = Target(here.array, False, here.start, tuple(here.array.shape))
                self._found.targets.setdefault(name, []).append(target)
                return lambda: _counted(live)
        elif how == "inplace" and here is None and kinds.is_dtensor(live):
            return lambda: live  # other ranks hold all of it
        elif how == "inplace" or (how == "reuse" and "shape" in other):
            self._found.misshaped.append(f"{names.place(parts)} ({other})")
            if how == "inplace":
                return lambda: live
        alike = here is not None and here.global_shape == entry.global_shape
        make = _in_the_image_of(image) if alike else None
        new = self._new(entry, here if make is not None else None)
        return lambda: make(new) if make is not None else new

    def _new(self, entry: Entry, block: Block | None = None) -> torch.Tensor | np.ndarray[Any, Any]:
        """A new array for a stored one, or for a part of it; the same one for the same name and part, so that what was
        tied is tied again."""
        shape = tuple(block.array.shape) if block is not None else entry.global_shape
        start = block.start if block is not None else (0,) * len(shape)
        key = (entry.name, start, shape)
        if key not in self._built:
            new: torch.Tensor | np.ndarray[Any, Any]
            if dtypes.is_torch(entry.dtype):
                from transom_hpc.ckpt import tensors

                new = tensors.empty(entry.dtype, shape)
            else:
                new = np.empty(shape, dtype=dtypes.numpy_dtype(entry.dtype))
            self._built[key] = new
            self._found.targets.setdefault(entry.name, []).append(Target(new, True, start, shape))
        return self._built[key]


def _difference(entry: Entry, live: Any, here: Block | None) -> str:
    """Why the stored array can't be put into the live one; empty where it can."""
    stored = f"stored: {list(entry.global_shape)} {entry.dtype}"
    array = here.array if here is not None else None
    if dtypes.is_torch(entry.dtype):
        dtype = dtypes.of_torch(str(array.dtype)) if kinds.is_tensor(array) else ""
    else:
        dtype = dtypes.of_numpy(array.dtype) if isinstance(array, np.ndarray) else ""
    if here is None or dtype == "":
        return f"{stored}; here: {'nothing' if live is ABSENT else type(live).__name__}"
    if here.global_shape != entry.global_shape:
        return f"{stored}; here: shape {list(here.global_shape)}"
    if dtype != entry.dtype:
        return f"{stored}; here: {dtype}"
    return ""


def _counted(live: Any) -> Any:
    """A live array that was filled. What is done to the part that is here does not move a DTensor's own counter."""
    if kinds.is_dtensor(live):
        from transom_hpc.ckpt import tensors

        tensors.count_change(live)
    return live


def _in_the_image_of(live: Any) -> Callable[[torch.Tensor | np.ndarray[Any, Any]], Any] | None:
    """What makes of a new array the part that is live; None where that is an array and no part."""
    if isinstance(live, Block):
        return lambda new: Block(new, live.global_shape, live.start)
    if kinds.is_dtensor(live):
        from transom_hpc.ckpt import dtensors

        return lambda new: dtensors.like(live, cast("torch.Tensor", new))
    return None
