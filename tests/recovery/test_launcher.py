"""Faults that come together, or at a bad moment: on a real Slurm, as an ordinary user."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy
import pytest

from .conftest import Runs, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

Unhurt = Callable[..., numpy.ndarray]


@pytest.mark.soak
def test_two_hosts_crashed_at_once(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "3", "--spares", "2", "--save-every", "20", steps=150)
    run.wait_saved(20)
    crashes = [threading.Thread(target=runs.lab.crash, args=(host,)) for host in ("n2", "n3")]
    for crash in crashes:
        crash.start()
    for crash in crashes:
        crash.join()
    run.wait_end()
    assert same_bits(run.field(), unhurt(150, 3)), run.story()
    assert [entry.facts["hosts"] for entry in run.entries("launch")] == [["n1", "n2", "n3"], ["n1", "n4", "n5"]]
    assert len(run.entries("restart")) == len(run.entries("host out")) == 1


@pytest.mark.soak
def test_host_crashed_while_the_program_is_started(runs: Runs, unhurt: Unhurt) -> None:
    """Nobody watches it yet, and the program waits for a rank that never comes."""
    run = runs.heat("--nodes", "4", "--spares", "1", "--save-every", "20", steps=100)
    run.wait_entry("launch")
    runs.lab.crash("n3")
    run.wait_end()
    assert same_bits(run.field(), unhurt(100)), run.story()
    assert run.entries("restart")[0].facts["host_out"] == "n3"
    assert "n3" not in run.entries("launch")[-1].facts["hosts"]


def test_cancelled_while_the_program_saves(runs: Runs) -> None:
    """The launcher is about to requeue because of the time limit; a person's word is the last."""
    program = ["bash", "-c", "trap 'sleep 2; exit 75' TERM; for second in $(seq 100); do sleep 1; done"]
    run = runs.submit("--nodes", "1", program=program)
    run.wait_entry("launch")
    run.wait("the program", lambda: runs.lab.run("n1", ["pgrep", "-f", "for second"], check=False).stdout, 30)
    runs.lab.run("login", ["scancel", "--batch", "--signal=USR1", str(run.job_id)])
    run.wait_entry("stop asked")
    runs.lab.run("login", ["scancel", str(run.job_id)])
    run.wait("its end", lambda: run.slurm()["JobState"] == "CANCELLED", 30)
    assert run.entries("end")[0].facts["why"].startswith("Slurm has ended the job already"), run.story()
    assert run.slurm()["Restarts"] == "0"
