from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.goodput import Goodput, goodput
from transom_hpc.tol.journal import Entry

BEGIN = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)


class Life:
    """A run whose entries are written at seconds after BEGIN."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, when: float, number: int, launch: int, kind: str, host: str = "n1", **facts: Any) -> None:
        time = (BEGIN + timedelta(seconds=when)).isoformat(timespec="milliseconds")
        self.entries.append(Entry(Attempt(number, launch), len(self.entries), time, host, kind, facts))

    def launch(self, when: float, number: int, launch: int, restored: int, step: int) -> None:
        """A launch that takes 3 s to restore, and 2 s more for its first step."""
        self.write(when, number, launch, "launch", hosts=["n1"])
        self.write(when + 3, number, launch, "restored", step=restored, source="")
        self.write(when + 5, number, launch, "running", step=step)

    def seconds(self, submitted: float | None = None) -> dict[str, float]:
        """What is not zero, and what is over."""
        found = self.of(submitted)
        return {word: value for word, value in {**found.seconds, "over": found.over_s}.items() if value}

    def of(self, submitted: float | None = None) -> Goodput:
        return goodput(self.entries, None if submitted is None else BEGIN + timedelta(seconds=submitted))


def start(life: Life) -> None:
    life.write(0, 1, 0, "start", job_id=7)
    life.launch(5, 1, 1, restored=0, step=1)
    for step in range(11, 52, 10):
        life.write(9 + step, 1, 1, "progress", step=step, step_s=1.0, stall_s=step / 20)


def test_nothing() -> None:
    found = goodput([])
    assert (found.wall_s, found.goodput, set(found.shares.values())) == (0.0, None, {0.0})
    assert goodput([], BEGIN).wall_s == 0.0


def test_a_run_that_ends_well() -> None:
    life = Life()
    start(life)
    life.write(64, 1, 1, "end", ending="ended well", why="", code=0)
    found = life.of()
    assert life.seconds() == {"restarting": 10.0, "training": pytest.approx(51.45), "saving": pytest.approx(2.55)}
    assert found.wall_s == pytest.approx(64.0)
    assert found.goodput == pytest.approx(51.45 / 64)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["training"] == found.goodput


def test_a_restart_in_the_job() -> None:
    life = Life()
    start(life)  # step 51 at 60 s
    life.write(66, 1, 1, "restart", cause="host silent", host_out="n2", committed=40, step=55)
    life.write(66, 1, 1, "pause", cause="host silent", seconds=4)
    life.launch(70, 1, 2, restored=40, step=41)
    life.write(85, 1, 2, "progress", step=51, step_s=1.0, stall_s=0.5)
    life.write(100, 1, 2, "progress", step=66, step_s=1.0, stall_s=0.75)
    assert life.seconds() == {
        "restarting": 10.0 + 5.0,
        "detecting": 6.0,
        "pausing": 4.0,
        "saving": pytest.approx(2.55 + 0.75),
        "redoing": 14.0,  # steps 42 to 55; the first one's time is in restarting
        "training": pytest.approx(50 - 2.55 + 25 - 0.75 - 14),
    }


def test_where_no_step_time_is_known_steps_are_taken_for_equal() -> None:
    life = Life()
    life.write(0, 1, 0, "start")
    life.launch(0, 1, 1, restored=0, step=1)
    life.write(25, 1, 1, "progress", step=11)
    life.write(25, 1, 1, "restart", cause="program killed", step=11)
    life.launch(25, 1, 2, restored=5, step=6)
    life.write(50, 1, 2, "progress", step=16)  # ten steps in 20 s, five of them again
    assert life.seconds() == {"restarting": 10.0, "training": 30.0, "redoing": 10.0}


def test_a_launch_that_begins_again_from_the_start() -> None:
    life = Life()
    start(life)
    life.write(60, 1, 1, "restart", cause="diverged", step=51)
    life.launch(60, 1, 2, restored=0, step=1)
    life.write(80, 1, 2, "progress", step=16, step_s=1.0, stall_s=0.0)
    assert life.seconds()["redoing"] == 15.0
    assert life.seconds()["training"] == pytest.approx(47.45)


def test_the_queue() -> None:
    life = Life()
    start(life)
    life.write(62, 1, 1, "stop asked", cause="time limit", signal="SIGUSR1")
    life.write(64, 1, 1, "progress", step=54, step_s=1.0, stall_s=30.0)  # the last save, no part of training
    life.write(65, 1, 1, "restart", cause="time limit", step=54)
    life.write(66, 1, 1, "requeue", cause="time limit")
    life.write(69, 1, 1, "requeued", ok=True)
    life.write(69, 1, 1, "end", ending="left", why="requeued")
    life.write(189, 2, 0, "start", job_id=7, ended_by="")
    life.launch(189, 2, 1, restored=54, step=55)
    assert life.seconds() == {
        "restarting": 15.0,
        "training": pytest.approx(49.45),
        "saving": pytest.approx(2.55),
        "stopping": 7.0,
        "waiting": 120.0,
    }
    assert life.seconds(submitted=-30)["waiting"] == 150.0
    assert life.of(submitted=-30).wall_s == pytest.approx(224.0)
    assert life.seconds(submitted=10_000)["waiting"] == 120.0
    assert life.seconds(submitted=33) == life.seconds()


def test_a_requeue_that_is_refused() -> None:
    life = Life()
    start(life)
    life.write(60, 1, 1, "restart", cause="host lost", step=51)
    life.write(61, 1, 1, "requeued", ok=False)
    life.write(65, 1, 1, "follow-up", job_id=8)
    life.write(75, 2, 0, "start", job_id=8)
    assert life.seconds()["restarting"] == 15.0
    assert life.seconds()["waiting"] == 10.0


def test_ended_by_slurm() -> None:
    life = Life()
    start(life)
    life.write(61, 1, 1, "stop asked", cause="terminated", signal="SIGTERM")
    life.write(63, 1, 1, "stopped", cause="terminated", step=53)
    life.write(63, 1, 1, "stop asked", cause="terminated", signal="SIGCONT")
    life.write(64, 1, 1, "end", ending="left", why="Slurm ends the job")
    life.write(164, 2, 0, "start", job_id=7, ended_by="preempted")
    assert life.seconds()["stopping"] == 2.0
    assert life.seconds()["waiting"] == 101.0


def test_a_launcher_that_leaves_no_word() -> None:
    life = Life()
    start(life)
    life.write(90, 2, 0, "start", host="n2", job_id=7, succeeds="")
    assert life.seconds()["waiting"] == 30.0
    life.entries[-1].facts["succeeds"] = "A0001-L00"
    assert life.seconds()["detecting"] == 30.0
    life.write(95, 2, 0, "restart", host="n2", cause="launcher lost")
    life.launch(95, 2, 1, restored=40, step=41)
    assert life.seconds()["restarting"] == 10.0 + 10.0


def test_what_a_launcher_that_stands_by_writes_later_is_not_the_run() -> None:
    life = Life()
    start(life)
    life.write(68, 1, 1, "standing by", cause="host silent", step=51)
    life.write(500, 1, 1, "end", ending="ended well", why="another launcher ended it")
    life.write(70, 2, 0, "start", host="n2", job_id=7, succeeds="A0001-L00")
    life.launch(72, 2, 1, restored=51, step=52)
    life.write(107, 2, 1, "progress", step=82, step_s=1.0, stall_s=0.0)
    life.write(107, 2, 1, "end", ending="ended well", why="")
    assert life.of().wall_s == pytest.approx(107.0)
    assert life.seconds()["detecting"] == 10.0
    assert life.seconds()["training"] == pytest.approx(47.45 + 30)


def test_two_writers_of_one_attempt_are_put_together_by_time() -> None:
    life = Life()
    life.write(80, 1, 1, "requeued", host="a1", ok=True)  # read first: files come by name
    start(life)
    assert life.seconds()["training"] == pytest.approx(47.45 + 20)
    assert life.of().wall_s == pytest.approx(80.0)


def test_the_time_after_an_end_is_not_counted() -> None:
    life = Life()
    start(life)
    life.write(60, 1, 1, "request", what="stop", by="me")
    life.write(62, 1, 1, "stopped", cause="stopped by a person", step=53)
    life.write(63, 1, 1, "end", ending="stopped", why="stopped by a person")
    life.write(5063, 2, 0, "start", job_id=9)
    assert life.seconds() == {
        "restarting": 10.0,
        "training": pytest.approx(47.45),
        "saving": pytest.approx(2.55),
        "stopping": 2.0,
        "waiting": 1.0,
        "over": 5000.0,
    }
    assert life.of().wall_s == pytest.approx(63.0)
    assert life.seconds(submitted=5000)["waiting"] == 64.0
    assert life.seconds(submitted=5000)["over"] == 4937.0


def test_clocks_that_go_back() -> None:
    life = Life()
    start(life)
    life.write(40, 1, 1, "restart", cause="host silent", step=51)  # a clock that was set
    life.write(75, 1, 2, "launch", hosts=["n1"])
    known = {"restarting": 25.0, "training": pytest.approx(47.45), "saving": pytest.approx(2.55)}
    assert life.seconds() == known, "what was written at 40 came after what was written at 60"
    life.write(-1000, 2, 0, "start", host="n2", job_id=7)
    life.write(80, 2, 1, "launch", host="n2")
    assert life.seconds() == {**known, "restarting": 30.0}, "nothing was cut off for a clock that is far behind"


def test_the_stall_is_not_more_than_there_was() -> None:
    life = Life()
    life.write(0, 1, 0, "start")
    life.launch(0, 1, 1, restored=0, step=1)
    life.write(9, 1, 1, "progress", step=2, step_s=1.0, stall_s=1e9)
    assert life.seconds() == {"restarting": 5.0, "saving": 4.0}


def test_steps_again_are_not_more_than_there_was_time_for() -> None:
    life = Life()
    start(life)
    life.write(60, 1, 1, "restart", cause="program killed", step=51)
    life.launch(60, 1, 2, restored=0, step=1)
    life.write(75, 1, 2, "progress", step=40, stall_s=2.0)  # 39 steps of 1 s, as in the launch before
    assert life.seconds()["redoing"] == 8.0
    assert life.seconds()["training"] == pytest.approx(47.45)
    life.entries[-1].facts["step"] = 5
    assert life.seconds()["redoing"] == 4.0


def test_steps_while_it_stops_are_no_training() -> None:
    life = Life()
    start(life)
    life.write(60, 1, 1, "restart", cause="program killed", step=51)
    life.launch(60, 1, 2, restored=20, step=21)
    life.write(70, 1, 2, "progress", step=26, step_s=1.0, stall_s=0.0)
    life.write(72, 1, 2, "request", what="stop", by="me")
    life.write(90, 1, 2, "progress", step=40, step_s=1.0, stall_s=9.0)
    assert life.seconds()["redoing"] == 5.0
    assert life.seconds()["stopping"] == 18.0
    life.write(90, 1, 2, "restart", cause="requeued by a person", step=40)
    life.launch(90, 1, 3, restored=40, step=41)  # 51 had been reached
    life.write(110, 1, 3, "progress", step=56, step_s=1.0, stall_s=0.0)
    assert life.seconds()["redoing"] == 15.0


def test_steps_while_it_stops_count_as_reached() -> None:
    life = Life()
    start(life)
    life.write(60, 1, 1, "stop asked", cause="terminated", signal="SIGTERM")
    life.write(69, 1, 1, "progress", step=60, step_s=1.0, stall_s=3.0)
    life.write(90, 2, 0, "start", job_id=7)  # the launcher was killed before it had saved
    life.launch(90, 2, 1, restored=50, step=51)
    life.write(110, 2, 1, "progress", step=66, step_s=1.0, stall_s=0.0)
    assert life.seconds()["redoing"] == 9.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1, -0.5, 10**400, "7", True, None, [3]])
@pytest.mark.parametrize("name", ["step", "step_s", "stall_s"])
def test_figures_that_are_none(name: str, bad: object) -> None:
    life = Life()
    start(life)
    whole = life.of()
    life.write(60, 1, 1, "progress", **{name: bad})
    assert life.of() == whole
    life.write(60, 1, 1, "restart", cause="program error", **{name: bad})
    life.launch(60, 1, 2, restored=0, step=50)
    assert life.of().redoing_s == 0.0


KINDS = [
    "start", "launch", "running", "progress", "restart", "pause", "request", "stop asked", "gave up", "standing by",
    "stopped", "follow-up", "requeue", "requeued", "end", "host out", "restored", "what else",
]  # fmt: skip
NUMBERS = st.one_of(st.integers(-3, 60), st.floats(-5, 50), st.sampled_from([math.nan, math.inf, 10**400, "7", None]))
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "step": NUMBERS,
        "step_s": NUMBERS,
        "stall_s": NUMBERS,
        "ok": st.sampled_from([True, False, "yes"]),
        "ending": st.sampled_from(["ended well", "ended badly", "stopped", "left", [], None]),
        "succeeds": st.sampled_from(["", "A0001-L00", 3]),
        **dict.fromkeys(
            ("cause", "ended_by", "evidence", "host_out", "hosts", "restored", "source", "why"),
            st.sampled_from(["n1", "terminated", 3, ["n1"], None, {}]),
        ),
    },
)
TIMES = st.one_of(
    st.integers(0, 10**7).map(lambda ms: (BEGIN + timedelta(milliseconds=ms)).isoformat()),
    st.datetimes().map(datetime.isoformat),
    st.sampled_from(["", "yesterday", None, 7, "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"]),
)
ENTRIES = st.lists(
    st.builds(
        Entry,
        st.builds(Attempt, st.integers(1, 3), st.integers(0, 3)),
        st.just(0),
        TIMES,
        st.sampled_from(["n1", "n2"]),
        st.one_of(st.sampled_from(KINDS), st.sampled_from([None, ["start"], 7])),
        FACTS,
    ),
    max_size=40,
).map(lambda entries: sorted(entries, key=lambda entry: entry.attempt.number))


@given(ENTRIES, st.none() | st.datetimes(timezones=st.just(timezone.utc)))
def test_whatever_the_journal_has(entries: list[Entry], submitted: datetime | None) -> None:
    found = goodput(entries, submitted)
    assert min(*found.seconds.values(), found.over_s) >= 0.0
    assert sum(found.shares.values()) == pytest.approx(1.0 if found.wall_s else 0.0)
    assert found.goodput is None or 0.0 <= found.goodput <= 1.0


@given(ENTRIES.filter(bool), st.lists(st.integers(0, 10**6), min_size=40, max_size=40).map(sorted))
def test_no_second_is_lost(entries: list[Entry], times: list[int]) -> None:
    life = Life()
    for entry, when in zip(entries, times, strict=False):  # one writer, whose clock does not go back
        life.write(when / 1000, entry.attempt.number, entry.attempt.launch, str(entry.kind), **entry.facts)
    found = life.of()
    begins = {*KINDS} - {"requeue", "requeued", "host out", "restored", "what else"}
    known = [
        when
        for entry, when in zip(life.entries, times, strict=False)
        if entry.kind in begins or (entry.kind == "requeued" and entry.facts.get("ok") is True)
    ]
    begun = known[0] if known else times[len(entries) - 1]
    whole = (times[len(entries) - 1] - begun) / 1000
    assert found.wall_s + found.over_s == pytest.approx(whole, abs=1e-3)
