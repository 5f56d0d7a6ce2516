"""Full names of parameters, by which an optimizer's state is kept where the state has their module, too.

Numbers, as torch has them, mean the order in which a program gave its parameters to the optimizer. Names still fit when
that order is another one, when there are other groups, and when ranks hold other parts of the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))

Owners = Sequence[tuple[tuple[str, ...], "torch.nn.Module"]]
"""Modules of a state, without wrappers around them, each once, and where each is."""


def tidy(name: str) -> str:
    """A name without the parts that compiling and activation checkpointing of inner modules put into it."""
    if "_orig_mod" not in name and "_checkpoint_wrapped_module" not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tidied(held: dict[str, Any]) -> dict[str, str]:
    """What each key of a module's state is called; as it is, where two would have one name."""
    names = {key: tidy(key) if isinstance(key, str) else key for key in held}
    return names if len(set(names.values())) == len(names) else {key: key for key in held}


def names_of(optimizer: torch.optim.Optimizer, owners: Owners) -> dict[int, str]:
    """What the parameters of an optimizer are called.

    Args:
        optimizer: whose parameters.
        owners: the modules in the state.

    Returns:
        By the number that torch gives a parameter in the optimizer's state_dict. A parameter is left out that belongs
        to no module, or to two. Where modules use a name for two parameters, the modules' own places are in front.
    """
    numbers = _numbers(optimizer)
    found = _found(numbers, owners)
    if len(found) < len(numbers):
        # Modules that have other tensors in place of their parameters between a forward and a backward pass (FSDP2)
        # put them back when they are asked for their state.
        hooked = [module for _, module in owners if any(part._state_dict_pre_hooks for part in module.modules())]
        for module in hooked:
            module.state_dict()
        found = _found(numbers, owners) if hooked else found
    names = {number: places[0] for number, places in found.items() if len(places) == 1}
    counts = Counter(name for _, name in names.values())
    full = {n: name if counts[name] == 1 else ".".join((*path, name)) for n, (path, name) in names.items()}
    again = Counter(full.values())
    return {number: name for number, name in full.items() if again[name] == 1}


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The numbers of parameters, as Optimizer.state_dict gives them, by their id."""
    numbers: dict[int, int] = {}
    begin = 0
    for group in optimizer.param_groups:
        numbers.update({id(p): n for n, p in enumerate(group["params"], begin) if id(p) not in numbers})
        begin += len(group["params"])
    return numbers


def _found(numbers: dict[int, int], owners: Owners) -> dict[int, list[tuple[tuple[str, ...], str]]]:
    found: dict[int, list[tuple[tuple[str, ...], str]]] = {}
    for path, module in owners:
        for name, parameter in module.named_parameters():
            number = numbers.get(id(parameter))
            if number is not None:
                found.setdefault(number, []).append((path, tidy(name)))
    return found


def named(held: Any, names: dict[int, str]) -> Any:
    """An optimizer's state_dict with names in place of numbers; as it is, where it is not made as torch makes it."""
    if not names or not is_usual(held) or set(names.values()) & held["state"].keys():
        return held
    state = {names.get(key, key) if type(key) is int else key: value for key, value in held["state"].items()}
    groups = [{**group, "params": [names.get(n, n) for n in group["params"]]} for group in held["param_groups"]]
    return {**held, "state": state, "param_groups": groups}


def is_usual(held: Any) -> bool:
    """Whether a state_dict is made as Optimizer.state_dict makes it."""
    return (
        isinstance(held, dict)
        and isinstance(held.get("state"), dict)
        and isinstance(held.get("param_groups"), list)
        and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in held["param_groups"])
    )
