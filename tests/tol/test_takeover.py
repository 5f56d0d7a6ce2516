"""A launcher in a step of its own; a survivor that starts one, or leaves it at that. `srun`, `scontrol` are scripts."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from transom_hpc.tol import sidecar, takeover
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Journal, claim_exactly, claim_number
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.sidecar import Survivor
from transom_hpc.tol.spec import JobSpec, Submitted
from transom_hpc.tol.succession import TakeOver
from transom_hpc.tol.takeover import start_launcher

JOB = Job(7, 0, ("n1", "n2", "n3"), "n2")
# As srun has one, a helper that outlives it; both write down who they are.
BEGINS = """#!/bin/bash
echo "$@" > {folder}/arguments
env > {folder}/environment
sleep 60 &
echo $$ $! > {folder}/pids
touch {run}/journal/A0002-n2.jsonl
wait
"""
FAILS = "#!/bin/sh\necho 'srun: error: no such node' >&2\nexit 3\n"
HANGS = "#!/bin/bash\necho $$ > {folder}/pids\nexec sleep 60\n"


class Ground:
    """A run whose first attempt has begun, and a folder of programs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.run = RunDir(folder / "run")
        self.run.create()
        self.run.write(Submitted(JobSpec(), ("true",), "/"))
        assert claim_number(self.run.journal) == 1
        self.write("start", job_id=7, requeues=0, hosts=list(JOB.hosts), needed=3, program=["the", "program"])
        (folder / "bin").mkdir()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")

    def program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text.replace("{folder}", str(self.folder)).replace("{run}", str(self.run.path)))
        path.chmod(0o755)

    def write(self, kind: str, **facts: Any) -> None:
        journal = Journal(self.run.journal, 1, "n1")
        journal.append(Attempt(1, 1), kind, **facts)
        journal.close()

    def start(self) -> str:
        taken = TakeOver(1, ("n1", "n3"), "n1 is not heard")
        environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "PMIX_RANK": "1"}
        return start_launcher(self.run, JOB, taken, ["the", "program"], ("/out", "/err"), environment)

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()

    def all_gone(self) -> bool:
        until = time.monotonic() + 5
        pids = [int(pid) for pid in self.read("pids").split()]
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
            time.sleep(0.02)
        return not any(psutil.pid_exists(pid) for pid in pids)

    def survivor(self) -> Survivor:
        return Survivor(self.run, Attempt(1, 1), JOB, "n2", "n1", JOB.hosts, self.folder / "shm", dict(os.environ))


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    return Ground(tmp_path, monkeypatch)


def test_it_lets_go_of_the_step_as_soon_as_the_launcher_has_begun(ground: Ground) -> None:
    ground.program("srun", BEGINS)
    assert ground.start() == ""
    assert ground.all_gone(), "srun, and its helper, which would end the step"
    words = ground.read("arguments").split()
    assert {"--overlap", "--no-kill", "--nodelist=n2", "--mpi=none", "/out", "/err", "--after=1"} <= set(words)
    assert "--lost=n1,n3" in words
    assert words[-3:] == ["--", "the", "program"]
    names = {line.partition("=")[0] for line in ground.read("environment").splitlines()}
    assert "SLURM_JOB_ID" in names
    assert not {"SLURM_STEP_ID", "PMIX_RANK"} & names


def test_a_step_that_does_not_start(ground: Ground) -> None:
    ground.program("srun", FAILS)
    assert ground.start() == "the launcher's step ended (exit status 3): srun: error: no such node"


