"""Names of things in a checkpoint, safe as paths in HDF5. Pure.

A name is the path of keys through the state, joined by '/'. A key may hold '/', be '.', be empty or be any text:
what HDF5 would misread is written as %XX, so that a name is always turned back into the same keys.
"""

from __future__ import annotations

import re
from functools import lru_cache

_UNSAFE = re.compile("[%/\x00-\x1f\x7f\ud800-\udfff]")
_ESCAPED = re.compile("%(u[0-9A-F]{4}|[0-9A-F]{2}|$)")


@lru_cache(1 << 16)
def escape(key: str) -> str:
    """One key as one part of a path."""
    if key == "":
        return "%"
    if key == ".":
        return "%2E"
    return _UNSAFE.sub(lambda m: f"%u{ord(m[0]):04X}" if ord(m[0]) > 0xFF else f"%{ord(m[0]):02X}", key)


def unescape(part: str) -> str:
    """The key that a part of a path stands for."""
    if part == "%":
        return ""
    return _ESCAPED.sub(lambda m: chr(int(m[1].lstrip("u"), 16)) if m[1] else "", part)


def join(parts: tuple[str, ...]) -> str:
    """The name for a path of keys; the state itself has the name of an empty key."""
    return "/".join(map(escape, parts)) or "%"


def shown(name: str) -> str:
    """A stored thing's name as a message shows it: without its folder, nothing escaped."""
    return place(tuple(unescape(part) for part in name.split("/")[1:]))


def place(parts: tuple[str, ...]) -> str:
    """A path of keys as a message shows it."""
    return "/".join(part or "''" for part in parts) or "the state"
