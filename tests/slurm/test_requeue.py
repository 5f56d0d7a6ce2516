"""The protocol against a Slurm whose rare answers are scripted, and from inside a real dying job."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.base.errors import SlurmError, SlurmMissing, SlurmRefused, SlurmUnreachable, TransomError
from transom_hpc.lab import Lab
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.requeue import RequeueOutcome, requeue_excluding
from transom_hpc.slurm.states import JobState
from transom_hpc.slurm.text import AccountRow, JobFacts, NodeRow, QueueRow, parse_show_job

RUNNING = parse_show_job((Path(__file__).parents[1] / "recorded/slurm-22.05.8/1-mixed-show-job.txt").read_text())[0]

COMPLETING = SlurmRefused("no", answer="Job is no longer pending execution for job 1")
DISABLED = SlurmRefused("no", answer="Requested operation is presently disabled for job 1")
PENDING = SlurmRefused("no", answer="Job is pending execution for job 1")
SILENT = SlurmUnreachable("scontrol gave no answer in 5 s", answer="")
MISSING = SlurmMissing("no Slurm on this machine: scontrol not found")
STRANGE = SlurmError("scontrol update: the moon is full", answer="the moon is full")


class StillClock:
    """Time passes by sleeping only."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> datetime:
        return datetime.fromtimestamp(self.time, timezone.utc)

    def sleep(self, seconds: float) -> None:
        self.time += seconds


