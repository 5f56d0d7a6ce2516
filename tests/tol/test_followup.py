"""The job that carries a run on: asked for as this one was, found again where sbatch was not heard, never twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from transom_hpc.base.errors import SlurmError, SlurmRefused, SlurmUnreachable
from transom_hpc.tol import followup
from transom_hpc.tol.followup import submit_followup
from transom_hpc.tol.job import Job
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted

from .slurm_fake import RUNNING, SILENT, FakeSlurm, StillClock, facts

JOB = Job(1, 0, ("n1", "n2"), "n1")
SPEC = JobSpec(nodes=2, spares=1, tasks_per_node=4, exclude="n7")
NO = SlurmRefused("no", answer="no")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    one = RunDir(tmp_path / "run")
    one.create()
    one.write(submitted())
    return one


def submitted(**changes: str) -> Submitted:
    return dataclasses.replace(Submitted(SPEC, ("python", "a b.py"), "/home/me", job_id="1", comment="old"), **changes)


def follow(run: RunDir, slurm: FakeSlurm, known: Submitted | None = None, exclude: tuple[str, ...] = ("n2",)) -> str:
    environment = {"HOME": "/home/me", "SLURM_JOB_ID": "1", "TRANSOM_SITE": "mine", "TRANSOM_ATTEMPT": "A0001-L01"}
    return submit_followup(run, known or submitted(), JOB, exclude, slurm, environment, StillClock(), 300.0)


def slurm_with(**changes: object) -> FakeSlurm:
    return FakeSlurm(facts(command="/x/j.sh python a b.py", **changes))


def test_asked_for_as_this_one_was(run: RunDir) -> None:
    slurm = slurm_with()
    assert follow(run, slurm) == "2"
    ((options, script, arguments, environment),) = slurm.sent
    assert script == "#!/bin/bash\n"
    assert arguments == ["python", "a b.py"]
    assert {"--nodes=3", "--ntasks-per-node=4", "--dependency=afterany:1", "--exclude=n[2,7]"} <= set(options)
    assert f"--time={RUNNING.words['TimeLimit']}" in options
    assert environment == {"HOME": "/home/me", "TRANSOM_SITE": "mine", "TRANSOM_RUN_DIR": str(run.path)}


def test_the_status_follows_the_new_job(run: RunDir) -> None:
    slurm = slurm_with()
    follow(run, slurm)
    assert run.submitted().job_id == "2"
    assert run.submitted().comment == slurm.jobs[2].comment != "old"


def test_hosts_that_are_no_nodes_are_left_out(run: RunDir) -> None:
    slurm = slurm_with()
    follow(run, slurm, exclude=("n2", "gone"))
    assert "--exclude=n[2,7]" in slurm.sent[0][0]
    slurm = slurm_with()
    slurm.cluster = []
    follow(run, slurm)
    assert not [option for option in slurm.sent[0][0] if option.startswith("--exclude")]


def test_submitits_script_has_no_arguments_and_its_function_goes_on(run: RunDir) -> None:
    known = submitted(submitit=str(run.logs))
    (run.logs / "1_submitted.pkl").write_bytes(b"function")
    slurm = slurm_with()
    follow(run, slurm, known)
    assert slurm.sent[0][2] == []
    assert (run.logs / "2_submitted.pkl").read_bytes() == b"function"


def test_sbatch_that_was_not_heard_is_not_tried_again(run: RunDir) -> None:
    slurm = slurm_with()
    slurm.unheard = True
    assert follow(run, slurm) == "2"
    assert slurm.sent == []
    assert sorted(slurm.jobs) == [1, 2]


def test_sbatch_that_did_nothing_is_tried_again(run: RunDir) -> None:
    slurm = slurm_with()
    slurm.errors = {"submit": [SILENT, SILENT], "show_job": [SILENT], "script": [SILENT], "nodes": [SILENT]}
    assert follow(run, slurm) == "2"
    assert slurm.calls.count("submit") == 3


def test_a_refusal_leaves_everything_as_it_was(run: RunDir) -> None:
    slurm = slurm_with()
    slurm.errors["submit"] = [NO]
    with pytest.raises(SlurmRefused):
        follow(run, slurm)
    assert run.submitted() == submitted()


def test_a_job_without_a_script(run: RunDir) -> None:
    slurm = slurm_with()
    slurm.errors["script"] = [NO]
    with pytest.raises(SlurmError):
        follow(run, slurm)
    assert run.submitted() == submitted()
    assert slurm.sent == []


def test_silence_for_all_that_time_leaves_the_mark(run: RunDir) -> None:
    """There may be such a job, and it will be known by its mark."""
    slurm = slurm_with()
    slurm.errors["submit"] = [SILENT] * 100
    with pytest.raises(SlurmUnreachable):
        follow(run, slurm)
    assert slurm.calls.count("submit") < 20
    assert run.submitted().job_id == ""
    assert run.submitted().comment.startswith("transom:")


def test_a_full_disk_stops_no_job(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "write", full)
    assert follow(run, slurm_with()) == "2"


def test_no_room_for_the_script(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(followup.tempfile, "NamedTemporaryFile", full)
    with pytest.raises(SlurmError, match="can't be handed on"):
        follow(run, slurm_with())
    assert run.submitted() == submitted()
