"""stop and requeue from outside: what is refused, what is asked, and what counts as done."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.errors import SlurmMissing, SlurmRefused, TransomError, UsageError
from transom_hpc.control import Control
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.history import fold
from transom_hpc.tol.journal import Journal
from transom_hpc.tol.requests import What, answered, asked
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec, Submitted

from .tol.slurm_fake import SILENT, FakeSlurm, StillClock, facts

MARK = "transom:1"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    one = RunDir(tmp_path / "run")
    one.create()
    one.write(Submitted(JobSpec(), ("python",), "/home/me", job_id="1", comment=MARK))
    return one


def write(run: RunDir, number: int, *entries: tuple[str, dict[str, Any]]) -> None:
    journal = Journal(run.journal, number, "n1")
    for kind, said in entries:
        journal.append(Attempt(number, 1), kind, **said)
    journal.close()


STARTED = (("start", {"job_id": 1, "requeues": 0}), ("launch", {"hosts": ["n1"], "spares": []}))
STOPPED = ("end", {"ending": "stopped", "why": "stopped by a person; step 5 is saved"})
LEFT = ("end", {"ending": "left", "why": "requeued"})


def control(run: RunDir, what: What, slurm: FakeSlurm, clock: StillClock | None = None) -> Control:
    return Control(run, what, slurm, clock or StillClock())


def quiet(_: str) -> None:
    """What is told is not looked at."""


def takes_up(run: RunDir, number: int, *entries: tuple[str, dict[str, Any]]) -> Callable[[], None]:
    """A launcher that acts on the request."""

    def act() -> None:
        request = asked(run, "1", 0)
        assert request is not None
        answered(run)
        write(run, number, ("request", {"what": request.what, "by": request.by}), *entries)

    return act


def test_a_working_run_is_asked_and_stops(run: RunDir) -> None:
    write(run, 1, *STARTED)
    clock, slurm = StillClock(), FakeSlurm(facts(comment=MARK))
    one = control(run, "stop", slurm, clock)
    outcome = one.send()
    assert (outcome.done, outcome.job_id) == (False, "1")
    clock.after(1, takes_up(run, 1, STOPPED))
    outcome = one.wait(60, quiet)
    assert outcome.done
    assert outcome.message == "job 1: stopped by a person; step 5 is saved"
    assert "cancel" not in slurm.calls


def test_slurm_need_not_answer(run: RunDir) -> None:
    write(run, 1, *STARTED)
    for silence in (SILENT, SlurmMissing("no Slurm here")):
        clock, slurm = StillClock(), FakeSlurm(facts(comment=MARK))
        slurm.errors["queue"] = [silence] * 100
        one = control(run, "requeue", slurm, clock)
        assert "not known" in one.send().message
        clock.after(20, takes_up(run, 1, ("requeued", {"ok": True})))
        assert one.wait(60, quiet).message == "job 1 is requeued"
        assert len(slurm.calls) < 6, "less and less often"


def test_a_run_that_may_not_be_requeued_goes_on_in_another_job(run: RunDir) -> None:
    write(run, 1, *STARTED)
    clock = StillClock()
    one = control(run, "requeue", FakeSlurm(facts(comment=MARK)), clock)
    one.send()
    clock.after(1, takes_up(run, 1, ("follow-up", {"job_id": "8"}), LEFT))
    outcome = one.wait(60, quiet)
    assert (outcome.done, outcome.job_id) == (True, "8")


def test_old_entries_of_the_journal_are_no_answer(run: RunDir) -> None:
    write(run, 1, *STARTED, ("requeued", {"ok": True}), LEFT)
    write(run, 2, *STARTED)
    clock = StillClock()
    one = control(run, "requeue", FakeSlurm(facts(comment=MARK)), clock)
    one.send()
    with pytest.raises(TransomError, match="not done after 60 s; no launcher has taken it up"):
        one.wait(60, quiet)
    assert asked(run, "1", 0) is not None, "it stays asked"


def test_a_requeue_that_comes_to_nothing_is_an_error(run: RunDir) -> None:
    write(run, 1, *STARTED)
    clock = StillClock()
    one = control(run, "requeue", FakeSlurm(facts(comment=MARK)), clock)
    one.send()
    clock.after(1, takes_up(run, 1, ("end", {"ending": "ended well", "why": "the program ended"})))
    with pytest.raises(TransomError, match="not requeued: the run ended well"):
        one.wait(60, quiet)


@pytest.mark.parametrize("state", ["PENDING", "REQUEUE_HOLD"])
def test_a_job_that_waits_is_cancelled_and_the_run_says_stopped(run: RunDir, state: str) -> None:
    write(run, 1, *STARTED, LEFT)
    slurm = FakeSlurm(facts(1, state, comment=MARK))
    outcome = control(run, "stop", slurm).send()
    assert outcome.done
    assert slurm.jobs == {}
    history = fold(run.entries())
    assert history.phase == "over"
    assert history.ending is not None
    assert history.ending[0] == "stopped"
    assert history.attempt is not None
    assert history.attempt.number == 2
    with pytest.raises(UsageError, match="the run is over"):
        control(run, "stop", slurm)


def test_a_job_that_has_never_run_is_cancelled_too(run: RunDir) -> None:
    slurm = FakeSlurm(facts(1, "PENDING", comment=MARK))
    assert "nothing is saved yet" in control(run, "stop", slurm).send().message
    assert slurm.jobs == {}


def test_a_cancel_that_is_refused_leaves_no_word(run: RunDir) -> None:
    slurm = FakeSlurm(facts(1, "PENDING", comment=MARK))
    slurm.errors["cancel"] = [SlurmRefused("no", answer="no")]
    with pytest.raises(SlurmRefused):
        control(run, "stop", slurm).send()
    assert run.entries() == []


def test_a_job_that_waits_need_not_be_requeued(run: RunDir) -> None:
    slurm = FakeSlurm(facts(1, "PENDING", comment=MARK, reason="Priority"))
    outcome = control(run, "requeue", slurm).send()
    assert (outcome.done, outcome.message) == (True, "job 1 waits already (Priority)")
    assert slurm.calls == ["queue"]
    assert not run.request.exists()


def test_a_held_job_can_not_be_requeued(run: RunDir) -> None:
    with pytest.raises(UsageError, match="scontrol release 1"):
        control(run, "requeue", FakeSlurm(facts(1, "REQUEUE_HOLD", comment=MARK))).send()


def test_a_job_that_goes_back_into_the_queue_while_it_is_asked_to_stop(run: RunDir) -> None:
    """As when its time was up in the same moment: the launcher never saw the request."""
    write(run, 1, *STARTED)
    clock, slurm = StillClock(), FakeSlurm(facts(comment=MARK))
    one = control(run, "stop", slurm, clock)
    one.send()
    clock.after(2, lambda: slurm.jobs.update({1: facts(1, "PENDING", comment=MARK)}))
    assert "is cancelled" in one.wait(60, quiet).message
    assert slurm.jobs == {}
    assert not run.request.exists()


def test_a_stop_goes_over_to_the_job_that_carries_the_run_on(run: RunDir) -> None:
    write(run, 1, *STARTED)
    clock, slurm = StillClock(), FakeSlurm(facts(comment=MARK))
    one = control(run, "stop", slurm, clock)
    one.send()

    def follow() -> None:
        run.write(dataclasses.replace(run.submitted(), job_id="2", comment="transom:2"))
        slurm.jobs = {2: facts(2, "PENDING", comment="transom:2")}

    clock.after(2, follow)
    outcome = one.wait(60, quiet)
    assert (outcome.job_id, slurm.jobs) == ("2", {})


def test_a_launcher_that_is_gone(run: RunDir) -> None:
    write(run, 1, *STARTED)
    for what, found in (("stop", None), ("requeue", "not requeued: job 1 has ended")):
        clock, slurm = StillClock(), FakeSlurm(facts(comment=MARK))
        one = control(run, what, slurm, clock)  # type: ignore[arg-type]
        one.send()
        clock.after(2, slurm.jobs.clear)
        if found is None:
            assert "without a word of its launcher" in one.wait(60, quiet).message
        else:
            with pytest.raises(TransomError, match=found):
                one.wait(60, quiet)


# Refused


def test_a_run_that_is_over(run: RunDir) -> None:
    write(run, 1, *STARTED, ("end", {"ending": "ended badly", "why": "program error"}))
    with pytest.raises(UsageError, match=r"nothing to stop: the run is over \(ended badly: program error\)"):
        control(run, "stop", FakeSlurm(facts(comment=MARK)))


def test_a_job_that_is_not_in_the_queue_any_more(run: RunDir) -> None:
    write(run, 1, *STARTED)
    with pytest.raises(UsageError, match="job 1 is not in the queue any more"):
        control(run, "stop", FakeSlurm()).send()
    assert not run.request.exists()


def test_a_local_run(run: RunDir) -> None:
    run.write(Submitted(JobSpec(local=True), ("python",), "/home/me"))
    with pytest.raises(UsageError, match="a local run"):
        control(run, "stop", FakeSlurm())


def test_a_run_that_was_never_submitted(run: RunDir) -> None:
    run.write(Submitted(JobSpec(), ("python",), "/home/me"))
    with pytest.raises(UsageError, match="has no job"):
        control(run, "stop", FakeSlurm())


def test_somebody_elses_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: run.spec.stat().st_uid + 1)
    with pytest.raises(UsageError, match="only they can stop it"):
        control(run, "stop", FakeSlurm(facts(comment=MARK)))


def test_a_job_of_another_cluster_with_the_same_id(run: RunDir) -> None:
    for what in ("stop", "requeue"):
        slurm = FakeSlurm(facts(1, "PENDING", comment="transom:other"))
        with pytest.raises(UsageError, match="another cluster"):
            control(run, what, slurm).send()  # type: ignore[arg-type]
        assert "cancel" not in slurm.calls


def test_a_job_without_a_mark_is_told_by_its_folder(run: RunDir) -> None:
    run.write(Submitted(JobSpec(), ("python",), "/home/me/work", job_id="1"))
    slurm = FakeSlurm(facts(1, "PENDING", work_dir="/home/me/other"))
    with pytest.raises(UsageError, match="another folder"):
        control(run, "stop", slurm).send()
    assert 1 in slurm.jobs
    slurm = FakeSlurm(facts(1, "PENDING", work_dir="/home/me/work"))
    assert control(run, "stop", slurm).send().done
