"""What Slurm says of hosts, read."""

from __future__ import annotations

import pytest

from transom_hpc.lab.controller import Node, parse_nodes


def test_one_line_a_host_is_read() -> None:
    text = (
        "NodeName=n1 State=IDLE*+DRAIN ThreadsPerCore=1 SlurmdStartTime=2026-11-30T14:46:40 Reason=State=x y\n"
        "NodeName=n2 State=UNKNOWN SlurmdStartTime=None\n"
    )
    assert parse_nodes(text) == {"n1": Node("idle*+drain", "2026-11-30T14:46:40"), "n2": Node("unknown", "None")}


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("idle", True),
        ("mixed+drain", True),
        ("allocated", True),
        ("idle*", False),
        ("idle+not_responding", False),
        ("down", False),
        ("down*+drain", False),
        ("unknown", False),
        ("fail", False),
    ],
)
def test_a_host_that_is_down_or_silent_is_not_usable(state: str, usable: bool) -> None:
    assert Node(state, "").is_usable is usable
