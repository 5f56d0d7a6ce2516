"""Hosts are lost, and the run goes on from what the others have in memory: on a real Slurm, as a user."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import transom_hpc
from transom_hpc.tol.rundir import RunDir

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(200)]

Unhurt = Callable[..., numpy.ndarray]


def until_only_in_memory(run: Submitted, hosts: int) -> int:
    """Let no more saves reach the disk, and wait until one that does not is in the memory of two hosts each.

    Returns:
        Its step.
    """
    checkpoints = run.path / "checkpoints"
    checkpoints.chmod(0o555)  # nobody may make anything there, so that each save fails when it begins to be written
    return until_copied(run, hosts)


def until_copied(run: Submitted, hosts: int) -> int:
    """Wait until a step that is not on disk is in the memory of two hosts each.

    Returns:
        The step.
    """
    step = committed = max(RunDir(run.path).committed_steps())

    def copied() -> bool:
        nonlocal step
        text = "".join(path.read_text() for path in (run.path / "logs").glob("*-server.log"))
        lines = [line for line in text.splitlines() if " has a copy of step " in line]
        found: dict[int, set[str]] = {}
        for line in lines:
            number, _, whose = line.partition(" has a copy of step ")[2].split()
            found.setdefault(int(number), set()).add(whose)
        there = set(RunDir(run.path).committed_steps())
        step = max((number for number, of in found.items() if len(of) == hosts and number not in there), default=0)
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
    run = runs.heat("--nodes", "4", "--spares", "1", "--save-every", "20", steps=140)
    run.wait_saved(40)
    step = until_only_in_memory(run, 4)
    committed = max(RunDir(run.path).committed_steps())
    runs.lab.crash("n3")
    let_write(run)
    run.wait_end()
    assert same_bits(run.field(), unhurt(140)), run.story()
    (restart,) = run.entries("restart")
    assert (restart.facts["host_out"], restart.facts["committed"]) == ("n3", committed)
    found = facts_of(run, "restored")[-1]
    assert found["source"] == "memory:A0001-L01", run.story()
    assert found["step"] >= step > committed
    (gathered,) = [facts for facts in facts_of(run, "gathered") if facts["moved"]]  # servers that came late found all
    assert (gathered["steps"], gathered["moved"], gathered["lost"]) == ([found["step"]], 1, [])
    assert gathered["bytes"] > 0
    assert run.entries("launch")[-1].facts["hosts"] == ["n1", "n2", "n5", "n4"]
    for host in ("n1", "n2", "n4", "n5"):
        left = runs.lab.run(host, ["bash", "-c", "ls -d /dev/shm/transom-* 2> /dev/null || true"]).stdout
        assert left == "", f"{host}: {left}"


OFTEN = """
import runpy, sys
from transom_hpc.ckpt import interval
interval.LEAST_S, interval.MOST_OVERHEAD = 0.5, 1e9
interval.intervals = lambda *_: interval.Intervals(0.5, 1000.0)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_lost_host_is_replaced_from_a_save_that_was_not_to_be_written(runs: Runs, unhurt: Unhurt) -> None:
    """The program saves in memory twice a second, and once on disk."""
    interpreter, *heat = runs.heat_program(120, 0.05)
    options = ["--nodes", "4", "--spares", "1", "--save-every", "auto"]
    run = runs.submit(*options, program=[interpreter, "-c", OFTEN, *heat])
    run.wait_saved(1)
    step = until_copied(run, 4)
    committed = max(RunDir(run.path).committed_steps())
    runs.lab.crash("n3")
    run.wait_end()
    assert same_bits(run.field(), unhurt(120)), run.story()
    (restart,) = run.entries("restart")
    assert (restart.facts["host_out"], restart.facts["committed"]) == ("n3", committed)
    found = facts_of(run, "restored")[-1]
    assert found["source"] == "memory:A0001-L01", run.story()
    assert found["step"] >= step > committed
    assert found["step"] not in RunDir(run.path).committed_steps()
    assert max(RunDir(run.path).committed_steps()) > found["step"], "written soon after it was restored"


def own_site(runs: Runs, **keys: object) -> str:
    """The lab's site config with some keys more."""
    path = runs.folder / "own.toml"
    text = (Path(transom_hpc.__file__).parents[1] / "site_configs" / "lab.toml").read_text()
    path.write_text(text + "".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items()))
    return str(path)


def restored_from_memory(run: Submitted) -> bool:
    return str(facts_of(run, "restored")[-1]["source"]).startswith("memory:")


@pytest.mark.soak
def test_two_hosts_lost_that_do_not_keep_each_others_copies(runs: Runs, unhurt: Unhurt) -> None:
    """The spares that replace them have the copies already."""
    options = ["--site", own_site(runs, copy_distance=2)]
    run = runs.heat("--nodes", "3", "--spares", "2", "--save-every", "20", *options, steps=200)
    run.wait_saved(40)
    step = until_only_in_memory(run, 3)
    runs.lab.crash("n2")
    runs.lab.crash("n3")
    let_write(run)
    run.wait_end()
    assert same_bits(run.field(), unhurt(200, 3)), run.story()
    assert restored_from_memory(run), run.story()
    assert facts_of(run, "restored")[-1]["step"] >= step
    gathered = facts_of(run, "gathered")[-1]
    assert (gathered["moved"], gathered["bytes"]) == (2, 0), "they only got other names"
    assert set(run.entries("launch")[-1].facts["hosts"]) == {"n1", "n4", "n5"}


