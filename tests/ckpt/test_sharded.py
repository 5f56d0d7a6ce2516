"""Real programs of several ranks: saved on any sharding, restored on any other, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)


def chain(sharded: Any, directory: Path, ways: Sequence[tuple[str, int]], **facts: Any) -> None:
    """Each start restores what the one before saved, on its own number of ranks and in its own way."""
    saved: dict[str, str] = {}
    for number, (kind, world_size) in enumerate(ways):
        found = sharded(
            "training",
            world_size,
            f"A{number}",
            directory=directory,
            kind=kind,
            lazy=False,
            backwards=number % 2,
            **facts,
        )
        assert found.codes == [0] * world_size, (kind, world_size, found.errors)
        for said in found.said:
            assert (said["start"], said["last"]) == (2 * number, 2 * number + 2)
            assert said["before"] == saved, f"{kind} of {world_size} after {ways[number - 1] if number else None}"
        saved = found.said[0]["after"]
        assert len(saved) > 60


FSDP = [("fsdp", n) for n in (4, 2, 3, 8, 1, 4)]


def test_fsdp_on_other_numbers_of_ranks(sharded: Any, directory: Path) -> None:
    chain(sharded, directory, FSDP[:4])


def test_from_each_way_to_another(sharded: Any, directory: Path) -> None:
    ways = [("fsdp", 3), ("ddp", 2), ("tp", 2), ("tp x fsdp", 4), ("hybrid", 4), ("ddp", 1), ("fsdp", 2)]
    chain(sharded, directory, ways, warm=False)
