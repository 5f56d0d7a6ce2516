"""How a program enters a checkpoint directory: it is refused where another one writes, gets its attempt's name, and has
the directory from then on.

Where every rank knows the name by itself (it was given, or Slurm gave it), ranks do not wait for each other here. Under
torchrun nothing tells one start from another: its run id is `none` or random, its count of restarts begins anew. There
rank 0 makes the name and hands it to each rank that asks, through small files. A question has a random number of its
own, so that what a start that died left behind answers nobody.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import CheckpointError, UsageError
from transom_hpc.ckpt import fence, housekeeping
from transom_hpc.ckpt.claim import Claim, this_process
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.meeting import FileMeeting, Overdue

PREFIX = ".start-"

_FIRST_WAIT_S = 0.002
_LONGEST_WAIT_S = 0.1
_REFUSED_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory entered.

    Args:
        attempt: this attempt's name.
        fence: its right to change the directory.
        claim: its hold on it; None on other ranks than 0.
    """

    attempt: str
    fence: Fence
    claim: Claim | None


def enter(
    directory: Path,
    rank: int,
    world_size: int,
    given: str | None,
    environment: Mapping[str, str],
    files: Files,
    clock: Clock,
    deadline_s: float,
) -> Entry:
    """Enter a directory that exists. All ranks must call it; under torchrun they wait for each other.

    Raises:
        CheckpointError: another program writes there, or a newer attempt has it, or a rank did not come.
        UsageError: several ranks, and nothing that gives them the same name.
    """
    name = fence.choose(given, world_size, environment)
    table = None
    if name is None and world_size > 1:
        key = same_start(environment)
        if not key:
            raise UsageError(
                f"{world_size} ranks need a common name for this attempt: pass attempt= to Checkpointer, the same text "
                "on all ranks and one that sorts after those of earlier attempts"
            )
        table = _Table(directory / f"{PREFIX}{key}", files, clock, deadline_s)
    if rank:
        if name is None:
            assert table is not None
            name = table.ask(rank)
        return Entry(name, Fence(directory, name, files), None)
    newest = Fence(directory, "", files).newest()[0]
    own = name if name is not None else fence.fresh(newest, clock.wall())
    entry = Entry(
        own,
        Fence(directory, own, files),
        Claim(directory, this_process(own, clock.wall().isoformat(timespec="seconds"), environment), files, clock),
    )
    try:
        _take(entry, directory, files, insist=environment.get("TRANSOM_ATTEMPT") == own)
    except CheckpointError as error:
        _tell_refusal(error, entry, newest, directory, world_size, table, files, clock)
        raise
    try:
        if table is not None:
            table.answer(world_size, {"attempt": own})
        for left in (path for path in files.names(directory) if path.startswith(PREFIX)):
            files.remove(directory / left)  # by starts that died here
    except BaseException:
        assert entry.claim is not None
        entry.claim.release()
        raise
    return entry


def _take(entry: Entry, directory: Path, files: Files, insist: bool) -> None:
    assert entry.claim is not None
    entry.claim.take(insist)
    try:
        entry.fence.announce()
        housekeeping.clean(directory, entry.attempt, files)
    except BaseException:
        entry.claim.release()
        raise


def _tell_refusal(
    error: CheckpointError,
    entry: Entry,
    newest: str,
    directory: Path,
    world_size: int,
    table: _Table | None,
    files: Files,
    clock: Clock,
) -> None:
    """Other ranks hear why rank 0 leaves instead of waiting for it."""
    try:
        if table is not None:
            table.answer(world_size, {"refused": str(error)}, _REFUSED_WAIT_S)
        elif world_size > 1 and newest != entry.attempt:  # else the one that works has meetings of the same names
            folder = directory / f".restore.{entry.attempt}.0"
            FileMeeting(folder, 0, world_size, files, clock, 0.0, "restore").give_up(str(error))
    except (OSError, Overdue):
        pass  # they find out by their own deadlines


def same_start(environment: Mapping[str, str]) -> str:
    """What the ranks of one torchrun have in common, and no other torchrun that runs has; empty outside one."""
    run = environment.get("TORCHELASTIC_RUN_ID", "")
    if not run:
        return ""
    names = ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    text = "\0".join([run, *(environment.get(name, "") for name in names)])
    return xxhash.xxh3_64_hexdigest(text.encode())


class _Table:
    """A folder with questions and answers."""

    def __init__(self, folder: Path, files: Files, clock: Clock, deadline_s: float) -> None:
        self._folder = folder
        self._files = files
        self._clock = clock
        self._deadline_s = deadline_s

    def ask(self, rank: int) -> str:
        """Ask rank 0 for the attempt's name, and wait for it."""
        number = secrets.token_hex(8)
        question = f"ask-{rank:05d}-{number}"
        end = self._clock.now() + self._deadline_s
        pause = _FIRST_WAIT_S
        while True:
            there = self._names()
            if question not in there and f"answer-{number}" not in there:
                self._files.make_dir(self._folder)
                self._files.publish(self._folder / question, b"")
            if f"answer-{number}" in there:
                said = json.loads(self._files.read(self._folder / f"answer-{number}"))
                self._files.publish(self._folder / f"heard-{rank:05d}-{number}", b"")
                if "attempt" in said:
                    return str(said["attempt"])
                raise CheckpointError(f"rank 0 was refused: {said['refused']}", path=self._folder.parent)
            pause = self._pause(pause, end, [0])

    def answer(self, world_size: int, said: Mapping[str, str], deadline_s: float | None = None) -> None:
        """Answer until every rank has heard it, then take the folder away."""
        wanted = set(range(1, world_size))
        text = json.dumps(dict(said)).encode()
        before: set[str] = set()
        answered: set[str] = set()
        end = 0.0
        pause = _FIRST_WAIT_S
        while True:
            there = self._names()
            if there != before or not end:
                before = there
                end = self._clock.now() + (self._deadline_s if deadline_s is None else deadline_s)
            for question in (name.removeprefix("ask-") for name in there if name.startswith("ask-")):
                # What was heard before it was answered is of a start that died here.
                if question not in answered and f"heard-{question}" not in there:
                    answered.add(question)
                    self._files.publish(self._folder / f"answer-{question.rpartition('-')[2]}", text)
            heard = {int(question.partition("-")[0]) for question in answered if f"heard-{question}" in there}
            if heard >= wanted:
                self._files.remove(self._folder)
                return
            pause = self._pause(pause, end, sorted(wanted - heard))

    def _names(self) -> set[str]:
        try:
            return set(self._files.names(self._folder))
        except FileNotFoundError:
            return set()

    def _pause(self, pause: float, end: float, late: list[int]) -> float:
        if self._clock.now() >= end:
            raise Overdue(
                f"{self._folder.parent}: no word from rank {', '.join(map(str, late[:8]))} at the start within "
                f"{self._deadline_s:g} s; does every rank make a Checkpointer on this directory?",
                kind="start",
                ranks=late,
                seconds=self._deadline_s,
            )
        self._clock.sleep(pause)
        return min(pause * 1.5, _LONGEST_WAIT_S)
