"""Slurm's job ids: `123`, `123_4`, `123_[5-9%2]`, `123+1`, `123.batch`.

Owns the one reader and the one writer of job ids. Never asks Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from transom_hpc.base.errors import JobIdError

MAX_TASKS = 4_000_001
"""Slurm's own limit of an array (MaxArraySize in slurm.conf(5))."""

# Step numbers with a meaning, from slurm.h: since 20.11, and the two of before.
_STEP_NAMES = {
    0xFFFFFFFD: "TBD",  # a step that waits for its resources
    0xFFFFFFFC: "extern",
    0xFFFFFFFB: "batch",
    0xFFFFFFFA: "interactive",
    0xFFFFFFFE: "batch",
    0xFFFFFFFF: "extern",
}
_MAX_STEP = 0xFFFFFFF0
_MAX_JOB = 0xFFFFFFFF

_WHOLE = re.compile(
    r"(?P<job>[0-9]{1,10})"
    r"(?:_(?:(?P<task>[0-9]{1,10})|\[(?P<tasks>[^\]%]*)(?:%(?P<throttle>[0-9]{1,10}))?\])|\+(?P<component>[0-9]{1,10}))?"
    r"(?:\.(?P<step>[0-9]{1,10}(?:\+[0-9]{1,10})?|batch|extern|interactive|TBD))?"
)
_RANGE = re.compile(r"(?P<low>[0-9]{1,10})(?:-(?P<high>[0-9]{1,10})(?::(?P<step>[0-9]{1,10}))?)?")


@dataclass(frozen=True, slots=True)
class JobId:
    """A job, some tasks of a job array, a component of a heterogeneous job, or a step of one of these."""

    job: int
    """The number that squeue and scontrol take: of an array or a heterogeneous job, that of the whole."""
    tasks: tuple[int, ...] | None = None
    """Array tasks, rising; None: no array, or the whole one."""
    throttle: int | None = None
    """How many tasks of the array may run at once."""
    component: int | None = None
    """Of a heterogeneous job, from 0."""
    step: str | None = None
    """'0', '1'…, 'batch', 'extern', 'interactive', 'TBD' (still waiting)."""

    def __str__(self) -> str:
        text = str(self.job)
        if self.tasks is not None:
            if len(self.tasks) == 1 and self.throttle is None:
                text += f"_{self.tasks[0]}"
            else:
                text += f"_[{_fold_tasks(self.tasks)}{'' if self.throttle is None else f'%{self.throttle}'}]"
        if self.component is not None:
            text += f"+{self.component}"
        if self.step is not None:
            text += f".{self.step}"
        return text


def parse_job_id(text: str) -> JobId:
    """Read a job id as Slurm's programs print it and people type it.

    Args:
        text: blanks around it do not matter. Step numbers that mean something become their names:
            4294967291 is 'batch'.

    Returns:
        The id; `str()` of it is the canonical text, and reads back as the same id.

    Raises:
        JobIdError: it can't be read; an array expression that squeue cut among them.
    """
    found = _WHOLE.fullmatch(text.strip())
    if not found:
        cut = ("[" in text and "]" not in text) or "..." in text
        raise _bad(text, "cut short: ask squeue with SLURM_BITSTR_LEN=0" if cut else "want a form like 123 or 123_4")
    job = int(found["job"])
    if not 0 < job <= _MAX_JOB:
        raise _bad(text, "no job has this number")
    tasks: tuple[int, ...] | None = None
    if found["task"] is not None:
        tasks = tuple(_read_tasks(found["task"], text))
    elif found["tasks"] is not None:
        tasks = tuple(sorted(set(_read_tasks(found["tasks"], text))))
    throttle = None if found["throttle"] is None else int(found["throttle"])
    component = None if found["component"] is None else int(found["component"])
    return JobId(job, tasks, throttle, component, _read_step(found["step"], text))


def _read_tasks(expression: str, text: str) -> Iterator[int]:
    count = 0
    for part in expression.split(","):
        found = _RANGE.fullmatch(part)
        if not found:
            raise _bad(text, f"{part!r} is no array task")
        low = int(found["low"])
        high = int(found["high"] or low)
        step = int(found["step"] or 1)
        if high < low or step < 1:
            raise _bad(text, f"{part!r} is empty")
        span = range(low, high + 1, step)
        count += len(span)
        if high >= MAX_TASKS or count > MAX_TASKS:
            raise _bad(text, f"{part!r} is more than Slurm's largest array")
        yield from span


def _read_step(step: str | None, text: str) -> str | None:
    if step is None or not step[0].isdigit():
        return step
    number, plus, part = step.partition("+")  # 0+1: the second component's part of step 0
    named = _STEP_NAMES.get(int(number))
    if named is None and int(number) > _MAX_STEP:
        raise _bad(text, f"no step has the number {number}")
    return (named or str(int(number))) + plus + part


def _fold_tasks(tasks: tuple[int, ...]) -> str:
    """As Slurm writes them: 0-20:5 when all are equally far apart, else 1-3,7."""
    if len(tasks) > 2:
        apart = tasks[1] - tasks[0]
        if apart > 1 and all(b - a == apart for a, b in pairwise(tasks)):
            return f"{tasks[0]}-{tasks[-1]}:{apart}"
    parts = []
    low = high = tasks[0]
    for task in (*tasks[1:], -1):
        if task == high + 1:
            high = task
            continue
        parts.append(str(low) if high == low else f"{low}-{high}")
        low = high = task
    return ",".join(parts)


def _bad(text: str, why: str) -> JobIdError:
    shown = text if len(text) <= 80 else text[:77] + "..."
    return JobIdError(f"not a job id: {shown!r}: {why}", text=text)
