"""Parts of arrays: how a program says that what a rank holds is a box of an array that all ranks hold together.

A torch DTensor says it by itself (see dtensors), so only numpy programs and those that cut their tensors themselves
need a Block. Owns what a box is; reads and copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import kinds

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """An array that is a part of a larger one, of which other ranks hold the rest.

    Put in a state in place of the array: it is saved as that part of one global array, and may be restored on any
    number of ranks that cut the array in any way. All ranks use the same key for it, the same type of element and the
    same global shape. Together the parts must cover the array; where some overlap they should hold the same.

    Args:
        array: what this rank holds: a numpy array or a torch tensor; a view will do, such as `u[1:-1, 1:-1]` without
            the ghost cells. It is filled in place when restoring. It may be empty.
        global_shape: of the whole array.
        start: index in the whole array of the part's first element.

    Raises:
        StateError: such a part is not inside such an array.
    """

    array: np.ndarray[Any, Any] | torch.Tensor
    global_shape: tuple[int, ...]
    start: tuple[int, ...]

    def __post_init__(self) -> None:
        if not kinds.is_array(self.array) or kinds.is_dtensor(self.array):
            raise StateError(
                f"a Block holds a numpy array or a plain tensor, not a {type(self.array).__name__}", name="Block"
            )
        object.__setattr__(self, "global_shape", tuple(int(n) for n in self.global_shape))
        object.__setattr__(self, "start", tuple(int(n) for n in self.start))
        shape = tuple(self.array.shape)
        fits = len(shape) == len(self.global_shape) == len(self.start) and all(
            begin >= 0 and begin + count <= size
            for begin, count, size in zip(self.start, shape, self.global_shape, strict=True)
        )
        if not fits:
            raise StateError(
                f"a part of shape {list(shape)} that starts at {list(self.start)} is not inside an array of shape "
                f"{list(self.global_shape)}",
                name="Block",
            )

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the array."""
        return tuple(self.array.shape) == self.global_shape


def block_of(value: object) -> Block | None:
    """What an array of a state is a part of; a plain one is the whole of itself.

    Returns:
        None where it is no array, or one of which this rank holds nothing.

    Raises:
        StateError: a DTensor that can't be kept (see dtensors).
    """
    if isinstance(value, Block):
        return value
    if kinds.is_dtensor(value):
        from transom_hpc.ckpt import dtensors

        return dtensors.block_of(value)
    if kinds.is_array(value):
        return Block(value, tuple(value.shape), (0,) * value.ndim)
    return None
