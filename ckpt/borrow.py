"""What a rank's own documents lack and those of other ranks have: structures of several ranks overlaid. Pure.

Ranks may have held different parts of a state, as the stages of a pipeline do. When the parts are cut otherwise now, a
rank finds in the documents of others what its own one does not have. What ranks disagree about belongs to each of them
alone and is nothing to be borrowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Node = Any
_NOTHING: Any = object()

_WITH_KEYS = ("dict", "odict")
_WITH_PLACES = ("list", "tuple", "named")
_WITH_ONE = ("module", "optimizer", "object", "root", "key")

BORROWED = "borrowed"
"""Stands behind an item of a dict that only other ranks had."""


def overlaid(own: Mapping[str, Node], others: Sequence[Mapping[str, Node]]) -> dict[str, tuple[Node, bool]]:
    """Documents that have all that is in a rank's own ones, and what only others have.

    Args:
        own: this rank's documents, by outermost key.
        others: those of other ranks which differ.

    Returns:
        By outermost key the document, and whether it is borrowed as a whole. In its dicts what is borrowed is marked.
    """
    found = {}
    for key in dict.fromkeys([*own, *(key for documents in others for key in documents)]):
        nodes = [documents[key] for documents in others if key in documents]
        node = _over([own[key], *nodes], True) if key in own else _over(nodes, False)
        if node is not _NOTHING:
            found[key] = (node, key not in own)
    return found


def _over(nodes: Sequence[Node], own: bool) -> Node:
    """One node from those at the same place; the first is this rank's own, or none is.

    Returns:
        _NOTHING where there is none of its own and others disagree.
    """
    first = nodes[0]
    rest = [node for node in nodes[1:] if node != first]
    if not rest:
        return first
    kind = first[0] if isinstance(first, list) else ""
    alike = [node for node in rest if isinstance(node, list) and node[0] == kind and len(node) == len(first)]
    if not own and len(alike) < len(rest):
        return _NOTHING
    if kind in _WITH_KEYS:
        return [kind, _items([node[1] for node in (first, *alike)], own)]
    if kind == "optimizer":
        return _optimizer([first, *alike], own)
    if kind in _WITH_ONE:
        inner = _over([node[-1] for node in (first, *alike)], own)
        return [*first[:-1], inner] if inner is not _NOTHING else _NOTHING
    if kind in _WITH_PLACES:
        alike, before = [node for node in alike if len(node[-1]) == len(first[-1])], alike
        if not own and alike != before:
            return _NOTHING
        places = [_over(items, own) for items in zip(first[-1], *(node[-1] for node in alike), strict=True)]
        return [*first[:-1], places] if _NOTHING not in places else _NOTHING
    return first if own else _NOTHING


def _optimizer(nodes: Sequence[Node], own: bool) -> Node:
    """An optimizer with the state that it has on any rank. The groups of its parameters are no list that goes on from
    rank to rank: those of other ranks stand behind it."""
    held = [{item[1]: item for item in node[1][1]} for node in nodes]
    groups = [row.pop("param_groups", ["", "param_groups", ["list", []]]) for row in held]
    items = _items([list(row.values()) for row in held], own)
    mine = [groups[0]] if own else [["param_groups", "param_groups", ["list", []], BORROWED]]
    theirs = [group for _, _, node, *_ in groups[1 if own else 0 :] for group in node[-1]]
    return ["optimizer", ["dict", [*items, *mine]], theirs]


def _items(rows: Sequence[Sequence[Any]], own: bool) -> list[Any]:
    """The items of dicts put over each other, in the order in which they come up."""
    at: dict[str, list[Any]] = {}
    mine = {text for _, text, *_ in rows[0]} if own else set()
    for row in rows:
        for item in row:
            at.setdefault(item[1], []).append(item)
    found = []
    for text, items in at.items():
        node = _over([item[2] for item in items], text in mine)
        if node is not _NOTHING:
            found.append([items[0][0], text, node] if text in mine else [items[0][0], text, node, BORROWED])
    return found
