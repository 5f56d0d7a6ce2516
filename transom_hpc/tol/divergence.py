"""Whether training has gone astray, judged by the losses that the program gives. Pure: fed with the sidecar's words.

Two things are told apart. A loss that is NaN or infinite for several steps does not come back: weights are lost, and
what was saved since is worth nothing. A finite loss far above its past may be that too, or another stage of the data, a
higher weight of some term, an evaluation: no rule tells these apart for all programs, so by itself it is only noted.
A program that gives no loss is never judged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from transom_hpc.monitors.verdict import Progress

ActOn: TypeAlias = Literal["nan", "spike", "never"]
"""What the program is started again for: a loss that is not finite; that or one that is far too high; nothing."""

BAD_STEPS = 10
"""So many steps must have passed with losses that are not finite. A gradient scaler skips a step of which the gradients
overflowed, and halves its scale, so ten in a row are a thousandth of the scale: whoever is not well then stays ill."""
BAD_LOSSES = 3
"""So many losses must have been given meanwhile: some programs give one in a hundred steps."""

PAST = 200
"""Words of the past that say what is usual, the newest ones."""
LEAST_PAST = 40
"""Before there are so many, nothing is called a spike."""
RECENT = 12
"""Words in a row that must be too high."""
RECENT_STEPS = 20
"""Steps that these must span."""
RANGES = 3.0
"""A loss is too high when it is so many times as far above the highest that there ever was as that is above the lowest.
That keeps out what the run has had before: the first losses of all, cycles of the learning rate, wild ones."""
LEAST_RANGE = 0.01
"""Nothing varies less, as a part of the median of the past."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Training has gone astray.

    Args:
        kind: "nan" for a loss that is not finite, "spike" for one that is far too high.
        evidence: one sentence for a person.
        before: the first step that is not to be trusted: nothing finite, or nothing normal, was ever computed from what
            was saved at it. 0: training began with that.
        act: whether the program is to be started again, from before that step; else it is to be noted.
    """

    kind: Literal["nan", "spike"]
    evidence: str
    before: int
    act: bool


@dataclass(frozen=True, slots=True)
class _Loss:
    step: int
    loss: float


class Losses:
    """The losses of one launch after the other.

    Args:
        act_on: what the program is to be started again for.
    """

    def __init__(self, act_on: ActOn = "nan") -> None:
        self._act_on = act_on
        self._past: deque[_Loss] = deque(maxlen=PAST)
        self._highest, self._lowest = -math.inf, math.inf  # of all that were not too high
        self._high: list[_Loss] = []  # the newest ones, as long as each is too high
        self._said: set[str] = set()

    def begin(self) -> None:
        """The program is started, perhaps from an earlier step. How high and low its loss has been stays known."""
        self._past.clear()
        self._high.clear()
        self._said.clear()

    def take(self, word: Progress) -> Finding | None:
        """Take in what the sidecar says of the program.

        Returns:
            What is wrong, said once; a loss that was normal again meanwhile may be found anew.
        """
        found = self._not_finite(word) or self._too_high(word)
        if found is None or found.kind in self._said:
            return None
        self._said.add(found.kind)
        return found

    def _not_finite(self, word: Progress) -> Finding | None:
        # All ranks that give a loss: one alone may have had nothing to learn from (0/0), which harms nobody; what harms
        # all, by the gradients, is seen by all a step later.
        if not word.bad_losses or word.loss is not None or word.bad_since is None or word.step_min is None:
            if word.loss is not None:
                self._said.discard("nan")
            return None
        steps = word.step_min - word.bad_since + 1
        if steps < BAD_STEPS or word.bad_count < BAD_LOSSES:
            return None
        before = word.bad_since - 1 if word.good_step is None else word.good_step
        who = "of all ranks that give one" if word.bad_losses > 1 else ""
        evidence = f"the loss {who} has been NaN or infinite since step {word.bad_since}, for {steps} steps"
        return Finding("nan", " ".join(evidence.split()), max(0, before), self._act_on != "never")

    def _too_high(self, word: Progress) -> Finding | None:
        if word.loss is None or not math.isfinite(word.loss) or word.bad_losses or word.step_min is None:
            return None
        last = self._high[-1] if self._high else self._past[-1] if self._past else None
        if last is not None and word.step_min <= last.step:
            return None  # heard already
        new = _Loss(word.step_min, word.loss)
        if not self._is_far_above(word.loss):
            self._keep((*self._high, new))  # they were part of how this run is
            self._said.discard("spike")
            return None
        self._high.append(new)
        if len(self._high) < RECENT or new.step - self._high[0].step < RECENT_STEPS:
            return None
        high, usual = [one.loss for one in self._high], median(one.loss for one in self._past)
        first, before = self._high[0], self._past[-1]
        if len(high) == PAST:  # it stays there: from now on that is how this run is
            self._keep(self._high)
        third = len(high) // 3
        if median(high[-third:]) < median(high[:third]) - (median(high[:third]) - usual) / 20:
            return None  # something new, and it is learned
        lowest = min(high)
        evidence = f"the loss has been {lowest:.4g} or more since step {first.step}; before it was about {usual:.4g}"
        return Finding("spike", evidence, before.step, self._act_on == "spike")

    def _keep(self, losses: Iterable[_Loss]) -> None:
        losses = list(losses)
        self._past.extend(losses)
        self._high.clear()
        self._highest = max(self._highest, *(one.loss for one in losses))
        self._lowest = min(self._lowest, *(one.loss for one in losses))

    def _is_far_above(self, loss: float) -> bool:
        if len(self._past) < LEAST_PAST or loss <= self._highest + RANGES * (self._highest - self._lowest):
            return False
        return loss > self._highest + RANGES * LEAST_RANGE * abs(median(one.loss for one in self._past))
