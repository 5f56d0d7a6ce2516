"""Checkpoints of several ranks, made by threads: what each rank holds is given leaf by leaf."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from transom_hpc.base.clock import SystemClock
from transom_hpc.ckpt import commit, dtypes, state
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.catalog import Checkpoint, read_checkpoint
from transom_hpc.ckpt.commit import Job
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.staging import Straight
from transom_hpc.ckpt.state import Leaf
from transom_hpc.ckpt.writers import Writers

Box = tuple[tuple[int, ...], tuple[int, ...]]


def leaf(name: str, array: numpy.ndarray[Any, Any], box: Box | None = None, dtype: str | None = None) -> Leaf:
    """An array, or the part of it in a box (start, shape)."""
    kind = dtype or dtypes.of_numpy(array.dtype) or ""
    if box is None:
        return Leaf(f"tensors/{name}", array, kind, array.shape, array.nbytes)
    start, shape = box
    part = array[tuple(slice(b, b + n) for b, n in zip(start, shape, strict=True))].copy()
    return Leaf(f"tensors/{name}", part, kind, shape, part.nbytes, global_shape=array.shape, start=start)


def together(
    directory: Path, step: int, held: Sequence[Sequence[Leaf]], structure: Sequence[dict[str, Any]] | None = None
) -> Checkpoint:
    """Save what each rank holds.

    Args:
        structure: documents of each rank; left out, one that lists its leaves.
    """
    files, clock = Files(), SystemClock()
    files.make_dir(directory)
    fence = Fence(directory, "T20260101T000000.000000", files)
    fence.announce()
    errors: list[BaseException] = []

    def rank(number: int) -> None:
        mine = list(held[number])
        if structure is None:
            documents = {n: ["key", n, ["tensor", f"tensors/{n}"]] for n in (leaf.name.split("/")[1] for leaf in mine)}
        else:
            documents = structure[number]
        job = Job(directory, step, step, number, len(held), fence.attempt, {}, 30.0)
        source = Straight(mine + state.documents(documents), step)
        try:
            commit.commit(job, source, Writers(files, None, "direct", clock), Blanks(files), fence, files, clock)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(held))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return read_checkpoint(directory / f"step-{step:09d}")
