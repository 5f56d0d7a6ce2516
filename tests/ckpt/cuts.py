"""Arrays cut in different ways over the ranks, for tests of resharding; runs as a scenario of worker.py."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import Block
from transom_hpc.ckpt.restore import Candidate

Place = tuple[tuple[int, ...], tuple[int, ...]]

ARRAYS: dict[str, tuple[tuple[int, ...], str]] = {
    "flat": ((1_500_001,), "<f8"),
    "wide": ((1009, 1201), "<f4"),
    "cube": ((61, 127, 130), "<c16"),
    "odd": ((9001, 77), "S5"),
    "few": ((3, 5), "<i2"),
    "dates": ((4000, 40), "M8[s]"),
}


def whole(name: str, step: int) -> np.ndarray[Any, Any]:
    """An array as it is after a step; every element of it is another one."""
    shape, dtype = ARRAYS[name]
    numbers = np.arange(np.prod(shape), dtype=np.int64) * 7 + step
    if dtype.startswith("S"):
        bits = numbers.view(np.uint8).reshape(-1, 8)[:, : np.dtype(dtype).itemsize]
        return np.ascontiguousarray(bits).view(dtype).reshape(shape)
    return numbers.astype(dtype).reshape(shape)


def mesh(how: str, ranks: int, axes: int) -> list[int]:
    """Into how many parts each axis is cut: "rows", "columns", "grid" or "whole"."""
    first = max(n for n in range(1, ranks + 1) if ranks % n == 0 and n * n <= ranks)
    if axes == 1 or how == "rows":
        return [1 if how == "whole" else ranks] + [1] * (axes - 1)
    if how == "columns":
        return [1] * (axes - 1) + [ranks]
    return [first, ranks // first] + [1] * (axes - 2) if how == "grid" else [1] * axes


def place(shape: tuple[int, ...], parts: list[int], rank: int) -> Place:
    """The box of one rank, as even as can be; it may be empty."""
    index = np.unravel_index(rank % int(np.prod(parts)), parts)
    start = tuple(size * int(i) // n for size, i, n in zip(shape, index, parts, strict=True))
    stop = tuple(size * (int(i) + 1) // n for size, i, n in zip(shape, index, parts, strict=True))
    return start, tuple(b - a for a, b in zip(start, stop, strict=True))


def cut(facts: dict[str, Any], make: Callable[..., Any]) -> Any:
    """Restore arrays cut as `how` says, compare each element; then save a step if there is one."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    logging.basicConfig(level=logging.INFO)
    state: dict[str, Any] = {"all": np.zeros(300_001), "n": 0}
    for name, (shape, dtype) in ARRAYS.items():
        start, size = place(shape, mesh(facts["how"], ranks, len(shape)), rank)
        room = np.zeros([n + 2 for n in size], dtype)  # with ghost cells around
        inner = room[tuple(slice(1, -1) for _ in size)] if facts.get("ghosts") else np.zeros(size, dtype)
        state[name] = Block(inner, shape, start)
    told: dict[str, Any] = {"step": 0}
    if facts.get("slow") == rank:
        _slow_down()
    if "hosts" in facts:  # each rank is on one of its own
        facts = {**facts, "shm": f"{facts['hosts']}-{rank}"}
    with make(facts) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            step = ckpt.restore(state)
        except StateError as error:
            return {"error": str(error)}
        if ckpt.restored is not None and step:
            told |= {k: getattr(ckpt.restored, k) for k in ("step", "source", "needed_bytes", "read_bytes")}
            told["wrong"] = [name for name in ARRAYS if not _right(state[name], name, step)]
            assert state["n"] == step
            assert np.array_equal(state["all"], np.arange(300_001.0) + step)
        saves = range(facts.get("save", 0), facts.get("save", 0) + facts.get("times", 1)) if "save" in facts else ()
        for number in saves:
            for name in ARRAYS:
                block = state[name]
                block.array[...] = whole(name, number)[_slices(block)]
            state["n"], state["all"][...] = number, np.arange(300_001.0) + number
            ckpt.save(number, state, block=number == saves[-1])
        if facts.get("dies"):
            os.kill(os.getpid(), 9)
    return told


