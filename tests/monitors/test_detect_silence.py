"""Silence from arrival times alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.monitors.detect_silence import Arrivals, blame


def test_silent_after_the_deadline_and_not_before() -> None:
    arrivals = Arrivals(3.0, 0.0, 0.5, 0.0)
    arrivals.expect(1, 0.0)
    arrivals.heard(1, 10.0)
    assert arrivals.silent(13.0) == frozenset()
    assert arrivals.silent(13.001) == {1}
    assert arrivals.waited(1, 13.5) == 3.5


def test_a_peer_never_heard_has_the_start() -> None:
    arrivals = Arrivals(3.0, 15.0, 0.5, 100.0)
    arrivals.expect(1, 100.0)
    assert not arrivals.silent(115.0)
    assert arrivals.silent(115.1) == {1}
    arrivals.expect(2, 120.0)  # asked later: the start is over, the ordinary deadline holds
    assert arrivals.silent(123.1) == {1, 2}


def test_own_absence_counts_against_nobody() -> None:
    arrivals = Arrivals(3.0, 0.0, 0.5, 0.0)
    for rank in (1, 2):
        arrivals.expect(rank, 0.0)
    arrivals.heard(1, 0.0)
    arrivals.heard(2, 0.0)
    for tenth in range(1, 20):
        arrivals.tick(tenth / 10)
    arrivals.heard(2, 62.0)  # taken in first after a minute without running
    assert arrivals.tick(62.0) == 62.0 - 1.9
    assert not arrivals.silent(62.0)
    assert arrivals.waited(1, 62.0) == pytest.approx(1.9)  # what had passed before still counts
    assert arrivals.waited(2, 62.0) == 0.0  # and nothing lies in the future
    assert arrivals.silent(62.0 + 1.2) == {1}


def test_who_is_forgotten_is_not_silent() -> None:
    arrivals = Arrivals(1.0, 0.0, 0.5, 0.0)
    arrivals.expect(1, 0.0)
    arrivals.forget(1)
    assert not arrivals.silent(9.0)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 3)), max_size=60),
    st.floats(1.0, 5.0),
)
def test_nobody_heard_within_the_deadline_is_silent(arrived: list[tuple[float, int]], after_s: float) -> None:
    arrivals = Arrivals(after_s, 0.0, 0.5, 0.0)
    for rank in range(4):
        arrivals.expect(rank, 0.0)
    now, gaps = 0.0, 0.0
    last = dict.fromkeys(range(4), 0.0)
    for wait, rank in arrived:
        now += wait
        arrivals.heard(rank, now)
        last[rank] = now
        gaps += arrivals.tick(now)
        silent = arrivals.silent(now)
        for peer, time in last.items():
            if now - time <= after_s:
                assert peer not in silent
            if now - time > after_s + gaps:
                assert peer in silent


NOBODY: frozenset[int] = frozenset()


def test_blame_names_the_silent_while_others_are_heard() -> None:
    assert blame(frozenset({2}), NOBODY, 4, 0.1, 0.3) == ({2}, False)


def test_blame_waits_while_nobody_has_just_been_heard() -> None:
    """The first of all to fall silent is not named: perhaps the others follow in a moment."""
    assert blame(frozenset({2}), NOBODY, 4, 0.9, 0.3) == (NOBODY, False)
    assert blame(frozenset({2}), NOBODY, 4, None, 0.3) == (NOBODY, False)


def test_when_all_fall_silent_at_once_it_is_the_listener() -> None:
    assert blame(frozenset({1, 2, 3}), NOBODY, 3, 1.1, 0.3) == (NOBODY, True)
    assert blame(frozenset({1, 2, 3}), frozenset({1}), 3, 1.1, 0.3) == (NOBODY, True)


def test_the_last_of_many_and_the_only_other_are_named() -> None:
    assert blame(frozenset({1, 2, 3}), frozenset({1, 2}), 3, 1.1, 0.3) == ({3}, False)
    assert blame(frozenset({1}), NOBODY, 1, 1.1, 0.3) == ({1}, False)


def test_who_was_named_is_not_named_again() -> None:
    assert blame(frozenset({2}), frozenset({2}), 4, 0.1, 0.3) == (NOBODY, False)
