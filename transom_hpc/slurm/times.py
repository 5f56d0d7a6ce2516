"""Slurm's time limits: `2:00:00`, `1-12`, `30`, `UNLIMITED`. Owns reading and writing them, nothing else."""

from __future__ import annotations

import re
from datetime import timedelta

from transom_hpc.base.errors import SpecError

_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "-1"})
_FORM = re.compile(r"(?:(?P<days>[0-9]{1,6})-)?(?P<rest>[0-9]{1,9}(?::[0-9]{1,9}){0,2})")


def parse_time(text: str) -> timedelta | None:
    """Read a time limit, as sbatch(1) defines it.

    Args:
        text: 'minutes', 'minutes:seconds', 'hours:minutes:seconds', 'days-hours', 'days-hours:minutes',
            'days-hours:minutes:seconds', or UNLIMITED.

    Returns:
        The time; None for no limit.

    Raises:
        SpecError: it can't be read (field 'time').
    """
    if text.strip().upper() in _UNLIMITED:
        return None
    found = _FORM.fullmatch(text.strip())
    if not found:
        raise SpecError(f"not a time limit: {text!r}; want a form like 30, 2:00:00, 1-12 or UNLIMITED", field="time")
    numbers = [int(n) for n in found["rest"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return timedelta(days=int(found["days"] or 0), hours=hours, minutes=minutes, seconds=seconds)


def format_time(limit: timedelta | None) -> str:
    """Write a time limit: 'days-hours:minutes:seconds' or 'hours:minutes:seconds'.

    Args:
        limit: None for no limit. Parts of a second are rounded up: a limit of zero means something else to Slurm.

    Raises:
        SpecError: a negative time (field 'time').
    """
    if limit is None:
        return "UNLIMITED"
    if limit < timedelta(0):
        raise SpecError(f"a time limit can't be negative: {limit}", field="time")
    total = -(-limit // timedelta(seconds=1))
    days, rest = divmod(total, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock
