"""How often to save: the interval that loses least time, to saving and to failures together. Pure.

The part of a save for which the program stands still is weighed against the work that a failure loses (Young, "A first
order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974; Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems 22(3), 2006). What
goes on in the background is free for the program as long as it keeps up: a save must be durable before the next one
begins, with a margin.

How often failures come is estimated from those that this run has seen, on top of what is known of others. Rates of
machines and programs differ by orders of magnitude, so the prior is wide: the published rate on average, others the
less likely the further they are from it. With no failure seen the estimate begins at the published rate and falls
slowly; some failures in a short time outweigh it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NODE_MTBF_S = 264.0 * 86400
"""Mean time between failures of one node, before anything is known of these. Llama 3 405B was interrupted 419 times
unexpectedly in 54 days on 2,048 nodes of 8 GPUs ("The Llama 3 Herd of Models", 2024, section 3.3.4)."""

UNLIKELY = 30.0
"""By this factor a rate is less likely than one that is nearer to the published one by a factor of ten."""

_DECADES = tuple(half / 2 for half in range(-2, 11))
"""Rates that are thought possible, as powers of ten of a middle one: half a decade apart."""

WRITING_SHARE = 0.5
"""Of the time, at most so much goes by while a save is on its way to the disk."""

COPYING_SHARE = 0.1
"""Of the time, at most so much goes by while a save that is not written is on its way to the neighbours, over the
network that the program uses too."""

LEAST_S = 10.0
MOST_S = 1800.0
"""Bounds of the interval. A person forgives the loss of a minute and not that of a morning, whatever is expected."""

MOST_OVERHEAD = 0.01
"""The upper bound gives way before the program stands still for more than this share of its time; and saves that are
not written come on top of those that are by no more than that."""

BEYOND_MEMORY = 0.1
"""Share of failures after which no copy in memory is left: those of two neighbours, of the job, of the whole machine.
A guess; with copies most of what fails is one node or one process."""

BEYOND_OWN_MEMORY = 0.5
"""The same where neighbours keep no copies: then memory serves the restart of a program on the same nodes only."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Seconds between the starts of two saves.

    Args:
        memory: of those that are kept in memory and at neighbours.
        disk: of those that are written; never shorter.
    """

    memory: float
    disk: float


def mtbf_s(nodes: int, failures: int = 0, node_seconds: float = 0.0) -> float:
    """Mean time between failures of a job, in seconds.

    Args:
        nodes: it runs on.
        failures: that were seen in this run.
        node_seconds: for which it ran meanwhile, times the nodes that it had.
    """
    rates = [math.pow(10, decade) / (_MIDDLE * NODE_MTBF_S) for decade in _DECADES]
    # Bayes: how likely each rate is, after so many failures in so much time (Poisson); in logarithms.
    likely = [
        -abs(decade) * math.log(UNLIKELY) + failures * math.log(rate) - rate * node_seconds
        for decade, rate in zip(_DECADES, rates, strict=True)
    ]
    weights = [math.exp(value - max(likely)) for value in likely]
    rate = sum(weight * rate for weight, rate in zip(weights, rates, strict=True)) / sum(weights)
    return 1 / (rate * max(1, nodes))


def _mean_of_prior() -> float:
    weights = [math.pow(UNLIKELY, -abs(decade)) for decade in _DECADES]
    return math.fsum(weight * math.pow(10, decade) for weight, decade in zip(weights, _DECADES, strict=True)) / sum(
        weights
    )


_MIDDLE = _mean_of_prior()
"""So that with nothing seen the expected rate is the published one."""


def young_s(cost_s: float, mtbf: float) -> float:
    """Young's interval: sqrt(2 x cost x MTBF), in seconds."""
    return math.sqrt(2 * cost_s * mtbf)


def daly_s(cost_s: float, mtbf: float) -> float:
    """Daly's interval, from the end of a save to the start of the next, in seconds.

    Equal to Young's where a save costs much less than the time between failures. Where it costs twice that time, so
    that hardly anything gets done, Daly takes the MTBF; here it is 8/9 of it, so that there is no step.
    """
    x = math.sqrt(min(1.0, cost_s / (2 * mtbf)))
    if x == 1.0:
        return 8 / 9 * mtbf
    return young_s(cost_s, mtbf) * (1 + x / 3 + x * x / 9) - cost_s


def intervals(
    cost_s: float, durable_s: float, mtbf: float, copied_s: float | None = None, neighbours: bool = True
) -> Intervals:
    """How often to save.

    Where neighbours keep copies, memory heals most failures, and files are for the others, which come more rarely.
    Where they don't, files come as often as without memory, and memory only helps where the disk is slow.

    Args:
        cost_s: for which the program stands still for a save.
        durable_s: from the start of a save until it is committed.
        mtbf: mean time between failures of the job, in seconds.
        copied_s: from the start of a save until it is whole in memory, and neighbours have it where they keep copies;
            None where saves that are not written can't be.
        neighbours: whether they keep copies.
    """
    alone = _bounded(cost_s, durable_s / WRITING_SHARE, mtbf)
    if copied_s is None:
        return Intervals(alone, alone)
    beyond = BEYOND_MEMORY if neighbours else BEYOND_OWN_MEMORY
    memory = _bounded(cost_s, copied_s / COPYING_SHARE, mtbf / (1 - beyond))
    memory = max(memory, min(cost_s / MOST_OVERHEAD, alone))
    if not neighbours:
        return Intervals(min(memory, alone), alone)
    return Intervals(memory, max(memory, _bounded(cost_s, durable_s / WRITING_SHARE, mtbf / beyond)))


def _bounded(cost_s: float, least_s: float, mtbf: float) -> float:
    most = max(MOST_S, cost_s / MOST_OVERHEAD)
    best = min(max(cost_s + daly_s(cost_s, mtbf), LEAST_S), most)
    return max(best, least_s)
