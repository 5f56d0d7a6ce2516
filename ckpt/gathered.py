"""A checkpoint's state without the program it belongs to: plain containers and values, with a Slot for each array.

What belongs to single ranks only is merged where that can be (stages of a pipeline hold different parts of one dict),
and else left out and named.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from transom_hpc.base.errors import StateError, UsageError
from transom_hpc.ckpt import dtypes, fill, names
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.contents import Array, arrays, read
from transom_hpc.ckpt.nodes import Node

_PER_RANK = "per rank"
_WRAPPERS = ("module", "optimizer", "object")
_ABSENT: Any = object()


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place of the state where an array belongs; the same object at each place where the same array does.

    Args:
        array: which one.
        dtype: its element type as torch calls it.
    """

    array: Array
    dtype: str


@dataclass(slots=True)
class Gathered:
    """A state.

    Args:
        state: plain containers and values, and slots.
        left_out: place, and why it is not in it.
    """

    state: Any = None
    left_out: list[tuple[str, str]] = field(default_factory=list)


def gather(checkpoint: Checkpoint, only: str = "", rank: int | None = None) -> Gathered:
    """Put a checkpoint's state together. Reads no arrays.

    Args:
        only: the part below this place, keys joined by '/'; empty for all.
        rank: whose own things to take; None: only what belongs to all.

    Raises:
        UsageError: there is no such place, or no such rank.
        CorruptCheckpoint: what has to be read is not what was written.
    """
    if rank is not None and not 0 <= rank < checkpoint.manifest.world_size:
        raise UsageError(f"rank {rank}: the checkpoint is of {checkpoint.manifest.world_size} ranks")
    found = arrays(checkpoint.manifest)
    documents: dict[str, list[Node]] = {}
    for array in found:
        if array.dtype == dtypes.JSON and array.rank in (None, rank if rank is not None else array.rank):
            key = array.name.partition("/")[2]
            documents.setdefault(key, []).append(json.loads(read(checkpoint, array)))
    root: Node = ["dict", []]
    for key, held in documents.items():
        if held[0][0] == "root":
            root = _merged([document[1] for document in held])
        else:
            root[1].append([held[0][1], names.unescape(key), _merged([document[2] for document in held])])
    parts = tuple(part for part in only.split("/") if part)
    builder = _Builder(checkpoint, found, rank)
    builder.gathered.state = builder.build(_below(root, parts), parts)
    if builder.gathered.state is _ABSENT:
        builder.gathered.state = {}
    return builder.gathered


def _below(node: Node, parts: Sequence[str]) -> Node:
    """The node at a place. Keys may hold '/' themselves."""
    while parts:
        inner = node[1] if isinstance(node, list) and node[0] in _WRAPPERS else node
        if isinstance(inner, list) and inner[0] in ("dict", "odict"):
            choices = {text: child for _, text, child in inner[1]}
        elif isinstance(inner, list) and inner[0] in ("list", "tuple", "named"):
            choices = {str(i): child for i, child in enumerate(inner[-1])}
        else:
            choices = {}
        for count in range(len(parts), 0, -1):
            text = "/".join(parts[:count])
            if text in choices:
                node, parts = choices[text], parts[count:]
                break
        else:
            there = ", ".join(list(choices)[:12]) or "nothing"
            raise UsageError(f"there is nothing at {'/'.join(parts)}; there are {there}")
    return node


def _merged(nodes: Sequence[Node]) -> Node:
    """What several ranks have at one place, as one."""
    first = nodes[0]
    if all(node == first for node in nodes[1:]):
        return first
    kinds = {node[0] if isinstance(node, list) else None for node in nodes}
    kind = first[0] if isinstance(first, list) else None
    if len(kinds) == 1 and kind in _WRAPPERS:
        return [kind, _merged([node[1] for node in nodes])]
    if len(kinds) == 1 and kind in ("dict", "odict"):
        places: dict[str, list[list[Any]]] = {}
        for node in nodes:
            for item in node[1]:
                places.setdefault(item[1], []).append(item)
        return [kind, [[items[0][0], text, _merged([i[2] for i in items])] for text, items in places.items()]]
    nested = kind in ("list", "tuple") and any(isinstance(item, list) for item in first[1])  # not a row of numbers
    if len(kinds) == 1 and nested and len({len(node[1]) for node in nodes}) == 1:
        return [kind, [_merged(items) for items in zip(*(node[1] for node in nodes), strict=True)]]
    return [_PER_RANK]


class _Builder:
    def __init__(self, checkpoint: Checkpoint, found: Sequence[Array], rank: int | None) -> None:
        self.gathered = Gathered()
        self._checkpoint = checkpoint
        self._rank = rank
        self._by_name: dict[str, list[Array]] = {}
        for array in found:
            self._by_name.setdefault(array.name, []).append(array)
        self._slots: dict[str, Slot] = {}

    def build(self, node: Node, parts: tuple[str, ...]) -> Any:
        if not isinstance(node, list):
            return node
        kind = node[0]
        if kind in ("tensor", "array"):
            return self._slot(node[1], parts)
        if kind in ("longbytes", "longbytearray"):
            array = self._find(node[1], parts)
            make: Callable[[bytes], Any] = bytes if kind == "longbytes" else bytearray
            return _ABSENT if array is None else make(read(self._checkpoint, array))
        if kind in ("dict", "odict"):
            built = [(fill.plain(key), self.build(child, (*parts, text))) for key, text, child in node[1]]
            return (OrderedDict if kind == "odict" else dict)((k, v) for k, v in built if v is not _ABSENT)
        if kind in ("list", "tuple", "named"):
            items = [self.build(child, (*parts, str(i))) for i, child in enumerate(node[-1])]
            items = [None if item is _ABSENT else item for item in items]  # the others keep their places
            return items if kind == "list" else tuple(items)
        if kind in _WRAPPERS:
            return self.build(node[1], parts)
        if kind == "pickle":
            return self._leave_out(parts, "a Python object")
        if kind == _PER_RANK:
            return self._leave_out(parts, "each rank has another value; --rank takes that of one")
        value = fill.plain(node)
        return value.item() if isinstance(value, np.generic) else value

    def _slot(self, name: str, parts: tuple[str, ...]) -> Any:
        if name not in self._slots:
            array = self._find(name, parts)
            if array is None:
                return _ABSENT
            dtype = array.dtype if dtypes.is_torch(array.dtype) else dtypes.torch_name(array.dtype)
            if dtype is None:
                return self._leave_out(parts, f"torch has no element type like {array.dtype}")
            self._slots[name] = Slot(array, dtype)
        return self._slots[name]

    def _find(self, name: str, parts: tuple[str, ...]) -> Array | None:
        held = self._by_name.get(name, [])
        if not held:
            raise StateError(f"{names.place(parts)}: the checkpoint names {name} and does not have it", name=name)
        for array in held:
            alone = len(held) == 1  # no other rank has anything of that name
            if array.start is None and (alone or array.rank in (None, self._rank)):
                return array
        why = "each rank has its own; --rank takes that of one"
        if any(array.start is not None for array in held):
            why = "its parts do not make a whole"
        self._leave_out(parts, why)
        return None

    def _leave_out(self, parts: tuple[str, ...], why: str) -> Any:
        self.gathered.left_out.append((names.place(parts), why))
        return _ABSENT
