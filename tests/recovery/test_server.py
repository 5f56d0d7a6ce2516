"""Saves that are under way when the program, a checkpoint server or a host dies: on a real Slurm, as a user."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy
import pytest

from transom_hpc.tol.rundir import RunDir

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(200)]

Unhurt = Callable[..., numpy.ndarray]
SERVER = "transom_hpc.ckpt.server"


def hold_a_save(runs: Runs, run: Submitted, host: str) -> int:
    """Let the server of a host stand still until a save waits for it.

    Returns:
        The server's process id.
    """
    pids = runs.lab.run(host, ["pgrep", "-f", SERVER + " "]).stdout.split()
    pid = max(int(pid) for pid in pids)
    runs.lab.run(host, ["kill", "-STOP", str(pid)])
    orders = ["bash", "-c", "ls -A /dev/shm/transom-*/ | grep -q '^[.]order'"]
    run.wait("an order", lambda: runs.lab.run(host, orders, check=False).returncode == 0, 30)
    held = "held-*.json"
    run.wait("the others", lambda: len(list((run.path / "checkpoints").glob(f".step-*/{held}"))) >= 2, 10)
    return pid


def test_program_killed_while_a_save_is_under_way(runs: Runs, unhurt: Unhurt) -> None:
    """The save is committed before the program is started again, and the hosts keep their servers."""
    run = runs.heat("--nodes", "3", "--save-every", "20", steps=120)
    run.wait_saved(40)
    pid = hold_a_save(runs, run, "n2")
    (under_way,) = (run.path / "checkpoints").glob(".step-*")
    step = int(under_way.name.split("-")[1].split(".")[0])
    runs.lab.run("n3", ["pkill", "-KILL", "-f", "heat_mpi.py"])
    run.wait("the program's end", lambda: not heat_pids(runs, "n2"), 20)
    assert max(RunDir(run.path).committed_steps()) < step
    runs.lab.run("n2", ["kill", "-CONT", str(pid)])
    run.wait_saved(step, 5)
    assert len(run.entries("launch")) == 1
    run.wait_end()
    assert same_bits(run.field(), unhurt(120, 3)), run.story()
    (restart,) = run.entries("restart")
    assert restart.facts["cause"] == "program killed"
    assert run.entries("server") == []
    logs = [path.name for path in (run.path / "logs").glob("*-server.log")]
    assert logs == ["A0001-L01-server.log"]


def test_server_killed_while_a_save_is_under_way(runs: Runs, unhurt: Unhurt) -> None:
    """The program does not notice: the next server takes the save up, or the program does."""
    run = runs.heat("--nodes", "3", "--save-every", "20", steps=120)
    run.wait_saved(40)
    hold_a_save(runs, run, "n2")
    runs.lab.run("n2", ["pkill", "-KILL", "-f", SERVER + " "])
    run.wait_end()
    assert same_bits(run.field(), unhurt(120, 3)), run.story()
    assert run.entries("restart") == []
    facts = run.entries("server")[0].facts
    # Killed itself (137), or ended by Slurm with the rest of its step (143): srun tells what it hears of first.
    assert re.fullmatch(r"the checkpoint server ended \(exit status 1(37|43)\) and is started again", facts["problem"])
    assert not facts["lasting"]
    assert "was not saved" not in run.story()


@pytest.mark.soak
def test_host_crashed_while_a_save_is_under_way(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=200)
    run.wait_saved(40)
    hold_a_save(runs, run, "n2")
    runs.lab.crash("n2")
    run.wait_end()
    assert same_bits(run.field(), unhurt(200, 3)), run.story()
    (restart,) = run.entries("restart")
    assert (restart.facts["cause"], restart.facts["host_out"]) == ("host silent", "n2")
    assert not list((run.path / "checkpoints").glob(".step-*"))


@pytest.mark.soak
def test_servers_killed_again_and_again(runs: Runs, unhurt: Unhurt) -> None:
    """They are given up for the launch; the program writes by itself."""
    run = runs.heat("--nodes", "2", "--save-every", "20", steps=900)
    for number in range(1, 6):
        run.wait("a server", lambda: runs.lab.run("n2", ["pgrep", "-f", SERVER], check=False).stdout, 30)
        runs.lab.run("n2", ["pkill", "-KILL", "-f", SERVER])
        run.wait_entry("server", number)
    assert run.entries("server")[-1].facts["lasting"]
    assert "is given up in this launch" in runs.transom("status", str(run.job_id)).stdout.replace("\n", " ")
    run.wait_end()
    assert same_bits(run.field(), unhurt(900, 2)), run.story()
    assert run.entries("restart") == []


def heat_pids(runs: Runs, host: str) -> list[str]:
    """Processes of the program on a host."""
    return runs.lab.run(host, ["pgrep", "-f", "heat_mpi.py --steps"], check=False).stdout.split()
