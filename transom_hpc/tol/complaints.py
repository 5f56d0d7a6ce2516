"""What Slurm says of a step in the job's own output, when that goes to a file."""

from __future__ import annotations

import os
import re
import stat

# srun's own, and what it passes on from the hosts: "slurmstepd-n1: error: …", with a task's number where it labels.
_LINE = re.compile(r"^(?:srun|(?:\d+: +)?slurmstepd(?:-\S+)?): error: (.*)$", re.MULTILINE)
_MOST_BYTES = 1 << 18


class Complaints:
    """Reads what is written to this process's standard error from now on, by whomever, if that is a file."""

    def __init__(self) -> None:
        self._start: int | None = None
        try:
            facts = os.fstat(2)
        except OSError:
            return
        if stat.S_ISREG(facts.st_mode):
            self._start = facts.st_size

    def lines(self) -> list[str]:
        """Slurm's own lines so far, in order; of a long output those at its end."""
        if self._start is None:
            return []
        try:
            with open("/proc/self/fd/2", "rb") as log:  # noqa: PTH123  (a file of its own, with an offset of its own)
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._start, size - _MOST_BYTES))
                return slurm_lines(log.read().decode(errors="replace"))
        except OSError:
            return []


def slurm_lines(text: str) -> list[str]:
    """Slurm's own lines in the output of a step, in order."""
    return [match[1].strip() for match in _LINE.finditer(text)]
