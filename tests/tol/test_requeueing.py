"""How a run goes on elsewhere: which hosts are avoided, which job, and what ended the life before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.errors import SlurmRefused
from transom_hpc.slurm.text import AccountRow, parse_sacct
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.causes import Cause
from transom_hpc.tol.events import Requeued
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Entry, Journal
from transom_hpc.tol.requeueing import carry_on, requeue_job, why_ended
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted

from .slurm_fake import SILENT, FakeSlurm, StillClock, facts, life, node

JOB = Job(1, 0, ("n1", "n2"), "n1")
DISABLED = SlurmRefused("no", answer="Requested operation is presently disabled for job 1")
RECORDED = Path(__file__).parents[1] / "recorded" / "slurm-22.05.8"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    one = RunDir(tmp_path / "run")
    one.create()
    one.write(Submitted(JobSpec(), ("python",), "/home/me", job_id="1"))
    return one


class Notes:
    """What was recorded."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, **facts: Any) -> None:
        self.entries.append((kind, facts))

    def of(self, kind: str) -> dict[str, Any]:
        return next(facts for name, facts in reversed(self.entries) if name == kind)


def incident(run: RunDir, number: int, host: str, clock: StillClock, cause: Cause = Cause.HOST_LOST) -> None:
    journal = Journal(run.journal, number, f"w{number}", clock)
    journal.append(Attempt(number, 1), "restart", cause=cause, host_out=host, evidence="dead", committed=0)
    journal.close()


def requeue(run: RunDir, slurm: FakeSlurm, clock: StillClock, nodes: int = 2, exclude: str = "") -> Notes:
    notes = Notes()
    found = requeue_job(run, JobSpec(nodes=nodes, exclude=exclude), JOB, Cause.HOST_LOST, slurm, notes, clock)
    assert found.ok
    return notes


def test_a_bad_host_joins_what_the_user_avoids(run: RunDir) -> None:
    clock, slurm = StillClock(), FakeSlurm(facts(exc_hosts=("n8",)))
    incident(run, 1, "n2", clock)
    notes = requeue(run, slurm, clock, exclude="n7")
    assert set(slurm.jobs[1].exc_hosts) == {"n2", "n7", "n8"}  # sbatch --exclude=n8, or the spec's n7
    assert notes.of("requeue") == {"cause": Cause.HOST_LOST, "avoid": ["n2"], "let_back": []}


def test_a_host_that_is_let_back_leaves_the_list(run: RunDir) -> None:
    """Else the list would only grow, until no node of the partition is left."""
    clock, slurm = StillClock(), FakeSlurm(facts(exc_hosts=("n2", "n8")))
    incident(run, 1, "n2", clock)
    clock.sleep(25 * 3600)
    incident(run, 2, "n3", clock)
    notes = requeue(run, slurm, clock)
    assert set(slurm.jobs[1].exc_hosts) == {"n3", "n8"}
    assert notes.of("requeue")["let_back"] == ["n2"]


def test_what_the_user_avoids_is_never_let_back(run: RunDir) -> None:
    clock, slurm = StillClock(), FakeSlurm(facts(exc_hosts=("n2",)))
    incident(run, 1, "n2", clock)
    clock.sleep(25 * 3600)
    requeue(run, slurm, clock, exclude="n2")
    assert slurm.jobs[1].exc_hosts == ("n2",)


def test_never_more_than_leaves_room_for_the_job(run: RunDir) -> None:
    clock, slurm = StillClock(), FakeSlurm(facts(exc_hosts=("n5",), partition="small"))
    slurm.cluster = [node(f"n{number}") for number in range(1, 6)]
    for number, host in enumerate(("n1", "n2", "n3"), 1):
        incident(run, number, host, clock, Cause.HOST_SILENT if host == "n2" else Cause.HOST_LOST)
    notes = requeue(run, slurm, clock, nodes=3)  # of n1 to n4, one may be left out
    assert notes.of("requeue")["avoid"] == ["n3"]
    assert notes.of("requeue")["let_back"] == ["n1", "n2"]
    assert slurm.partition_asked == "small"


