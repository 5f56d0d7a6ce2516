"""Keeps a checkpoint directory in order: what dead attempts left, old checkpoints, damaged ones. Rank 0 only.

Everything that goes is renamed first to a name that no reader takes for a checkpoint, so that a half-deleted one is
never seen.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from transom_hpc.ckpt import catalog, claim, fence, manifest, retention
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.retention import Keep

log = logging.getLogger("transom_hpc.ckpt")

DAMAGED = ".damaged-"
DISTRUSTED = ".distrusted-"
"""How the names of checkpoints begin that were put aside; the folder's name and the attempt that did it follow."""

_TRASH = ".trash-"
_SCRAPS = (claim.ASIDE, f".{fence.FILE}.")
"""Of files that a program was killed over, while it changed them."""


def clean(directory: Path, attempt: str, files: Files) -> list[str]:
    """Remove what older attempts left half done. Called by the attempt that has the directory.

    Returns:
        Their names. What belongs to a newer attempt is left.
    """
    removed = []
    for name in sorted(files.names(directory)):
        owner = fence.attempt_of(name)
        if name.startswith(_SCRAPS) or (owner is not None and fence.is_before(owner, attempt)):
            try:
                files.remove(directory / name)
            except OSError as error:
                log.warning("%s could not be removed: %s", directory / name, error)
                continue
            removed.append(name)
    return removed


def clean_own(directory: Path, attempt: str, serial: int, files: Files) -> None:
    """Remove what this attempt's saves that failed, and its restore, left: all ranks are past them.

    Args:
        serial: of a save that all ranks have finished; only what is older goes.
    """
    for name in sorted(files.names(directory)):
        if fence.attempt_of(name) == attempt and int(name.rpartition(".")[2]) < serial:
            files.remove(directory / name)


def retain(directory: Path, keep: Keep, fence_: Fence, serial: int, files: Files) -> tuple[int, ...]:
    """Delete committed checkpoints that are not to be kept, and of those that were put aside the damaged ones, and the
    ones that are not trusted once a later step is committed.

    The last one is left as trash: the next save may take its files (see blank), and what it does not take goes with
    clean_own.

    Returns:
        The steps that went.

    Raises:
        SaveError: a newer attempt has the directory; nothing was deleted.
    """
    committed = {found.step: found for found in catalog.list_checkpoints(directory, files)}
    metrics = {step: found.manifest.metrics for step, found in committed.items()}
    doomed = retention.superfluous(list(committed), metrics, keep)
    for step in doomed:
        fence_.check()
        gone = directory / f"{_TRASH}{manifest.folder(step)}.{fence_.attempt}.{serial}"
        files.rename(committed[step].path, gone)
        if step != doomed[-1]:
            files.remove(gone)
    newest = max(committed, default=-1)
    for step, path in aside(directory, files):
        if path.name.startswith(DAMAGED) or step < newest:
            fence_.check()
            files.remove(path)
    return doomed


def aside(directory: Path, files: Files) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint that was put aside, oldest first."""
    found = []
    for name in files.names(directory):
        kind = next((kind for kind in (DAMAGED, DISTRUSTED) if name.startswith(kind)), None)
        step = None if kind is None else manifest.step_of(name.removeprefix(kind).partition(".")[0])
        if step is not None:
            found.append((step, directory / name))
    return sorted(found)


def trash(directory: Path, attempt: str, files: Files) -> list[Path]:
    """What this attempt has deleted and not removed yet."""
    names = sorted(files.names(directory))
    return [directory / name for name in names if name.startswith(_TRASH) and fence.attempt_of(name) == attempt]


def put_aside(directory: Path, names: Sequence[str], kind: str, fence_: Fence, files: Files) -> None:
    """Take the names away from checkpoints that are not to be restored, so that their steps can be saved again.

    They are kept, for people to look at: damaged ones until the next checkpoint is committed, those that are not
    trusted until a later step is.

    Args:
        names: of their folders.
        kind: DAMAGED: their bytes have changed; or DISTRUSTED.
    """
    what = "damaged checkpoint" if kind == DAMAGED else "checkpoint, which is not trusted,"
    for name in names:
        target = directory / f"{kind}{name}.{fence_.attempt}"
        try:
            fence_.check()
            files.rename(directory / name, target)
        except OSError as error:
            log.warning("the %s %s could not be put aside: %s", what, directory / name, error)
        else:
            log.warning("the %s of %s was put aside as %s", what, name, target)
