"""Which start of a run this is: the number that orders and fences everything that is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from transom_hpc.base.errors import TransomError

_FORM = re.compile(r"A(\d{4,})-L(\d{2,})")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One start of the program within a run.

    Written "A0002-L03"; while numbers stay below 10,000 and 100 the order of the texts is the order of time.

    Args:
        number: counts the starts of the launcher in this run directory, from 1: one a job start or requeue.
        launch: counts the starts of the program under that launcher, from 1; 0 before the first.
    """

    number: int
    launch: int

    def __str__(self) -> str:
        return f"A{self.number:04d}-L{self.launch:02d}"

    @classmethod
    def parse(cls, text: str) -> Attempt:
        """Read the form that str() writes.

        Raises:
            TransomError: the text is not of that form.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            raise TransomError(f"not an attempt: {text!r} (expected the form A0001-L01)", text=text)
        return cls(int(match[1]), int(match[2]))