class ScriptedSlurm:
    """One job; each call of `requeue`, `exclude` and `show_job` first takes its next scripted answer, if any is left.

    Args:
        requeues: errors to give; None: do it. The word 'lost': do it and say nothing (the answer got lost).
        excludes: errors to give; None: do it.
        shows: errors to give; None: answer.
        unknown: hosts that are no nodes.
        completing: how many calls of `exclude` the requeued job goes on completing for.
    """

    def __init__(
        self,
        job: JobFacts = RUNNING,
        *,
        requeues: Sequence[TransomError | str | None] = (),
        excludes: Sequence[TransomError | None] = (),
        shows: Sequence[TransomError | None] = (),
        unknown: Sequence[str] = (),
        completing: int = 0,
    ) -> None:
        self.completing = completing
        self.job = job
        self.scripts: dict[str, list[TransomError | str | None]] = {
            "requeue": list(requeues),
            "exclude": list(excludes),
            "show": list(shows),
        }
        self.unknown = unknown
        self.calls: list[str] = []

    def _next(self, call: str, job_id: int) -> TransomError | str | None:
        assert job_id == self.job.job_id
        self.calls.append(call)
        script = self.scripts[call]
        return script.pop(0) if script else None

    def requeue(self, job_id: int) -> None:
        answer = self._next("requeue", job_id)
        if isinstance(answer, TransomError):
            raise answer
        if self.job.state is JobState.WAITING:
            raise PENDING
        self.job = dataclasses.replace(self.job, restarts=self.job.restarts + 1)
        self._settle()
        if answer == "lost":
            raise SILENT

    def exclude(self, job_id: int, hosts: Sequence[str]) -> list[str]:
        answer = self._next("exclude", job_id)
        if isinstance(answer, TransomError):
            raise answer
        if self.job.state is not JobState.WAITING:
            self._settle()
            raise COMPLETING
        self.job = dataclasses.replace(self.job, exc_hosts=tuple(h for h in hosts if h not in self.unknown))
        return [host for host in hosts if host in self.unknown]

    def _settle(self) -> None:
        if self.completing == 0:
            self.job = dataclasses.replace(self.job, state=JobState.WAITING, hosts=())
        self.completing -= 1

    def show_job(self, job_id: int) -> JobFacts:
        answer = self._next("show", job_id)
        if isinstance(answer, TransomError):
            raise answer
        return self.job

    def queue(self, job_ids: Sequence[int] | None = None) -> list[QueueRow]:
        raise NotImplementedError

    def accounting(self, job_ids: Sequence[int], *, duplicates: bool = True) -> list[AccountRow]:
        raise NotImplementedError

    def nodes(self, hosts: Sequence[str] | None = None, *, partition: str = "") -> list[NodeRow]:
        raise NotImplementedError

    def partitions(self) -> list[str]:
        raise NotImplementedError

    def release_now(self, job_id: int) -> None:
        raise NotImplementedError

    def cancel(self, job_id: int) -> None:
        raise NotImplementedError

    def signal_step(self, job_id: int, step: int | str, signal_name: str) -> None:
        raise NotImplementedError

    def script(self, job_id: int) -> str:
        raise NotImplementedError

    def submit(
        self, options: Sequence[str], script: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        raise NotImplementedError

    def version(self) -> str:
        raise NotImplementedError


def requeue(slurm: ScriptedSlurm, hosts: Sequence[str] = ("n2",), user: Sequence[str] = ()) -> RequeueOutcome:
    typed: Slurm = slurm
    return requeue_excluding(typed, 1, hosts, user, StillClock(), 20.0)


def test_requeued_and_excluded() -> None:
    slurm = ScriptedSlurm()
    assert requeue(slurm) == RequeueOutcome(True, ("n2",), (), "")
    assert slurm.job.exc_hosts == ("n2",)
    assert slurm.calls == ["show", "requeue", "exclude"]


def test_the_list_is_the_union_of_what_is_there_what_the_user_said_and_what_is_new() -> None:
    slurm = ScriptedSlurm(dataclasses.replace(RUNNING, exc_hosts=("n4", "n9")))
    assert requeue(slurm, ["n2", "n4"], ["n7"]).excluded == ("n4", "n9", "n7", "n2")
    assert slurm.job.exc_hosts == ("n4", "n9", "n7", "n2")


def test_a_completing_job_refuses_for_a_while() -> None:
    slurm = ScriptedSlurm(excludes=[COMPLETING, COMPLETING, STRANGE, SILENT])
    assert requeue(slurm) == RequeueOutcome(True, ("n2",), (), "")
    assert slurm.calls.count("exclude") == 5
    assert slurm.calls.count("requeue") == 1


def test_a_job_that_never_gets_pending_is_said_at_the_deadline() -> None:
    slurm = ScriptedSlurm(excludes=[COMPLETING] * 1000)
    assert requeue(slurm) == RequeueOutcome(True, (), (), COMPLETING.answer)
    assert 190 < slurm.calls.count("exclude") < 210  # every 0.1 s


def test_requeueing_that_is_impossible_is_not_tried_twice() -> None:
    slurm = ScriptedSlurm(requeues=[DISABLED])
    assert requeue(slurm) == RequeueOutcome(False, (), (), DISABLED.answer)
    assert slurm.calls == ["show", "requeue", "show"]
    assert slurm.job.exc_hosts == ()


def test_no_scontrol_in_the_container() -> None:
    slurm = ScriptedSlurm(requeues=[MISSING], shows=[MISSING])
    assert requeue(slurm) == RequeueOutcome(False, (), (), str(MISSING))


def test_an_answer_that_got_lost_is_looked_up() -> None:
    slurm = ScriptedSlurm(requeues=["lost"])
    assert requeue(slurm).requeued
    assert slurm.calls.count("requeue") == 1
    assert slurm.job.restarts == RUNNING.restarts + 1


def test_an_answer_that_got_lost_is_told_by_the_restarts_while_the_job_completes() -> None:
    slurm = ScriptedSlurm(requeues=["lost"], completing=3)
    assert requeue(slurm) == RequeueOutcome(True, ("n2",), (), "")
    assert slurm.calls == ["show", "requeue", "show", *["exclude"] * 4]


def test_an_answer_that_got_lost_and_cannot_be_looked_up_is_asked_again() -> None:
    slurm = ScriptedSlurm(requeues=["lost"], shows=[None, SILENT])
    assert requeue(slurm) == RequeueOutcome(True, ("n2",), (), "")
    assert slurm.calls == ["show", "requeue", "show", "requeue", "exclude"]
    assert slurm.job.restarts == RUNNING.restarts + 1  # not twice


def test_somebody_else_requeued_it_already() -> None:
    slurm = ScriptedSlurm(dataclasses.replace(RUNNING, state=JobState.WAITING))
    assert requeue(slurm).excluded == ("n2",)
    slurm = ScriptedSlurm(dataclasses.replace(RUNNING, state=JobState.WAITING), shows=[SILENT] * 9)
    assert requeue(slurm) == RequeueOutcome(True, ("n2",), (), "")  # the refusal is proof enough


def test_a_controller_that_is_silent_for_ever_is_said_at_the_deadline() -> None:
    slurm = ScriptedSlurm(requeues=[SILENT] * 1000, shows=[SILENT] * 1000)
    assert requeue(slurm) == RequeueOutcome(False, (), (), str(SILENT))


def test_a_host_that_is_no_node_is_dropped_and_said() -> None:
    slurm = ScriptedSlurm(unknown=["gone"])
    assert requeue(slurm, ["n2", "gone"]) == RequeueOutcome(True, ("n2",), ("gone",), "")


_errors = st.sampled_from([None, COMPLETING, SILENT, STRANGE])


@given(
    requeues=st.lists(st.sampled_from([None, SILENT, "lost", DISABLED, STRANGE, MISSING]), max_size=4),
    excludes=st.lists(_errors, max_size=6),
    shows=st.lists(st.sampled_from([None, SILENT]), max_size=6),
    user=st.lists(st.sampled_from(["n1", "n3"]), max_size=2),
)
def test_whatever_slurm_answers_the_outcome_is_true(
    requeues: list[TransomError | str | None],
    excludes: list[TransomError | None],
    shows: list[TransomError | None],
    user: list[str],
) -> None:
    slurm = ScriptedSlurm(requeues=requeues, excludes=excludes, shows=shows)
    outcome = requeue(slurm, ["n2"], user)
    assert set(outcome.excluded) <= set(slurm.job.exc_hosts)
    if outcome.requeued:
        assert slurm.job.restarts == RUNNING.restarts + 1
        assert set(outcome.excluded) >= {"n2", *user} or outcome.answer
    else:
        assert outcome.answer
        assert outcome.excluded == ()


# --- for real

DYING = """
import dataclasses, json, os, signal, sys, time
from pathlib import Path
from transom_hpc.base.clock import SystemClock
from transom_hpc.slurm.commands import SlurmCommands
from transom_hpc.slurm.requeue import requeue_excluding

notes = Path(sys.argv[1])
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(time.monotonic()))  # as the launcher does: a flag
job = int(os.environ["SLURM_JOB_ID"])
mine = os.environ["SLURM_JOB_NODELIST"]
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    outcome = requeue_excluding(SlurmCommands(5, ignore_term=True), job, [mine, "gone"], ["n5"], SystemClock(), 20.0)
    (notes / "outcome.new").write_text(json.dumps(dataclasses.asdict(outcome) | {"told": len(told), "host": mine}))
    (notes / "outcome.new").rename(notes / "outcome")
else:
    (notes / "again.new").write_text(mine)
    (notes / "again.new").rename(notes / "again")
"""


def wait_for(path: Path, seconds: float = 40) -> str:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name} after {seconds} s"
        time.sleep(0.1)
    return path.read_text()


