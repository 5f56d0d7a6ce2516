"""An optimizer's stored state held against a live optimizer: parameter by parameter, whatever groups they are in.

A parameter's state goes to the parameter of that name, wherever it was stored. A group's settings (learning rate,
weight decay) are those of the group that its parameters were in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transom_hpc.ckpt import block, kinds, names
from transom_hpc.ckpt.nodes import Node, plain
from transom_hpc.ckpt.wanted import ABSENT, Image

if TYPE_CHECKING:
    import torch

    from transom_hpc.ckpt.fill import _Matcher
    from transom_hpc.ckpt.wanted import Ready

Id = str | int
"""What a stored parameter is called: its full name, or its number."""

_OF_PARAMETERS = ("params", "param_names")
_OF_THE_PROGRAM = ("foreach", "fused", "capturable", "differentiable")
"""How the step is computed, not what: parameters cut otherwise, or on another device, may need another way."""


@dataclass(frozen=True, slots=True)
class Group:
    """A stored group of parameters.

    Args:
        ids: what its parameters are called.
        settings: items of its dict but for those and for how the step is computed.
        own: whether this rank stored it.
    """

    ids: tuple[Id, ...]
    settings: tuple[Any, ...]
    own: bool

    @property
    def key(self) -> str:
        """Equal for groups with equal settings."""
        return json.dumps([item[1:3] for item in self.settings])


def stored(node: Node, elsewhere: Sequence[Node]) -> list[Group] | None:
    """The groups of a stored state_dict, this rank's own first; None where it is not made as torch makes it."""
    if not isinstance(node, list) or node[0] not in ("dict", "odict"):
        return None
    items = {text: item for _, text, item, *_ in node[1]}
    if not {"state", "param_groups"} <= items.keys() or items["state"][0] not in ("dict", "odict"):
        return None
    own = items["param_groups"]
    if not isinstance(own, list) or own[0] != "list":
        return None
    groups = [_group(group, True) for group in own[1]] + [_group(group, False) for group in elsewhere]
    return None if None in groups else [group for group in groups if group is not None]


def _group(node: Node, own: bool) -> Group | None:
    if not isinstance(node, list) or node[0] not in ("dict", "odict"):
        return None
    params = next((item for _, text, item, *_ in node[1] if text == "params"), None)
    if not isinstance(params, list) or params[0] != "list" or not all(type(i) in (int, str) for i in params[1]):
        return None
    return Group(
        tuple(params[1]), tuple(item for item in node[1] if item[1] not in (*_OF_PARAMETERS, *_OF_THE_PROGRAM)), own
    )


def match(
    matcher: _Matcher,
    node: Node,
    groups: Sequence[Group],
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, Any],
    parts: tuple[str, ...],
) -> Ready | None:
    """Hold it against the live one.

    Args:
        matcher: what is found is written there.
        node: the stored state_dict.
        groups: those in it, and those of other ranks.
        optimizer: the live one.
        held: its state_dict.
        parts: its place in the state.

    Returns:
        What gives a state_dict for the live optimizer; None where its parameters can't be told from each other.
    """
    ids = _ids(groups, matcher.called.get(id(optimizer), {}), held)
    if ids is None:
        counts = [len(group.ids) for group in groups if group.own]
        here = [len(group["params"]) for group in held["param_groups"]]
        place = names.place((*parts, "param_groups"))
        matcher.found.misshaped.append(f"{place} (stored: {counts} parameters in its groups; here: {here})")
        return None
    known = {i for group in groups for i in group.ids}
    absent = [names.place((*parts, "state", str(i))) for i in ids.values() if i not in known]
    matcher.found.missing.extend(absent)
    wanted = set(ids.values())
    for group in groups:
        unwanted = [names.place((*parts, "state", str(i))) for i in group.ids if i not in wanted]
        (matcher.found.extra if group.own else matcher.found.elsewhere).extend(unwanted)
    state = _state(matcher, node, known, ids, optimizer, held, parts)
    settings = [_settings(matcher, groups, i, group, ids, parts) for i, group in enumerate(held["param_groups"])]
    rest = [item for item in node[1] if item[1] not in ("state", "param_groups")]
    others = matcher.mapping(rest, held, parts, "reuse")
    return lambda: {**others(), "state": state(), "param_groups": [ready() for ready in settings]}


