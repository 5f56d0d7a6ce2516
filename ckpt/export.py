"""Writes a checkpoint, or a part of one, into a file that others read: safetensors, or torch's own.

In bounded memory, however large it is, and each byte is compared with its checksum on the way. The file has its name
when it is whole and on disk; before, and after a failure, there is none.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt.catalog import Checkpoint
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.gathered import Slot, gather

SUFFIXES = (".safetensors", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that was written.

    Args:
        path: the file.
        nbytes: of it.
        arrays: how many are in it, each counted once.
        tied: names that are not in it because another name has the same array, with that name.
        left_out: place in the state, and why it is not in it.
    """

    path: Path
    nbytes: int
    arrays: int
    tied: dict[str, str] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)


class Format(Protocol):
    """A kind of file."""

    tied: dict[str, str]
    left_out: list[tuple[str, str]]
    slots: list[Slot]

    def write(self, checkpoint: Checkpoint, path: Path, progress: Callable[[int], None] | None) -> None:
        """Write a file that does not exist yet; its bytes are on disk when this returns."""


def plan(checkpoint: Checkpoint, path: Path, only: str = "", rank: int | None = None) -> Format:
    """Decide what the file will hold. Writes nothing.

    Args:
        path: whose suffix says which kind of file.
        only: the part below this place of the state, keys joined by '/'; empty for all.
        rank: whose own things to take; None: only what belongs to all ranks.

    Raises:
        UsageError: it can't be done.
        CorruptCheckpoint: what has to be read is not what was written.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: the name must end with one of {', '.join(SUFFIXES)}, which says what is written")
    found = gather(checkpoint, only, rank)
    made: Format
    if path.suffix == ".safetensors":
        from transom_hpc.ckpt.to_safetensors import SafetensorsFormat

        made = SafetensorsFormat(found.state, checkpoint.step, only.rpartition("/")[2])
    else:
        from transom_hpc.ckpt.to_torch import TorchFormat

        made = TorchFormat(found.state)
    made.left_out[:0] = found.left_out
    if not made.slots:
        why = "; ".join(f"{place}: {why}" for place, why in made.left_out[:3])
        raise UsageError(f"there is no array to export from {only or checkpoint.path}{why and f' ({why})'}")
    return made


def export(
    checkpoint: Checkpoint,
    made: Format,
    path: Path,
    replace: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Exported:
    """Write the file that was planned.

    Args:
        made: by `plan`, for this checkpoint and path.
        replace: whether a file that is there already goes.
        progress: called with the number of bytes of arrays after each piece.

    Raises:
        UsageError: there is such a file, or no room for it.
        CorruptCheckpoint: bytes are not those that were written; there is no file then.
        OSError: it could not be written.
    """
    files = Files()
    if path.exists() and not replace:
        raise UsageError(f"{path} is there already; --force replaces it", path=path)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", path=path)
    need, free = sum(slot.array.nbytes for slot in made.slots), files.free_bytes(path.parent)
    if free < need:
        raise UsageError(
            f"{path.parent} has {free / 1e9:.2f} GB left and the file takes {need / 1e9:.2f} GB", path=path
        )
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name[:64]}.", dir=path.parent))
    try:
        unfinished = folder / path.name  # the same name, since torch keeps it in the file
        made.write(checkpoint, unfinished, progress)
        nbytes = files.size(unfinished)
        if not replace and path.exists():
            raise UsageError(f"{path} came into being meanwhile", path=path)
        files.rename(unfinished, path)
        files.fsync_dir(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Exported(path, nbytes, len(made.slots), dict(made.tied), list(made.left_out))


def put(fd: int, data: memoryview, offset: int, files: Files) -> int:
    """Write all bytes at an offset; where they end."""
    while data:
        sent = files.pwrite(fd, data, offset)
        data, offset = data[sent:], offset + sent
    return offset


def finish(path: Path, files: Files) -> None:
    """A file's bytes are on disk when this returns."""
    fd = files.open(path, os.O_RDONLY)
    try:
        files.fsync(fd)
    finally:
        files.close(fd)


def flat(state: Any, parts: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Everything in a state that is no container, with its place."""
    if isinstance(state, dict | OrderedDict):
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        items = [(str(i), value) for i, value in enumerate(state)]
    else:
        return [(parts, state)]
    return [found for key, value in items for found in flat(value, (*parts, key))]