def test_a_step_that_does_not_begin(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_PATIENCE_S", 1.0)
    ground.program("srun", HANGS)
    assert ground.start() == "the launcher's step did not begin within 1 s"
    assert ground.all_gone()


def test_no_srun(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(ground.folder / "bin"))
    assert ground.start().startswith("srun can't be started")


RECORDED = Path(__file__).parents[1] / "recorded" / "slurm-22.05.8" / "1-mixed-show-job.txt"
SHOW = """#!/bin/sh
echo "$@" >> {folder}/asked
[ "$1" = show ] && exec cat {folder}/job
echo "Requested operation is presently disabled" >&2
exit 1
"""


def asked(ground: Ground) -> str:
    path = ground.folder / "asked"
    return path.read_text() if path.exists() else ""


def orphaned(ground: Ground, state: str = "RUNNING") -> None:
    record = RECORDED.read_text().partition("\n\n")[0] + "\n\n"
    job = record.replace("JobId=1 ", "JobId=7 ").replace("JobState=RUNNING", f"JobState={state}")
    (ground.folder / "job").write_text(job)
    ground.program("scontrol", SHOW)
    ground.program("sinfo", "#!/bin/sh\nexit 1\n")
    ground.survivor().orphaned(("n1",), "n1 is not heard")


@pytest.mark.parametrize("state", ["RUNNING", "SIGNALING"])
def test_a_survivor_takes_over(ground: Ground, state: str) -> None:
    ground.program("srun", BEGINS)
    orphaned(ground, state)
    assert "--after=1" in ground.read("arguments")
    assert (ground.run.journal / "A0002.claim").exists()
    assert "requeue" not in asked(ground)


def test_where_another_one_has_the_number_nothing_is_done(ground: Ground) -> None:
    ground.program("srun", BEGINS)
    assert claim_exactly(ground.run.journal, 2, "n3")
    orphaned(ground)
    assert not (ground.folder / "arguments").exists()
    assert "requeue" not in asked(ground)


@pytest.mark.parametrize(
    ("kind", "facts"), [("monitoring", {"problem": ""}), ("requeued", {"ok": True}), ("running", {"step": 3})]
)
def test_a_host_that_the_launcher_goes_on_without_does_nothing(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, kind: str, facts: dict[str, Any]
) -> None:
    monkeypatch.setattr(sidecar, "_OUT_S", 0.0)
    ground.program("srun", BEGINS)
    ground.write("restart", host_out="n2", cause="host silent", evidence="")
    ground.write(kind, **facts)
    orphaned(ground)
    assert asked(ground) == ""
    assert not (ground.run.journal / "A0002.claim").exists()


def test_a_launcher_that_has_only_blamed_this_host_may_be_the_one_that_is_cut_off(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "_OUT_S", 0.0)
    ground.program("srun", BEGINS)
    ground.write("monitoring", problem="")
    ground.write("restart", host_out="n2", cause="host silent", evidence="")
    ground.write("monitoring", problem="the sidecar ended and is started again")
    ground.write("requeued", ok=False)
    orphaned(ground)
    assert "--after=1" in ground.read("arguments")


def test_who_can_not_take_over_requeues(ground: Ground) -> None:
    ground.program("srun", FAILS)
    orphaned(ground)
    kinds = [entry.kind for entry in ground.run.entries() if entry.host == "n2"]
    assert kinds[:2] == ["restart", "requeue"]
    assert "requeue 7" in asked(ground)


def test_who_can_not_ask_slurm_claims_nothing(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two hosts it may be the one that is cut off: a claim would stop the other one's launcher."""
    requeued: list[str] = []
    monkeypatch.setattr("transom_hpc.tol.sidecar.requeue_job", lambda *_: requeued.append("asked"))
    ground.program("scontrol", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    ground.survivor().orphaned(("n1",), "n1 is not heard")
    assert not (ground.run.journal / "A0002.claim").exists()
    assert requeued == ["asked"]


@pytest.mark.parametrize(("ending", "ends"), [("ended well", True), ("left", False)])
def test_a_launcher_that_had_done_its_work_is_not_replaced(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, ending: str, ends: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("transom_hpc.tol.sidecar.end_job", lambda _job, code, *_: ended.append(code))
    ground.program("srun", BEGINS)
    ground.write("end", ending=ending, why="", code=0)
    orphaned(ground)
    assert ended == ([0] if ends else [])
    assert not (ground.run.journal / "A0002.claim").exists()


def test_a_job_that_is_ending_is_not_taken_over(ground: Ground) -> None:
    ground.program("srun", BEGINS)
    orphaned(ground, "COMPLETING")
    assert not (ground.run.journal / "A0002.claim").exists()
    assert "requeue" not in asked(ground)
