"""Makes a committed checkpoint out of a state from elsewhere, as if a program of one rank had saved it.

The same fence, claim and commit as a program's guard what is in the directory. Tensors go from their file into the
checkpoint one after the other.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import StateError, UsageError
from transom_hpc.ckpt import commit, direct, leaves, manifest, names, staging, start, state
from transom_hpc.ckpt.arriving import Arrived, Fetch, is_module, is_optimizer
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.commit import Job
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import Entry, blocks
from transom_hpc.ckpt.nodes import Node, keyed, scalar
from transom_hpc.ckpt.state import Leaf
from transom_hpc.ckpt.writers import Writers

_DEADLINE_S = 60.0
_HELD = 2
"""Tensors in memory at a time: the one that is being written and the one after it."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint that was made.

    Args:
        path: its folder.
        step: the training step.
        nbytes: of state in it.
        arrays: how many are in it.
        places: its outermost keys, each with what it is taken for: module, optimizer or plain.
        left_out: place, and why it is not in it.
    """

    path: Path
    step: int
    nbytes: int
    arrays: int
    places: dict[str, str]
    left_out: list[tuple[str, str]] = field(default_factory=list)


def import_state(
    arrived: Arrived,
    directory: Path,
    step: int,
    key: str = "",
    progress: Callable[[int], None] | None = None,
) -> Imported:
    """Make a checkpoint.

    What looks like a module's or an optimizer's state_dict is stored as such, so that `restore` gives it to one.

    Args:
        arrived: the state.
        directory: that holds the checkpoints; made if need be.
        step: of the checkpoint.
        key: under which all of it stands in the state; empty: as it is, or `model` where it is a module's state_dict.
        progress: called with the number of bytes after each tensor.

    Raises:
        UsageError: the step is there already, or the state can't be one.
        CheckpointError: a program writes to the directory.
        StateError: something in the state can't be saved.
        OSError, SaveError: it could not be written. What was there before is untouched.
    """
    held = arrived.state
    if key or is_module(held):
        held = {key or "model": held}
    if not isinstance(held, dict) or not held:
        raise UsageError("there is no dict of things in it; name a place for it with --as")
    if (directory / manifest.folder(step)).exists():
        raise UsageError(f"step {step} of {directory} is there already and is not replaced", path=directory)
    walked = state.walk(held)
    kinds: dict[str, str] = {}
    documents = {name: _recast(document, held, kinds) for name, document in walked.structure.items()}
    everything = walked.leaves + state.documents(documents)
    files, clock = Files(), SystemClock()
    files.make_dir(directory)
    entry = start.enter(directory, 0, 1, None, {}, files, clock, _DEADLINE_S)
    try:
        job = Job(directory, step, 0, 0, 1, entry.attempt, {}, _DEADLINE_S)
        if files.exists(job.target):
            raise UsageError(f"step {step} of {directory} is there already and is not replaced", path=directory)
        source = Arriving(everything, arrived.fetch, progress)
        commit.commit(job, source, Writers(files, None, "direct", clock), Blanks(files), entry.fence, files, clock)
    finally:
        if entry.claim is not None:
            entry.claim.release()
    nbytes = sum(leaf.nbytes for leaf in everything)
    return Imported(job.target, step, nbytes, len(walked.leaves), kinds, list(arrived.left_out))


def _recast(document: Node, held: dict[Any, Any], kinds: dict[str, str]) -> Node:
    """A dict that was a module's or an optimizer's state_dict, as its owner would have saved it."""
    _, key, node = document
    name, value = next((n, v) for k, n, v in keyed(held, ()) if scalar(k) == key)
    kind = "module" if is_module(value) else "optimizer" if is_optimizer(value) else ""
    kinds[name] = kind or "plain"
    return ["key", key, [kind, ["dict", node[1]]] if kind else node]


class Arriving:
    """Bytes on their way from somebody else's file (see staging.Source).

    Args:
        held: what to write.
        fetch: see Arrived.
        progress: called with the number of bytes after each leaf that was read.
    """

    def __init__(
        self, held: Sequence[Leaf], fetch: dict[int, Fetch], progress: Callable[[int], None] | None = None
    ) -> None:
        self.outline: Sequence[Entry] = staging.outline(held)
        self._leaves = list(held)
        self._fetch = fetch
        self._progress = progress
        self._lock = threading.Lock()
        self._here: OrderedDict[int, memoryview] = OrderedDict()
        self._sums: dict[int, tuple[str, ...]] = {}

    def data(self, index: int, begin: int, end: int) -> memoryview:
        return self._whole(index)[begin:end]

    def entries(self) -> list[Entry]:
        for index, entry in enumerate(self.outline):
            if entry.nbytes and index not in self._sums:
                self._whole(index)
        return [replace(entry, sums=self._sums.get(i, ())) for i, entry in enumerate(self.outline)]

    def confirm(self) -> None:
        """Nobody changes these while they are read, but a file that is."""

    def _whole(self, index: int) -> memoryview:
        with self._lock:
            if index not in self._here:
                data = self._read(self._leaves[index])
                sums = tuple(xxhash.xxh3_128_hexdigest(data[b:e]) for b, e in blocks(len(data)))
                if self._sums.setdefault(index, sums) != sums:
                    raise StateError(f"{names.shown(self._leaves[index].name)} changed while it was being read")
                self._here[index] = data
                if len(self._here) > _HELD:
                    self._here.popitem(last=False)
                if self._progress is not None:
                    self._progress(len(data))
            return self._here[index]

    def _read(self, leaf: Leaf) -> memoryview:
        fetch = self._fetch.get(leaf.source.data_ptr()) if isinstance(leaf.source, torch.Tensor) else None
        if fetch is None and (whole := leaves.in_place(leaf)) is not None:
            return whole
        room = direct.room(leaf.nbytes)[: leaf.nbytes]  # whoever has a part of it keeps it alive
        there = np.frombuffer(room, dtype=np.uint8)
        if fetch is not None:
            fetch(torch.from_numpy(there).view(getattr(torch, leaf.dtype)).reshape(leaf.shape))
        else:
            leaves.copy(leaf, 0, leaf.nbytes, there)
        return room
