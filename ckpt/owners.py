"""How torch modules and optimizers take their state back.

Modules are filled in place. Optimizers get their state through load_state_dict, since before their first step there is
nothing to fill, but tensors that they hold already are filled, not replaced. Imports torch, so it is imported only
where a module or an optimizer is at hand (see kinds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from transom_hpc.ckpt import fqn, grouped, kinds
from transom_hpc.ckpt.nodes import Node

if TYPE_CHECKING:
    from transom_hpc.ckpt.fill import _Matcher

Finish = Callable[[], None]


def load_module(matcher: _Matcher, node: Node, module: torch.nn.Module, parts: tuple[str, ...]) -> Finish:
    """Fill a module's parameters and buffers; call load_state_dict only where that does more than filling."""
    raw = dict(module.state_dict())
    own = {_place(t) for t in (*module.parameters(), *module.buffers())}
    aliases = all(isinstance(t, torch.Tensor) and _place(t) in own for t in raw.values())
    called = fqn.tidied(raw)
    held = {called[key]: value for key, value in raw.items()}
    # Older checkpoints have names of compiled parts as torch gives them.
    stored = fqn.tidied({item[1]: item for item in node[1]})
    items = [[stored[text] if key == text else key, stored[text], *rest] for key, text, *rest in node[1]]
    ready = matcher.mapping(items, held, parts, "inplace")

    def finish() -> None:
        loaded = ready()
        if not aliases or _has_hooks(module):
            module.load_state_dict({key: loaded[called[key]] for key in raw}, strict=False)

    return finish


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    tensor = tensor._local_tensor if kinds.is_dtensor(tensor) else tensor
    return (tensor.data_ptr() if tensor.numel() else 0, tensor.shape)


def _has_hooks(module: torch.nn.Module) -> bool:
    return type(module).load_state_dict is not torch.nn.Module.load_state_dict or any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or type(part)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
        for part in module.modules()
    )


def load_optimizer(
    matcher: _Matcher,
    node: Node,
    optimizer: torch.optim.Optimizer,
    parts: tuple[str, ...],
    elsewhere: Sequence[Node] = (),
) -> Finish:
    """Give an optimizer its state, with the element types that were stored.

    Args:
        node: its state_dict, as it was stored.
        elsewhere: groups of parameters that only other ranks stored.
    """
    held = optimizer.state_dict()
    groups = grouped.stored(node, elsewhere)
    if groups is None or not fqn.is_usual(held):  # not as torch makes it: given back as it was
        ready = matcher.node(node, held, parts, "reuse")
    else:
        found = grouped.match(matcher, node, groups, optimizer, held, parts)
        if found is None:
            return lambda: None
        ready = found

    def finish() -> None:
        loaded = ready()
        optimizer.load_state_dict(loaded)
        _undo_casts(optimizer, loaded)

    return finish


def _undo_casts(optimizer: torch.optim.Optimizer, loaded: Any) -> None:
    """torch casts floating-point state to the parameter's type when loading; what was stored is what must be there."""
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict or not isinstance(loaded, dict):
        return
    order = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in loaded["param_groups"] for i in group["params"]]
    by_id = dict(zip(ids, order, strict=True))
    for index, stored in loaded["state"].items():
        parameter = by_id.get(index)
        if parameter is None or not isinstance(stored, dict):
            continue
        for key, value in stored.items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)
