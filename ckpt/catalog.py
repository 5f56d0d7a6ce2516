"""What is committed in a directory, and whether its bytes are still those that were written. Reads only.

There is no pointer to the newest: it is the highest step with a valid manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from transom_hpc.base.errors import CorruptCheckpoint, OtherFormat
from transom_hpc.ckpt import direct, manifest, names
from transom_hpc.ckpt.direct import Target
from transom_hpc.ckpt.fetch import Fault as Fault
from transom_hpc.ckpt.fetch import FileTier, everything, fetch
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import PIECE_BYTES
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
        OtherFormat: another version wrote it. Facts: path, step.
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
    except manifest.OtherManifest as error:
        raise OtherFormat(
            f"{path} was written by another version of transom-hpc ({error}): restore it with that version, or move "
            "it away to begin without it",
            path=path,
            step=step,
        ) from error
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
        except (CorruptCheckpoint, OtherFormat, FileNotFoundError):
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
        OtherFormat: another version wrote it.
    """
    try:
        found = read_checkpoint(path)
    except CorruptCheckpoint as error:
        return [Fault(manifest.FILE, "", None, getattr(error, "offset", 0), str(error))]
    stored = [item for item in found.manifest.stored if item.entry.nbytes]
    with FileTier(Files(), found.path, (item.file for item in stored)) as tier:
        return fetch(tier, [everything(item) for item in stored], progress=progress or (lambda _: None))


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
