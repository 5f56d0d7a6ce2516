"""Which rank holds the others up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.tol.behind import Stand, parse_stand, who_is_behind

WAIT = "train.py:88 in all_reduce"


def at(rank: int, step: int | None = 41, place: str = WAIT, age_s: float = 30.0, **more: str) -> Stand:
    return Stand(f"n{rank // 2 + 1}", rank, step, age_s, "training", place=place, **more)


@pytest.mark.parametrize(
    ("stands", "said"),
    [
        # the lowest step, whatever else there is
        (
            [at(0, 42), at(1, 42, state="is stopped (SIGSTOP)"), at(2, 42), at(3, 41)],
            "rank 3 on n2 is behind, at step 41: train.py:88 in all_reduce",
        ),
        (
            [at(0, 42), at(3, None)],
            "rank 3 on n2 is behind, before its first step (training): train.py:88 in all_reduce",
        ),
        # at the same step one that can't go on
        (
            [at(0), at(1), at(2, place="", state="is stopped (SIGSTOP)"), at(3, age_s=99.0)],
            "rank 2 on n2 is behind, at step 41: it is stopped (SIGSTOP)",
        ),
        (
            [at(0), at(1), at(2, failed="ValueError: x (train.py:7)", place="train.py:9 in finalize"), at(3)],
            "rank 2 on n2 is behind, at step 41: it has failed and does not end (ValueError: x (train.py:7))",
        ),
        (
            [at(0), *(at(rank, place="", state="has ended", age_s=rank) for rank in range(1, 7))],
            "rank 6 on n4 is behind, at step 41: it has ended; the same of rank 1 on n1, rank 2 on n2, rank 3 on n2 "
            "and 2 more",
        ),
        # else the only one that stands elsewhere
        (
            [at(0), at(1, place="data.py:3 in read"), at(2), at(3, age_s=99.0)],
            "rank 1 on n1 is behind, at step 41: data.py:3 in read",
        ),
        # which one of two does not tell
        (
            [at(0, place="data.py:3 in read"), at(1, age_s=31.0)],
            "all 2 ranks are at step 41; longest without a sign is rank 1 on n1: train.py:88 in all_reduce",
        ),
        (
            [at(0), at(1, age_s=31.0), at(2)],
            "all 3 ranks are at step 41; longest without a sign is rank 1 on n1: train.py:88 in all_reduce",
        ),
        ([at(0)], "rank 0 on n1 is at step 41: train.py:88 in all_reduce"),
        ([Stand("n1", 0)], "rank 0 on n1 is where no step is known: where it stands is not known"),
        ([], "no rank was found"),
    ],
)
def test_who_is_behind(stands: list[Stand], said: str) -> None:
    for _ in range(3):
        random.shuffle(stands)
        assert who_is_behind(stands) == said


def test_hosts_that_have_not_answered() -> None:
    assert who_is_behind([], {"n2", "n1"}) == "no rank was found; no answer from n1, n2"
    assert who_is_behind([at(0)], {"n2"}).endswith(": train.py:88 in all_reduce; no answer from n2")


@given(st.builds(Stand, st.text(), st.integers(0), st.none() | st.integers(0), st.none() | st.floats(0, 1e9)))
def test_lines(stand: Stand) -> None:
    assert parse_stand(stand.to_line()) == stand
    assert "\n" not in stand.to_line()


@given(st.text())
def test_other_lines(text: str) -> None:
    parse_stand(text)


@pytest.mark.parametrize("text", ["done n1", "{}", "[]", "1", '{"host": "n1", "rank": 1, "new": 2}'])
def test_what_is_no_stand(text: str) -> None:
    assert parse_stand(text) is None
