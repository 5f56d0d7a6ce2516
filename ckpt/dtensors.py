"""The hand on torch's DTensor: which box of the whole a rank holds, and new ones in the image of those that are there.

Imports torch.distributed, so it is imported only where a DTensor is at hand (see kinds).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt.block import Block

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def refusal(tensor: DTensor) -> str:
    """Why a DTensor can't be saved, and what to do; empty where it can."""
    for placement in tensor.placements:
        if isinstance(placement, Partial):
            return (
                f"a DTensor with the placement {placement} is not summed up yet; "
                "call redistribute(placements=...) with Replicate() or Shard(...) in place of it, and save that"
            )
        if not isinstance(placement, (Shard, Replicate)) and not _is_strided(placement):
            return (
                f"a DTensor with the placement {placement} can't be saved; "
                "call redistribute(placements=...) with Replicate() or Shard(...), and save that"
            )
    return _refusal(tuple(tensor._local_tensor.shape), *_place(tensor))


@lru_cache(1 << 12)
def _refusal(
    here: tuple[int, ...],
    whole: tuple[int, ...],
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
) -> str:
    if coordinate is None:
        return ""
    shape, _ = box(whole, mesh, coordinate, placements)
    if here != shape:
        return (
            f"a DTensor of shape {list(whole)} should have {list(shape)} on this rank, and has {list(here)}; "
            "make it with distribute_tensor, or give from_local its shape and stride"
        )
    if any(map(_is_strided, placements)) and not is_together(whole, mesh, coordinate, placements):
        return (
            f"a DTensor with the placements {placements} holds rows here that are no single block; "
            "call redistribute(placements=...) with Replicate() or Shard(...), and save that"
        )
    return ""


def block_of(tensor: DTensor) -> Block | None:
    """The plain tensor that this rank holds, and which part it is. They share memory.

    Returns:
        None where this rank is not in the tensor's mesh.

    Raises:
        StateError: it can't be kept.
    """
    why = refusal(tensor)
    if why:
        raise StateError(why, name="DTensor")
    whole, mesh, coordinate, placements = _place(tensor)
    if coordinate is None:
        return None
    return Block(tensor._local_tensor, whole, box(whole, mesh, coordinate, placements)[1])


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor on the same mesh, with the same placements and shape, that has this local part."""
    whole = torch.empty(tensor.shape, device="meta")
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=whole.stride()
    )


def _is_strided(placement: Placement) -> bool:
    """Whether it is torch's placement for a dimension that is cut twice, the inner cut first; it has no public name."""
    return type(placement).__name__ == "_StridedShard"


def _place(
    tensor: DTensor,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, tuple[Placement, ...]]:
    """What decides which part this rank holds, as `box` takes it; no coordinate where it is not in the mesh."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    return (
        tuple(tensor.shape),
        tuple(mesh.shape),
        None if coordinate is None else tuple(coordinate),
        tuple(tensor.placements),
    )


@lru_cache(1 << 12)
def box(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and start of the part of a DTensor that the rank at a place of the mesh holds.

    Args:
        shape: of the whole.
        mesh: how many ranks it has along each of its dimensions.
        coordinate: the rank's place in it.
        placements: one for each dimension of the mesh.
    """
    local, start = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
    return tuple(map(int, local)), tuple(map(int, start))


@lru_cache(1 << 12)
def is_together(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> bool:
    """Whether the indices that the rank holds follow each other along each dimension; arguments as for `box`."""
    for dim, size in enumerate(shape):
        indices = torch.arange(size)
        for ranks, own, placement in zip(mesh, coordinate, placements, strict=True):
            if getattr(placement, "dim", None) == dim:
                along = type(placement)(0, split_factor=placement.split_factor) if _is_strided(placement) else Shard(0)
                parts, _ = along._split_tensor(indices, ranks, with_padding=False, contiguous=False)
                indices = parts[own]
        if indices.numel() > 1 and int(indices[-1] - indices[0]) != indices.numel() - 1:
            return False
    return True
