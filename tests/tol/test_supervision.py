"""What a launcher finds out when the one before it on its host was killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.errors import RunDirError
from transom_hpc.tol import supervision
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Journal, claim_exactly, claim_number
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted
from transom_hpc.tol.succession import TakeOver
from transom_hpc.tol.supervision import supervise

JOB = Job(900_000_000 + os.getpid(), 1, ("n1", "n2"), "n1")
MINE = {"job_id": JOB.job_id, "requeues": 1}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def write(run: RunDir, host: str, kind: str, **facts: Any) -> int:
    """An entry of a new attempt."""
    number = claim_number(run.journal)
    again(run, number, host, kind, **facts)
    return number


def again(run: RunDir, number: int, host: str, kind: str, **facts: Any) -> None:
    journal = Journal(run.journal, number, host)
    journal.append(Attempt(number, 0), kind, **facts)
    journal.close()


class Began(Exception):
    """A launcher was started."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TakeOver | None]:
    """What launchers were told; none of them does anything."""
    told: list[TakeOver | None] = []

    class Launcher:
        def __init__(self, *_: Any, taken: TakeOver | None) -> None:
            told.append(taken)

        def run(self) -> int:
            raise Began

    monkeypatch.setattr(supervision, "Launcher", Launcher)
    return told


def begin(run: RunDir, taken: TakeOver | None = None) -> int:
    return supervise(run, Submitted(JobSpec(), ("true",), "/"), (), JOB, taken, "it was killed")


def test_it_takes_over_from_the_newest_one_on_this_host(run: RunDir, started: list[TakeOver | None]) -> None:
    write(run, "n1", "start", job_id=JOB.job_id, requeues=0)
    number = write(run, "n1", "start", **MINE)
    with pytest.raises(Began):
        begin(run)
    assert started == [TakeOver(number, (), "it was killed")]
    with pytest.raises(Began):
        begin(run)
    assert started[1] == started[0], "that one was killed before it began, and its claim is ours"


def test_one_that_was_killed_before_it_began_is_started_again(run: RunDir, started: list[TakeOver | None]) -> None:
    write(run, "n1", "start", job_id=JOB.job_id, requeues=0)
    with pytest.raises(Began):
        begin(run)
    assert started == [None]


def test_one_that_was_to_take_over_and_did_not_begin(run: RunDir, started: list[TakeOver | None]) -> None:
    write(run, "n1", "start", **MINE)
    taken = TakeOver(write(run, "n2", "start", **MINE), ("n2",), "not heard")
    with pytest.raises(Began):
        begin(run, taken)
    assert started == [taken]


def test_one_that_had_done_its_work_is_not_repeated(run: RunDir, started: list[TakeOver | None]) -> None:
    number = write(run, "n1", "start", **MINE)
    again(run, number, "n1", "end", ending="ended badly", why="no", code=4)
    assert begin(run) == 4
    assert started == []


def test_where_another_one_leads_it_stands_by(run: RunDir, started: list[TakeOver | None]) -> None:
    number = write(run, "n1", "start", **MINE)
    claim_exactly(run.journal, number + 1, "n2 100")
    again(run, number + 1, "n2", "end", ending="ended well", why="", code=0)
    assert begin(run) == 0
    assert started == []


def test_a_journal_that_can_not_be_read_is_no_reason_to_begin_anew(
    run: RunDir, started: list[TakeOver | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: RunDir) -> None:
        raise RunDirError("no")

    monkeypatch.setattr(RunDir, "entries", fail)
    with pytest.raises(RunDirError):
        begin(run)
    assert started == []