def _slow_down() -> None:
    """Let this rank be long in taking what was agreed on."""
    take = Candidate.take

    def slow(self: Candidate) -> None:
        time.sleep(2)
        take(self)

    Candidate.take = slow  # type: ignore[method-assign]


def _slices(block: Block) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(block.start, block.array.shape, strict=True))


def _right(block: Block, name: str, step: int) -> bool:
    return block.array.tobytes() == whole(name, step)[_slices(block)].tobytes()


def stages(facts: dict[str, Any], make: Callable[..., Any]) -> Any:
    """Restore the layers of this rank's stage of a pipeline, each stage on `copies` ranks; then save a step."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    count = ranks // facts.get("copies", 1)
    stage, layers = rank % count, facts.get("layers", 7)
    held = range(layers * stage // count, layers * (stage + 1) // count)
    state: dict[str, Any] = {"model": {f"layer{i}": np.zeros((300, 400 + i)) for i in held}, "n": 0}
    if facts.get("rng"):
        state["rng"] = np.full(9, float(rank))
    try:
        with make(facts) as ckpt:
            step = ckpt.restore(state)
            wrong = [i for i in held if step and not (state["model"][f"layer{i}"] == i + step).all()]
            if facts.get("save"):
                for i in held:
                    state["model"][f"layer{i}"][...] = i + facts["save"]
                state["n"] = facts["save"]
                ckpt.save(facts["save"], state, block=True)
            if facts.get("dies"):
                os.kill(os.getpid(), 9)
    except StateError as error:
        return {"error": str(error)}
    assert step == 0 or state["n"] == facts.get("save", step)
    return {"step": step, "wrong": wrong}


def drift(facts: dict[str, Any], make: Callable[..., Any]) -> Any:
    """Restore an array whose replicas have gone apart on one rank, or that has a gap or overlaps; then save a step."""
    rank = int(os.environ["RANK"])
    start, size = facts["places"][rank]
    block = Block(np.zeros(size, "<i4"), (facts["size"],), (start,))
    logging.basicConfig(level=logging.INFO)
    try:
        with make(facts) as ckpt:
            step = ckpt.restore({"u": block}, strict=facts.get("strict", True))
            found = block.array.tolist()
            if facts.get("save"):
                block.array[...] = np.arange(start, start + size) + 1000 * (rank == facts.get("apart"))
                ckpt.save(facts["save"], {"u": block}, block=True)
    except StateError as error:
        return {"error": str(error)}
    return {"step": step, "found": found}


def huge(facts: dict[str, Any], make: Callable[..., Any]) -> Any:
    """Restore this rank's part of an array of more than 2 GiB and compare each element; then save it."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shape = tuple(facts["shape"])
    start, size = place(shape, mesh(facts["how"], ranks, 2), rank)
    block = Block(np.zeros(size, "<i4"), shape, start)
    columns = np.arange(start[1], start[1] + size[1], dtype=np.int32)

    def rows(step: int) -> Iterator[tuple[slice, np.ndarray[Any, Any]]]:
        for first in range(0, size[0], 500):
            some = np.arange(first, min(first + 500, size[0]), dtype=np.int32) + start[0]
            yield slice(first, first + len(some)), some[:, None] * 30_000 + columns + step

    with make(facts) as ckpt:
        step = ckpt.restore({"u": block})
        right = all(np.array_equal(block.array[where], values) for where, values in rows(step)) if step else None
        for where, values in rows(facts["save"]):
            block.array[where] = values
        ckpt.save(facts["save"], {"u": block}, block=True)
        if facts.get("dies"):
            os.kill(os.getpid(), 9)
    return {"step": step, "right": right, "source": ckpt.restored.source if ckpt.restored else ""}
