"""Which hosts a launcher takes over, who leads, and how those who stand by hear of the end."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.clock import Clock
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.events import EXIT_STOPPED, Ended, Ending
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Entry, Journal, claim_exactly
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.succession import Estate, TakeOver, end_of_attempt, end_of_successor, estate, stand_by

HOSTS = ("n1", "n2", "n3", "n4")


def entry(number: int, kind: str, **facts: Any) -> Entry:
    return Entry(Attempt(number, 1), 0, "", "n1", kind, facts)


START = entry(1, "start", hosts=list(HOSTS), needed=3)
LAUNCH = entry(1, "launch", hosts=["n1", "n2", "n3"], spares=["n4"])


def left(home: str, *entries: Entry, lost: tuple[str, ...] = ("n1",)) -> Estate:
    return estate(entries, TakeOver(1, lost), Job(7, 0, HOSTS, home))


def test_a_survivor_changes_places_with_the_lost_first_host() -> None:
    assert left("n2", START, LAUNCH) == Estate(("n2", "n1", "n3"), ("n4",), ("n1",))
    assert left("n3", START, LAUNCH).active == ("n3", "n2", "n1")
    assert left("n2", START, LAUNCH).living == ("n2", "n3", "n4")


def test_a_spare_is_the_first_to_replace_the_lost_host() -> None:
    launch = entry(1, "launch", hosts=["n1", "n3"], spares=["n4", "n2"])
    assert left("n2", START, launch) == Estate(("n1", "n3"), ("n2", "n4"), ("n1",))


def test_a_launcher_that_was_killed_leaves_all_as_it_was() -> None:
    assert left("n1", START, LAUNCH, lost=()) == Estate(("n1", "n2", "n3"), ("n4",), ())


def test_before_the_first_launch_the_start_tells() -> None:
    assert left("n2", START) == Estate(("n2", "n1", "n3"), ("n4",), ("n1",))


def test_the_newest_launch_counts_and_only_of_the_lost_launchers_attempt() -> None:
    later = entry(1, "launch", hosts=["n1", "n4", "n3"], spares=[])
    other = entry(2, "launch", hosts=["n9"], spares=[])
    assert left("n4", START, LAUNCH, later, other).active == ("n4", "n1", "n3")


def test_hosts_that_it_had_taken_out_stay_out_and_are_named_once() -> None:
    out = entry(1, "host out", host_out="n4")
    assert left("n2", START, LAUNCH, out, lost=("n1", "n4")).lost == ("n1", "n4")
    assert left("n2", START, LAUNCH, out).living == ("n2", "n3")
    gone_before = entry(1, "restart", host_out="n9")
    assert left("n2", START, LAUNCH, gone_before).lost == ("n1",), "it is not among the hosts any more"


def test_entries_that_can_not_be_read_are_passed_over() -> None:
    assert left("n2", START, LAUNCH, entry(1, "launch"), entry(1, "restart")).active == ("n2", "n1", "n3")


def end(number: int, ending: str) -> Entry:
    return entry(number, "end", ending=ending, why="so", code=3)


def test_the_end_of_an_attempt() -> None:
    assert end_of_attempt([START, end(2, "ended well")], 1) is None
    assert end_of_attempt([START, end(1, "ended badly")], 1) == Ended(Ending.BADLY, "so", 3)
    assert end_of_attempt([entry(1, "end"), entry(1, "end", ending="in a new way", why="", code=0)], 1) is None


class Ticks(Clock):
    """A clock that only sleeping moves; it writes what has happened meanwhile."""

    def __init__(self) -> None:
        self.time = 0.0
        self.then: dict[float, Any] = {}

    def wall(self) -> datetime:
        return datetime.fromtimestamp(self.time, timezone.utc)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        for when in [when for when in self.then if when <= self.time]:
            self.then.pop(when)()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def write(run: RunDir, number: int, kind: str, **facts: Any) -> None:
    journal = Journal(run.journal, number, f"n{number}")
    journal.append(Attempt(number, 1), kind, **facts)
    journal.close()


def test_only_the_newest_launchers_end_counts(run: RunDir) -> None:
    write(run, 1, "end", ending="left", why="", code=0)
    assert end_of_successor(run, 1) is None
    write(run, 2, "end", ending="left", why="requeued", code=0)
    assert end_of_successor(run, 1) is None, "the run goes on in a later attempt"
    write(run, 3, "start")
    assert end_of_successor(run, 1) is None
    write(run, 3, "end", ending="ended badly", why="no", code=4)
    assert end_of_successor(run, 1) == Ended(Ending.BADLY, "no", 4)
    assert end_of_successor(run, 3) is None, "nobody has taken over from that one"


def test_who_stands_by_leaves_with_the_status_of_who_leads(run: RunDir) -> None:
    clock = Ticks()
    claim_exactly(run.journal, 2)
    clock.then[100.0] = lambda: write(run, 2, "start")
    clock.then[5000.0] = lambda: write(run, 2, "end", ending="ended badly", why="no", code=4)
    assert stand_by(run, 1, clock) == 4
    assert clock.time >= 5000


def test_who_stands_by_for_one_that_never_begins_gives_up(run: RunDir) -> None:
    clock = Ticks()
    claim_exactly(run.journal, 2)
    assert stand_by(run, 1, clock) == EXIT_STOPPED
    assert clock.time < 200