def test_a_slurm_that_shows_nothing_now(run: RunDir) -> None:
    clock, slurm = StillClock(), FakeSlurm(facts(exc_hosts=("n8",)))
    slurm.errors["show_job"] = [SILENT, SILENT]  # is it cancelled, what does it avoid
    incident(run, 1, "n2", clock)
    requeue(run, slurm, clock)
    assert set(slurm.jobs[1].exc_hosts) == {"n2", "n8"}


# Another job


def go_on(run: RunDir, slurm: FakeSlurm, *, may_requeue: bool) -> tuple[Requeued, Notes]:
    notes = Notes()
    known = Submitted(JobSpec(nodes=2), ("python",), "/home/me", job_id="1")
    clock = StillClock()
    return carry_on(run, known, JOB, Cause.TIME_LIMIT, slurm, {}, notes, clock, may_requeue=may_requeue), notes


def test_requeued_where_that_is_allowed(run: RunDir) -> None:
    slurm = FakeSlurm(facts())
    answer, notes = go_on(run, slurm, may_requeue=True)
    assert (answer.ok, slurm.sent, notes.of("requeued")["ok"]) == (True, [], True)


def test_followed_where_it_is_known_that_it_is_not(run: RunDir) -> None:
    clock, slurm = StillClock(), FakeSlurm(facts(exc_hosts=("n8",)))
    incident(run, 1, "n2", clock)
    answer, notes = go_on(run, slurm, may_requeue=False)
    assert answer == Requeued(True, "job 2 carries the run on")
    assert "requeue" not in slurm.calls
    assert notes.of("follow-up") == {"job_id": "2", "excluded": ["n8", "n2"]}
    assert notes.of("requeue")["avoid"] == ["n2"]  # the new job is to compare its hosts with these


def test_followed_where_slurm_refuses(run: RunDir) -> None:
    slurm = FakeSlurm(facts())
    slurm.errors["requeue"] = [DISABLED, DISABLED]
    answer, notes = go_on(run, slurm, may_requeue=True)
    assert answer.ok
    assert notes.of("follow-up")["job_id"] == "2"


def test_neither(run: RunDir) -> None:
    slurm = FakeSlurm(facts())
    slurm.errors = {"requeue": [DISABLED, DISABLED], "submit": [SlurmRefused("a limit", answer="a limit")]}
    answer, notes = go_on(run, slurm, may_requeue=True)
    assert not answer.ok
    assert "presently disabled" in answer.answer
    assert "a limit" in answer.answer
    assert notes.of("requeued")["ok"] is False


def test_a_job_that_a_person_has_cancelled_is_not_followed(run: RunDir) -> None:
    slurm = FakeSlurm(facts(1, "COMPLETING"))
    for may_requeue in (True, False):
        answer, _ = go_on(run, slurm, may_requeue=may_requeue)
        assert (answer.ok, answer.cancelled) == (False, True)
    assert slurm.sent == []
    assert "requeue" not in slurm.calls


