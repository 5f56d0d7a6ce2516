"""The messages of rank 0, from readings and standings that are made up."""

from __future__ import annotations

import math
from typing import Any

from transom_hpc.monitors.heartbeat import Heartbeat
from transom_hpc.monitors.reading import Reading
from transom_hpc.monitors.succession import Member, Ping, Rules, Standing
from transom_hpc.monitors.verdict import Alone, Behind, Cleared, Progress, Ready, Replaced, Verdict
from transom_hpc.monitors.watch import Watch, own_word

RULES = Rules(ping_s=0.5, silent_after_s=6.0, isolated_after_s=12.0, start_deadline_s=15.0)


def standing(**values: Any) -> Standing:
    quiet: dict[str, Any] = {
        "leader": 0,
        "silent": (),
        "named": (),
        "followers": 0,
        "alone": False,
        "isolated": False,
        "speaks": False,
        "spoken_by": (),
        "dismissed": False,
        "gap_s": 0.0,
    }
    return Standing(**(quiet | values))


def watch(size: int, hosts: tuple[str, ...] = (), heard: tuple[int, ...] | None = None) -> Watch:
    member = Member(0, size, RULES, 0.0)
    for rank in range(1, size) if heard is None else heard:
        member.heard(rank, 1.0, Ping(f"n{rank}", 0, 1))
    return Watch("n0", size, hosts, RULES, member, 0.0)


def reading(host: str, **figures: float | None) -> Reading:
    return Reading(host, "A0001-L01", 1, 0.0, **figures)


def test_ready_once_all_were_heard() -> None:
    one = watch(3)
    assert one.messages(standing(), 1.0) == [Ready(("n0", "n1", "n2"))]
    assert one.messages(standing(), 2.0) == []


def test_ready_at_the_deadline_with_those_that_are_missing() -> None:
    one = watch(4, hosts=("n0", "n1", "n2", "n3"), heard=(1, 3))
    assert one.messages(standing(), 14.9) == []
    said = one.messages(standing(silent=(2,), named=(2,)), 15.1)
    assert said[0] == Ready(("n0", "n1", "n3"), ("n2",))
    assert said[1] == Verdict("n2", "missing", "act", "n2 (rank 2 of 4) has never been heard, for 15.1 s")


def test_what_a_host_calls_itself_beats_what_was_given() -> None:
    one = watch(3, hosts=("a", "b", "c"), heard=(1,))
    assert [one.host(rank) for rank in (1, 2)] == ["n1", "c"]
    assert watch(3, heard=()).host(2) == "rank 2"


def test_a_verdict_once_with_the_last_readings_and_cleared_once() -> None:
    one = watch(3)
    one.messages(standing(), 1.0)
    one.take(2, reading("n2", cpu_use=0.5), 1.5)
    silent = standing(silent=(2,), named=(2,))
    evidence = "n2 has not been heard for 6.5 s (rank 2 of 3; last sample 6.0 s ago)"
    assert one.messages(silent, 7.5) == [Verdict("n2", "silent", "act", evidence, {"cpu_use": 0.5})]
    assert one.messages(silent, 8.0) == []
    assert one.messages(standing(), 9.0) == [Cleared("n2", "silent", "n2 is heard again")]
    assert one.messages(standing(), 9.0) == []


def test_the_other_of_two_is_named_with_the_doubt() -> None:
    one = watch(2)
    one.messages(standing(), 1.0)
    alone, verdict = one.messages(standing(silent=(1,), named=(1,), alone=True), 8.0)
    assert alone == Alone(2, 7.0)
    assert isinstance(verdict, Verdict)
    assert verdict.evidence.endswith(
        "no sample was received); there is no third host to ask which of the two is cut off"
    )


def test_cut_off_and_back() -> None:
    one = watch(4)
    one.messages(standing(), 1.0)
    cut_off = standing(silent=(1, 2, 3), alone=True, isolated=True)
    alone, verdict = one.messages(cut_off, 7.5)
    assert isinstance(alone, Alone)
    assert isinstance(verdict, Verdict)
    assert (verdict.host, verdict.cause) == ("n0", "isolated")
    assert one.messages(cut_off, 9.0) == []
    assert one.cut_off_for(9.0) == 1.5
    assert one.messages(standing(), 9.5) == [Cleared("n0", "isolated", "n0 hears other hosts again")]
    assert one.cut_off_for(10.0) == 0.0


