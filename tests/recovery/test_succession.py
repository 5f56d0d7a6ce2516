"""The launcher, or its host, is lost: another one takes over in the allocation. On a real Slurm, as a user."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest

from transom_hpc.tol.rundir import RunDir

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

Unhurt = Callable[..., numpy.ndarray]


def state(run: Submitted) -> str:
    return run.slurm()["JobState"]


def wait_state(run: Submitted, wanted: str, seconds: float = 60) -> None:
    run.wait(wanted, lambda: state(run) not in ("RUNNING", "COMPLETING"), seconds)
    assert state(run) == wanted, run.story()


def nothing_left(runs: Runs, *hosts: str) -> None:
    """No process of the user on these hosts, and nothing in their shared memory."""
    for host in hosts:
        left = runs.lab.run(host, ["pgrep", "-u", runs.lab.user, "-a"], check=False).stdout
        assert [line for line in left.splitlines() if "pgrep" not in line] == [], host
        assert runs.lab.run(host, ["ls", "-A", "/dev/shm"]).stdout == "", host


def supervisors(run: Submitted) -> list[tuple[int, str]]:
    """Attempts with the host of their launcher."""
    return [(entry.attempt.number, entry.host) for entry in run.entries("start")]


def test_first_host_crashed_with_a_spare(runs: Runs, unhurt: Unhurt) -> None:
    """It goes on in the same allocation, from what the others have in memory, and the job ends as it should."""
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.crash("n1")
    run.wait_end()
    assert same_bits(run.field(), unhurt(150, 3)), run.story()
    assert supervisors(run) == [(1, "n1"), (2, "n2")]
    (restart,) = run.entries("restart")
    assert (restart.facts["cause"], restart.facts["host_out"]) == ("host silent", "n1")
    assert [entry.facts["hosts"] for entry in run.entries("launch")] == [["n1", "n2", "n3"], ["n2", "n4", "n3"]]
    assert run.entries("requeue") == []
    assert str(run.entries("restored")[-1].facts["source"]).startswith("memory:"), run.story()
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n2", "n3", "n4")


def test_launcher_killed(runs: Runs, unhurt: Unhurt) -> None:
    """Its host lives: another one goes on in the same job."""
    run = runs.heat("--nodes", "3", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.run("n1", ["pkill", "-KILL", "-f", "transom_hpc launch --guarded"])
    run.wait_end()
    assert same_bits(run.field(), unhurt(150, 3)), run.story()
    assert supervisors(run) == [(1, "n1"), (2, "n1")]
    (restart,) = run.entries("restart")
    assert restart.facts["cause"] == "launcher lost"
    assert "was killed (SIGKILL)" in restart.facts["evidence"]
    assert run.entries("requeue") == []
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n1", "n2", "n3")


@pytest.mark.soak
def test_first_host_cut_off_and_mended(runs: Runs, unhurt: Unhurt) -> None:
    """There is one supervisor only; the old one comes back, finds that another leads, and waits for its end."""
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=400)
    run.wait_saved(40)
    runs.lab.cut("n1")
    run.wait_entry("start", 2, 40)
    written = set(RunDir(run.path).committed_steps())
    run.wait("its own program's end", lambda: not pids(runs, "n1", "heat_mpi.py --steps"), 30)
    run.wait("its server's end", lambda: not pids(runs, "n1", "transom_hpc.ckpt.server"), 30)
    runs.lab.mend("n1")
    aside = run.wait_entry("standing by", seconds=60)
    assert (aside.attempt.number, aside.host) == (1, "n1")
    run.wait_end()
    assert same_bits(run.field(), unhurt(400, 3)), run.story()
    assert supervisors(run) == [(1, "n1"), (2, "n2")]
    assert len(run.entries("restart")) == 1
    assert run.entries("requeue") == []
    assert written
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n1", "n2", "n3", "n4")


def pids(runs: Runs, host: str, pattern: str) -> list[str]:
    """Processes on a host."""
    return runs.lab.run(host, ["pgrep", "-f", pattern], check=False).stdout.split()
