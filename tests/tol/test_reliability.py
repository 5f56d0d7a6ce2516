from __future__ import annotations

import pytest

from tests.tol.test_history import life
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Entry
from transom_hpc.tol.reliability import Interruptions, interruptions


def test_nothing() -> None:
    assert interruptions([]) == Interruptions(0, 0.0)
    assert str(Interruptions()) == "0/0"


def test_time_counts_from_the_first_step_of_a_launch() -> None:
    writer = life()  # running for 2 s on two hosts, then one of them silent
    assert interruptions(writer.entries) == Interruptions(1, 4.0)
    writer.write(1, 2, "progress", step=7)  # not running yet
    writer.write(1, 2, "running", step=8)
    for _ in range(3):
        writer.write(1, 2, "progress", step=9)
    assert interruptions(writer.entries) == Interruptions(1, 10.0)
    writer.write(1, 2, "end", ending="left", why="requeued", code=0)
    writer.write(2, 0, "start", job_id=7)
    writer.write(2, 1, "launch", hosts=["n1"], spares=[])
    writer.write(2, 1, "running", step=9)
    writer.write(2, 1, "restart", cause="program error", committed=5, step=9)
    assert interruptions(writer.entries) == Interruptions(2, 13.0)
    assert str(interruptions(writer.entries)) == "2/13"


@pytest.mark.parametrize("cause", ["time limit", "terminated", "misplaced", "requeued by a person"])
def test_what_is_announced_loses_nothing(cause: str) -> None:
    writer = life()
    writer.write(1, 2, "restart", cause=cause, committed=5, step=9)
    assert interruptions(writer.entries).failures == 1


def test_a_launcher_that_could_say_no_more() -> None:
    for succeeds, failures in (("", 2), ("A0001-L00", 1)):  # who takes over in the same job says itself what was lost
        writer = life()
        writer.write(1, 2, "running", step=6)
        writer.write(1, 2, "progress", step=8)  # a second on two hosts; the queue until the next start is none of it
        writer.write(2, 0, "start", job_id=7, succeeds=succeeds)
        assert interruptions(writer.entries) == Interruptions(failures, 6.0)


def test_a_launcher_that_stands_by_runs_nothing() -> None:
    writer = life()
    writer.write(1, 2, "running", step=6)
    writer.write(1, 2, "standing by", cause="host silent", host_out="n1", committed=5)
    writer.write(1, 2, "end", ending="left", why="another launcher led to the end")
    assert interruptions(writer.entries) == Interruptions(1, 6.0)


def test_damaged_entries_are_passed_over() -> None:
    writer = life()
    broken = [
        Entry(Attempt(1, 2), 9, "yesterday", "n1", "running", {}),
        Entry(Attempt(1, 2), 9, "2026-11-30T12:00:00.000+00:00", "n1", "restart", {"cause": "moths"}),
        Entry(Attempt(1, 2), 9, "2026-11-30T12:00:00.000+00:00", "n1", "launch", {}),
        Entry(Attempt(1, 2), 9, "2026-11-30T12:00:00.000", "n1", "restart", {}),
    ]
    assert interruptions([*writer.entries, *broken]) == Interruptions(1, 4.0)
