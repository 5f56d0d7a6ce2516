"""The launcher's hold on the checkpoint server; `srun` is a script that runs what it is given on this host."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.ckpt.roster import Roster
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.job import Job
from transom_hpc.tol.keeper import DRAIN_S, MUTE_S, Keeper
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.steps import Steps

FIRST = Attempt(1, 1)


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.time = 0.0
        self.waiting: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.time

    def wall(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.waiting()


class Stage:
    """A keeper with what it needs; servers live until they are ended, or end at once with the status in `code`."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder / "run")
        self.run.create()
        self.code = folder / "code"
        self.started = folder / "started"
        self.called = folder / "called"
        programs = folder / "bin"
        programs.mkdir()
        srun = programs / "srun"
        srun.write_text(
            f'#!/bin/bash\necho "$*" >> {folder / "called"}\necho $BASHPID >> {self.started}\n'
            f"[ -e {self.code} ] && exit $(cat {self.code})\nexec sleep 60\n"
        )
        srun.chmod(0o755)
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        job = Job(900_000_000 + os.getpid(), 0, ("n1", "n2", "n3"), "n1")
        self.clock = Clock()
        self.said: list[tuple[str, bool]] = []
        site = SiteConfig()
        steps = Steps(job, site, environment)
        self.path = environment["PATH"]
        self.keeper = Keeper(steps, job, site, self.run, lambda *said: self.said.append(said), self.clock)

    def starts(self, at_least: int = 0) -> int:
        """How often a server was started."""
        until = time.monotonic() + 10
        while True:
            count = len(self.started.read_text().splitlines()) if self.started.exists() else 0
            if count >= at_least or time.monotonic() > until:
                return count
            time.sleep(0.01)

    def until_it_has_ended(self) -> None:
        """Let the server's end be seen."""
        before = len(self.said)
        until = time.monotonic() + 10
        while len(self.said) == before and time.monotonic() < until:
            self.keeper.look()
            time.sleep(0.01)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    found = Stage(tmp_path)
    monkeypatch.setenv("PATH", found.path)
    yield found
    found.keeper.end_unless(())


def test_it_stays_on_the_same_hosts(stage: Stage) -> None:
    stage.keeper.start(FIRST, ("n1", "n2"))
    assert stage.starts(1) == 1
    stage.keeper.end_unless(("n2", "n1"))
    stage.keeper.start(Attempt(1, 2), ("n1", "n2"))
    stage.keeper.look()
    assert stage.starts() == 1
    stage.keeper.start(Attempt(1, 3), ("n1", "n3"))
    assert stage.starts(2) == 2
    assert stage.said == []
    assert {path.name for path in stage.run.logs.iterdir()} == {"A0001-L01-server.log", "A0001-L03-server.log"}


def test_it_is_started_again_and_given_up(stage: Stage) -> None:
    stage.code.write_text("139")
    stage.keeper.start(FIRST, ("n1", "n2"))
    for number, pause in enumerate((1, 2, 4, 8), 1):
        stage.until_it_has_ended()
        assert stage.said[-1] == ("the checkpoint server ended (exit status 139) and is started again", False)
        stage.keeper.look()
        assert stage.starts() == number, "not at once"
        stage.clock.time += pause
        stage.keeper.look()
        assert stage.starts(number + 1) == number + 1
    stage.until_it_has_ended()
    assert stage.said[-1][0].startswith("the checkpoint server ended 5 times and is given up in this launch, see ")
    assert stage.said[-1][1]
    stage.clock.time += 100
    stage.keeper.look()
    assert stage.starts() == 5
    stage.code.unlink()
    stage.keeper.start(Attempt(1, 2), ("n1", "n2"))
    assert stage.starts(6) == 6, "a new launch begins anew"


def test_one_that_leaves_by_itself_is_no_news(stage: Stage) -> None:
    """Its folder has gone, since the program has left and given the memory back."""
    stage.code.write_text("0")
    stage.keeper.start(FIRST, ("n1",))
    assert stage.starts(1) == 1
    time.sleep(0.2)
    stage.keeper.look()
    assert stage.said == []


def test_it_rests_when_slurm_ends_the_job(stage: Stage) -> None:
    stage.code.write_text("143")
    stage.keeper.start(FIRST, ("n1",))
    stage.keeper.rest()
    assert stage.starts(1) == 1
    time.sleep(0.2)
    stage.keeper.look()
    stage.clock.time += 100
    stage.keeper.look()
    assert (stage.starts(), stage.said) == (1, [])