def as_user(lab: Lab, code: str) -> Any:
    """Run code on the login node, as the ordinary user: `slurm` is there; the value of `answer` comes back."""
    head = "import json, dataclasses\nfrom transom_hpc.slurm.commands import SlurmCommands\nslurm = SlurmCommands()\n"
    done = lab.run("login", [sys.executable, "-c", f"{head}{code}\nprint(json.dumps(answer))"])
    return json.loads(done.stdout)


@pytest.mark.slurm
@pytest.mark.slow
def test_a_job_excludes_its_host_while_it_dies_and_starts_elsewhere(healthy_lab: Lab) -> None:
    notes = healthy_lab.shared / f"dying-{time.monotonic_ns()}"
    healthy_lab.run("login", ["mkdir", str(notes)])
    script = notes / "job.sh"
    program = notes / "dying.py"
    program.write_text(DYING)
    script.write_text(f"#!/bin/bash\nexec {sys.executable} {program} {notes}\n")
    sent = healthy_lab.run("login", ["sbatch", "--parsable", "-N1", f"--output={notes}/log", str(script)])
    job = int(sent.stdout.strip())

    outcome = json.loads(wait_for(notes / "outcome"))
    bad = outcome["host"]
    assert outcome["requeued"], (notes / "log").read_text()
    assert sorted(outcome["excluded"]) == sorted({bad, "n5"})
    assert outcome["dropped"] == ["gone"]
    assert outcome["answer"] == ""
    assert outcome["told"] == 1  # it was being killed while it did all that

    facts = as_user(healthy_lab, f"f = slurm.show_job({job}); answer = [f.state, f.restarts, f.exc_hosts]")
    assert facts[0] in ("waiting", "running")  # pending, or still completing as well
    assert facts[1] == 1
    assert sorted(facts[2]) == sorted({bad, "n5"})

    # 120 s of waiting, or nobody waits: somebody outside releases it.
    deadline = time.monotonic() + 40
    while not (notes / "again").exists() and time.monotonic() < deadline:
        as_user(
            healthy_lab,
            "from transom_hpc.base.errors import SlurmRefused\nanswer = 'released'\n"
            f"try: slurm.release_now({job})\nexcept SlurmRefused as error: answer = error.answer",
        )
        time.sleep(1)
    assert wait_for(notes / "again", 5) not in {bad, "n5"}


