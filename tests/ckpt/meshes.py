"""DTensors of any rank of any mesh in one process, and what a checkpoint does with their bytes, in a few lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from transom_hpc.ckpt import fill
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.state import Walked


def mesh(shape: Sequence[int], rank: int) -> DeviceMesh:
    """The mesh as a rank sees it; nothing can be sent over it."""
    _clear_sharding_prop_cache()  # torch takes what it found for one rank for all ranks in this process
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).view(*shape), _init_backend=False, _rank=rank)


def split(whole: torch.Tensor, shape: Sequence[int], rank: int, placements: Sequence[Any]) -> DTensor:
    """The DTensor of a rank, with memory of its own, cut by torch."""
    made = distribute_tensor(whole, mesh(shape, rank), list(placements), src_data_rank=None)
    local = made._local_tensor.clone()
    return DTensor.from_local(
        local, made.device_mesh, made.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def stored(ranks: Sequence[Walked]) -> tuple[dict[str, Entry], dict[str, np.ndarray[Any, Any]]]:
    """Each array that ranks hold parts of, as a whole: its entry, and its elements as bytes."""
    entries: dict[str, Entry] = {}
    wholes: dict[str, np.ndarray[Any, Any]] = {}
    for walked in ranks:
        for leaf in walked.leaves:
            if isinstance(leaf.source, bytes):
                continue
            shape = leaf.shape if leaf.global_shape is None else leaf.global_shape
            start = leaf.start or (0,) * len(shape)
            local = _bytes(leaf.source)
            width = local.shape[-1]
            whole = wholes.setdefault(leaf.name, np.full((*shape, width), 255, dtype=np.uint8))
            whole[tuple(slice(b, b + n) for b, n in zip(start, leaf.shape, strict=True))] = local
            entries[leaf.name] = Entry(leaf.name, leaf.dtype, shape, shape, (0,) * len(shape), whole.nbytes, ())
    return entries, wholes


def take(match: fill.Match, wholes: dict[str, np.ndarray[Any, Any]]) -> None:
    """Put the boxes that are wanted into their places, and hand everything over."""
    for name, targets in match.targets.items():
        for target in targets:
            box = tuple(slice(b, b + n) for b, n in zip(target.start, target.shape, strict=True))
            wanted = np.ascontiguousarray(wholes[name][box])
            if isinstance(target.array, np.ndarray):
                target.array[...] = wanted.view(target.array.dtype).reshape(target.array.shape)
            else:
                with torch.no_grad():
                    new = torch.from_numpy(wanted.reshape(-1)).view(target.array.dtype).reshape(target.shape)
                    target.array.copy_(new)
    match.apply()


def _bytes(source: Any) -> np.ndarray[Any, Any]:
    """The elements with their bytes as a last dimension."""
    if isinstance(source, np.ndarray):
        whole = np.ascontiguousarray(source)
        return whole.reshape(-1).view(np.uint8).reshape(*source.shape, source.itemsize)
    plain = source.contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    return plain.reshape(*source.shape, source.element_size())
