"""Which writer puts the bytes there: the choice, made once by measurement, and the write itself.

Both writers put the same bytes at the same places, so nothing but the speed depends on the choice. Rank 0 decides for
each save, from what every rank can do, and all follow. Where both are possible and nothing is known, the first save is
the measurement: its first bytes are written by both in turns, each byte once, and what is left by the faster one.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.base.errors import SaveError, UsageError
from transom_hpc.ckpt import mpio
from transom_hpc.ckpt.direct import Batch, DirectWriter
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES
from transom_hpc.ckpt.meeting import Meeting

log = logging.getLogger("transom_hpc.ckpt")

Asked = Literal["auto", "direct", "mpio"]

ASKED = ("auto", "direct", "mpio")
RECORD = ".writer-choice.json"
MEASURE = "measure"

_TURNS = ("direct", "mpio", "mpio", "direct")
_TURN_BYTES = 64 << 20
"""What a rank writes at most in each of the four."""
_TELLING_BYTES = 1 << 20
"""What a rank writes at least, for the times to say anything."""


Crew = Sequence[tuple[int, int]]
"""The processes that write together: number of each in their communicator, and ranks that it writes for."""


class Collective(Protocol):
    """A writer whose ranks write together, so that none may enter unless all do."""

    @property
    def lost(self) -> str:
        """Why it can't be used any more in this process; empty while it can."""

    @property
    def process(self) -> int:
        """Number of this process."""

    @property
    def world(self) -> int:
        """What only the processes that can write together have in common."""

    def write(
        self, crew: Crew, folder: Path, names: Sequence[str], batches: Sequence[Batch], progress: Callable[[], None]
    ) -> float:
        """As Writer.write. Every rank of the crew must call it."""


@dataclass(frozen=True, slots=True)
class Way:
    """How all ranks write a save.

    Args:
        name: "direct", "mpio" or "measure".
        crew: for what is written together.
    """

    name: str
    crew: Crew = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """What a rank saw of both writers.

    Args:
        seconds: by writer.
        nbytes: by writer.
        trouble: why mpio can't be used here; empty where it can.
    """

    seconds: Mapping[str, float]
    nbytes: Mapping[str, int]
    trouble: str = ""


