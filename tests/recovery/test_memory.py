"""Hosts are lost, and the run goes on from what the others have in memory: on a real Slurm, as a user."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from transom_hpc.tol.rundir import RunDir

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(200)]

Unhurt = Callable[..., numpy.ndarray]


def until_only_in_memory(run: Submitted, hosts: int) -> int:
    """Let no more saves reach the disk, and wait until one that does not is in the memory of two hosts each.

    Returns:
        Its step.
    """
    committed = max(RunDir(run.path).committed_steps())
    checkpoints = run.path / "checkpoints"
    # Nobody may make anything in the folder, so that each save fails when it begins to be written.
    os.chmod(checkpoints, 0o555)  # noqa: PTH101
    if run.lab.user == "root" or os.geteuid() == 0:
        assert checkpoints.stat().st_uid != 0, "the run's user is an ordinary one"
    step = committed

    def copied() -> bool:
        nonlocal step
        text = "".join(path.read_text() for path in (run.path / "logs").glob("*-server.log"))
        lines = [line for line in text.splitlines() if " has a copy of step " in line]
        found: dict[int, int] = {}
        for line in lines:
            number = int(line.partition(" has a copy of step ")[2].split()[0])
            found[number] = found.get(number, 0) + 1
        there = set(RunDir(run.path).committed_steps())
        step = max((number for number, count in found.items() if count == hosts and number not in there), default=0)
        return step > committed

    run.wait("a step that is in memory only", copied, 30)
    return step


def let_write(run: Submitted) -> None:
    checkpoints: Path = run.path / "checkpoints"
    checkpoints.chmod(stat.S_IRWXU | 0o055)


def facts_of(run: Submitted, kind: str) -> list[dict[str, Any]]:
    return [dict(entry.facts) for entry in run.entries(kind)]


def test_a_lost_host_is_replaced_from_its_neighbours_memory(runs: Runs, unhurt: Unhurt) -> None:
    """Nothing is read from disk: the step was never written."""
    run = runs.heat("--nodes", "4", "--spares", "1", "--save-every", "20", steps=200)
    run.wait_saved(40)
    step = until_only_in_memory(run, 4)
    committed = max(RunDir(run.path).committed_steps())
    runs.lab.crash("n3")
    let_write(run)
    run.wait_end()
    assert same_bits(run.field(), unhurt(200)), run.story()
    (restart,) = run.entries("restart")
    assert (restart.facts["host_out"], restart.facts["committed"]) == ("n3", committed)
    found = facts_of(run, "restored")[-1]
    assert found["source"] == "memory:A0001-L01", run.story()
    assert found["step"] >= step > committed
    (gathered,) = facts_of(run, "gathered")
    assert (gathered["steps"], gathered["moved"], gathered["lost"]) == ([found["step"]], 1, [])
    assert gathered["bytes"] > 0
    assert run.entries("launch")[-1].facts["hosts"] == ["n1", "n2", "n5", "n4"]
    for host in ("n1", "n2", "n4", "n5"):
        left = runs.lab.run(host, ["bash", "-c", "ls -d /dev/shm/transom-* 2> /dev/null || true"]).stdout
        assert left == "", f"{host}: {left}"
