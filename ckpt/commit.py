"""One save on one rank, from staged bytes to a committed checkpoint.

The order on every path: all data on disk, then the manifest, then the folder's name. Until the rename the checkpoint is
invisible; after it, it never changes. Ranks meet in the temporary folder itself, and what they have told each other
there tells a second writer, when the first one dies, how far a rank had come.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import CorruptCheckpoint, SaveError
from transom_hpc.ckpt import catalog, dtypes, housekeeping, manifest
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.direct import Batch, pieces
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Plan, Shard, Span, data_file, plan
from transom_hpc.ckpt.meeting import Abandoned, Alone, FileMeeting, Meeting
from transom_hpc.ckpt.staging import Source
from transom_hpc.ckpt.writers import Way, Writers

_FILES_OF_A_RANK = 6
"""Small files by which a rank speaks to the others in a save, or the manifest where there are no others."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a save needs to know.

    Args:
        directory: that holds the checkpoints.
        step: the training step.
        serial: number of this save in the attempt, the same on all ranks.
        rank: this one.
        world_size: ranks that take part.
        attempt: whose save it is.
        metrics: figures to keep with it.
        deadline_s: longest wait for other ranks, in seconds.
    """

    directory: Path
    step: int
    serial: int
    rank: int
    world_size: int
    attempt: str
    metrics: Mapping[str, float]
    deadline_s: float

    @property
    def target(self) -> Path:
        """Where it will be."""
        return self.directory / manifest.folder(self.step)

    @property
    def temporary(self) -> Path:
        """Where it is until it is whole."""
        return self.directory / f".{manifest.folder(self.step)}.{self.attempt}.{self.serial}"


def meet(job: Job, files: Files, clock: Clock) -> Meeting:
    """The meeting of this save's ranks. Touches nothing."""
    if job.world_size == 1:
        return Alone()
    return FileMeeting(
        job.temporary,
        job.rank,
        job.world_size,
        files,
        clock,
        job.deadline_s,
        f"save of step {job.step}",
        lambda: files.exists(job.target),
    )


def is_committed(job: Job, files: Files) -> bool:
    """Whether the step is there, whole as far as its manifest tells. A damaged one does not count."""
    if not files.exists(job.target):
        return False
    try:
        catalog.read_checkpoint(job.target, files)
    except CorruptCheckpoint:
        return False
    return True


def commit(job: Job, source: Source, writers: Writers, blanks: Blanks, fence: Fence, files: Files, clock: Clock) -> int:
    """Write this rank's part and commit with the others. All ranks must call it.

    Where the process that did it has died, another one may call it again with the same job and bytes: it goes on.

    Returns:
        Bytes that this rank wrote; 0 where the step turned out to be committed already.

    Raises:
        SaveError, Overdue, Abandoned, OSError: nothing was committed, and what was committed before is untouched.
    """
    meeting = meet(job, files, clock)
    try:
        files.make_dir(job.temporary)
        # Where this rank was between two writers: its part may be there, the manifest too, the checkpoint too. Each
        # takes the place of the one before, so they are looked for in this order.
        written = meeting.said("written") is not None
        sealed = files.exists(job.temporary / manifest.FILE)
        if is_committed(job, files):
            files.remove(job.temporary)
            return 0
        if job.rank == 0 and sealed:
            _seal(job, fence, files)
            return 0
        if job.rank and (written or sealed) and isinstance(meeting, FileMeeting):
            meeting.until_gone()
            return 0
        if job.world_size == 1:
            return _alone(job, source, writers, blanks, fence, files, clock, meeting)
        return _together(job, source, writers, blanks, fence, files, clock, meeting)
    except BaseException as error:
        first = None
        try:
            if isinstance(error, Abandoned | FileNotFoundError) and is_committed(job, files):
                return 0
            first = meeting.given_up() if isinstance(error, OSError) else None
            if first is None and not isinstance(error, Abandoned):
                meeting.give_up(f"{type(error).__name__}: {error}")
            if job.rank == 0:
                # The space back at once; what the others still read goes with the next save.
                _clear(job, files)
                if job.world_size == 1:
                    files.remove(job.temporary)
        except OSError:
            pass  # the file system that failed us may fail here too; the next start cleans up
        if first is not None:  # where another rank gave up before, rank 0 has taken the file from under our hands
            raise first from error
        raise