def test_replaced_is_said_once() -> None:
    one = watch(3)
    one.messages(standing(), 1.0)
    assert one.messages(standing(spoken_by=(1,)), 2.0) == [Replaced("n1")]
    assert one.messages(standing(spoken_by=(1,)), 3.0) == []


def test_progress_over_all_hosts_that_are_heard() -> None:
    one = watch(3)
    one.take(0, reading("n0", ranks=2, ended=1, step_min=12, step_max=13, behind_rank=1, phase=2, loss=1.0), 10.0)
    one.take(1, reading("n1", ranks=1, step_min=11, step_max=11, behind_rank=2, phase=3, loss=4.0, beat_age_s=1.0), 9.0)
    one.take(2, reading("n2", ranks=1, step_min=2, step_max=2, behind_rank=3, phase=2), 1.0)
    one.messages(standing(silent=(2,), named=(2,)), 10.0)
    assert one.progress(10.5) == Progress(
        ranks=3,
        ended=1,
        step_min=11,
        step_max=13,
        age_s=2.5,  # the age at the sample, and the time since its arrival
        loss=2.0,
        phase="saving",
        behind=Behind("n1", 2),
        hosts=2,
    )


def test_bad_losses_of_all_hosts() -> None:
    one = watch(3)
    where: dict[str, float | None] = {"ranks": 1, "step_min": 60}
    one.take(0, reading("n0", **where, loss=1.0, bad_losses=0), 10.0)
    one.take(1, reading("n1", **where, bad_losses=1, bad_since=50, bad_count=11, good_step=49), 10.0)
    one.take(2, reading("n2", **where, bad_losses=1, bad_since=51, bad_count=2, good_step=45), 10.0)
    said = one.progress(10.0)
    assert (said.bad_losses, said.bad_since, said.bad_count, said.good_step) == (2, 50, 2, 45)


def test_the_word_of_one_hosts_heartbeats() -> None:
    def beat(rank: int, step: int | None, loss: float | None, **bad: int) -> Heartbeat:
        return Heartbeat(rank, "A0001-L01", 1, 0, "training", step, 0, 0.5, loss, 40, 0.0, **bad)

    assert own_word([beat(0, None, None)]) == Progress(0)
    both = [beat(0, 61, math.nan, bad_since=52, bad_count=10, good_step=51), beat(1, 60, 2.0), beat(2, None, None)]
    assert own_word(both) == Progress(
        2, step_min=60, step_s=0.5, loss=2.0, bad_losses=1, bad_since=52, bad_count=10, good_step=51, saved_step=40
    )
    assert own_word(both[:1]).loss is None  # never NaN, which the journal could not keep


def test_no_step_as_long_as_one_rank_has_none() -> None:
    one = watch(2)
    one.take(0, reading("n0", ranks=1, step_min=12, step_max=12, behind_rank=0, phase=2), 10.0)
    one.take(1, reading("n1", ranks=1, behind_rank=1, phase=0), 10.0)
    progress = one.progress(10.0)
    assert (progress.step_min, progress.step_max) == (None, 12)
    assert progress.behind == Behind("n1", 1)
    assert progress.phase == "starting"


def test_spares_have_no_step_and_hold_nobody_back() -> None:
    one = watch(2)
    one.take(0, reading("n0", ranks=1, step_min=12, step_max=12, behind_rank=0, phase=2), 10.0)
    one.take(1, reading("n1", ranks=0, ended=0), 10.0)
    assert one.progress(10.0).step_min == 12
    assert watch(2).progress(1.0) == Progress(0, hosts=2)


def test_the_loss_of_the_launchers_host_in_a_sentence() -> None:
    member = Member(1, 4, RULES, 0.0)
    for rank in (0, 2, 3):
        member.heard(rank, 1.0, Ping(f"n{rank}", 0, 1))
    one = Watch("n1", 4, (), RULES, member, 0.0)
    dead, evidence = one.loss(standing(leader=1, silent=(0,), followers=2), 1, 8.0)
    assert dead == ("n0",)
    assert evidence == (
        "n0 (rank 0) has not been heard for 7.0 s; 3 of 4 hosts hear each other and not it; "
        "the first of them is n1 (rank 1)"
    )