def test_without_a_log_it_is_tried_again(stage: Stage) -> None:
    log = stage.run.logs / f"{FIRST}-server.log"
    log.mkdir()
    stage.keeper.start(FIRST, ("n1",))
    ((text, lasting),) = stage.said
    assert text.startswith("the checkpoint server can't be started ([Errno 21]")
    assert not lasting
    log.rmdir()
    stage.clock.time += 2
    stage.keeper.look()
    assert stage.starts(1) == 1


def begin_save(stage: Stage, attempt: str = "A0001-L01") -> Path:
    folder = stage.run.checkpoints / f".step-000000020.{attempt}.3"
    folder.mkdir()
    (folder / "held-00000.json").touch()
    return folder


def test_a_new_launch_waits_for_saves_under_way(stage: Stage) -> None:
    stage.keeper.start(FIRST, ("n1", "n2"))
    folder = begin_save(stage)
    begin_save(stage, "A0001-L00")  # of an attempt that is fenced off already

    def commit() -> None:
        if stage.clock.time >= 1:
            folder.rename(stage.run.checkpoints / "step-000000020")
            stage.clock.waiting = lambda: None

    stage.clock.waiting = commit
    stage.keeper.drain(FIRST, ("n1", "n2"), lambda: False)
    assert 1 <= stage.clock.time < 1.2
    stage.keeper.drain(FIRST, ("n1", "n2"), lambda: False)
    assert stage.clock.time < 1.2, "nothing is under way"


@pytest.mark.parametrize("how", ["given up", "host lost", "hurry", "no server"])
def test_a_new_launch_does_not_wait(stage: Stage, how: str) -> None:
    folder = begin_save(stage)
    if how != "no server":
        stage.keeper.start(FIRST, ("n1", "n2"))
    if how == "given up":
        (folder / "failed-00001.json").touch()
    stage.keeper.drain(FIRST, ("n1", "n3") if how == "host lost" else ("n1", "n2"), lambda: how == "hurry")
    assert stage.clock.time == 0
    assert stage.said == []


def test_a_save_that_does_not_end_is_left(stage: Stage) -> None:
    stage.keeper.start(FIRST, ("n1", "n2"))
    begin_save(stage)
    stage.keeper.drain(FIRST, ("n1", "n2"), lambda: False)
    assert DRAIN_S <= stage.clock.time < DRAIN_S + 1
    assert stage.said == [("a save of A0001-L01 was not over after 15 s and is given up", False)]


def roster(stage: Stage, at_least: int) -> dict[str, Any]:
    """What the servers that were started last were told."""
    stage.starts(at_least)
    (argument,) = re.findall(r"--roster=(\{.*?\}) ", stage.called.read_text().splitlines()[-1] + " ")
    found: dict[str, Any] = json.loads(argument)
    return found


def test_spares_have_servers_too(stage: Stage) -> None:
    stage.keeper.start(FIRST, ("n2", "n1"), ("n3",))
    facts = roster(stage, 1)
    assert (facts["attempt"], facts["serving"], facts["spares"]) == ("A0001-L01", ["n2", "n1"], ["n3"])
    assert (facts["copies"], facts["distance"], facts["per_host"]) == (1, 1, 1)
    assert "--ranks=3" in stage.called.read_text()
    assert "--nodelist=n2,n1,n3" in stage.called.read_text()


def test_a_lost_spare_is_left_out_at_once(stage: Stage) -> None:
    stage.keeper.start(FIRST, ("n1", "n2"), ("n3",))
    stage.keeper.drop("n2")
    stage.keeper.look()
    assert stage.starts(1) == 1, "a host with ranks is a matter of the next launch"
    stage.keeper.drop("n3")
    stage.keeper.look()
    assert roster(stage, 2)["spares"] == []
    stage.keeper.look()
    assert stage.starts() == 2
    assert stage.said == []


def test_a_spare_that_is_missing_in_the_next_launch_is_left_out(stage: Stage) -> None:
    stage.keeper.start(FIRST, ("n1", "n2"), ("n3",))
    assert stage.starts(1) == 1
    assert stage.keeper.stays(("n2", "n1"))
    stage.keeper.start(Attempt(1, 2), ("n1", "n2"), ())
    stage.keeper.look()
    assert roster(stage, 2)["spares"] == []


