"""What there is for one rank: of everything that is stored, the parts of each array that it may have. Pure.

Stored things come from a checkpoint's files or from segments in memory; both are told apart by who reads them only.
What is bitwise the same wherever it was held belongs to everybody. What ranks held differently under one name belongs
to each of them: a rank has its own, and no other rank has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from transom_hpc.ckpt import dtypes, names
from transom_hpc.ckpt.layout import Entry, is_whole
from transom_hpc.ckpt.manifest import Stored

_REFERENCES = ("tensor", "array", "longbytes", "longbytearray", "pickle")


class Stock:
    """What one rank may have.

    Args:
        stored: everything.
        rank: this one.
        world_size: ranks that saved it.
    """

    def __init__(self, stored: Iterable[Stored], rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.parts: dict[str, tuple[Stored, ...]] = {}
        """By name the parts of each array and object, in the order in which they give their elements."""
        self.entries: dict[str, Entry] = {}
        """By name each of them as a whole; without checksums where it is kept in parts."""
        self.private: dict[str, tuple[Stored, ...]] = {}
        """By name what ranks held differently, so that it belongs to each of them."""
        self.documents: list[Stored] = []
        """This rank's own."""
        self.others: list[Stored] = []
        """Those that only other ranks have."""
        by_name: dict[str, list[Stored]] = {}
        for item in stored:
            if item.entry.dtype == dtypes.JSON:
                (self.documents if item.is_held_by(rank) else self.others).append(item)
            else:
                by_name.setdefault(item.entry.name, []).append(item)
        for name, items in by_name.items():
            self._add(name, items)
        self.others.sort(key=lambda item: item.lowest)

    def _add(self, name: str, items: list[Stored]) -> None:
        mine = next((item for item in items if item.is_held_by(self.rank)), None)
        kinds = {(item.entry.dtype, item.entry.global_shape) for item in items}
        whole = all(is_whole(item.entry) for item in items)
        if len(kinds) > 1 or (whole and len(items) > 1):
            self.private[name] = tuple(items)
            if mine is None:
                return
            of = [item for item in items if (item.entry.dtype, item.entry.global_shape) == _kind(mine)]
            items = [mine] if is_whole(mine.entry) else of
        first = mine or items[0]
        items.sort(key=lambda item: (item is not mine, item.lowest))
        self.parts[name] = tuple(items)
        self.entries[name] = first.entry if is_whole(first.entry) else _as_a_whole(first.entry)


def _kind(item: Stored) -> tuple[str, tuple[int, ...]]:
    return item.entry.dtype, item.entry.global_shape


def _as_a_whole(part: Entry) -> Entry:
    nbytes = math.prod(part.global_shape) * dtypes.numpy_dtype(part.dtype).itemsize
    start = (0,) * len(part.global_shape)
    return replace(part, shape=part.global_shape, start=start, nbytes=nbytes, sums=())


def homeless(stock: Stock, world_size: int, documents: Mapping[str, Sequence[Any]], missing: Sequence[str]) -> str:
    """What was kept for each rank and can't be given back to as many ranks as there are now.

    Args:
        stock: of this rank.
        world_size: how many ranks there are now.
        documents: the content of all documents of each key on which ranks differ.
        missing: places of this rank's state for which nothing is stored.

    Returns:
        The first such thing and both numbers of ranks; empty where everything has its place.
    """
    sizes = f"the checkpoint is of {stock.world_size} ranks and here are {world_size}"
    plain = {key for key, nodes in documents.items() if not any(refers(node) for node in nodes)}
    keys = Counter(item.entry.name for item in (*stock.documents, *stock.others))
    left = [item for items in stock.private.values() for item in items]
    left += [i for i in stock.others if i.entry.name.partition("/")[2] in plain and keys[i.entry.name] > 1]
    gone = [item for item in left if item.lowest >= world_size]
    if gone:
        item = min(gone, key=lambda item: item.lowest)
        return f"{names.shown(item.entry.name)} of rank {item.lowest} has no rank to go to: {sizes}"
    if stock.rank >= stock.world_size:
        kept = {names.shown(item.entry.name) for item in left}
        for place in missing:
            part = place.partition(" (")[0]
            if part in kept or any(part.startswith(f"{name}/") for name in kept):
                return f"{part} is kept for each rank, and there is none for rank {stock.rank}: {sizes}"
    return ""


def refers(node: Any) -> bool:
    """Whether a document speaks of arrays or objects, which are stored apart from it."""
    if not isinstance(node, list):
        return False
    if len(node) == 2 and node[0] in _REFERENCES and isinstance(node[1], str):
        return True
    return any(refers(item) for item in node)