def _alone(
    job: Job,
    source: Source,
    writers: Writers,
    blanks: Blanks,
    fence: Fence,
    files: Files,
    clock: Clock,
    meeting: Meeting,
) -> int:
    """One rank needs no agreement, so it writes each array as soon as it is staged."""
    way = writers.decide(job.directory, [writers.possible()])
    outline = plan([source.outline], blanks.count)
    offsets = _lay_out(job, outline, blanks, files)
    names = _names(outline.shards)
    batches = _and_what_rank_0_made(_batches(_orders(outline, outline.work[0], offsets), source), names)
    if way.name != "direct":
        source.entries()  # nothing is measured that waits for a copy
    wrote = writers.write(way, job.temporary, names, batches, meeting, 0, 1)
    source.confirm()
    summed = {entry.name: entry for entry in source.entries()}
    whole = replace(outline, shards=tuple(replace(s, entry=summed[s.entry.name]) for s in outline.shards))
    _finish(job, _describe(job, whole, offsets, wrote, files, clock), fence, files)
    return outline.bytes_of(0)


def _together(
    job: Job,
    source: Source,
    writers: Writers,
    blanks: Blanks,
    fence: Fence,
    files: Files,
    clock: Clock,
    meeting: Meeting,
) -> int:
    entries = source.entries()
    resumed = meeting.said("held") is not None  # nobody comes back into what was written together: each by itself then
    meeting.tell("held", [[manifest.entry_to_json(entry) for entry in entries], writers.possible()])
    agreed: Plan | None = None
    offsets: dict[str, int] = {}
    if job.rank == 0:
        held = meeting.hear_all("held")
        laid = meeting.said("laid")
        way = Way("direct")
        if laid:
            way = Way(*laid[0])
        elif not resumed:
            way = writers.decide(job.directory, [possible for _, possible in held])
        everything = [[manifest.entry_from_json(entry) for entry in mine] for mine, _ in held]
        agreed = plan(everything, blanks.count, together=way.name != "direct")
        if laid:
            offsets = laid[1]
        else:
            offsets = _lay_out(job, agreed, blanks, files)
            meeting.tell("laid", [[way.name, way.crew], offsets])
        names = _names(agreed.shards)
        works: list[list[Any]] = [[[way.name, way.crew], names, _orders(agreed, work, offsets)] for work in agreed.work]
        for rank in range(1, job.world_size):
            meeting.tell("work", works[rank], to=rank)
        decided, names, orders = works[0]
    else:
        decided, names, orders = meeting.hear("work", 0, mine=True)
    batches = _batches(orders, source)
    if job.rank == 0:
        batches = _and_what_rank_0_made(batches, names)
    way = Way("direct") if resumed else Way(*decided)
    wrote = way.name
    if meeting.said("written") is None:
        wrote = writers.write(way, job.temporary, names, batches, meeting, job.rank, job.world_size)
        source.confirm()
        meeting.tell("written", sum(batch.nbytes for batch in batches))
    if agreed is not None:
        text = _describe(job, agreed, offsets, wrote, files, clock)  # while the others may still be writing
        meeting.hear_all("written")
        _finish(job, text, fence, files)
    elif isinstance(meeting, FileMeeting):
        meeting.until_gone()
    return sum(batch.nbytes for batch in batches)


def _names(shards: Sequence[Shard]) -> list[str]:
    """The data files that these make."""
    return [data_file(number) for number in range(1 + max((shard.file for shard in shards), default=0))]


def _orders(agreed: Plan, work: Sequence[Span], offsets: Mapping[str, int]) -> list[list[Any]]:
    """What one rank writes, as it is told."""
    return [
        [s.entry.name, data_file(s.file), s.path, offsets[s.path], span.begin, span.end, span.turns]
        for span in work
        for s in (agreed.shards[span.shard],)
    ]


def _batches(orders: Sequence[Sequence[Any]], source: Source) -> list[Batch]:
    """What one rank writes, with the bytes."""
    index = {entry.name: (i, entry.dtype == dtypes.JSON) for i, entry in enumerate(source.outline)}
    found = []
    for name, file, dataset, offset, begin, end, turns in orders:
        number, whole = index[name]
        found.append(Batch(file, dataset, offset, pieces(begin, end, partial(source.data, number), whole), turns))
    return found


def _and_what_rank_0_made(batches: list[Batch], names: Sequence[str]) -> list[Batch]:
    """Rank 0 laid all files out, so it makes all of them durable, also those into which it writes nothing."""
    written = {batch.file for batch in batches}
    return batches + [Batch(name, "", 0, ()) for name in names if name not in written]