def _ids(groups: Sequence[Group], called: Mapping[int, str], held: Mapping[str, Any]) -> dict[int, Id] | None:
    """What each live parameter is called in what is stored, by its number."""
    numbers = [number for group in held["param_groups"] for number in group["params"]]
    own = [group for group in groups if group.own]
    if any(type(i) is str for group in groups for i in group.ids) and called:
        return {number: called.get(number, number) for number in numbers}
    # Numbers on one side: then the order of the parameters is all that there is.
    if [len(group.ids) for group in own] != [len(group["params"]) for group in held["param_groups"]]:
        return None
    return dict(zip(numbers, [i for group in own for i in group.ids], strict=True))


def _state(
    matcher: _Matcher,
    node: Node,
    known: set[Id],
    ids: Mapping[int, Id],
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, Any],
    parts: tuple[str, ...],
) -> Ready:
    """The state of each live parameter, and what is kept under other keys."""
    stored_state = {plain(item[0]): item for item in next(item[2] for item in node[1] if item[1] == "state")[1]}
    live = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parameters = dict(zip([n for group in held["param_groups"] for n in group["params"]], live, strict=True))
    ready: dict[Any, Ready] = {}
    for number, i in ids.items():
        here = (*parts, "state", str(i))
        if i in stored_state:
            mine = held["state"].get(number, {})
            node_of = stored_state[i][2]
            mine = _with_images(matcher, node_of, mine, parameters[number])
            ready[number] = matcher.node(node_of, mine, here, "reuse")
        elif i not in known and number in held["state"]:
            ready[number] = lambda kept=held["state"][number]: kept  # type: ignore[misc]
    for key, item in stored_state.items():
        if key not in known:
            ready[key] = matcher.node(item[2], held["state"].get(key, ABSENT), (*parts, "state", item[1]), "reuse")
    return lambda: {key: value() for key, value in ready.items()}


def _with_images(matcher: _Matcher, node: Node, mine: Any, parameter: torch.Tensor) -> Any:
    """The live state of one parameter, with images of what it does not hold yet: what has a DTensor's shape becomes
    one like it."""
    if not kinds.is_dtensor(parameter) or block.block_of(parameter) is None or not isinstance(mine, dict):
        return mine
    if not isinstance(node, list) or node[0] not in ("dict", "odict"):
        return mine
    images = {}
    for key, text, item, *_ in node[1]:
        entry = matcher.arrays.entries.get(item[1]) if isinstance(item, list) and item[0] == "tensor" else None
        if entry is not None and entry.global_shape == tuple(parameter.shape) and text != "step":
            images[plain(key)] = Image(parameter)
    return {**images, **mine}


def _settings(
    matcher: _Matcher,
    groups: Sequence[Group],
    index: int,
    held: Mapping[str, Any],
    ids: Mapping[int, Id],
    parts: tuple[str, ...],
) -> Ready:
    """A live group with the settings that its parameters were stored with."""
    of: dict[Id, Group] = {}
    for group in groups:  # own ones first
        for i in group.ids:
            of.setdefault(i, group)
    found = {of[ids[n]].key: of[ids[n]] for n in held["params"] if ids[n] in of}
    here = (*parts, "param_groups", str(index))
    if len(found) > 1:
        differ = sorted({text for group in found.values() for text in _differing(group, next(iter(found.values())))})
        matcher.found.misshaped.append(
            f"{names.place(here)} (its parameters were stored in groups that differ in {', '.join(differ)})"
        )
    own = [group for group in groups if group.own]
    if not held["params"] and index < len(own) and not own[index].ids:
        found = {"": own[index]}
    fixed = {key: held[key] for key in (*_OF_PARAMETERS, *_OF_THE_PROGRAM) if key in held}
    if len(found) != 1:
        return lambda: dict(held)
    (group,) = found.values()
    ready = matcher.mapping(list(group.settings), held, here, "reuse")
    return lambda: {**ready(), **fixed}


def _differing(a: Group, b: Group) -> list[str]:
    left, right = ({item[1]: item[2] for item in group.settings} for group in (a, b))
    return [text for text in left.keys() | right.keys() if left.get(text) != right.get(text)]
