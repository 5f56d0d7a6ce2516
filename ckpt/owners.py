"""How torch modules and optimizers take their state back.

Modules are filled in place. Optimizers get their state through load_state_dict, since before their first step there is
nothing to fill, but tensors that they hold already are filled, not replaced. Imports torch, so it is imported only
where a module or an optimizer is at hand (see kinds).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from transom_hpc.ckpt import names
from transom_hpc.ckpt.nodes import Node

if TYPE_CHECKING:
    from transom_hpc.ckpt.fill import _Matcher

Finish = Callable[[], None]


def load_module(matcher: _Matcher, node: Node, module: torch.nn.Module, parts: tuple[str, ...]) -> Finish:
    """Fill a module's parameters and buffers; call load_state_dict only where that does more than filling."""
    held = dict(module.state_dict())
    own = {_place(t) for t in (*module.parameters(), *module.buffers())}
    aliases = all(isinstance(t, torch.Tensor) and _place(t) in own for t in held.values())
    ready = matcher.mapping(node[1], held, parts, "inplace")

    def finish() -> None:
        loaded = ready()
        if not aliases or _has_hooks(module):
            module.load_state_dict(loaded, strict=False)

    return finish


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return (tensor.data_ptr() if tensor.numel() else 0, tensor.shape)


def _has_hooks(module: torch.nn.Module) -> bool:
    return type(module).load_state_dict is not torch.nn.Module.load_state_dict or any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or type(part)._load_from_state_dict is not torch.nn.Module._load_from_state_dict
        for part in module.modules()
    )


def load_optimizer(matcher: _Matcher, node: Node, optimizer: torch.optim.Optimizer, parts: tuple[str, ...]) -> Finish:
    """Give an optimizer its state, with the element types that were stored."""
    held = optimizer.state_dict()
    _compare_groups(matcher, node, held, parts)
    ready = matcher.node(node, held, parts, "reuse")

    def finish() -> None:
        loaded = ready()
        optimizer.load_state_dict(loaded)
        _undo_casts(optimizer, loaded)

    return finish


def _compare_groups(matcher: _Matcher, node: Node, held: Any, parts: tuple[str, ...]) -> None:
    """Other groups or another number of parameters: named before anything is touched."""
    stored = {key: item for key, _, item in node[1]}.get("param_groups", ["list", []])[1]
    counts = [len({key: item for key, _, item in group[1]}.get("params", ["list", []])[1]) for group in stored]
    here = [len(group["params"]) for group in held.get("param_groups", [])]
    if counts != here:
        matcher.found.misshaped.append(
            f"{names.place((*parts, 'param_groups'))} (stored: {counts} parameters in its groups; here: {here})"
        )


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