class Writers:
    """The writers of one process.

    Args:
        files: the hand on the file system.
        together: the collective writer; None where there is no MPI to do it with.
        asked: "auto" for the one that is faster here, or the one to take. Only rank 0's counts.
        clock: for the date in the record.
    """

    def __init__(
        self, files: Files, together: Collective | None = None, asked: Asked = "auto", clock: Clock | None = None
    ) -> None:
        self._files = files
        self._direct = DirectWriter(files)
        self._mpio = together
        self.asked = asked
        self._clock = clock or SystemClock()

    def possible(self) -> dict[str, int]:
        """What this process can write with, now, and its number in it."""
        if self._mpio is None or self._mpio.lost:
            return {"direct": 0}
        return {"direct": 0, "mpio": self._mpio.process, "world": self._mpio.world}

    def decide(self, directory: Path, possible: Sequence[Mapping[str, int]]) -> Way:
        """How all ranks write a save. Called by rank 0.

        Args:
            directory: that holds the checkpoints.
            possible: what each rank can do (see there).

        Raises:
            SaveError: mpio was asked for and a rank can't any more.
        """
        without = [rank for rank, names in enumerate(possible) if "mpio" not in names]
        if self.asked == "mpio" and without:
            why = self._mpio.lost if self._mpio is not None and without[0] == 0 else ""
            raise SaveError(f"the writer mpio was asked for and rank {without[0]} can't use it{why and f': {why}'}")
        apart = len({names.get("world") for names in possible}) > 1  # some of them programs, some of them servers
        if self.asked == "direct" or without or apart:
            return Way("direct")
        name = "mpio" if self.asked == "mpio" else recorded(directory, len(possible), self._files) or MEASURE
        return Way(name, sorted(Counter(names["mpio"] for names in possible).items()))

    def write(
        self,
        way: Way,
        folder: Path,
        names: Sequence[str],
        batches: Sequence[Batch],
        meeting: Meeting,
        rank: int,
        world_size: int,
    ) -> str:
        """Write this rank's part and make it durable. All ranks must call it.

        Args:
            way: as rank 0 decided.
            folder: that holds the data files.
            names: of all data files.
            batches: this rank's part; those with turns are the same ones in the same order on all ranks.
            meeting: of the ranks.
            rank: this one.
            world_size: how many there are.

        Returns:
            The writer that wrote it.

        Raises:
            OSError, SaveError, Overdue, Abandoned: something is not on disk.
        """
        if way.name == MEASURE:
            return self._measure(way, folder, names, batches, meeting, rank, world_size)
        if way.name == "mpio":
            _enter(meeting, rank, "ready", "")
        try:
            self._write(way.name, way.crew, folder, names, batches, meeting.beat)
        except SaveError:
            self._record_loss(folder.parent, rank, world_size)
            raise
        return way.name

    def _write(
        self,
        name: str,
        crew: Crew,
        folder: Path,
        names: Sequence[str],
        batches: Sequence[Batch],
        progress: Callable[[], None],
    ) -> float:
        if name == "direct":
            return self._direct.write(folder, names, batches, progress)
        if self._mpio is None:
            raise SaveError("rank 0 decided for the writer mpio, which this process does not have")
        return self._mpio.write(crew, folder, names, batches, progress)

    def _measure(
        self,
        way: Way,
        folder: Path,
        names: Sequence[str],
        batches: Sequence[Batch],
        meeting: Meeting,
        rank: int,
        world_size: int,
    ) -> str:
        parts = cut(batches, len(_TURNS))
        seconds, nbytes = dict.fromkeys(ASKED[1:], 0.0), dict.fromkeys(ASKED[1:], 0)
        trouble = ""
        try:
            for number, name in enumerate(_TURNS):
                trouble = _enter(meeting, rank, f"ready{number}", trouble)
                if name == "mpio" and trouble:
                    continue
                try:
                    seconds[name] += self._write(name, way.crew, folder, names, parts[number], meeting.beat)
                    nbytes[name] += sum(batch.nbytes for batch in parts[number])
                except (OSError, SaveError) as error:
                    if name != "mpio":
                        raise
                    trouble = f"rank {rank}: {error}"
        finally:
            self._record_loss(folder.parent, rank, world_size)
        meeting.tell("measured", [seconds, nbytes, trouble])
        if rank == 0:
            said = [Measured(*item) for item in meeting.hear_all("measured")]
            choice, speeds, why = choose(said)
            self._record(folder.parent, choice, speeds, sum(sum(m.nbytes.values()) for m in said), world_size, why)
            meeting.tell("chosen", [choice, why])
        chosen, why = meeting.hear("chosen", 0)
        rest = list(parts[-1])
        if why:
            rest = [*(b for part, name in zip(parts, _TURNS, strict=False) if name == "mpio" for b in part), *rest]
        elif chosen == "mpio":
            _enter(meeting, rank, "ready", "")
        self._write(chosen, way.crew, folder, names, rest, meeting.beat)
        return str(chosen)

    def _record_loss(self, directory: Path, rank: int, world_size: int) -> None:
        """A writer that was lost once is not taken again by the next process."""
        if rank == 0 and self._mpio is not None and self._mpio.lost:
            self._record(directory, "direct", {}, 0, world_size, self._mpio.lost)

    def _record(
        self, directory: Path, choice: str, speeds: Mapping[str, float], nbytes: int, ranks: int, why: str
    ) -> None:
        """Keep the choice for later starts. A record that can't be written costs another measurement, no save."""
        facts = {
            "choice": choice,
            "bytes_per_s": {name: round(speed) for name, speed in speeds.items()},
            "bytes": nbytes,
            "ranks": ranks,
            "when": self._clock.wall().isoformat(timespec="seconds"),
            "why": why,
        }
        shown = ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in speeds.items())
        log.info("the writer here is %s (%s)", choice, why or shown)
        try:
            self._files.write(directory / RECORD, json.dumps(facts, indent=2).encode() + b"\n")
        except OSError as error:
            log.warning("the choice of the writer could not be kept in %s: %s", directory, error)


