"""transom watch: whom it lets go, when, and whom never."""

from __future__ import annotations

from pathlib import Path

import pytest

from transom_hpc.base.errors import SlurmMissing, SlurmRefused
from transom_hpc.slurm.text import JobFacts
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted
from transom_hpc.watching import AGE_S, Watch

from .tol.slurm_fake import SILENT, FakeSlurm, StillClock, facts

MARK = "transom:1"


def held(job_id: int = 1, requeued: str = "2026-12-01T10:00:00", **changes: object) -> JobFacts:
    """A job right after its requeue."""
    known = {"comment": MARK, "restarts": 1, "reason": "BeginTime", "submit_time": requeued}
    return facts(job_id, "PENDING", **{**known, "eligible_time": "2026-12-01T10:02:01", **changes})


class Watcher:
    """A watch, and what it has said."""

    def __init__(self, folder: Path, slurm: FakeSlurm, jobs: dict[str, str] | None = None) -> None:
        self.slurm, self.clock, self.said = slurm, StillClock(), list[str]()
        runs = []
        for job_id, mark in (jobs or {"1": MARK}).items():
            run = RunDir(folder / f"run{job_id}")
            run.create()
            run.write(Submitted(JobSpec(), ("python",), "/home/me", job_id=job_id, comment=mark))
            runs.append(run)
        self.watch = Watch([*runs, RunDir(folder / "removed")], slurm, self.clock, self.said.append)

    def look(self, times: int = 1) -> float:
        pause_s = 0.0
        for _ in range(times):
            self.clock.sleep(pause_s)
            pause_s = self.watch.look()
        return pause_s


def test_a_requeued_job_is_let_go_after_some_seconds_and_not_before(tmp_path: Path) -> None:
    one = Watcher(tmp_path, FakeSlurm(held()))
    pause_s = one.look()
    assert pause_s == AGE_S
    assert one.watch.waiting
    assert "release_now" not in one.slurm.calls
    one.clock.sleep(AGE_S - 0.1)
    one.watch.look()
    assert "release_now" not in one.slurm.calls
    one.clock.sleep(0.2)
    one.watch.look()
    assert one.slurm.calls.count("release_now") == 1
    assert not one.watch.waiting
    run = tmp_path / "run1"
    assert one.said == [f"job 1 ({run}) may start now; Slurm would have held it until 2026-12-01T10:02:01"]


def test_each_life_is_let_go(tmp_path: Path) -> None:
    one = Watcher(tmp_path, FakeSlurm(held()))
    one.look(2)
    one.slurm.jobs[1] = held(requeued="2026-12-01T11:00:00", eligible_time="2026-12-01T11:02:01")
    one.look(2)
    assert one.slurm.calls.count("release_now") == 2


def test_a_life_that_was_requeued_meanwhile_waits_anew(tmp_path: Path) -> None:
    one = Watcher(tmp_path, FakeSlurm(held()))
    one.look()
    one.clock.sleep(AGE_S - 1)
    one.slurm.jobs[1] = held(requeued="2026-12-01T10:00:04")
    one.look()
    one.clock.sleep(2)
    one.look()
    assert "release_now" not in one.slurm.calls


def test_a_refusal_is_said_once(tmp_path: Path) -> None:
    one = Watcher(tmp_path, FakeSlurm(held()))
    one.slurm.errors["release_now"] = [SlurmRefused("Job is no longer pending", answer="Job is no longer pending")]
    one.look(5)
    assert len(one.said) == 1
    assert "could not be started" in one.said[0]
    assert one.slurm.calls.count("release_now") == 1


@pytest.mark.parametrize(
    "job",
    [
        held(restarts=0),  # sbatch --begin
        held(eligible_time="2026-12-02T10:00:00"),  # a person put it off
        held(eligible_time=""),
        held(reason="Priority"),
        held(reason="JobHeldUser"),
        held(comment="transom:other"),
        held(job_id=2),
        facts(1, "RUNNING", comment=MARK, restarts=1),
    ],
)
def test_others_are_left_alone(tmp_path: Path, job: JobFacts) -> None:
    one = Watcher(tmp_path, FakeSlurm(job))
    one.look(4)
    assert "release_now" not in one.slurm.calls
    assert one.said == []


def test_several_at_once(tmp_path: Path) -> None:
    one = Watcher(tmp_path, FakeSlurm(held(), held(2, comment="b"), held(3, comment="c")), {"1": MARK, "2": "b"})
    one.look(2)
    assert one.slurm.calls.count("release_now") == 2


def test_a_silent_slurm_is_asked_less_often_and_said_once(tmp_path: Path) -> None:
    one = Watcher(tmp_path, FakeSlurm(held()))
    one.slurm.errors["queue"] = [SILENT] * 4
    pauses = [one.look() for _ in range(4)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 4 * pauses[0] / 2
    assert one.watch.silent
    one.look(2)
    assert [text.partition("(")[0] for text in one.said] == ["Slurm does not answer ", "Slurm answers again", "job 1 "]


def test_no_slurm_here(tmp_path: Path) -> None:
    one = Watcher(tmp_path, FakeSlurm())
    one.slurm.errors["queue"] = [SlurmMissing("no Slurm on this machine")]
    with pytest.raises(SlurmMissing):
        one.watch.look()
