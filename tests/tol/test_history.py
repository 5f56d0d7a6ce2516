from __future__ import annotations

from typing import Any

from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.causes import Cause, Restart
from transom_hpc.tol.history import fold, restarts_of_job
from transom_hpc.tol.journal import Entry


class Writer:
    """Entries as a launcher writes them, one second apart."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, number: int, launch: int, kind: str, **facts: Any) -> None:
        time = f"2026-11-30T12:00:{len(self.entries):02d}.000+00:00"
        self.entries.append(Entry(Attempt(number, launch), len(self.entries), time, "n1", kind, facts))


def life() -> Writer:
    writer = Writer()
    writer.write(1, 0, "start", job_id=7, hosts=["n1", "n2", "n3"])
    writer.write(1, 1, "launch", hosts=["n1", "n2"], spares=["n3"])
    writer.write(1, 1, "running", step=1)
    writer.write(1, 1, "progress", step=9, step_s=0.5, loss=2.0, committed=5)
    writer.write(1, 1, "restart", cause="host silent", host_out="n2", evidence="not heard", committed=5, step=9)
    writer.write(1, 2, "launch", hosts=["n1", "n3"], spares=[])
    return writer


def test_nothing() -> None:
    history = fold([])
    assert (history.phase, history.attempt, history.restarts) == ("submitted", None, ())


def test_life() -> None:
    writer = life()
    history = fold(writer.entries)
    assert (history.phase, history.hosts, history.step, history.committed) == ("launching", ("n1", "n3"), 9, 5)
    assert history.restarts[0].restart == Restart(Cause.HOST_SILENT, 5, "n2", "not heard", 9)
    assert history.restarts[0].back_s is None
    assert [incident.host for incident in history.incidents] == ["n2"]
    writer.write(1, 2, "running", step=6)
    history = fold(writer.entries)
    assert (history.phase, history.restarts[0].back_s) == ("running", 2.0)


def test_requeued_and_over() -> None:
    writer = life()
    writer.write(1, 2, "requeue", avoid=["n2"], let_back=[])
    writer.write(1, 2, "requeued", ok=True, excluded=["n2"])
    writer.write(1, 2, "end", ending="left", why="requeued", code=0)
    history = fold(writer.entries)
    assert (history.phase, history.excluded) == ("requeued", ("n2",))
    writer.write(2, 0, "start", job_id=7, hosts=["n1", "n3"])
    history = fold(writer.entries)
    assert (history.phase, history.ending, history.job_ids) == ("starting", None, ("7",))
    writer.write(2, 1, "end", ending="ended badly", why="exit status 3", code=3)
    assert fold(writer.entries).ending == ("ended badly", "exit status 3")


def test_a_survivor_speaks_when_the_launcher_is_lost() -> None:
    writer = life()
    writer.write(1, 2, "restart", cause="host silent", host_out="n1", evidence="not heard", committed=5, step=0)
    writer.write(1, 2, "requeue", avoid=["n2", "n1"], let_back=[])
    history = fold(writer.entries)
    assert history.phase == "requeued"
    assert [incident.host for incident in history.incidents] == ["n2", "n1"]


def test_budgets_count_the_restarts_of_one_job() -> None:
    writer = life()
    assert len(restarts_of_job(writer.entries, "7")) == 1
    writer.write(2, 0, "start", job_id=8, hosts=[])
    writer.write(2, 1, "restart", cause="program error", host_out="", evidence="", committed=5, step=9)
    assert [restart.cause for restart in restarts_of_job(writer.entries, "8")] == [Cause.PROGRAM_ERROR]
    assert [restart.cause for restart in restarts_of_job(writer.entries, "7")] == [Cause.HOST_SILENT]


def test_what_slurm_stopped_counts_as_a_restart_when_it_comes_back() -> None:
    writer = life()
    writer.write(1, 2, "stopped", cause="terminated", host_out="", evidence="cancelled", committed=8, step=9)
    writer.write(1, 2, "end", ending="left", why="Slurm ends the job", code=75)
    assert [facts.restart.cause for facts in fold(writer.entries).restarts] == [Cause.HOST_SILENT]
    writer.write(2, 0, "start", job_id=7, hosts=["n1", "n3"])
    writer.write(2, 1, "launch", hosts=["n1", "n3"], spares=[])
    writer.write(2, 1, "running", step=9)
    history = fold(writer.entries)
    assert [facts.restart.cause for facts in history.restarts] == [Cause.HOST_SILENT, Cause.TERMINATED]
    assert history.restarts[1].back_s == 4.0


def test_entries_of_another_version_or_damaged_ones_are_passed_over() -> None:
    writer = life()
    for kind in ("start", "launch", "running", "progress", "monitoring", "end"):
        writer.write(2, 0, kind)
    writer.write(2, 0, "restart", cause="a new cause", host_out="n9")
    writer.write(2, 0, "progress", step="many")
    writer.write(2, 0, "host out", cause="host lost", host_out="n1", evidence="e")
    whole = life()
    whole.write(2, 0, "host out", cause="host lost", host_out="n1", evidence="e")
    one, other = fold(writer.entries), fold(whole.entries)
    assert (one.phase, one.step, one.hosts, one.restarts) == (other.phase, other.step, other.hosts, other.restarts)
    assert [incident.host for incident in one.incidents] == ["n2", "n1"]
    assert restarts_of_job(writer.entries, "7") == restarts_of_job(whole.entries, "7")


def test_why_slurm_ended_a_life_is_known_to_the_next() -> None:
    for ended_by, cause in (("", Cause.TERMINATED), ("preempted", Cause.PREEMPTED)):
        writer = life()
        writer.write(1, 2, "stopped", cause="terminated", committed=5, step=9, evidence="Slurm ends the job")
        writer.write(2, 0, "start", job_id=7, hosts=["n1"], ended_by=ended_by)
        assert [facts.restart.cause for facts in fold(writer.entries).restarts][-1] is cause


def test_a_job_that_carries_another_one_on_goes_on_with_its_budgets() -> None:
    writer = life()
    writer.write(1, 2, "restart", cause="time limit", host_out="", evidence="", committed=5, step=9)
    writer.write(1, 2, "follow-up", job_id=8, excluded=["n2"])
    writer.write(1, 2, "end", ending="left", why="job 8 carries the run on", code=0)
    history = fold(writer.entries)
    assert (history.job_ids, history.phase) == (("7", "8"), "requeued")
    writer.write(2, 0, "start", job_id=8, hosts=["n1", "n3"])
    assert fold(writer.entries).job_ids == ("7", "8")
    assert [past.cause for past in restarts_of_job(writer.entries, "8")] == [Cause.HOST_SILENT, Cause.TIME_LIMIT]
    assert restarts_of_job(writer.entries, "9") == ()


def test_a_pause_says_until_when() -> None:
    writer = life()
    writer.write(1, 2, "pause", cause="storage fault", seconds=30.0)
    history = fold(writer.entries)
    assert (history.phase, history.pause) == ("pausing", ("storage fault", "2026-11-30T12:00:36+00:00"))
    writer.write(1, 3, "launch", hosts=["n1"], spares=[])
    assert fold(writer.entries).pause is None


def test_what_is_wrong_is_kept() -> None:
    writer = life()
    writer.write(1, 2, "stacks", folder="/run/logs/x", behind="rank 1 on n2 is behind")
    writer.write(1, 2, "loss", problem="spike", evidence="the loss has been 9 or more", before=5, acts=False)
    writer.write(1, 2, "distrust", below=60, upto="A0001-L02", evidence="")
    writer.write(1, 2, "standing by", cause="host silent", host_out="n1", evidence="cut off", committed=5)
    history = fold(writer.entries)
    assert history.stacks == ("/run/logs/x", "rank 1 on n2 is behind")
    assert history.loss_note == "the loss has been 9 or more"
    assert history.distrusted == "step 60 and later ones saved by A0001-L02 or before"
    assert history.phase == "standing by"
    writer.write(2, 0, "start", job_id=7, hosts=["n2"], succeeds="A0001-L00")
    assert fold(writer.entries).succeeds == "A0001-L00"


def test_a_life_that_slurm_ended_before_a_word_could_be_written() -> None:
    for ended_by, succeeds, causes in (
        ("preempted", "", [Cause.HOST_SILENT, Cause.PREEMPTED]),
        ("", "", [Cause.HOST_SILENT]),  # nobody knows: the job of a person who submitted again, or a launcher killed
        ("a new cause", "", [Cause.HOST_SILENT]),
        ("preempted", "A0001-L00", [Cause.HOST_SILENT]),  # the life before was another one, long over
    ):
        writer = life()
        writer.write(1, 2, "running", step=6)
        writer.write(1, 2, "progress", step=8, committed=7)
        writer.write(2, 0, "start", job_id=7, ended_by=ended_by, succeeds=succeeds)
        history = fold(writer.entries)
        assert [facts.restart.cause for facts in history.restarts] == causes
        assert (history.phase, history.job_ids) == ("starting", ("7",))
    writer = life()
    writer.write(1, 2, "restart", cause="time limit", committed=5, step=9)
    writer.write(2, 0, "start", job_id=7, ended_by="time limit")  # it has said so
    assert [facts.restart.cause for facts in fold(writer.entries).restarts] == [Cause.HOST_SILENT, Cause.TIME_LIMIT]


def test_a_cause_of_another_version_does_not_hide_the_next_life() -> None:
    writer = life()
    writer.write(1, 2, "stopped", cause="terminated", committed=5, step=9, evidence="Slurm ends the job")
    writer.write(2, 0, "start", job_id=8, ended_by="a new cause")
    history = fold(writer.entries)
    assert ([facts.restart.cause for facts in history.restarts][-1], history.job_ids) == (Cause.TERMINATED, ("7", "8"))


def test_hosts_that_were_let_back() -> None:
    writer = life()
    writer.write(1, 2, "requeue", cause="time limit", avoid=[], let_back=["n2", "n5"])
    assert fold(writer.entries).let_back == ("n2", "n5")
    writer.write(2, 1, "host out", cause="host lost", host_out="n2", evidence="again")
    assert fold(writer.entries).let_back == ("n5",)
    writer.write(2, 1, "requeue", cause="host lost", avoid=["n2"], let_back=[])
    assert fold(writer.entries).let_back == ()
