"""Slurm itself fails: the controller dies, stands still, or its accounting is gone. The run does not notice.

On a real Slurm, as an ordinary user; `transom status` says what it does not know.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import numpy
import pytest

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

Unhurt = Callable[..., numpy.ndarray]
THREE = ("--nodes", "3", "--save-every", "20")


@pytest.fixture(autouse=True)
def _healed(runs: Runs) -> Iterator[None]:
    """Whatever a test has done to Slurm, the next one finds it whole. (Before `runs` is cleared, which needs Slurm.)"""
    lab = runs.lab
    yield
    if lab.daemon("slurmctld").state != "up":
        lab.daemon("slurmctld").heal()
    if lab.daemon("slurmdbd").state != "up":
        lab.daemon("slurmdbd").heal()


def status(runs: Runs, run: Submitted) -> tuple[int, dict[str, object]]:
    """Exit status and facts of `transom status`."""
    answer: subprocess.CompletedProcess[str] = runs.transom("status", "--json", str(run.path), check=False, timeout=150)
    return answer.returncode, json.loads(answer.stdout)


def unmoved(run: Submitted) -> None:
    """The program was started once, and no host was blamed."""
    assert len(run.entries("launch")) == 1, run.story()
    assert run.entries("restart") == run.entries("host out") == run.entries("requeue") == [], run.story()


def test_the_controller_killed_and_started_again(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat(*THREE, steps=500)
    run.wait_saved(20)
    runs.lab.daemon("slurmctld").kill()
    seen = max(entry.facts["committed"] for entry in run.entries("progress"))
    code, facts = status(runs, run)
    assert code == 5
    assert facts["phase"] == "running", "the journal knows that much"
    assert "state unknown: " in " ".join(facts["advice"])  # type: ignore[arg-type]
    assert facts["step"] >= seen  # type: ignore[operator]
    run.wait_saved(min(500, max(saved(run)) + 20))
    runs.lab.daemon("slurmctld").start()
    run.wait_end()
    assert same_bits(run.field(), unhurt(500, 3)), run.story()
    unmoved(run)
    run.wait("its end", lambda: run.slurm()["JobState"] == "COMPLETED", 60)
    assert status(runs, run)[0] == 0


@pytest.mark.soak
def test_the_controller_is_away_while_the_program_ends_and_hosts_are_lost(runs: Runs, unhurt: Unhurt) -> None:
    """A spare takes over when there is a controller again: without one no step can be started."""
    run = runs.heat(*THREE, "--spares", "1", steps=200)
    run.wait_saved(40)
    runs.lab.daemon("slurmctld").kill()
    runs.lab.crash("n2")
    time.sleep(15)
    runs.lab.daemon("slurmctld").start()
    run.wait_end(seconds=200)
    assert same_bits(run.field(), unhurt(200, 3)), run.story()
    assert {entry.facts["host_out"] for entry in run.entries("restart")} <= {"n2", ""}, run.story()
    assert run.entries("restart"), run.story()


@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", "still"])
def test_the_controller_is_away_just_when_the_job_is_to_be_requeued(runs: Runs, unhurt: Unhurt, how: str) -> None:
    run = runs.heat(*THREE, steps=800)
    run.wait_saved(40)
    daemon = runs.lab.daemon("slurmctld")
    daemon.kill() if how == "killed" else daemon.pause()
    runs.transom("requeue", "--no-wait", str(run.path), timeout=150)
    run.wait_entry("requeue", seconds=90)
    time.sleep(10)
    daemon.heal()
    requeued = run.wait_entry("requeued", seconds=120)
    assert requeued.facts["ok"], run.story()
    run.release(120)
    run.wait_end()
    assert same_bits(run.field(), unhurt(800, 3)), run.story()
    assert len(run.entries("start")) == 2, run.story()
    assert run.entries("start")[-1].facts["ended_by"] == "requeued by a person", run.story()


@pytest.mark.soak
def test_a_controller_that_answers_slowly(runs: Runs, unhurt: Unhurt) -> None:
    """It stands still for 6 s of every 9; commands take long, or time out, and a rank dies meanwhile."""
    run = runs.heat(*THREE, steps=800)
    run.wait_saved(20)
    daemon, over = runs.lab.daemon("slurmctld"), threading.Event()

    def hesitate() -> None:
        while not over.is_set():
            daemon.pause()
            over.wait(6)
            daemon.go_on()
            over.wait(3)

    thread = threading.Thread(target=hesitate)
    thread.start()
    try:
        code, facts = status(runs, run)
        assert (code, facts["phase"]) in ((0, "running"), (5, "running"))
        runs.lab.run("n2", ["pkill", "-KILL", "-f", "heat_mpi.py"])
        run.wait_entry("running", 2, 120)
    finally:
        over.set()
        thread.join()
    run.wait_end()
    assert same_bits(run.field(), unhurt(800, 3)), run.story()
    (restart,) = run.entries("restart")
    assert restart.facts["cause"] == "program killed", run.story()
    assert run.entries("host out") == [], "a slow answer is no sick host"


@pytest.mark.soak
def test_a_controller_that_does_not_answer(runs: Runs, unhurt: Unhurt) -> None:
    """The status says so within its deadline, a stop is heard all the same, and the run can go on later."""
    run = runs.heat(*THREE, steps=2000)
    run.wait_saved(20)
    daemon = runs.lab.daemon("slurmctld")
    daemon.pause()
    code, facts = status(runs, run)
    assert (code, facts["phase"]) == (5, "running")
    answer = runs.transom("stop", "--no-wait", str(run.path), timeout=150)
    assert "whether the job runs is not known" in answer.stdout
    run.wait_end("stopped")
    saved_at = max(saved(run))
    assert run.entries("end")[-1].facts["committed"] == saved_at > 0
    daemon.go_on()
    run.wait("its end", lambda: run.slurm()["JobState"] == "COMPLETED", 90)
    words = json.loads((run.path / "spec.json").read_text())["program"]
    words[words.index("--steps") + 1] = str(saved_at + 60)
    again = ["submit", "--json", "--site", "lab", *THREE, "--run-dir", str(run.path), "--", *words]
    run.job_id = int(json.loads(runs.transom(*again).stdout)["job_id"])
    run.wait("the end", lambda: run.entries("end")[-1].facts["ending"] == "ended well", 90)
    assert same_bits(run.field(), unhurt(saved_at + 60, 3)), run.story()


@pytest.mark.soak
def test_submitting_to_a_controller_that_stands_still(runs: Runs) -> None:
    """sbatch is not answered in time: the job is submitted once, or that it is not known is said."""
    daemon = runs.lab.daemon("slurmctld")
    daemon.pause()
    timer = threading.Timer(20, daemon.go_on)
    timer.start()
    program = runs.heat_program(40, 0.01)
    argv = ["submit", "--json", "--site", "lab", *THREE, "--run-dir", "once", "--", *program]
    answer = runs.transom(*argv, check=False, timeout=200)
    timer.join()
    time.sleep(3)
    queue = runs.lab.run(
        "login", ["sacct", "-n", "-X", "-o", "jobid", "--name=transom", "-S", "now-2minutes"], check=False
    )
    jobs = runs.lab.run("login", ["scontrol", "-o", "show", "jobs"]).stdout.splitlines()
    mine = [line for line in jobs if str(runs.folder) in line]
    if answer.returncode == 0:
        assert len(mine) == 1, (mine, queue.stdout)
        run = Submitted(
            runs.lab, runs.folder / "once", int(json.loads(answer.stdout)["job_id"]), runs.folder / "final1.npy"
        )
        run.wait_end()
    else:
        assert len(answer.stderr.splitlines()) == 1, answer.stderr
        assert len(mine) <= 1, mine


@pytest.mark.soak
def test_the_accounting_is_away(runs: Runs, unhurt: Unhurt) -> None:
    """Nobody notices while it runs, requeued too; once the job is forgotten, its state is not known."""
    runs.lab.daemon("slurmdbd").kill()
    run = runs.heat(*THREE, steps=600)
    run.wait_saved(20)
    code, facts = status(runs, run)
    assert (code, facts["phase"]) == (0, "running")
    assert facts["advice"] == []
    answer = runs.transom("requeue", str(run.path), timeout=150)
    assert f"job {run.job_id} is requeued" in answer.stdout
    run.release(120)
    assert run.entries("start")[-1].facts["ended_by"] == "requeued by a person"
    run.wait_end()
    assert same_bits(run.field(), unhurt(600, 3)), run.story()
    run.wait("its end", lambda: run.slurm()["JobState"] == "COMPLETED", 60)
    code, facts = status(runs, run)
    assert facts["phase"] == "ended well"
    assert code == 0, "the journal knows how it ended"


def saved(run: Submitted) -> list[int]:
    """The committed steps."""
    return [int(path.name[5:]) for path in (run.path / "checkpoints").glob("step-*")]
