"""What is kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.ckpt.retention import Keep, superfluous


def test_last_k() -> None:
    assert superfluous([1, 2, 3, 4], {}, Keep(last=2)) == (1, 2)


def test_every_nth_for_ever_and_the_best() -> None:
    metrics = {1: {"loss": 3.0}, 2: {"loss": 1.0}, 3: {"loss": 2.0}, 4: {}, 5: {"loss": float("nan")}}
    assert superfluous([1, 2, 3, 4, 5], metrics, Keep(last=1, every=4, best=1, metric="loss")) == (1, 3)
    found = superfluous([1, 2, 3, 4, 5], metrics, Keep(last=1, best=1, metric="-loss"))
    assert found == (2, 3), "5 does not stand for 4"


@given(st.lists(st.integers(0, 50)), st.integers(0, 5), st.integers(0, 5), st.integers(0, 3))
def test_the_newest_is_never_deleted(steps: list[int], last: int, every: int, best: int) -> None:
    gone = superfluous(steps, {}, Keep(last=last, every=every, best=best, metric="loss"))
    assert set(gone) <= set(steps)
    if steps:
        assert max(steps) not in gone
        assert len(set(steps) - set(gone)) >= min(len(set(steps)), max(1, last))