def test_silence_is_no_refusal(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requeue may have been done: a second job must not run beside it."""
    monkeypatch.setattr("transom_hpc.tol.requeueing.PATIENCE_S", 60.0)

    class Dumb(FakeSlurm):
        """Silent until the requeue has been given up, and one question longer."""

        silent = 3  # was it done; is Slurm silent; has it refused

        def _call(self, name: str) -> None:
            if name == "requeue":
                self.left = self.silent
                raise SILENT
            if name == "show_job" and self.left:
                self.left -= 1
                raise SILENT
            super()._call(name)

        left = 2

    slurm = Dumb(facts())
    answer, notes = go_on(run, slurm, may_requeue=True)
    assert not answer.ok
    assert slurm.sent == []
    assert notes.of("requeued")["ok"] is False
    slurm = Dumb(facts(restarts=1))  # it answers at last, and the requeue had been done
    slurm.silent = 2
    go_on(run, slurm, may_requeue=True)
    assert slurm.sent == []


# What ended the life before


def entries(*kinds: tuple[str, dict[str, Any]]) -> list[Entry]:
    return [Entry(Attempt(1, 0), order, "", "n1", kind, facts) for order, (kind, facts) in enumerate(kinds)]


START = ("start", {"job_id": 1})


def ended(lives: Sequence[AccountRow], past: Sequence[Entry] = (), restarts: int = 1, job_id: int = 1) -> Cause | None:
    slurm = FakeSlurm(facts())
    slurm.lives = list(lives)
    return why_ended(past, Job(job_id, restarts, ("n1",), "n1"), slurm)


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("PREEMPTED", Cause.PREEMPTED),
        ("REQUEUED", Cause.REQUEUED),
        ("NODE_FAIL", Cause.HOST_LOST),
        ("CANCELLED by 1000", None),
        ("FAILED", None),
    ],
)
def test_slurms_word_for_the_last_life(word: str, cause: Cause | None) -> None:
    assert ended([life(1, word), life(1, "RUNNING", "")]) is cause


def test_the_last_life_counts_and_only_of_this_job() -> None:
    lives = [life(1, "PREEMPTED"), life(1, "NODE_FAIL"), life(2, "REQUEUED"), life(1, "RUNNING", "")]
    assert ended(lives, restarts=2) is Cause.HOST_LOST


def test_an_accounting_that_is_late_is_not_believed() -> None:
    assert ended([life(1, "PREEMPTED"), life(1, "RUNNING", "")], restarts=2) is None


def test_our_own_requeue_needs_no_accounting() -> None:
    own = entries(START, ("requeue", {"cause": "time limit"}), ("requeued", {"ok": True}))
    assert ended([life(1, "REQUEUED")], own) is Cause.TIME_LIMIT
    unheard = entries(START, ("requeue", {"cause": "host lost"}))
    assert ended([], unheard) is Cause.HOST_LOST
    refused = entries(START, ("requeue", {"cause": "time limit"}), ("requeued", {"ok": False}))
    assert ended([life(1, "PREEMPTED")], refused) is Cause.PREEMPTED
    earlier = [*own, *entries(START)]
    assert ended([life(1, "REQUEUED"), life(1, "REQUEUED")], earlier, restarts=2) is Cause.REQUEUED


def test_a_job_that_follows_another_knows_why() -> None:
    past = entries(START, ("requeue", {"cause": "time limit"}), ("follow-up", {"job_id": "2"}))
    assert ended([], past, restarts=0, job_id=2) is Cause.TIME_LIMIT
    assert ended([], past, restarts=0, job_id=3) is None


def test_a_first_life_asks_nobody() -> None:
    slurm = FakeSlurm(facts())
    assert why_ended([], JOB, slurm) is None
    assert slurm.calls == []


def test_no_accounting() -> None:
    slurm = FakeSlurm(facts())
    slurm.errors["accounting"] = [SlurmRefused("disabled", answer="Slurm accounting storage is disabled")]
    assert why_ended([], Job(1, 1, ("n1",), "n1"), slurm) is None


def test_an_accounting_that_hangs_is_left_behind() -> None:
    class Slow(FakeSlurm):
        def accounting(self, job_ids: Sequence[int], *, duplicates: bool = True) -> list[AccountRow]:
            time.sleep(2)
            return super().accounting(job_ids, duplicates=duplicates)

    before = time.monotonic()
    assert why_ended([], Job(1, 1, ("n1",), "n1"), Slow(facts()), 0.1) is None
    assert time.monotonic() - before < 1.5


def test_what_a_real_slurm_says() -> None:
    rows = parse_sacct((RECORDED / "lives-sacct.txt").read_text())
    assert ended(rows[:1], job_id=rows[0].job_id) is Cause.PREEMPTED
    assert ended(rows, restarts=2, job_id=rows[0].job_id) is Cause.REQUEUED
