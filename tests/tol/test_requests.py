"""A person's request: for one job, once, and never an error for the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from transom_hpc.base.errors import RunDirError
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Journal
from transom_hpc.tol.requests import answered, ask, asked, waits
from transom_hpc.tol.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    one = RunDir(tmp_path / "run")
    one.create()
    return one


def starts(run: RunDir, number: int, job_id: int, requeues: int) -> None:
    journal = Journal(run.journal, number, "n1")
    journal.append(Attempt(number, 0), "start", job_id=job_id, requeues=requeues)
    journal.close()


def test_asked_and_answered(run: RunDir) -> None:
    assert asked(run, "7", 0) is None
    request = ask(run, "stop", "7")
    assert asked(run, "7", 0) == request
    assert (request.what, request.by.count("@")) == ("stop", 1)
    assert waits(run, request)
    answered(run)
    assert asked(run, "7", 0) is None
    assert not waits(run, request)
    answered(run)  # once more does no harm


def test_a_request_for_another_job_is_not_ours(run: RunDir) -> None:
    ask(run, "stop", "7")
    assert asked(run, "8", 0) is None


def test_a_life_that_follows_fulfils_a_requeue_and_not_a_stop(run: RunDir) -> None:
    starts(run, 1, 7, 0)
    ask(run, "requeue", "7")
    assert asked(run, "7", 0) is not None
    assert asked(run, "7", 1) is None
    ask(run, "stop", "7")
    assert asked(run, "7", 1) is not None


def test_a_requeue_that_is_asked_of_a_later_life_is_its_own(run: RunDir) -> None:
    starts(run, 1, 7, 0)
    starts(run, 2, 7, 1)
    request = ask(run, "requeue", "7")
    assert request.restarts == 1
    assert asked(run, "7", 1) == request


def test_the_newer_request_counts(run: RunDir) -> None:
    first = ask(run, "requeue", "7")
    second = ask(run, "stop", "7")
    assert asked(run, "7", 0) == second
    assert not waits(run, first)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"what":"dance","by":"a","job_id":"7","when":""}', b"\xff"])
def test_what_can_not_be_read_is_no_request(run: RunDir, content: bytes) -> None:
    run.request.write_bytes(content)
    assert asked(run, "7", 0) is None


def test_a_run_directory_that_is_gone(tmp_path: Path) -> None:
    gone = RunDir(tmp_path / "gone")
    assert asked(gone, "7", 0) is None
    answered(gone)
    with pytest.raises(RunDirError, match="can't write in the run directory"):
        ask(gone, "stop", "7")
