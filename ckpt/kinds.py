"""What is a tensor, a module, an optimizer: asked without importing torch.

None of them can exist before the program has imported torch, and importing it costs a numpy program more than a second
of every start. What is done with tensors once there are some is in `tensors` and `owners`, which do import it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch.distributed.tensor import DTensor

_torch: Any = None
_dtensor: Any = None


def loaded_torch() -> Any:
    """The torch module where the program has imported it, whole; None where it has not."""
    global _torch  # asked some times for each tensor of each save
    if _torch is None:
        found = sys.modules.get("torch")
        _torch = found if hasattr(found, "Tensor") and hasattr(found, "optim") else None
    return _torch


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a torch tensor."""
    found = _torch or loaded_torch()
    return found is not None and isinstance(value, found.Tensor)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether it is a torch DTensor, of which this rank may hold a part."""
    global _dtensor
    if _dtensor is None:
        found = sys.modules.get("torch.distributed.tensor")
        _dtensor = getattr(found, "DTensor", None)
    return _dtensor is not None and isinstance(value, _dtensor)


def is_array(value: object) -> TypeGuard[torch.Tensor | np.ndarray[Any, Any]]:
    """Whether it is a torch tensor or a numpy array."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def is_module(value: object) -> TypeGuard[torch.nn.Module]:
    """Whether it is a torch module."""
    found = loaded_torch()
    return found is not None and isinstance(value, found.nn.Module)


def is_optimizer(value: object) -> TypeGuard[torch.optim.Optimizer]:
    """Whether it is a torch optimizer."""
    found = loaded_torch()
    return found is not None and isinstance(value, found.optim.Optimizer)


def unwrap(value: Any) -> Any:
    """The module inside wrappers that only change names: data parallel and compiled ones."""
    while is_module(value):
        parallel = loaded_torch().nn.parallel
        if isinstance(value, (parallel.DistributedDataParallel, parallel.DataParallel)):
            value = value.module
        elif "_orig_mod" in value._modules:
            value = value._modules["_orig_mod"]
        else:
            break
    return value
