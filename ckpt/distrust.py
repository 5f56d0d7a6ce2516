"""What is not to be restored although it is whole, as a launcher says: it was saved by a program that had gone astray,
or a program that begins from it dies. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import fence


@dataclass(frozen=True, slots=True)
class Distrust:
    """What is not to be restored.

    Args:
        below: the first step that is not trusted; only what lies below it is.
        upto: the attempt that has saved it last. What a newer one saves is trusted again. Empty: everything is trusted.
    """

    below: int = 0
    upto: str = ""

    @classmethod
    def parse(cls, text: str) -> Distrust:
        """From "STEP@ATTEMPT"; from nothing, nothing.

        Raises:
            UsageError: it is neither.
        """
        if not text:
            return cls()
        step, _, attempt = text.partition("@")
        if not (step.isdecimal() and step.isascii() and attempt):
            raise UsageError(f"distrust={text!r}: STEP@ATTEMPT, as 120@A0001-L02, for what is not to be restored")
        fence.check_name(attempt)
        return cls(int(step), attempt)

    def covers(self, step: int, attempt: str) -> bool:
        """Whether a state of this step that this attempt saved is not to be restored."""
        if not self.upto or step < self.below:
            return False
        return attempt == self.upto or fence.is_before(attempt, self.upto)
