"""Succession: a launcher takes over from one that was lost, in the same allocation, once and only once.

Who claims the attempt number after the lost launcher's leads; everybody else, and the lost one when it comes back,
stands by until it has ended its work. The one that leads first ends, on every living host, what is left of older
attempts. Their shared memory stays, and the next launch restores from it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import RunDirError
from transom_hpc.tol.events import EXIT_STOPPED, Ended, Ending
from transom_hpc.tol.job import Job
from transom_hpc.tol.journal import Entry, begun_after
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.steps import Steps

CLEAR_S = 10.0
"""Longest time for ending what is left on the hosts. Starting a step on a dead host takes it all."""
_LOOK_S = 3.0
_NEVER_BEGAN_S = 120.0


@dataclass(frozen=True, slots=True)
class TakeOver:
    """What a launcher that takes over knows of the one before it. Attempt `before` + 1 is its own already.

    Args:
        before: number of the lost launcher's attempt.
        lost: hosts that were lost with it; none where only its process ended.
        evidence: one sentence.
    """

    before: int
    lost: tuple[str, ...] = ()
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Estate:
    """The hosts that a launcher takes over.

    Args:
        active: hosts of the last launch in order of rank, lost ones included. Once spares have taken their places, the
            new launcher's host is the first one.
        spares: hosts that stand by.
        lost: those that are not to be used, of both.
    """

    active: tuple[str, ...]
    spares: tuple[str, ...]
    lost: tuple[str, ...]

    @property
    def living(self) -> tuple[str, ...]:
        """All that can be used."""
        return tuple(host for host in (*self.active, *self.spares) if host not in self.lost)


def estate(entries: Sequence[Entry], taken: TakeOver, job: Job) -> Estate:
    """The hosts of a lost launcher, as its journal tells them. Pure.

    Rank 0's place is the new launcher's host: a survivor that had another rank changes places with the lost host, and
    one that was a spare is the first to replace it.
    """
    active, spares, lost = tuple(job.hosts), tuple[str, ...](), list(taken.lost)
    for entry in entries:
        if entry.attempt.number != taken.before:
            continue
        with suppress(KeyError, TypeError, ValueError):  # written by another version, or damaged
            if entry.kind == "start":
                hosts, needed = tuple(entry.facts["hosts"]), int(entry.facts["needed"])
                active, spares = hosts[:needed], hosts[needed:]
            elif entry.kind == "launch":
                active, spares = tuple(entry.facts["hosts"]), tuple(entry.facts["spares"])
            elif entry.kind in ("restart", "host out") and entry.facts["host_out"]:
                lost.append(str(entry.facts["host_out"]))
    home = job.home
    if home in active:
        at = active.index(home)
        active = (home, *active[1:at], active[0], *active[at + 1 :]) if at else active
    else:
        spares = (home, *(host for host in spares if host != home))
    there = {*active, *spares} - {home}
    return Estate(active, spares, tuple(dict.fromkeys(host for host in lost if host in there)))


def clear(steps: Steps, hosts: Sequence[str], shm: Path) -> dict[str, str]:
    """End on each host what is left of this job's older steps of ours: programs, sidecars, checkpoint servers.

    Args:
        steps: starts a step on each host.
        hosts: the living hosts.
        shm: the job's folder in shared memory, by which the processes are known; it stays.

    Returns:
        Hosts on which that could not be done within CLEAR_S, with the reason.
    """
    return steps.probe(hosts, CLEAR_S, argv=[sys.executable, "-P", "-m", "transom_hpc.tol.clearing", str(shm)])


def end_of_attempt(entries: Sequence[Entry], number: int) -> Ended | None:
    """How the launcher of an attempt ended its work; None while it has not. Pure."""
    for entry in reversed(entries):
        if entry.attempt.number == number and entry.kind == "end":
            with suppress(KeyError, TypeError, ValueError):
                facts = entry.facts
                return Ended(Ending(facts["ending"]), str(facts["why"]), int(facts["code"]))
    return None


def end_of_successor(run: RunDir, number: int) -> Ended | None:
    """How the newest launcher after this attempt ended its work; None while it leads, or leaves the run to another.

    Args:
        run: the run directory; one that can't be read now is asked again later.
        number: of the attempt that stands by.
    """
    try:
        entries = run.entries()
    except RunDirError:
        return None
    newest = max((entry.attempt.number for entry in entries), default=0)
    found = end_of_attempt(entries, newest) if newest > number else None
    return None if found is None or found.ending is Ending.LEFT else found


def stand_by(run: RunDir, number: int, clock: Clock) -> int:
    """Wait until the launcher that leads in place of this attempt's has ended its work.

    Returns:
        Its exit status; EXIT_STOPPED where none begins.
    """
    until = clock.now() + _NEVER_BEGAN_S
    while clock.now() < until or begun_after(run.journal, number):
        ended = end_of_successor(run, number)
        if ended is not None:
            return ended.code
        clock.sleep(_LOOK_S)
    return EXIT_STOPPED
