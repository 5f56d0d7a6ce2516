"""Puts a state together again: matches a stored structure with the live state, then fills it in place.

Two phases, so that nothing is touched before everything is known to fit and to be whole. `match` compares and says
where the bytes of each array must go; `Match.apply`, called when those bytes are there and verified, hands them over.
"""

from __future__ import annotations

import importlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import dtypes, kinds, names
from transom_hpc.ckpt.block import Block, block_of
from transom_hpc.ckpt.borrow import BORROWED, overlaid
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.nodes import Node, keyed
from transom_hpc.ckpt.nodes import plain as plain
from transom_hpc.ckpt.state import Stateful, walk

if TYPE_CHECKING:
    import torch

_ABSENT: Any = object()

Ready = Callable[[], Any]
"""Gives the value of one place of the state, once the bytes are there."""


@dataclass(slots=True)
class Target:
    """An array that wants the bytes of a stored one.

    Args:
        array: the live tensor or array, or a new one.
            Never a DTensor: of one it is what this rank holds.
        fresh: whether it is new, so that bytes may be put in before they are verified.
        start, shape: which box of the whole stored array it wants; shape is the array's own.
    """

    array: torch.Tensor | np.ndarray[Any, Any]
    fresh: bool
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(slots=True)
class Match:
    """A stored state held against a live one.

    Args:
        targets: for each stored array that is wanted, where it goes.
        objects: names of pickled objects that are wanted.
        missing: places of the live state for which nothing is stored.
        extra: what this rank stored and has no place in the live state.
        elsewhere: what only other ranks stored and has no place in the live state of this one. Of this and `extra`,
            what all ranks have no place for fits nowhere.
        misshaped: what is stored with another shape, type or kind.
    """

    targets: dict[str, list[Target]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    misshaped: list[str] = field(default_factory=list)
    _ready: list[Ready] = field(default_factory=list)

    def complain(self, extras: bool = True) -> str:
        """What does not fit, whole; empty where everything does.

        Args:
            extras: whether to name what this rank has no place for; other ranks may have one.
        """
        parts = [
            f"{label}: {', '.join(sorted(places))}"
            for label, places in (
                ("not in the checkpoint", self.missing),
                ("only in the checkpoint", self.extra if extras else []),
                ("different", self.misshaped),
            )
            if places
        ]
        return "; ".join(parts)

    def apply(self) -> None:
        """Hand everything over that is not an array's bytes: numbers, objects, load_state_dict calls."""
        for ready in self._ready:
            ready()


def match(
    structure: Mapping[str, Node],
    entries: Mapping[str, Entry],
    state: Any,
    unpickle: bool = False,
    others: Sequence[Mapping[str, Node]] = (),
) -> Match:
    """Hold a stored state against the live one. Changes nothing.

    Args:
        structure: this rank's documents for each outermost key, as `state.walk` made them.
        entries: by name, each array as a whole, also where it is kept in parts, if this rank can have it.
        state: the live state.
        unpickle: whether to unpickle objects also where the live state holds none of that type.
        others: documents of other ranks which differ from those of this one: what its own ones lack is looked up there.

    Raises:
        StateError: the live state itself can't be a target (a lambda, a tensor without storage).
    """
    walk(state)  # what could not be saved can't be restored either; named here, before anything is read
    matcher = _Matcher(entries, unpickle)
    found = matcher.found
    documents = overlaid(structure, others)
    root, _ = documents.get(names.join(()), ([""], False))
    if root[0] == "root":
        ready = matcher.node(root[1], state, (), "inplace")
        found._ready.append(lambda: _same(ready(), state))
        return found
    items = [
        [document[1], names.unescape(key), document[2], *([BORROWED] if borrowed else [])]
        for key, (document, borrowed) in documents.items()
    ]
    ready = matcher.mapping(items, state, (), "inplace")
    found._ready.append(lambda: _same(ready(), state))
    return found


def _same(value: Any, state: Any) -> None:
    if value is not state:
        raise StateError("the state itself can't be replaced; wrap it in a dict", name="the state")


class _Matcher:
    """Walks both. `how` is "inplace" (containers are filled), "reuse" (containers are new, tensors that fit are
    filled) or "build" (everything is new)."""

    def __init__(self, entries: Mapping[str, Entry], unpickle: bool) -> None:
        self.found = Match()
        self._entries = entries
        self._unpickle = unpickle
        self._built: dict[Any, torch.Tensor | np.ndarray[Any, Any]] = {}

    def node(self, node: Node, live: Any, parts: tuple[str, ...], how: str) -> Ready:
        if not isinstance(node, list):
            return self._keep_kind(node, live, parts, how)
        kind = node[0]
        if kind in ("tensor", "array", "longbytes", "longbytearray"):
            return self._array(node, live, parts, how)
        if kind in ("dict", "odict"):
            return self.mapping(node[1], live, parts, how, OrderedDict if kind == "odict" else dict)
        if kind in ("list", "tuple", "named"):
            return self._sequence(node, live, parts, how)
        if kind in ("module", "optimizer", "object"):
            return self._stateful(node, live, parts)
        if kind == "pickle":
            return self._pickled(node[1], live, parts)
        return self._keep_kind(node, live, parts, how)

    def _keep_kind(self, node: Node, live: Any, parts: tuple[str, ...], how: str) -> Ready:
        """A plain value. It replaces any other plain value, but never an array or a container of the live state."""
        value = plain(node)
        if how == "inplace" and (kinds.is_array(live) or isinstance(live, (dict, list, Stateful))):
            self.found.misshaped.append(f"{names.place(parts)} (stored: {_short(value)}; here: {type(live).__name__})")
            return lambda: live
        return lambda: value

    def mapping(
        self, items: list[Any], live: Any, parts: tuple[str, ...], how: str, make: type[dict[Any, Any]] = dict
    ) -> Ready:
        held: dict[Any, Any] = live if isinstance(live, dict) else {}
        if how == "inplace" and not isinstance(live, dict):
            self.found.misshaped.append(f"{names.place(parts)} (stored: a dict; here: {type(live).__name__})")
            return lambda: live
        ready: list[tuple[Any, Ready]] = []
        stored = set()
        for key_node, text, node, *borrowed in items:
            key = plain(key_node)
            stored.add(_typed(key))
            here = (*parts, text)
            if key not in held and how == "inplace":
                (self.found.elsewhere if borrowed else self.found.extra).append(names.place(here))
                continue
            ready.append((key, self.node(node, held.get(key, _ABSENT), here, how)))
        if how == "inplace":
            self.found.missing += [
                names.place((*parts, text)) for key, text, _ in keyed(held, parts) if _typed(key) not in stored
            ]

        def finish() -> Any:
            values = [(key, value()) for key, value in ready]
            if how != "inplace":
                return make(values)
            for key, value in values:
                if held[key] is not value:
                    held[key] = value
            return held

        return finish

    def _sequence(self, node: Node, live: Any, parts: tuple[str, ...], how: str) -> Ready:
        kind, items = node[0], node[-1]
        wanted: Any = list if kind == "list" else tuple
        fits = isinstance(live, wanted)
        if how == "inplace" and not fits:
            self.found.misshaped.append(f"{names.place(parts)} (stored: a {kind}; here: {type(live).__name__})")
            return lambda: live
        if how == "inplace" and len(live) != len(items):
            self.found.misshaped.append(f"{names.place(parts)} (stored: {len(items)} items; here: {len(live)})")
            return lambda: live
        held = live if fits else ()
        ready = [
            self.node(item, held[i] if i < len(held) else _ABSENT, (*parts, str(i)), how)
            for i, item in enumerate(items)
        ]

        def finish() -> Any:
            values = [value() for value in ready]
            if kind == "named":
                cls = type(live) if fits and live is not _ABSENT else _named(node[1])
                return live if _all_same(values, held) else cls(*values)
            if how != "inplace":
                return wanted(values)
            if kind == "list":
                for i, value in enumerate(values):
                    if live[i] is not value:
                        live[i] = value
                return live
            return live if _all_same(values, held) else tuple(values)

        return finish

    def _array(self, node: Node, live: Any, parts: tuple[str, ...], how: str) -> Ready:
        kind, name = node[0], node[1]
        entry = self._entries.get(name)
        if entry is None:
            self.found.missing.append(f"{names.place(parts)} (its bytes belong to another rank)")
            return lambda: live
        if kind in ("longbytes", "longbytearray"):
            whole = self._new(entry)
            return lambda: (bytes if kind == "longbytes" else bytearray)(np.asarray(whole).tobytes())
        here = block_of(live)
        fresh: Callable[[torch.Tensor | np.ndarray[Any, Any]], Any] | None = None
        if how == "inplace" or here is not None:
            other = _difference(entry, live, here)
            if not other and here is not None:
                fresh = _in_the_image_of(live)
                if how != "build" and (kinds.is_tensor(here.array) or here.array.flags.writeable):
                    target = Target(here.array, False, here.start, tuple(here.array.shape))
                    self.found.targets.setdefault(name, []).append(target)
                    return lambda: live
            elif how == "inplace" or (how == "reuse" and "shape" in other):
                self.found.misshaped.append(f"{names.place(parts)} ({other})")
                if how == "inplace":
                    return lambda: live
        if fresh is None:
            new = self._new(entry)
            return lambda: new
        part = self._new(entry, here)
        return lambda: fresh(part)

    def _new(self, entry: Entry, block: Block | None = None) -> torch.Tensor | np.ndarray[Any, Any]:
        """A new array for a stored one, or for a part of it; the same one for the same name and part, so that what was
        tied is tied again."""
        shape = tuple(block.array.shape) if block is not None else entry.global_shape
        start = block.start if block is not None else (0,) * len(shape)
        key = (entry.name, start, shape)
        if key not in self._built:
            new: torch.Tensor | np.ndarray[Any, Any]
            if dtypes.is_torch(entry.dtype):
                from transom_hpc.ckpt import tensors

                new = tensors.empty(entry.dtype, shape)
            else:
                new = np.empty(shape, dtype=dtypes.numpy_dtype(entry.dtype))
            self._built[key] = new
            self.found.targets.setdefault(entry.name, []).append(Target(new, True, start, shape))
        return self._built[key]

    def _pickled(self, name: str, live: Any, parts: tuple[str, ...]) -> Ready:
        if name not in self._entries:
            self.found.missing.append(f"{names.place(parts)} (its bytes belong to another rank)")
            return lambda: live
        no_object = live is _ABSENT or kinds.is_array(live) or isinstance(live, Stateful)
        wanted = self._unpickle or not no_object
        if not wanted:
            self.found.misshaped.append(
                f"{names.place(parts)} (stored as a pickled object, which is only unpickled with unpickle=True)"
            )
            return lambda: live
        self.found.objects[name] = b""
        return lambda: pickle.loads(self.found.objects[name])

    def _stateful(self, node: Node, live: Any, parts: tuple[str, ...]) -> Ready:
        kind, inner_node = node
        if live is _ABSENT or not isinstance(live, Stateful) or isinstance(live, type):
            self.found.misshaped.append(f"{names.place(parts)} (stored: a {kind}; here: {type(live).__name__})")
            return lambda: live
        inner = kinds.unwrap(live)
        finish: Callable[[], object]
        if (kind == "module" and kinds.is_module(inner)) or (kind == "optimizer" and kinds.is_optimizer(inner)):
            from transom_hpc.ckpt import owners

            load = owners.load_module if kind == "module" else owners.load_optimizer
            finish = load(self, inner_node, inner, parts)
        else:
            ready = self.node(inner_node, inner.state_dict(), parts, "build")
            finish = lambda: inner.load_state_dict(ready())  # noqa: E731

        def done() -> Any:
            finish()
            return live

        return done


def _typed(key: Any) -> Any:
    return (type(key), key)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _all_same(values: list[Any], held: Any) -> bool:
    return len(values) == len(held) and all(a is b for a, b in zip(values, held, strict=True))


def _named(where: str) -> Any:
    module, _, qualname = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _difference(entry: Entry, live: Any, here: Block | None) -> str:
    """Why the stored array can't be put into the live one; empty where it can."""
    stored = f"stored: {list(entry.global_shape)} {entry.dtype}"
    if here is None and kinds.is_dtensor(live):
        return ""  # other ranks hold all of it
    array = here.array if here is not None else None
    if dtypes.is_torch(entry.dtype):
        dtype = dtypes.of_torch(str(array.dtype)) if kinds.is_tensor(array) else ""
    else:
        dtype = dtypes.of_numpy(array.dtype) if isinstance(array, np.ndarray) else ""
    if here is None or dtype == "":
        return f"{stored}; here: {'nothing' if live is _ABSENT else type(live).__name__}"
    if here.global_shape != entry.global_shape:
        return f"{stored}; here: shape {list(here.global_shape)}"
    if dtype != entry.dtype:
        return f"{stored}; here: {dtype}"
    return ""


def _in_the_image_of(live: Any) -> Callable[[torch.Tensor | np.ndarray[Any, Any]], Any] | None:
    """What makes of a new array the part that is live; None where that is an array and no part."""
    if isinstance(live, Block):
        return lambda new: Block(new, live.global_shape, live.start)
    if kinds.is_dtensor(live):
        from transom_hpc.ckpt import dtensors

        return lambda new: dtensors.like(live, cast("torch.Tensor", new))
    return None
