"""The launcher, or its host, is lost: another one takes over in the allocation. On a real Slurm, as a user."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy
import pytest

from transom_hpc.tol.rundir import RunDir

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

Unhurt = Callable[..., numpy.ndarray]


def state(run: Submitted) -> str:
    return str(run.slurm()["JobState"])


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
    runs.lab.run("n1", KILL_LAUNCHER)
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
    assert {attempt_of(run, step) for step in RunDir(run.path).committed_steps()} == {"A0002-L01"}
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n1", "n2", "n3", "n4")


@pytest.mark.soak
def test_the_host_of_the_one_that_took_over_crashes_too(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "3", "--spares", "2", "--save-every", "20", steps=300)
    run.wait_saved(40)
    runs.lab.crash("n1")
    run.wait_entry("running", 2, 60)
    runs.lab.crash("n2")
    run.wait_end()
    assert same_bits(run.field(), unhurt(300, 3)), run.story()
    assert supervisors(run) == [(1, "n1"), (2, "n2"), (3, "n3")]
    assert [entry.facts["host_out"] for entry in run.entries("restart")] == ["n1", "n2"]
    assert run.entries("requeue") == run.entries("host out") == []
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n3", "n4", "n5")


@pytest.mark.soak
def test_the_one_that_took_over_is_killed(runs: Runs, unhurt: Unhurt) -> None:
    """It has a guard as the first one had, and the job still ends with the run."""
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=300)
    run.wait_saved(40)
    runs.lab.crash("n1")
    run.wait_entry("running", 2, 60)
    runs.lab.run("n2", KILL_LAUNCHER)
    run.wait_end()
    assert same_bits(run.field(), unhurt(300, 3)), run.story()
    assert supervisors(run) == [(1, "n1"), (2, "n2"), (3, "n2")]
    assert [entry.facts["cause"] for entry in run.entries("restart")] == ["host silent", "launcher lost"]
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n2", "n3", "n4")


@pytest.mark.soak
def test_two_hosts_and_the_first_one_crashes(runs: Runs, unhurt: Unhurt) -> None:
    """No third host can tell who is right: Slurm does."""
    run = runs.heat("--nodes", "1", "--spares", "1", "--save-every", "20", steps=300)
    run.wait_saved(40)
    runs.lab.crash("n1")
    run.wait_end()
    assert same_bits(run.field(), unhurt(300, 1)), run.story()
    assert supervisors(run) == [(1, "n1"), (2, "n2")]
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n2")


@pytest.mark.soak
def test_two_hosts_and_the_first_one_is_cut_off(runs: Runs, unhurt: Unhurt) -> None:
    """Each takes the other for dead; only the second one reaches Slurm."""
    run = runs.heat("--nodes", "2", "--min-nodes", "1", "--save-every", "20", steps=400)
    run.wait_saved(40)
    runs.lab.cut("n1")
    run.wait_entry("start", 2, 120)
    runs.lab.mend("n1")
    run.wait_end()
    assert supervisors(run) == [(1, "n1"), (2, "n2")]
    assert run.field().shape == unhurt(400, 1).shape
    wait_state(run, "COMPLETED")
    nothing_left(runs, "n1", "n2")


@pytest.mark.soak
def test_a_run_that_fails_after_its_first_host_was_lost(runs: Runs) -> None:
    """Slurm calls the job FAILED, with the program's status, although its batch script has gone."""
    flag = runs.folder / "fail"
    program = ["bash", "-c", f'[ -e {flag} ] && exit 3; exec "$@"', "program", *runs.heat_program(300, 0.05)]
    run = runs.submit("--nodes", "2", "--spares", "1", "--save-every", "20", program=program)
    run.wait_saved(40)
    flag.touch()
    runs.lab.crash("n1")
    run.wait_end("ended badly")
    wait_state(run, "FAILED")
    assert run.slurm()["ExitCode"] == "3:0"
    assert list((run.path / "logs").glob("*_result.pkl")), "submitit hears of it too"


@pytest.mark.soak
def test_the_time_limit_after_the_first_host_was_lost(runs: Runs) -> None:
    """Slurm's signal goes to the batch script, which is gone: the program is asked to save all the same."""
    site = runs.folder / "short.toml"
    site.write_text('partition = "main"\nsignal_lead_s = 25\nsample_period_s = 1.0\n')
    options = ["--save-every", "10000", "--time", "1", "--site", str(site)]
    run = runs.heat("--nodes", "3", "--spares", "1", *options, steps=2000, sleep=0.06)
    run.wait_entry("running")
    runs.lab.crash("n1")
    asked = run.wait_entry("stop asked", seconds=90)
    assert (asked.host, asked.facts["cause"]) == ("n2", "time limit")
    run.wait_entry("requeued")
    restart = run.entries("restart")[-1]
    assert restart.facts["cause"] == "time limit"
    assert restart.facts["committed"] > 0, "the save was asked for, none was due"


KILL_LAUNCHER = ["pkill", "-KILL", "-f", "transom_hpc launch --guarded"]


def attempt_of(run: Submitted, step: int) -> str:
    """The attempt that committed a step."""
    manifest = json.loads((run.path / "checkpoints" / f"step-{step:09d}" / "manifest.json").read_text())
    return str(manifest["body"]["attempt"])


def pids(runs: Runs, host: str, pattern: str) -> list[str]:
    """Processes on a host."""
    return runs.lab.run(host, ["pgrep", "-f", pattern], check=False).stdout.split()
