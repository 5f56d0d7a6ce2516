"""Which committed checkpoints are kept. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keep:
    """What is kept.

    Args:
        last: this many of the newest, at least 1.
        every: each step that this divides is kept for ever; 0 for none.
        best: this many of the best by `metric` are kept too.
        metric: name of a figure given to `step`, smaller is better; "-name" where larger is better.
    """

    last: int = 3
    every: int = 0
    best: int = 0
    metric: str = ""


def superfluous(steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]], keep: Keep) -> tuple[int, ...]:
    """The steps to delete, oldest first. The newest is never among them.

    Args:
        steps: committed steps, each with a valid manifest. What has none is not counted, so that it never stands for
            a good one.
        metrics: figures of each step, as given when it was saved. Steps whose `loss` was not finite do not stand for
            others: as many of the newest of those without that are kept beside them.
        keep: what is kept.
    """
    ordered = sorted(set(steps))
    last = max(1, keep.last)
    sound = [step for step in ordered if math.isfinite(metrics.get(step, {}).get("loss", 0.0))]
    kept = {*ordered[-last:], *sound[-last:]}
    if keep.every > 0:
        kept |= {step for step in ordered if step % keep.every == 0}
    if keep.best > 0 and keep.metric:
        name = keep.metric.removeprefix("-")
        sign = -1.0 if keep.metric.startswith("-") else 1.0
        rated = [
            (sign * metrics[step][name], step)
            for step in ordered
            if name in metrics.get(step, {}) and metrics[step][name] == metrics[step][name]
        ]
        kept |= {step for _, step in sorted(rated)[: keep.best]}
    return tuple(step for step in ordered if step not in kept)
