from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given

from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Entry
from transom_hpc.tol.launches import LaunchFacts, launches

from .test_goodput import BEGIN, ENTRIES, Life, start


def at(second: int) -> str:
    return f"{BEGIN.isoformat()[:17]}{second:02d}.000+00:00"


def test_nothing() -> None:
    assert launches([]) == ()


def test_a_launch_and_the_next() -> None:
    life = Life()
    start(life)
    life.write(20, 1, 1, "host out", cause="host lost", host_out="n3", evidence="a spare")
    life.write(50, 1, 1, "restart", cause="host silent", host_out="n2", evidence="not heard", step=55, restored=0)
    life.write(50, 1, 1, "pause", cause="host silent", seconds=4)
    life.launch(54, 1, 2, restored=40, step=41)
    life.entries[-2].facts["source"] = "memory: n1"
    first, second = launches(life.entries)
    assert first == LaunchFacts(
        attempt=Attempt(1, 1),
        began=at(5),
        first_step_s=5.0,
        ended=at(50),
        cause="host silent",
        host_out="n3,n2",
        evidence="not heard",
        from_step=0,
        to_step=55,
        hosts=("n1",),
    )
    assert first.duration_s == 45.0
    assert second == LaunchFacts(
        Attempt(1, 2), at(54), 5.0, from_step=40, to_step=41, hosts=("n1",), restored_from="memory: n1"
    )
    assert second.duration_s is None


def last(life: Life) -> tuple[str | None, str, str]:
    found = launches(life.entries)[-1]
    return found.ended, found.cause, found.evidence


def test_it_ends_with_its_launcher() -> None:
    life = Life()
    start(life)
    life.write(55, 1, 1, "end", ending="ended well", why="all ranks ended well", code=0)
    assert last(life) == (at(55), "ended well", "all ranks ended well")


def test_the_first_word_on_its_end_counts() -> None:
    life = Life()
    start(life)
    life.write(50, 1, 1, "gave up", cause="program error", evidence="ValueError")
    life.write(51, 1, 1, "standing by", cause="host silent", evidence="cut off")
    life.write(52, 1, 1, "end", ending="ended badly", why="program error came 5 times")
    assert last(life) == (at(50), "program error", "ValueError")


def test_only_the_next_life_knows_why() -> None:
    life = Life()
    start(life)
    life.write(50, 1, 1, "stopped", cause="terminated", evidence="Slurm ends the job")
    life.write(58, 2, 0, "start", job_id=7, ended_by="preempted")
    assert last(life) == (at(50), "preempted", "Slurm ends the job")
    life.entries[-2].facts["cause"] = "time limit"
    assert last(life) == (at(50), "time limit", "Slurm ends the job")
    del life.entries[-2]
    assert last(life) == (None, "preempted", "")


def test_who_takes_over_says_how_the_launch_before_ended() -> None:
    life = Life()
    start(life)
    life.write(50, 2, 0, "start", host="n2", succeeds="A0001-L00")
    life.write(55, 2, 0, "restart", host="n2", cause="launcher lost", host_out="n1", evidence="silent")
    life.launch(55, 2, 1, restored=40, step=41)
    assert [(facts.ended, facts.cause, facts.host_out) for facts in launches(life.entries)] == [
        (at(55), "launcher lost", "n1"),
        (None, "", ""),
    ]


def test_who_begins_anew_does_not() -> None:
    life = Life()
    start(life)
    life.write(50, 2, 0, "start", host="n2", succeeds="")
    life.write(55, 2, 0, "restart", host="n2", cause="misplaced", host_out="n1", evidence="to be avoided")
    assert last(life) == (None, "", "")


def test_where_it_began_is_told_by_the_end_too() -> None:
    life = Life()
    life.write(0, 1, 1, "launch", hosts=["n1"])
    life.write(1, 1, 1, "restart", cause="program error", restored=30, step=31)
    (found,) = launches(life.entries)
    assert (found.from_step, found.to_step, found.first_step_s) == (30, 31, None)


def test_clocks_that_go_back() -> None:
    life = Life()
    life.write(9, 1, 1, "launch", hosts=["n1"])
    life.write(5, 1, 1, "restart", cause="program error")
    assert launches(life.entries)[0].duration_s == 0.0


def test_entries_that_are_not_ours() -> None:
    life = Life()
    start(life)
    known = launches(life.entries)
    life.write(60, 1, 1, ["x"])  # type: ignore[arg-type]
    life.write(60, 1, 1, "progress", step=True)
    life.write(60, 1, 1, "progress", step="9")
    assert launches(life.entries) == known
    life.write(60, 1, 1, "restart", cause=7, host_out=["n2"], evidence=None, step=-4, restored="x")
    assert last(life) == ("2026-11-30T12:01:00.000+00:00", "", "")
    (found,) = launches(life.entries)
    assert (found.host_out, found.from_step, found.to_step) == ("", 0, 51)


@given(ENTRIES)
def test_whatever_the_journal_has(entries: Sequence[Entry]) -> None:
    for facts in launches(entries):
        assert all(isinstance(text, str) for text in (facts.cause, facts.host_out, facts.evidence, facts.restored_from))
        assert (facts.from_step or 0) >= 0
        assert facts.duration_s is None or facts.duration_s >= 0.0
