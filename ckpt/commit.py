"""One save on one rank, from staged bytes to a committed checkpoint.

The order on every path: all data on disk, then the manifest, then the folder's name. Until the rename the checkpoint is
invisible; after it, it never changes. Ranks meet in the temporary folder itself, and what they have told each other
there tells a second writer, when the first one dies, how far a rank had come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import CorruptCheckpoint, SaveError
from transom_hpc.ckpt import catalog, housekeeping, manifest
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.direct import Writer, pieces
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Plan, plan
from transom_hpc.ckpt.meeting import Abandoned, Alone, FileMeeting, Meeting
from transom_hpc.ckpt.staging import Source

DATA_FILE = "data-00000.h5"


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


def commit(job: Job, source: Source, writer: Writer, blanks: Blanks, fence: Fence, files: Files, clock: Clock) -> int:
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
        if is_committed(job, files):  # the others went on while this rank was between two writers
            files.remove(job.temporary)
            return 0
        if job.rank == 0 and files.exists(job.temporary / manifest.FILE):
            _seal(job, fence, files)
            return 0
        if job.world_size == 1:
            return _alone(job, source, writer, blanks, fence, files, clock)
        return _together(job, source, writer, blanks, fence, files, clock, meeting)
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
                files.remove(job.temporary / DATA_FILE)
                if job.world_size == 1:
                    files.remove(job.temporary)
        except OSError:
            pass  # the file system that failed us may fail here too; the next start cleans up
        if first is not None:  # where another rank gave up before, rank 0 has taken the file from under our hands
            raise first from error
        raise


def _alone(job: Job, source: Source, writer: Writer, blanks: Blanks, fence: Fence, files: Files, clock: Clock) -> int:
    """One rank needs no agreement, so it writes each array as soon as it is staged."""
    path = job.temporary / DATA_FILE
    outline = plan([source.outline])
    if files.exists(path):
        files.remove(path)
    _make_room(outline, path, files)
    offsets = blanks.make(path, outline.shards, _attributes(job))
    index = {entry.name: i for i, entry in enumerate(source.outline)}
    parts = [
        piece
        for span in outline.work[0]
        for piece in pieces(
            offsets[outline.shards[span.shard].path],
            span.begin,
            span.end,
            lambda begin, end, i=index[outline.shards[span.shard].entry.name]: source.data(i, begin, end),  # type: ignore[misc]
        )
    ]
    writer.write(path, parts, lambda: None)
    source.confirm()
    summed = {entry.name: entry for entry in source.entries()}
    whole = replace(outline, shards=tuple(replace(s, entry=summed[s.entry.name]) for s in outline.shards))
    _finish(job, whole, offsets, fence, files, clock)
    return outline.bytes_of(0)


def _together(
    job: Job, source: Source, writer: Writer, blanks: Blanks, fence: Fence, files: Files, clock: Clock, meeting: Meeting
) -> int:
    path = job.temporary / DATA_FILE
    entries = source.entries()
    meeting.tell("held", [manifest.entry_to_json(entry) for entry in entries])
    agreed: Plan | None = None
    offsets: dict[str, int] = {}
    if job.rank == 0:
        agreed = plan([[manifest.entry_from_json(e) for e in held] for held in meeting.hear_all("held")])
        offsets = meeting.said("laid") or {}
        if not offsets:
            if files.exists(path):  # laid out in part: nobody has been told of it
                files.remove(path)
            _make_room(agreed, path, files)
            offsets = blanks.make(path, agreed.shards, _attributes(job))
            meeting.tell("laid", offsets)
        for rank, work in enumerate(agreed.work):
            spans = [
                [agreed.shards[s.shard].entry.name, s.begin, s.end, offsets[agreed.shards[s.shard].path]] for s in work
            ]
            meeting.tell("work", spans, to=rank)
    index = {entry.name: i for i, entry in enumerate(entries)}
    mine = meeting.hear("work", 0, mine=True)
    parts = [
        piece
        for name, begin, end, offset in mine
        for piece in pieces(
            offset,
            begin,
            end,
            lambda begin, end, i=index[name]: source.data(i, begin, end),  # type: ignore[misc]
        )
    ]
    if meeting.said("written") is None:
        writer.write(path, parts, meeting.beat)
        source.confirm()
        meeting.tell("written", sum(piece.nbytes for piece in parts))
    if agreed is not None:
        meeting.hear_all("written")
        _finish(job, agreed, offsets, fence, files, clock)
    elif isinstance(meeting, FileMeeting):
        meeting.until_gone()
    return sum(piece.nbytes for piece in parts)


def _make_room(agreed: Plan, path: Path, files: Files) -> None:
    """Refuse before anything is written what can't end well."""
    need = sum(shard.entry.nbytes for shard in agreed.shards)
    free = files.free_bytes(path.parent)
    if free < need:
        raise SaveError(
            f"{path.parent.parent} has {free / 1e9:.2f} GB left and the checkpoint takes {need / 1e9:.2f} GB; "
            "make room, or keep fewer checkpoints",
            path=path,
        )
    if files.free_inodes(path.parent) == 0:
        raise SaveError(f"{path.parent.parent} has no room for another file (inodes); remove some", path=path)


def _attributes(job: Job) -> dict[str, int]:
    """What the data file says about itself to other tools. The step is in the manifest: blank files are reused."""
    return {"transom_checkpoint": manifest.FORMAT, "world_size": job.world_size}


def _finish(job: Job, agreed: Plan, offsets: Mapping[str, int], fence: Fence, files: Files, clock: Clock) -> None:
    """Everything is on disk, by everybody: manifest, then the name. Rank 0 only."""
    path = job.temporary / DATA_FILE
    whole = manifest.Manifest(
        step=job.step,
        attempt=job.attempt,
        world_size=job.world_size,
        metrics=job.metrics,
        files={DATA_FILE: files.size(path)},
        stored=tuple(
            manifest.Stored(shard.entry, shard.rank, shard.path, DATA_FILE, offsets.get(shard.path, 0))
            for shard in agreed.shards
        ),
        saved_at=clock.wall().isoformat(timespec="seconds"),
    )
    files.write(job.temporary / manifest.FILE, manifest.encode(whole))
    _seal(job, fence, files)


def _seal(job: Job, fence: Fence, files: Files) -> None:
    """The manifest is there, so everything else is: only the name is missing. Rank 0 only."""
    for name in files.names(job.temporary):
        if name not in (DATA_FILE, manifest.FILE):
            files.remove(job.temporary / name)
    files.fsync_dir(job.temporary)
    fence.check()
    if files.exists(job.target):
        if is_committed(job, files):  # by a rank that saw it late, or an attempt before: the same step, whole
            files.remove(job.temporary)
            return
        housekeeping.put_aside(job.directory, [job.target.name], fence, files)
    files.rename(job.temporary, job.target)
    files.fsync_dir(job.directory)
