"""What is tried, in which order, and what is decided from what ranks found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transom_hpc.ckpt.agree import Proposal, decide, nowhere, proposals
from transom_hpc.ckpt.restore import Found


def found(**facts: Any) -> dict[str, Any]:
    return Found(**facts).to_json()


def committed(*steps: int) -> list[tuple[int, Path, str]]:
    return [(step, Path(f"step-{step}"), "") for step in steps]


def test_newest_first_and_memory_only_where_all_ranks_have_it() -> None:
    held = [[(4, "A1"), (2, "A1")], [(4, "A1")]]
    assert proposals(committed(1, 2), held) == [
        Proposal(4, "memory:A1"), Proposal(2, "step-2"), Proposal(1, "step-1"),
    ]  # fmt: skip
    assert proposals(committed(2), [[(4, "A1")], []]) == [Proposal(2, "step-2")]
    assert proposals(committed(2), [[(4, "A1")], [(4, "A0")]]) == [Proposal(2, "step-2")]


def test_memory_older_than_the_disk_is_not_tried() -> None:
    assert proposals(committed(5), [[(4, "A1")]]) == [Proposal(5, "step-5")]
    assert proposals(committed(4), [[(4, "A1")]])[0].source == "memory:A1"


def test_one_fault_is_enough() -> None:
    assert decide([found(), found()])["take"]
    bad = decide([found(), found(faults=["w: changed"])])
    assert not bad["take"]
    assert bad["damaged"]
    assert "rank 1: w: changed" in bad["why"]


def test_unreadable_is_not_damaged() -> None:
    bad = decide([found(unreadable="EIO"), found()])
    assert not bad["take"]
    assert not bad["damaged"]


def test_a_state_that_does_not_fit_ends_it_unless_the_bytes_are_bad() -> None:
    assert decide([found(unfit="no"), found()])["unfit"] == "rank 0: no"
    assert decide([found(unfit="no"), found(faults=["x"])])["unfit"] == ""


def test_what_all_ranks_say_is_said_once() -> None:
    assert decide([found(unfit="no"), found(unfit="no")])["unfit"] == "no"
    assert decide([found(left_out="x"), found(left_out="x")])["left_out"] == "x"
    assert decide([found(), found(left_out="x"), found(left_out="x")])["left_out"] == "rank 1: x; rank 2: x"


def test_what_nobody_has_a_place_for() -> None:
    """A rank that has not looked at what others saved wants none of it."""
    here, there = found(extra=["a", "b"], looked=True), found(extra=["b", "c"], looked=True)
    assert nowhere([here, there]) == ["b"]
    assert nowhere([here, found()]) == ["a", "b"]
    assert nowhere([found(), found()]) == []
    assert "only in the checkpoint: b; strict=False" in decide([here, there])["unfit"]
    lax = decide([found(extra=["b"], looked=True, strict=False)])
    assert (lax["unfit"], lax["left_out"]) == ("", "only in the checkpoint: b")
