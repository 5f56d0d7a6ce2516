from __future__ import annotations

from transom_hpc.tol.hang import HangWatch


def test_first_step_has_its_own_deadline() -> None:
    watch = HangWatch(since=100.0, start_deadline_s=30.0, limit_s=5.0)
    assert not watch.hung(130.0)
    assert watch.hung(130.1)


def test_given_limit() -> None:
    watch = HangWatch(0.0, 30.0, 5.0).seen(1, 10.0)
    assert not watch.hung(15.0)
    assert watch.hung(15.1)
    assert not watch.seen(2, 15.0).hung(20.0)


def test_same_step_is_no_sign_of_life() -> None:
    watch = HangWatch(0.0, 30.0, 5.0).seen(1, 10.0)
    assert watch.seen(1, 14.0).hung(15.1)


def test_learned_from_the_longest_pause() -> None:
    watch = HangWatch(0.0, 1000.0, None).seen(1, 500.0)
    assert watch.allowed_s() == 60.0, "the time to the first step teaches nothing"
    for step, now in ((2, 501.0), (3, 511.0), (4, 512.0)):
        watch = watch.seen(step, now)
    assert watch.allowed_s() == 200.0