def for_program(asked: Asked, world_size: int, files: Files, clock: Clock, deadline_s: float) -> Writers:
    """The writers of a program's rank. All ranks must call it, at the same place of the program.

    Raises:
        UsageError: mpio is asked for where it can't be.
    """
    if asked == "direct":
        return Writers(files, None, asked, clock)
    comm, why = mpio.find(world_size, sharing=asked == "mpio")
    if comm is None and asked == "mpio":
        raise UsageError(f"writer='mpio' can't be used: {why}; 'direct' and 'auto' need no MPI")
    return Writers(files, mpio.MpioWriter(comm, files, clock, deadline_s) if comm is not None else None, asked, clock)


def _enter(meeting: Meeting, rank: int, kind: str, trouble: str) -> str:
    """Wait until every rank is here: one that gave up is heard of before anybody waits for it inside MPI.

    Returns:
        The first trouble that a rank brought along.
    """
    meeting.tell(kind, trouble)
    if rank == 0:
        meeting.tell(f"go-{kind}", next(filter(None, meeting.hear_all(kind)), ""))
    return str(meeting.hear(f"go-{kind}", 0))


def choose(measured: Sequence[Measured]) -> tuple[str, dict[str, float], str]:
    """The faster writer. Pure.

    Args:
        measured: what each rank saw.

    Returns:
        Its name, "direct" where too little was written to tell; bytes per second of each, of all ranks together; why
        mpio can't be used, empty where it can.
    """
    why = next((m.trouble for m in measured if m.trouble), "")
    speeds = {
        name: sum(m.nbytes[name] for m in measured) / max(1e-9, *(m.seconds[name] for m in measured))
        for name in ASKED[1:]
    }
    if why:
        return "direct", {"direct": speeds["direct"]}, why
    telling = min(sum(m.nbytes[name] for m in measured) for name in ASKED[1:]) >= _TELLING_BYTES * len(measured)
    return ("mpio" if telling and speeds["mpio"] > speeds["direct"] else "direct"), speeds, ""


def cut(batches: Sequence[Batch], parts: int, most_bytes: int = _TURN_BYTES) -> list[list[Batch]]:
    """Cut a rank's work into parts of equal size, and what is left. Pure.

    What ranks write together is cut at the same turns on all of them.

    Args:
        batches: the work.
        parts: how many.
        most_bytes: that one of them may have.

    Returns:
        The parts, and then the rest.
    """
    turns = sum(batch.turns for batch in batches)
    alone = sum(batch.nbytes for batch in batches if not batch.turns)
    each_turns = min(-(-turns // parts), most_bytes // PIECE_BYTES)
    each_bytes = min(-(-alone // parts), most_bytes)
    found: list[list[Batch]] = [[] for _ in range(parts + 1)]
    past_turns = past_bytes = 0
    for batch in batches:
        sizes = [(i, 0) for i in range(batch.turns)] or [(i, piece.nbytes) for i, piece in enumerate(batch.pieces)]
        if not sizes:
            found[-1].append(batch)
        begin, part = 0, -1
        for i, nbytes in [*sizes, (len(sizes), 0)]:
            now = past_turns // max(1, each_turns) if batch.turns else past_bytes // max(1, each_bytes)
            now = min(now, parts) if i < len(sizes) else -1
            if now != part:
                if part >= 0:
                    pieces = batch.pieces[begin:i]
                    found[part].append(replace(batch, pieces=pieces, turns=i - begin if batch.turns else 0))
                begin, part = i, now
            if i < len(sizes):
                past_turns, past_bytes = past_turns + (batch.turns > 0), past_bytes + nbytes
    return found


def recorded(directory: Path, ranks: int, files: Files) -> str:
    """What was chosen here before, for as many ranks; empty where nothing was."""
    try:
        facts: dict[str, Any] = json.loads(files.read(directory / RECORD))
        return str(facts["choice"]) if facts["choice"] in ASKED[1:] and facts["ranks"] == ranks else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
