"""The hand on torch tensors: which can be kept, and how bits get from them and into them.

Imports torch, so it is imported only where a tensor is at hand (see kinds).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import direct, dtypes, kinds

_LARGE_BYTES = 1 << 20


@lru_cache
def dtype_of(dtype: torch.dtype) -> str | None:
    """How an element type is called in a checkpoint (see dtypes); None where it can't be saved."""
    return dtypes.of_torch(str(dtype))


@lru_cache
def _refusal_of_type(kind: type) -> str:
    if issubclass(kind, torch.nn.parameter.UninitializedTensorMixin):
        return "it has no shape yet; run its module once before, as on one batch"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
        return f"a {kind.__name__} has no storage of its own; save what it is made of"
    return ""


def refusal(tensor: torch.Tensor) -> str:
    """Why a tensor can't be saved, and what to do; empty where it can."""
    why = _refusal_of_type(type(tensor))  # type: ignore[arg-type]  # a class can be hashed
    if why and kinds.is_dtensor(tensor):
        from transom_hpc.ckpt import dtensors

        return dtensors.refusal(tensor)
    if why:
        return why
    if tensor.is_nested:
        return "a nested tensor can't be saved; save the tensors in it"
    return _refusal_of_layout(tensor.layout, tensor.dtype, tensor.device)


@lru_cache
def _refusal_of_layout(layout: torch.layout, dtype: torch.dtype, device: torch.device) -> str:
    if layout is not torch.strided:
        return f"a tensor of layout {layout} can't be saved; save its indices and values"
    if device.type == "meta":
        return "a tensor on the meta device has no data"
    if dtype_of(dtype) is None:  # quantized ones among them
        return f"element type {dtype} can't be saved; save its integer representation"
    return ""


def empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A new tensor of this element type (see dtypes), with nothing in it yet; a large one begins on a page, so that it
    can be read into past the page cache, and has large pages where there are any."""
    kind = getattr(torch, dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _LARGE_BYTES:
        return torch.empty(shape, dtype=kind)
    base = torch.empty(nbytes + direct.ALIGN, dtype=torch.uint8)
    direct.in_large_pages(base.data_ptr(), base.nbytes)
    skipped = -base.data_ptr() % direct.ALIGN
    strides = torch.empty(shape, dtype=kind, device="meta").stride()
    return torch.empty(0, dtype=kind).set_(base.untyped_storage(), skipped // kind.itemsize, shape, strides)


def copy_out(tensor: torch.Tensor, room: np.ndarray[Any, Any], wait: bool = True) -> None:
    """Copy a tensor's elements, in order, to where these bytes are.

    Args:
        wait: return when they are there; False only starts it, where the tensor is on a GPU (see cuda).
    """
    source = _plain(tensor.detach())
    _over(room, source.dtype, tuple(source.shape)).copy_(source, non_blocking=not wait)


def copy_in(tensor: torch.Tensor, room: np.ndarray[Any, Any], name: str) -> None:
    """Put bytes into a tensor whose elements do not lie together in this machine's memory.

    Raises:
        StateError: it is expanded, and the bytes differ where it has one element only.
    """
    with torch.no_grad():
        live = _plain(tensor.detach())
        source = _over(room, live.dtype, tuple(live.shape))
        for axis, stride in enumerate(live.stride()):
            if stride == 0 and live.shape[axis] > 1:  # an expanded tensor: all along this axis is one element
                if not torch.equal(_bits(source), _bits(source.narrow(axis, 0, 1).expand_as(source))):
                    raise StateError(
                        f"{name}: expanded here, but the stored values differ along axis {axis}; make it contiguous",
                        name=name,
                    )
                live, source = live.narrow(axis, 0, 1), source.narrow(axis, 0, 1)
        live.copy_(source)


def count_change(tensor: torch.Tensor) -> None:
    """Let autograd know that the bytes were changed behind its back."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Elements of one byte as integers: bits are copied, and not every type has a copy of its own."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _over(room: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this type and shape whose memory the bytes are."""
    return torch.from_numpy(room).view(dtype).reshape(shape)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
