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
from typing import TYPE_CHECKING, Any

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import kinds, names
from transom_hpc.ckpt.borrow import BORROWED, overlaid
from transom_hpc.ckpt.layout import Entry
from transom_hpc.ckpt.nodes import Node, keyed
from transom_hpc.ckpt.nodes import plain as plain
from transom_hpc.ckpt.state import Stateful, walk
from transom_hpc.ckpt.wanted import ABSENT, Arrays, Ready
from transom_hpc.ckpt.wanted import Target as Target

if TYPE_CHECKING:
    pass


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
    walked = walk(state)  # what could not be saved can't be restored either; named here, before anything is read
    matcher = _Matcher(entries, unpickle, walked.called)
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

    def __init__(self, entries: Mapping[str, Entry], unpickle: bool, called: Mapping[int, dict[int, str]]) -> None:
        self.found = Match()
        self.called = called
        self.arrays = Arrays(entries, self.found)
        self._unpickle = unpickle

    def node(self, node: Node, live: Any, parts: tuple[str, ...], how: str) -> Ready:
        if not isinstance(node, list):
            return self._keep_kind(node, live, parts, how)
        kind = node[0]
        if kind in ("tensor", "array", "longbytes", "longbytearray"):
            return self.arrays.place(node, live, parts, how)
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
            ready.append((key, self.node(node, held.get(key, ABSENT), here, how)))
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
            self.node(item, held[i] if i < len(held) else ABSENT, (*parts, str(i)), how) for i, item in enumerate(items)
        ]

        def finish() -> Any:
            values = [value() for value in ready]
            if kind == "named":
                cls = type(live) if fits and live is not ABSENT else _named(node[1])
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

    def _pickled(self, name: str, live: Any, parts: tuple[str, ...]) -> Ready:
        if name not in self.arrays.entries:
            self.found.missing.append(f"{names.place(parts)} (its bytes belong to another rank)")
            return lambda: live
        no_object = live is ABSENT or kinds.is_array(live) or isinstance(live, Stateful)
        wanted = self._unpickle or not no_object
        if not wanted:
            self.found.misshaped.append(
                f"{names.place(parts)} (stored as a pickled object, which is only unpickled with unpickle=True)"
            )
            return lambda: live
        self.found.objects[name] = b""
        return lambda: pickle.loads(self.found.objects[name])

    def _stateful(self, node: Node, live: Any, parts: tuple[str, ...]) -> Ready:
        kind, inner_node, *elsewhere = node
        if live is ABSENT or not isinstance(live, Stateful) or isinstance(live, type):
            self.found.misshaped.append(f"{names.place(parts)} (stored: a {kind}; here: {type(live).__name__})")
            return lambda: live
        inner = kinds.unwrap(live)
        finish: Callable[[], object]
        if (kind == "module" and kinds.is_module(inner)) or (kind == "optimizer" and kinds.is_optimizer(inner)):
            from transom_hpc.ckpt import owners

            if kind == "module":
                finish = owners.load_module(self, inner_node, inner, parts)
            else:
                finish = owners.load_optimizer(self, inner_node, inner, parts, *elsewhere)
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
