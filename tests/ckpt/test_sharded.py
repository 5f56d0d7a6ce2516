"""Real programs of several ranks: saved on any sharding, restored on any other, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)


def chain(sharded: Any, directory: Path, ways: Sequence[tuple[str, int]], **facts: Any) -> None:
    """Each start restores what the one before saved, on its own number of ranks and in its own way; every other one
    with its parameters in another order, after an optimizer's step, and with some parameters whole while it saves."""
    saved: dict[str, str] = {}
    for number, (kind, world_size) in enumerate(ways):
        odd = number % 2 == 1
        found = sharded(
            "training",
            world_size,
            f"A{number}",
            directory=directory,
            kind=kind,
            backwards=odd,
            warm=odd,
            unsharded=odd,
            **facts,
        )
        assert found.codes == [0] * world_size, (kind, world_size, found.errors)
        for said in found.said:
            assert (said["start"], said["last"]) == (2 * number, 2 * number + 2)
            assert said["before"] == saved, f"{kind} of {world_size} after {ways[number - 1] if number else None}"
        saved = found.said[0]["after"]
        assert len(saved) > 60


def test_fsdp_on_other_numbers_of_ranks(sharded: Any, directory: Path) -> None:
    chain(sharded, directory, [("fsdp", n) for n in (4, 2, 3, 1)])


def test_from_each_way_to_another(sharded: Any, directory: Path) -> None:
    chain(sharded, directory, [("fsdp", 3), ("ddp", 2), ("tp x fsdp", 4), ("tp", 2), ("ddp", 1), ("hybrid", 4)])


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["fsdp", "ddp", "tp"])
def test_there_and_back(sharded: Any, directory: Path, kind: str) -> None:
    """Eight ranks have empty parts of some of it."""
    # torch itself can't train a part of 30 rows on 4 or 8 ranks.
    numbers = (5, 2, 3, 6, 1, 6, 3, 2, 5) if kind == "tp" else (4, 2, 3, 8, 1, 8, 3, 2, 4)
    chain(sharded, directory, [(kind, n) for n in numbers])


WAYS = [("fsdp", 8), ("ddp", 3), ("tp", 5), ("tp x fsdp", 8), ("hybrid", 6)]


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_way_and_each_other(sharded: Any, directory: Path, way: tuple[str, int]) -> None:
    chain(sharded, directory, [step for other in WAYS if other != way for step in (way, other)])


def test_from_memory_alone(sharded: Any, directory: Path) -> None:
    """Programs that died left their parts in the host's memory: for as many ranks, and for others."""
    saved: dict[str, str] = {}
    for number, (kind, ranks, die) in enumerate([("fsdp", 3, True), ("fsdp", 3, True), ("ddp", 2, False)]):
        found = sharded("training", ranks, f"A{number}", directory=directory, kind=kind, die=die)
        assert found.codes == [9 if die else 0] * ranks, found.errors
        for said in found.said:
            assert said["start"] == 2 * number
            assert said["before"] == saved
        saved = found.said[0]["after"]
        for folder in directory.glob("step-*"):
            shutil.rmtree(folder)


def test_blocks_with_ghost_cells_on_another_grid(sharded: Any, directory: Path) -> None:
    for number, (rows, columns) in enumerate([(2, 2), (1, 3), (3, 1), (1, 1), (2, 3)]):
        ranks = rows * columns
        found = sharded("blocks", ranks, f"A{number}", directory=directory, grid=[rows, columns])
        assert found.codes == [0] * ranks, found.errors
        assert {said["start"] for said in found.said} == {2 * number}


def test_stages_of_a_pipeline_cut_otherwise(sharded: Any, directory: Path) -> None:
    saved: dict[str, str] = {}
    for number, (count, shards) in enumerate([(3, 1), (2, 2), (1, 3), (5, 1), (1, 1), (2, 2)]):
        ranks = count * shards
        found = sharded("stages", ranks, f"A{number}", directory=directory, shards=shards)
        assert found.codes == [0] * ranks, found.errors
        before: dict[str, str] = {}
        for said in found.said:
            assert said["start"] == 2 * number
            assert said["rates"] == [pytest.approx(0.1 ** (number + 1))]
            before |= said["before"]
        assert before == saved
        saved = {name: digest for said in found.said for name, digest in said["after"].items()}
        assert len(saved) == 14 * 5
