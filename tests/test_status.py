"""What status makes of Slurm's answers. The stand-in for Slurm forces rare ones; real ones are in tests/recovery."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from transom_hpc.base.errors import SlurmUnreachable
from transom_hpc.cli.status import exit_code
from transom_hpc.slurm.jobid import parse_job_id
from transom_hpc.slurm.states import JobState
from transom_hpc.slurm.text import AccountRow, QueueRow
from transom_hpc.status import collect
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Journal
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted


class StandIn:
    """Answers with given rows, and counts the questions."""

    def __init__(self, queued: Sequence[QueueRow] = (), accounted: Sequence[AccountRow] = (), silent: bool = False):
        self.queued, self.accounted, self.silent = queued, accounted, silent
        self.asked: list[str] = []

    def queue(self, job_ids: Sequence[int] | None = None) -> list[QueueRow]:
        self.asked.append(f"queue {job_ids}")
        if self.silent:
            raise SlurmUnreachable("squeue gave no answer in 20 s: the state is unknown, ask again later")
        return list(self.queued)

    def accounting(self, job_ids: Sequence[int], *, duplicates: bool = True) -> list[AccountRow]:
        assert duplicates
        self.asked.append(f"accounting {job_ids}")
        return list(self.accounted)


def queued(job_id: int, state: JobState, comment: str, reason: str = "None") -> QueueRow:
    return QueueRow(
        job_id, parse_job_id(str(job_id)), state, state.upper(), reason, 1, "", "", (), (), comment, "transom"
    )


def accounted(job_id: str, state: JobState, name: str = "transom") -> AccountRow:
    found = parse_job_id(job_id)
    return AccountRow(found.job, found, state, state.upper(), 0, 0, (), "", "", "", name)


def made(path: Path, job_id: int) -> RunDir:
    run = RunDir(path)
    run.create()
    run.write(Submitted(JobSpec(), ("true",), "/", job_id=str(job_id), comment=f"transom:{path.name}"))
    return run


def test_one_question_each_whatever_the_number_of_runs(tmp_path: Path) -> None:
    runs = [made(tmp_path / f"r{number}", number) for number in (1, 2, 3)]
    rows = [queued(1, JobState.RUNNING, "transom:r1"), queued(2, JobState.WAITING, "transom:r2", "Priority")]
    lives = [
        accounted("3", JobState.ENDED_BADLY),
        accounted("3", JobState.ENDED_WELL),
        accounted("3.batch", JobState.RUNNING),
    ]
    slurm = StandIn(rows, lives)
    statuses = collect(runs, slurm)  # type: ignore[arg-type]
    assert slurm.asked == ["queue [1, 2, 3]", "accounting [3]"]
    assert [item.job.state for item in statuses] == [JobState.RUNNING, JobState.WAITING, JobState.ENDED_WELL]
    assert "waits behind jobs of higher priority" in statuses[1].advice[0]


def test_another_clusters_job_of_the_same_number(tmp_path: Path) -> None:
    mine, other = made(tmp_path / "mine", 7), made(tmp_path / "other", 7)
    first, second = collect([mine, other], StandIn([queued(7, JobState.RUNNING, "transom:mine")]))  # type: ignore[arg-type]
    assert first.job.state is JobState.RUNNING
    assert second.job.state is JobState.UNKNOWN
    assert "submitted to another cluster" in second.advice[0]
    (gone,) = collect([mine], StandIn(accounted=[accounted("7", JobState.ENDED_BADLY, "somebody-elses")]))  # type: ignore[arg-type]
    assert gone.job.state is JobState.UNKNOWN


@pytest.mark.parametrize(("silent", "words"), [(True, "no answer in 20 s"), (False, "does not know this job any more")])
def test_no_answer_is_unknown_and_not_finished(tmp_path: Path, silent: bool, words: str) -> None:
    (item,) = collect([made(tmp_path / "run", 7)], StandIn(silent=silent))  # type: ignore[arg-type]
    assert (item.job.state, item.phase) == (JobState.UNKNOWN, "submitted")
    assert words in item.advice[0]


def _journal(run: RunDir, *entries: tuple[str, dict[str, object]]) -> None:
    journal = Journal(run.journal, 1, "n1")
    for kind, facts in entries:
        journal.append(Attempt(1, 1), kind, **facts)
    journal.close()


def test_hosts_left_out_are_those_that_still_are(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 7)
    bad = {"cause": "host silent", "host_out": "n3", "evidence": "not heard", "committed": 0, "step": 0}
    _journal(run, ("start", {"job_id": 7, "hosts": ["n1"]}), ("host out", bad))
    now = datetime.now(timezone.utc)
    for later, left in ((timedelta(hours=23), ["n3"]), (timedelta(hours=25), [])):
        (item,) = collect([run], StandIn(), now=now + later)  # type: ignore[arg-type]
        assert [incident.host for incident in item.excluded] == left


def test_a_host_that_was_let_back_is_not_left_out(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 7)
    bad = {"cause": "host silent", "host_out": "n3", "evidence": "not heard", "committed": 0, "step": 0}
    _journal(run, ("host out", bad), ("requeue", {"cause": "time limit", "avoid": [], "let_back": ["n3"]}))
    assert collect([run], StandIn())[0].excluded == ()  # type: ignore[arg-type]


def test_stopped_by_a_person(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 7)
    why = "stopped by a person; step 5 is saved. To go on: transom submit with the same --run-dir"
    _journal(run, ("start", {"job_id": 7}), ("end", {"ending": "stopped", "why": why, "code": 75}))
    (item,) = collect([run], StandIn(accounted=[accounted("7", JobState.ENDED_BADLY)]))  # type: ignore[arg-type]
    assert (item.phase, item.advice) == ("stopped", (why,))
    assert exit_code(item) == 0


def test_a_pause_is_explained(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 7)
    _journal(run, ("start", {"job_id": 7}), ("pause", {"cause": "storage fault", "seconds": 30.0}))
    (item,) = collect([run], StandIn([queued(7, JobState.RUNNING, "transom:run")]))  # type: ignore[arg-type]
    assert item.phase == "pausing"
    assert "since storage fault came again" in item.advice[0]
