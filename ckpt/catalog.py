"""What is committed in a directory, and whether its bytes are still those that were written. Reads only.

There is no pointer to the newest: it is the highest step with a valid manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from transom_hpc.base.errors import CorruptCheckpoint
from transom_hpc.ckpt import direct, lanes, manifest, names
from transom_hpc.ckpt.direct import Target
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES, blocks
from transom_hpc.ckpt.manifest import Manifest, Stored
from transom_hpc.ckpt.shm import align


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint.

    Args:
        path: its folder.
        manifest: what it is made of.
    """

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The training step after which it was taken."""
        return self.manifest.step


@dataclass(frozen=True, slots=True)
class Fault:
    """Bytes that are not those that were written.

    Args:
        file: in the checkpoint's folder.
        name: of the array, as in the state; empty where it is about the whole file.
        rank: whose array; None where all ranks share it.
        offset: in the file, of the first block that is wrong (see layout.blocks).
        what: what is wrong.
    """

    file: str
    name: str
    rank: int | None
    offset: int
    what: str

    def __str__(self) -> str:
        about = f"{self.name}: " if self.name else ""
        whose = f" (rank {self.rank})" if self.rank is not None else ""
        return f"{self.file}: {about}{self.what} at byte {self.offset}{whose}"


def folders(directory: Path, files: Files | None = None) -> list[tuple[int, Path]]:
    """Step and folder of everything that was ever committed and is there, oldest first, valid or not."""
    try:
        found = (files or Files()).names(directory)
    except FileNotFoundError:
        return []
    steps = ((manifest.step_of(name), name) for name in found)
    return sorted((step, directory / name) for step, name in steps if step is not None)


def read_checkpoint(path: str | Path, files: Files | None = None) -> Checkpoint:
    """Read the manifest of one checkpoint and compare it with the files that are there. Reads no data.

    Args:
        path: the folder `step-*`.

    Raises:
        CorruptCheckpoint: it is not whole. Facts: path, step.
    """
    hand = files or Files()
    path = Path(path)
    step = manifest.step_of(path.name)
    try:
        found = manifest.decode(hand.read(path / manifest.FILE))
        if found.step != step:
            raise manifest.BadManifest(f"it is of step {found.step}")
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{path} has no {manifest.FILE}", path=path, step=step) from error
    except manifest.BadManifest as error:
        raise CorruptCheckpoint(f"{path / manifest.FILE}: {error}", path=path, step=step) from error
    for name, size in found.files.items():
        try:
            there = hand.size(path / name)
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{path} has no {name}", path=path, step=step) from error
        if there != size:
            raise CorruptCheckpoint(
                f"{path / name} has {there} bytes and should have {size}", path=path, step=step, offset=min(there, size)
            )
    return Checkpoint(path, found)


def list_checkpoints(directory: str | Path, files: Files | None = None) -> list[Checkpoint]:
    """What is committed in a directory, oldest first. Those without a valid manifest are left out; reads no data.

    Args:
        directory: that holds the folders `step-*`; one that is not there holds none.
        files: the hand on the file system.
    """
    found = []
    for _, path in folders(Path(directory), files):
        try:
            found.append(read_checkpoint(path, files))
        except (CorruptCheckpoint, FileNotFoundError):
            continue
    return found


def verify(path: str | Path, progress: Callable[[int], None] | None = None) -> list[Fault]:
    """Read every byte of a checkpoint and compare it with the checksums.

    Args:
        path: the folder `step-*`.
        progress: called with the number of bytes after each block, from several threads.

    Returns:
        What is wrong, by file and offset; empty where all is as it was written.

    Raises:
        OSError: it could not be read.
    """
    try:
        found = read_checkpoint(path)
    except CorruptCheckpoint as error:
        return [Fault(manifest.FILE, "", None, getattr(error, "offset", 0), str(error))]
    files = Files()
    faults: list[Fault] = []
    for name in found.manifest.files:
        stored = [item for item in found.manifest.stored if item.file == name]
        with Target(files, found.path / name, os.O_RDONLY) as source:
            jobs = [
                lambda job=job: faults.extend(check_block(source, *job, progress=progress))  # type: ignore[misc]
                for job in blocks_of(stored)
            ]
            lanes.run(jobs)
    return sorted(faults, key=lambda fault: (fault.file, fault.offset))


def blocks_of(stored: Iterable[Stored]) -> list[tuple[Stored, int, int, int]]:
    """All blocks (stored, index, begin, end) of some arrays, in file order."""
    ordered = sorted(stored, key=lambda item: (item.file, item.offset))
    return [(item, i, begin, end) for item in ordered for i, (begin, end) in enumerate(blocks(item.entry.nbytes))]


def check_block(
    source: Target,
    item: Stored,
    index: int,
    begin: int,
    end: int,
    into: memoryview | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Fault]:
    """Read one block and compare it with its checksum.

    Args:
        into: where to put it; None to forget it.

    Returns:
        The fault, or nothing.
    """
    summed = xxhash.xxh3_128()
    got = 0
    for at in range(begin, end, PIECE_BYTES):
        count = min(PIECE_BYTES, end - at)
        # Whole pages into our own buffer; what lies behind the end is not looked at.
        room = direct.buffer()[: align(count)] if into is None else into[at - begin : at - begin + count]
        got += min(count, source.get(room, item.offset + at))
        summed.update(room[:count])
    if progress is not None:
        progress(end - begin)
    what = ""
    if got < end - begin:
        what = f"only {got} of {end - begin} bytes are there"
    elif summed.hexdigest() != item.entry.sums[index]:
        what = "the bytes have changed"
    return [Fault(item.file, names.shown(item.entry.name), item.rank, item.offset + begin, what)] if what else []
