"""The values of a state as JSON, and back. Pure.

A string, number, boolean or null stands for itself; everything else is a list that begins with its kind.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import dtypes, names

Node = Any
"""JSON that stands for a part of the state."""

_SCALARS = frozenset((type(None), bool, int, float, str, complex))


def keyed(mapping: dict[Any, Any], parts: tuple[str, ...]) -> Iterator[tuple[Any, str, Any]]:
    """The items of a dict, each with the text that stands for its key in names.

    A key that is no text stands as its repr, unless another key of the dict is that text.
    """
    taken: set[str] | None = None
    for key, value in mapping.items():
        if type(key) is str:
            yield key, key, value
            continue
        if taken is None:
            taken = {other for other in mapping if type(other) is str}
        if not is_scalar(key) and type(key) is not tuple:
            raise StateError(
                f"{names.place(parts)}: a key of type {type(key).__name__} can't be saved; use text or numbers as keys",
                name=names.place(parts),
            )
        text = repr(key)
        while text in taken:
            text = f"{type(key).__name__}:{text}"
        taken.add(text)
        yield key, text, value


def is_scalar(value: Any) -> bool:
    """Whether the value is written into the structure as it stands."""
    return type(value) in _SCALARS


def scalar(value: Any) -> Node:
    """A value that is_scalar, or a tuple of such, as JSON."""
    if type(value) is float and not math.isfinite(value):
        return ["float", value.hex()]
    if type(value) is complex:
        return ["complex", value.real.hex(), value.imag.hex()]
    if type(value) is tuple:
        return ["tuple", [scalar(item) for item in value]]
    return value


def plain(node: Node) -> Any:
    """The value that a node without arrays stands for."""
    if not isinstance(node, list):
        return node
    kind = node[0]
    if kind == "float":
        return float.fromhex(node[1])
    if kind == "complex":
        return complex(float.fromhex(node[1]), float.fromhex(node[2]))
    if kind == "bytes":
        return base64.b64decode(node[1])
    if kind == "bytearray":
        return bytearray(base64.b64decode(node[1]))
    if kind == "scalar":
        return np.frombuffer(base64.b64decode(node[2]), dtype=dtypes.numpy_dtype(node[1]))[0]
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](plain(item) for item in node[1])
    raise StateError(f"the checkpoint has a kind of value that this version does not know: {kind!r}", name=str(kind))