def _clear(job: Job, files: Files) -> None:
    """Take away data files that nobody will commit."""
    for name in files.names(job.temporary):
        if name.startswith("data-"):
            files.remove(job.temporary / name)


def _lay_out(job: Job, agreed: Plan, blanks: Blanks, files: Files) -> dict[str, int]:
    """Make the data files. Rank 0 only.

    Returns:
        The offset of each dataset by its path.
    """
    _clear(job, files)  # laid out in part: nobody has been told of it
    deleted = housekeeping.trash(job.directory, job.attempt, files)
    for older in deleted[:-1]:
        files.remove(older)
    if deleted:
        files.fsync_dir(job.directory)  # else a crash of the host could give the changed files their old name back
    _make_room(job, agreed, deleted[-1:], files)
    attributes = {"transom_checkpoint": manifest.FORMAT, "world_size": job.world_size}  # what other tools see
    return blanks.make(job.temporary, agreed.shards, attributes, *deleted[-1:])


def _make_room(job: Job, agreed: Plan, deleted: Sequence[Path], files: Files) -> None:
    """Refuse before anything is made what can't end well. What a quota or a reservation leaves shows when the blank
    files are made, which reserves every block of them, still before any data is written."""
    need = sum(shard.entry.nbytes for shard in agreed.shards)
    free = files.free_bytes(job.temporary)
    for path in deleted:  # taken, or removed
        free += sum(files.size(path / name) for name in files.names(path) if name.startswith("data-"))
    if free < need:
        raise SaveError(
            f"{job.directory} has {free / 1e9:.2f} GB left and the checkpoint takes {need / 1e9:.2f} GB; "
            "make room, or keep fewer checkpoints",
            path=job.directory,
        )
    number = len(_names(agreed.shards)) + _FILES_OF_A_RANK * job.world_size
    left = files.free_inodes(job.temporary)
    if left is not None and left < number:
        raise SaveError(
            f"{job.directory} has room for {left} more files (inodes) and the checkpoint takes up to {number}; "
            "remove some",
            path=job.directory,
        )


def _describe(job: Job, agreed: Plan, offsets: Mapping[str, int], writer: str, files: Files, clock: Clock) -> bytes:
    """The manifest. Rank 0 only."""
    whole = manifest.Manifest(
        step=job.step,
        attempt=job.attempt,
        world_size=job.world_size,
        metrics=job.metrics,
        files={name: files.size(job.temporary / name) for name in _names(agreed.shards)},
        stored=tuple(
            manifest.Stored(s.entry, s.rank, s.path, data_file(s.file), offsets.get(s.path, 0), s.holders)
            for s in agreed.shards
        ),
        saved_at=clock.wall().isoformat(timespec="seconds"),
        writer=writer,
        written=tuple(agreed.bytes_of(rank) for rank in range(job.world_size)),
    )
    return manifest.encode(whole)


def _finish(job: Job, text: bytes, fence: Fence, files: Files) -> None:
    """Everything is on disk, by everybody: manifest, then the name. Rank 0 only."""
    _write(job.temporary / manifest.FILE, text, files)
    _seal(job, fence, files)


def _write(path: Path, data: bytes, files: Files) -> None:
    """A file, whole or not at all. Its bytes are on disk when it has its name; the folder is left to the caller."""
    unfinished = path.with_name(f".{path.name}.tmp")
    fd = files.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        view = memoryview(data)
        while view:
            view = view[files.pwrite(fd, view, len(data) - len(view)) :]
        files.fsync(fd)
    finally:
        files.close(fd)
    files.rename(unfinished, path)


def _seal(job: Job, fence: Fence, files: Files) -> None:
    """The manifest is there, so everything else is: only the name is missing. Rank 0 only."""
    for name in files.names(job.temporary):
        if name != manifest.FILE and not name.startswith("data-"):
            files.remove(job.temporary / name)
    files.fsync_dir(job.temporary)
    fence.check()
    if files.exists(job.target):
        if is_committed(job, files):  # by a rank that saw it late, or an attempt before: the same step, whole
            files.remove(job.temporary)
            return
        housekeeping.put_aside(job.directory, [job.target.name], housekeeping.DAMAGED, fence, files)
    files.rename(job.temporary, job.target)
    files.fsync_dir(job.directory)