@pytest.mark.soak
def test_two_neighbours_lost(runs: Runs, unhurt: Unhurt) -> None:
    """A host and the one that kept its copy: the newest on disk is taken, and that is said."""
    run = runs.heat("--nodes", "3", "--spares", "2", "--save-every", "20", steps=200)
    run.wait_saved(40)
    step = until_only_in_memory(run, 3)
    committed = max(RunDir(run.path).committed_steps())
    runs.lab.crash("n2")
    runs.lab.crash("n3")
    let_write(run)
    run.wait_end()
    assert same_bits(run.field(), unhurt(200, 3)), run.story()
    restored = facts_of(run, "restored")[-1]
    assert restored == {"step": committed, "source": f"step-{committed:09d}"}, run.story()
    lost = facts_of(run, "gathered")[-1]["lost"]
    assert len(lost) == 1
    assert lost[0].startswith("no memory has step ")
    assert lost[0].endswith(" of rank 1")
    assert int(lost[0].split()[4]) >= step
    assert lost[0] in (run.path / "logs" / f"{run.job_id}_0_log.out").read_text()


@pytest.mark.soak
def test_a_spare_lost_while_it_keeps_copies(runs: Runs, unhurt: Unhurt) -> None:
    """The program goes on, copies go elsewhere, and the next loss finds them there."""
    run = runs.heat("--nodes", "3", "--spares", "2", "--save-every", "20", steps=400)
    run.wait_saved(40)
    runs.lab.crash("n4")
    run.wait_entry("host out", seconds=30)
    log = run.path / "logs" / "A0001-L01-server.log"
    run.wait("other copies", lambda: "copies of this host's memory go to n5" in log.read_text(), 30)
    step = until_only_in_memory(run, 3)
    runs.lab.crash("n3")
    let_write(run)
    run.wait_end()
    assert same_bits(run.field(), unhurt(400, 3)), run.story()
    assert restored_from_memory(run), run.story()
    assert facts_of(run, "restored")[-1]["step"] >= step
    assert run.entries("launch")[-1].facts["hosts"] == ["n1", "n2", "n5"]


@pytest.mark.soak
def test_hosts_lost_one_after_the_other(runs: Runs, unhurt: Unhurt) -> None:
    """The second one right after the restart: what was given back, and copies, still serve."""
    run = runs.heat("--nodes", "3", "--spares", "2", "--save-every", "20", steps=300)
    run.wait_saved(40)
    step = until_only_in_memory(run, 3)
    runs.lab.crash("n2")
    run.wait("the restart", lambda: len(run.entries("launch")) == 2, 30)
    let_write(run)
    run.wait("restored", lambda: len(facts_of(run, "restored")) >= 2, 30)
    runs.lab.crash("n3")
    run.wait_end()
    assert same_bits(run.field(), unhurt(300, 3)), run.story()
    assert len(run.entries("restart")) == 2
    assert restored_from_memory(run), run.story()
    assert facts_of(run, "restored")[-1]["step"] >= step


@pytest.mark.soak
def test_first_host_lost(runs: Runs, unhurt: Unhurt) -> None:
    """The launcher that takes over goes on from a step that was never written."""
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=200)
    run.wait_saved(40)
    step = until_only_in_memory(run, 3)
    runs.lab.crash("n1")
    let_write(run)
    run.wait_end()
    assert same_bits(run.field(), unhurt(200, 3)), run.story()
    assert restored_from_memory(run), run.story()
    assert facts_of(run, "restored")[-1]["step"] >= step
    assert run.entries("requeue") == []


def at(moment: str, run: Submitted) -> bool:
    """Whether a run is in that moment of a save."""
    log = "".join(path.read_text() for path in (run.path / "logs").glob("*-server.log"))
    under_way = list((run.path / "checkpoints").glob(".step-*"))
    match moment:
        case "sending":
            return " has a copy of step 60 " in log
        case "staging":
            return bool(under_way)
        case "writing":
            return any(list(path.glob("work-*")) for path in under_way)
        case "committing":
            return any(list(path.glob("written-*")) for path in under_way)
    return len(run.entries("launch")) == 2  # restoring


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["training", "staging", "sending", "writing", "committing", "restoring"])
def test_a_host_lost_at_any_moment(runs: Runs, unhurt: Unhurt, moment: str) -> None:
    run = runs.heat("--nodes", "3", "--spares", "2", "--save-every", "10", steps=300)
    run.wait_saved(40)
    if moment == "restoring":
        runs.lab.run("n3", ["pkill", "-KILL", "-f", "heat_mpi.py"])
    deadline = time.monotonic() + 20
    while moment != "training" and not at(moment, run) and time.monotonic() < deadline:
        time.sleep(0.002)
    runs.lab.crash("n2")
    run.wait_end()
    assert same_bits(run.field(), unhurt(300, 3)), run.story()
    last = run.entries("restart")[-1].facts
    assert last["host_out"] == "n2"
    assert facts_of(run, "restored")[-1]["step"] >= last["committed"], "never worse than the file"
