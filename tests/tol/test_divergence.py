"""When training has gone astray: what is never mistaken for it, and what always is found, and from which step on."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import pytest

from transom_hpc.monitors.verdict import Progress
from transom_hpc.tol.divergence import BAD_LOSSES, BAD_STEPS, ActOn, Finding, Losses

SEEDS = range(5000, 5030)
"""The figures of the rule were chosen with other seeds (0 to 99)."""


def findings(losses: Iterable[float], stride: int = 7, act_on: ActOn = "nan") -> list[Finding]:
    """What is found where every so many steps one word is heard, as the heartbeat counts."""
    judge, found, good, since, count = Losses(act_on), [], 0, None, 0
    for step, loss in enumerate(losses, 1):
        if math.isfinite(loss):
            good, since, count = step, None, 0
        else:
            since, count = since or step, count + 1
        if step % stride == 0:
            bad = since is not None
            word = Progress(
                4,
                step_min=step,
                loss=None if bad else loss,
                bad_losses=4 if bad else 0,
                bad_since=since,
                bad_count=count,
                good_step=good if bad else None,
            )
            found += [one] if (one := judge.take(word)) is not None else []
    return found


# ---------------------------------------------------------------------- NaN


def nan_word(step: int, since: int, count: int, good: int | None = None, **other: float | None) -> Progress:
    facts = {"loss": None, "bad_losses": 2, "good_step": good} | other
    return Progress(2, step_min=step, bad_since=since, bad_count=count, **facts)  # type: ignore[arg-type]


def test_a_loss_that_stays_nan_is_found_once_with_the_step_that_is_not_to_be_trusted() -> None:
    judge = Losses()
    assert judge.take(nan_word(58, 50, 9, 49)) is None
    found = judge.take(nan_word(59, 50, 10, 49))
    assert found is not None
    assert (found.kind, found.before, found.act) == ("nan", 49, True)
    assert found.evidence == "the loss of all ranks that give one has been NaN or infinite since step 50, for 10 steps"
    assert judge.take(nan_word(70, 50, 21, 49)) is None


def test_found_again_after_it_was_finite_and_in_another_launch() -> None:
    judge = Losses()
    assert judge.take(nan_word(70, 50, 21, 49)) is not None
    judge.take(Progress(2, step_min=80, loss=1.0))
    assert judge.take(nan_word(100, 90, 11, 89)) is not None
    judge.begin()
    assert judge.take(nan_word(100, 90, 11, 89)) is not None


def test_a_step_or_two_that_are_skipped_are_nothing() -> None:
    losses = [1.0] * 1000
    for at in range(100, 900, 40):
        losses[at : at + BAD_STEPS - 1] = [math.inf] * (BAD_STEPS - 1)
    assert findings(losses, stride=1) == []
    losses[500 : 500 + BAD_STEPS] = [math.nan] * BAD_STEPS
    (found,) = findings(losses, stride=1)
    assert found.before == 500  # the state of step 500 has led to no finite loss


def test_one_loss_in_a_hundred_steps_is_not_enough_and_three_are() -> None:
    judge = Losses()
    assert judge.take(nan_word(199, 100, 1, 90)) is None
    assert judge.take(nan_word(299, 100, BAD_LOSSES - 1, 90)) is None
    assert judge.take(nan_word(300, 100, BAD_LOSSES, 90)) is not None


def test_one_rank_alone_is_nothing() -> None:
    assert Losses().take(nan_word(500, 100, 400, 99, bad_losses=1, loss=1.0)) is None


def test_a_pipeline_gives_losses_on_one_rank_only() -> None:
    found = Losses().take(nan_word(500, 100, 400, 99, bad_losses=1))
    assert found is not None
    assert found.evidence == "the loss has been NaN or infinite since step 100, for 401 steps"


def test_nan_from_the_first_step_distrusts_what_it_began_from() -> None:
    judge = Losses()
    found = judge.take(nan_word(140, 121, 20, 120))
    assert found is not None
    assert found.before == 120
    judge.begin()
    found = judge.take(nan_word(20, 1, 20, 0))
    assert found is not None
    assert found.before == 0  # there is nothing that could be put aside


def test_never_means_only_noted() -> None:
    found = Losses("never").take(nan_word(59, 50, 10, 49))
    assert found is not None
    assert not found.act


def test_without_a_loss_nothing_is_judged() -> None:
    judge = Losses("spike")
    assert [judge.take(Progress(4, step_min=step)) for step in range(1, 3000)] == [None] * 2999


# ---------------------------------------------------------------------- healthy

Series = Callable[[random.Random], list[float]]
STEPS = 4000


def falling(rng: random.Random) -> list[float]:
    """As language models: fast, then slowly, with noise."""
    top, floor, scale = rng.uniform(3, 12), rng.uniform(0.5, 3), rng.uniform(20, 500)
    noise = rng.uniform(0.001, 0.3)
    return [floor + (top - floor) / (1 + step / scale) ** 0.7 + rng.gauss(0, noise) for step in range(STEPS)]


def heavy_tailed(rng: random.Random) -> list[float]:
    """Single batches that are far off."""
    return [loss + (rng.paretovariate(1.2) if rng.random() < 0.05 else 0.0) for loss in falling(rng)]


def cyclic(rng: random.Random) -> list[float]:
    """Learning rates that go up and down; a data set whose parts come one after the other."""
    period, height = rng.randint(30, 1500), rng.uniform(0.05, 1.5)
    square = rng.random() < 0.5
    wave = [math.sin(2 * math.pi * step / period) for step in range(STEPS)]
    return [loss + height * (math.copysign(1, w) if square else w) for loss, w in zip(falling(rng), wave, strict=True)]


def warming_up(rng: random.Random) -> list[float]:
    """It rises before it falls."""
    peak, width = rng.uniform(1, 30), rng.randint(20, 400)
    return [loss + peak * (step / width) * math.exp(1 - step / width) for step, loss in enumerate(falling(rng))]


def curriculum(rng: random.Random) -> list[float]:
    """Every so often the data get harder, and are learned."""
    every, jump, scale = rng.randint(300, 1200), rng.uniform(0.3, 3), rng.uniform(30, 300)
    return [
        loss + (jump / (1 + (step % every) / scale) if step >= every else 0.0) for step, loss in enumerate(falling(rng))
    ]


def negative(rng: random.Random) -> list[float]:
    """Log densities, returns of a policy: below zero, and of any size."""
    scale = 10 ** rng.uniform(-6, 6)
    return [scale * (loss - 10) for loss in rng.choice([falling, cyclic, curriculum])(rng)]


def restless(rng: random.Random) -> list[float]:
    """A random walk that comes back, as with adversarial training."""
    found, now, pull, push = [], 0.0, rng.uniform(0.002, 0.05), rng.uniform(0.01, 0.2)
    for _ in range(STEPS):
        now += -pull * now + rng.gauss(0, push)
        found.append(1 + now)
    return found


def unmoved(rng: random.Random) -> list[float]:
    """All learned: nothing left but rounding."""
    return [1e-3 + rng.gauss(0, 1e-9) + (1e-6 if rng.random() < 0.01 else 0.0) for _ in range(STEPS)]


HEALTHY = [falling, heavy_tailed, cyclic, warming_up, curriculum, negative, restless, unmoved]


@pytest.mark.parametrize("series", HEALTHY, ids=lambda series: series.__name__)
def test_a_healthy_run_is_never_called_astray(series: Series) -> None:
    for seed in SEEDS:
        rng = random.Random(f"{series.__name__} {seed}")
        losses = series(rng)
        begin = rng.choice([0, rng.randrange(len(losses) // 2)])  # of the launch: it need not have seen the high losses
        assert findings(losses[begin:], stride=rng.choice([1, 3, 10, 30])) == [], seed


# ---------------------------------------------------------------------- spikes


@pytest.mark.parametrize("series", [falling, cyclic, restless], ids=lambda series: series.__name__)
def test_a_loss_far_above_all_that_was_is_found_when_it_stays(series: Series) -> None:
    for seed in SEEDS:
        rng = random.Random(f"spike {series.__name__} {seed}")
        losses, at, stride = series(rng), rng.randint(2000, 3000), rng.choice([1, 3, 10])
        losses[at:] = [loss + 100 + abs(rng.gauss(0, 3)) for loss in losses[at:]]
        (found,) = findings(losses, stride=stride)
        assert (found.kind, found.act) == ("spike", False)
        assert at - stride <= found.before <= at
        (found,) = findings(losses, stride=stride, act_on="spike")
        assert found.act


def test_a_high_loss_that_comes_back_is_nothing() -> None:
    losses = falling(random.Random(1))
    losses[2000:2010] = [1000.0] * 10
    assert findings(losses, stride=1) == []


def test_what_was_there_before_is_not_far_above_it() -> None:
    losses = [9.0, *[2.0 + step % 5 / 100 for step in range(500)]]
    assert findings([*losses, *[25.0] * 200], stride=1) == []  # it began at 9, and goes as far above that
    assert len(findings([*losses, *[40.0] * 200], stride=1)) == 1
    assert findings([1.0] * 500 + [1.02] * 200, stride=1) == []  # it has never varied at all


def test_a_few_words_that_are_high_are_nothing_however_far_apart() -> None:
    losses = falling(random.Random(2))
    losses[2000:2200] = [1000.0] * 200
    assert findings(losses, stride=30) == []


def test_what_is_learned_again_is_nothing() -> None:
    losses = [2.0 + step % 5 / 100 for step in range(500)]
    losses += [2.0 + 200 * math.exp(-step / 200) for step in range(1500)]
    assert findings(losses, stride=1) == []


def test_a_program_that_stands_is_not_counted_again_and_again() -> None:
    judge = Losses()
    for step in range(1, 100):
        judge.take(Progress(1, step_min=step, loss=1.0 + step % 3 / 100))
    assert [judge.take(Progress(1, step_min=100, loss=99.0)) for _ in range(200)] == [None] * 200
    assert judge.take(Progress(1, step_min=130, loss=99.0)) is None  # the second word that is high


def test_what_is_said_of_a_spike() -> None:
    losses = [2.0 + step % 5 / 100 for step in range(500)] + [90.0] * 100
    (found,) = findings(losses, stride=1)
    assert found == Finding(
        "spike", "the loss has been 90 or more since step 501; before it was about 2.02", 500, False
    )