def test_without_copies_spares_have_none(stage: Stage) -> None:
    stage.keeper._copies = 0
    stage.keeper.start(FIRST, ("n1", "n2"), ("n3",))
    assert roster(stage, 1)["spares"] == []
    assert "--ranks=2" in stage.called.read_text()


def test_news_of_memory(stage: Stage) -> None:
    """Lines of the log are read once, whole; what the program left is read once."""
    stage.keeper.start(FIRST, ("n1", "n2"))
    assert list(stage.keeper.news()) == []
    log = stage.run.logs / f"{FIRST}-server.log"
    with log.open("a") as file:
        file.write('2026 n1: serving\n2026 n1: @transom {"kind": "copies", "host": "n1", "problem": "x"}\n')
        file.write('n2: @transom {"kind": "gath')
        file.flush()
        assert list(stage.keeper.news()) == [{"kind": "copies", "host": "n1", "problem": "x"}]
        file.write('ered"}\nn2: @transom {"no\nn2: @transom 5\n')
    assert list(stage.keeper.news()) == [{"kind": "gathered"}]
    assert list(stage.keeper.news()) == []
    stage.keeper._job.shm.mkdir()
    try:
        (stage.keeper._job.shm / ".restored").write_text('{"step": 7, "source": "memory:A1"}')
        assert list(stage.keeper.news()) == [{"kind": "restored", "step": 7, "source": "memory:A1"}]
        assert list(stage.keeper.news()) == []
    finally:
        stage.keeper._job.shm.rmdir()


def test_servers_that_do_not_begin_are_started_again(stage: Stage) -> None:
    """MPI may wait for ever when it starts."""
    stage.keeper.start(FIRST, ("n1", "n2"))
    assert stage.starts(1) == 1
    stage.clock.time += MUTE_S - 1
    stage.keeper.look()
    assert stage.said == []
    stage.clock.time += 1
    stage.keeper.look()
    assert stage.said == [("the checkpoint server did not begin within 20 s and is started again", False)]
    stage.clock.time += 1
    stage.keeper.look()
    assert stage.starts(2) == 2
    shm = stage.keeper._job.shm
    shm.mkdir()
    try:
        (shm / ".server").touch()
        stage.keeper.look()
        stage.clock.time += 10 * MUTE_S
        stage.keeper.look()
        assert len(stage.said) == 1, "it has begun"
    finally:
        shutil.rmtree(shm)


def test_how_long_a_start_may_take_is_learned(stage: Stage) -> None:
    keeper, clock = stage.keeper, stage.clock
    shm = keeper._job.shm
    shm.mkdir()

    def begins_after(seconds: float) -> None:
        clock.time += seconds
        (shm / ".server").touch()
        keeper.look()

    def given_up_after(seconds: float) -> None:
        said = len(stage.said)
        clock.time += seconds - 0.1
        keeper.look()
        assert len(stage.said) == said
        clock.time += 0.2
        keeper.look()
        assert stage.said[said:] == [
            (f"the checkpoint server did not begin within {seconds:.0f} s and is started again", False)
        ]

    try:
        keeper.start(FIRST, ("n1", "n2"))
        begins_after(1.0)
        keeper.start(Attempt(1, 2), ("n1", "n3"))
        given_up_after(5.0)  # never less
        clock.time += 2
        keeper.look()
        given_up_after(10.0)  # hosts may be busy
        clock.time += 3
        keeper.look()
        begins_after(4.0)
        keeper.start(Attempt(1, 3), ("n1", "n2"))
        given_up_after(12.0)  # three times the longest
        clock.time += 2
        keeper.look()
        given_up_after(MUTE_S)  # never more
    finally:
        shutil.rmtree(shm)


def test_servers_hear_what_is_not_to_be_restored(stage: Stage) -> None:
    stage.keeper.start(FIRST, ("n1", "n2"))
    assert roster(stage, 1)["distrust"] == ""
    stage.keeper.distrust = "120@A0001-L01"
    stage.keeper.start(Attempt(1, 2), ("n1", "n3"))
    assert roster(stage, 2)["distrust"] == "120@A0001-L01"
    assert Roster.parse(json.dumps(roster(stage, 2))).distrust.covers(120, "A0001-L01")
