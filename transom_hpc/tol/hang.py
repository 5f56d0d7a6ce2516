"""Whether the program is stuck, judged by its own step times. Pure: the caller passes the time."""

from __future__ import annotations

from dataclasses import dataclass, replace

START_DEADLINE_S = 1800.0
"""From the start of a program that uses a Checkpointer to its first step."""
_LEAST_S = 60.0
_TIMES_LONGEST = 20.0


@dataclass(frozen=True, slots=True)
class HangWatch:
    """What is known about the program's pace in this launch.

    Args:
        since: when the step last changed, or the program was started; seconds on the caller's clock.
        start_deadline_s: seconds that may pass before the first step.
        limit_s: seconds that may pass between two steps; None: 20 times the longest pause between two steps so far
            (evaluations and saves included), at least a minute.
        step: newest step of the slowest rank, 0 before the first.
        longest_s: longest pause between two steps seen.
    """

    since: float
    start_deadline_s: float
    limit_s: float | None
    step: int = 0
    longest_s: float = 0.0

    def seen(self, step: int, now: float) -> HangWatch:
        """The watch after the program was seen at a step."""
        if step == self.step:
            return self
        pause = now - self.since if self.step else 0.0
        return replace(self, step=step, since=now, longest_s=max(self.longest_s, pause))

    def allowed_s(self) -> float:
        """Seconds that the present pause may last."""
        if not self.step:
            return self.start_deadline_s
        return self.limit_s or max(_LEAST_S, _TIMES_LONGEST * self.longest_s)

    def hung(self, now: float) -> bool:
        """Whether the present pause is too long."""
        return now - self.since > self.allowed_s()
