"""Slurm's host lists: `rack[0-1]n[01-02]` to names and back.

Owns the one reader and the one writer of host lists. Never asks Slurm: what it reads agrees with
`scontrol show hostnames` of Slurm 22.05 where that reads a list at all, order and duplicates included. It reads
more than that (text after the last bracket, as other tools write it) and refuses what Slurm mangles in silence
(`n[1-` is one host named `n]` to Slurm).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import product

from transom_hpc.base.errors import HostListError

MAX_HOSTS = 1 << 18
"""A list of more hosts than this is a typing error, and would only fill the memory."""

MAX_RANGE = 1 << 16
"""Slurm refuses a range of more hosts than this ("Too many hosts in range")."""

_NOTHING = frozenset({"", "none assigned", "(null)", "none", "n/a", "null"})
_PLAIN = re.compile(r"[A-Za-z0-9_.:@+%-]+")
_NUMBER = re.compile(r"[0-9]{1,18}")
_TAIL = re.compile(r"(.*[^0-9]|)([0-9]{1,9})")
_CHUNK = re.compile(r"([0-9]+)")


def expand_hosts(text: str) -> list[str]:
    """Read a host list as Slurm and its tools write it.

    Args:
        text: names and bracketed ranges, split by commas or blanks. What Slurm prints for no host at all
            ('None assigned', '(null)', 'N/A', 'None', nothing) means no host, also as one entry among others.

    Returns:
        The names in the order of the text. Duplicates stay, as in `scontrol show hostnames`: the list of a job
        with two tasks a host is not shortened. With three and more brackets the order is Slurm's own.

    Raises:
        HostListError: it can't be read, or has more than MAX_HOSTS names; `part` is what is wrong in it.
    """
    names: list[str] = []
    for entry in _entries(text):
        names.extend(_expand_entry(entry, text, MAX_HOSTS - len(names)))
    return names


def fold_hosts(names: Iterable[str]) -> str:
    """Write names as a host list that every Slurm since 22.05 reads.

    Args:
        names: host names, in any order, duplicates allowed.

    Returns:
        Each name once, in natural order (n2 before n10), ranges only at the end of a name: Slurm refuses text
        after the last bracket, so `n1-ib0,n2-ib0` stays as it is. Nothing for no names.

    Raises:
        HostListError: something that is no host name.
    """
    distinct = set(names)
    for name in distinct:
        if not _PLAIN.fullmatch(name):
            raise HostListError(f"not a host name: {name!r}", text=name, part=name)
    groups: dict[str, list[str]] = {}
    for name in sorted(distinct, key=_natural):
        tail = _TAIL.fullmatch(name)
        prefix, number = tail.groups() if tail else (name, "")
        groups.setdefault(prefix, []).append(number)
    return ",".join(part for prefix, numbers in groups.items() for part in _fold_group(prefix, numbers))


def _entries(text: str) -> Iterator[str]:
    """Split at commas and blanks outside brackets."""
    if text.strip().lower() in _NOTHING:
        return
    start = depth = 0
    for at, char in enumerate(text):
        if char == "[":
            if depth:
                raise _bad(text, text[start : at + 1], "a bracket inside a bracket")
            depth = 1
        elif char == "]":
            if not depth:
                raise _bad(text, text[start : at + 1], "a closing bracket without its opening one")
            depth = 0
        elif char == "," and not depth:
            yield from _words(text[start:at])
            start = at + 1
    if depth:
        raise _bad(text, text[start:], "a bracket is not closed")
    yield from _words(text[start:])


def _words(entry: str) -> Iterator[str]:
    entry = entry.strip()
    if entry.lower() in _NOTHING:  # before the split: 'None assigned' is two words
        return
    # Blanks inside brackets stay, and are refused there.
    for word in re.split(r"\s+(?![^\[]*\])", entry):
        if word.lower() not in _NOTHING:
            yield word


def _expand_entry(entry: str, text: str, room: int) -> list[str]:
    pieces = re.split(r"\[([^\]]*)\]", entry)
    fixed, brackets = pieces[::2], pieces[1::2]
    for piece in fixed:
        if piece and not _PLAIN.fullmatch(piece):
            raise _bad(text, entry, f"{piece!r} has a character that no host name has")
    if not brackets:
        if room < 1:
            raise _bad(text, entry, f"more than {MAX_HOSTS} hosts")
        return [entry]
    spans = [[_span(part, text) for part in bracket.split(",")] for bracket in brackets]
    total = 1
    for ranges in spans:
        total *= sum(high - low + 1 for low, high, _ in ranges)
    if total > room:
        raise _bad(text, entry, f"more than {MAX_HOSTS} hosts")
    numbers = [[f"{n:0{width}d}" for low, high, width in ranges for n in range(low, high + 1)] for ranges in spans]
    # Slurm runs through the last bracket fastest and through the others from left (fast) to right (slow)
    # (hostlist.c, _push_range_list); the order of a node list is the order of the ranks, so it must be the same.
    outer = numbers[-2::-1]
    names = []
    for choice in product(*outer, numbers[-1]):
        ordered = (*reversed(choice[:-1]), choice[-1])
        names.append(fixed[0] + "".join(n + after for n, after in zip(ordered, fixed[1:], strict=True)))
    return names


def _span(part: str, text: str) -> tuple[int, int, int]:
    """One range, ends included, and the width to pad to (that of its low end, as Slurm does)."""
    low, dash, high = part.partition("-")
    if not _NUMBER.fullmatch(low) or (dash and not _NUMBER.fullmatch(high)):
        raise _bad(text, part, "not a number or a range of two")
    first, last = int(low), int(high if dash else low)
    if last < first:
        raise _bad(text, part, "the range runs backwards")
    return first, last, len(low)


def _fold_group(prefix: str, numbers: list[str]) -> Iterator[str]:
    """The names of one prefix; 9 runs on to 10 and 09 to 10, but 09 not to 010."""
    if "" in numbers:
        yield prefix
    spans: list[str] = []
    left = dict.fromkeys(number for number in numbers if number)
    while left:
        low = high = next(iter(left))
        del left[low]
        while int(high) - int(low) < MAX_RANGE - 1 and (following := f"{int(high) + 1:0{len(low)}d}") in left:
            del left[following]
            high = following
        spans.append(low if high == low else f"{low}-{high}")
    if len(spans) == 1 and "-" not in spans[0]:
        yield prefix + spans[0]
    elif spans:
        yield f"{prefix}[{','.join(spans)}]"


def _natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """n2 before n10: a number's order is that of its length, then of its digits."""
    chunks = [part for part in _CHUNK.split(name) if part]
    return [(len(c.lstrip("0")) + 1, c.lstrip("0")) if c[0].isdigit() else (0, c) for c in chunks], name


def _bad(text: str, part: str, why: str) -> HostListError:
    shown = part if len(part) <= 80 else part[:77] + "..."
    return HostListError(f"can't read the host list: {shown!r}: {why}", text=text, part=part)