@pytest.mark.slurm
def test_what_the_fake_and_the_real_slurm_both_do(healthy_lab: Lab) -> None:
    """The contract that the protocol rests on, and how a real Slurm words it."""
    sent = healthy_lab.run("login", ["sbatch", "--parsable", "-N1", "--output=/dev/null", "--wrap", "sleep 300"])
    job = int(sent.stdout.strip())
    code = """
import time
from transom_hpc.base.errors import SlurmRefused
def refused(call):
    try: call()
    except SlurmRefused as error: return error.answer
    return ""
JOB = %d
while slurm.show_job(JOB).state != "running": time.sleep(0.1)
before = slurm.show_job(JOB)
answer = {"running": refused(lambda: slurm.exclude(JOB, ["n5"]))}
slurm.requeue(JOB)
while slurm.show_job(JOB).state != "waiting": time.sleep(0.1)
answer["restarts"] = slurm.show_job(JOB).restarts - before.restarts
answer["twice"] = refused(lambda: slurm.requeue(JOB))
answer["dropped"] = slurm.exclude(JOB, ["n5", "gone"])
answer["excluded"] = slurm.show_job(JOB).exc_hosts
(row,) = slurm.queue([JOB])
answer["queue"] = [row.state, row.exc_hosts]  # the reason comes some seconds later
slurm.exclude(JOB, [])
answer["cleared"] = slurm.show_job(JOB).exc_hosts
answer["lives"] = [row.state_text for row in slurm.accounting([JOB]) if row.id.step is None]
slurm.cancel(JOB)
slurm.cancel(JOB)
slurm.cancel(424242)
answer["gone"] = [slurm.queue([JOB, 424242]) == [], slurm.queue([424242]) == []]
answer["unknown"] = refused(lambda: slurm.show_job(424242))
answer["nodes"] = [row.host for row in slurm.nodes(["n1", "gone"])]
answer["partitions"] = slurm.partitions()
answer["version"] = slurm.version()
"""
    answer = as_user(healthy_lab, code % job)
    assert "no longer pending" in answer["running"]
    assert answer["restarts"] == 1
    assert "is pending execution" in answer["twice"]
    assert answer["dropped"] == ["gone"]
    assert answer["excluded"] == ["n5"]
    assert answer["queue"] == ["waiting", ["n5"]]
    assert answer["cleared"] == []
    assert answer["lives"][:1] == ["REQUEUED"]
    assert answer["gone"] == [True, True]
    assert "Invalid job id" in answer["unknown"]
    assert answer["nodes"] == ["n1"]
    assert "main" in answer["partitions"]
    assert answer["version"][0].isdigit()
