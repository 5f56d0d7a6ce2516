"""A person's requests, follow-up jobs and `transom watch`, on real runs."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.tol.rundir import RunDir

from .conftest import HEAT, PYTHON, Runs, Submitted

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

TEMPLATE = Path(__file__).parents[2] / "sbatch_templates" / "train.sbatch"
TWO = ["--nodes", "2", "--save-every", "20"]


def follow(run: Submitted, job_id: str) -> None:
    """Look at the job that carries the run on from now on."""
    run.job_id = int(job_id)


def test_requeued_by_a_person_let_go_and_stopped(
    runs: Runs, unhurt: Callable[..., Any], identical: Callable[..., bool]
) -> None:
    run = runs.heat(*TWO, steps=160, sleep=0.1)
    run.wait_saved(20)
    answer = runs.transom("requeue", str(run.path))
    assert f"job {run.job_id} is requeued" in answer.stdout
    asked = run.wait_entry("request")
    assert (asked.facts["what"], asked.facts["by"]) == ("requeue", f"{runs.lab.user}@login")
    assert not RunDir(run.path).request.exists()
    left = max(RunDir(run.path).committed_steps())
    run.wait("the queue", lambda: run.slurm()["JobState"] == "PENDING", 20)
    assert "waits already" in runs.transom("requeue", str(run.path)).stdout
    before = time.monotonic()
    watched = runs.transom("watch", "--once", str(run.path))
    assert time.monotonic() - before > 4, "what ends the old life would meet the new one"
    assert f"job {run.job_id} ({run.path}) may start now" in watched.stdout
    again = run.wait_entry("start", 2, 20)
    assert again.facts["ended_by"] == "requeued by a person"
    assert run.wait_entry("restored", 2).facts["step"] == left
    facts = json.loads(runs.transom("stop", "--json", str(run.path)).stdout)
    assert facts["done"]
    assert run.wait_end("stopped").facts["committed"] >= left
    over = runs.transom("stop", str(run.path), check=False)
    assert over.returncode == 2
    assert "nothing to stop: the run is over (stopped: " in over.stderr
    # It can go on by a new submission.
    program = runs.heat_program(160, 0.02)
    program[-1] = str(run.final)
    again_at = runs.transom("submit", "--json", "--site", "lab", *TWO, "--run-dir", str(run.path), "--", *program)
    follow(run, json.loads(again_at.stdout)["job_id"])
    assert run.wait_entry("end", 3, 60).facts["ending"] == "ended well"
    assert identical(run.field(), unhurt(160, 2))


def test_a_job_that_waits_is_stopped(runs: Runs) -> None:
    blocker = runs.heat("--nodes", "5", steps=5000)
    blocker.wait_entry("running")
    (runs.folder / "full.toml").write_text('partition = "main"\nsbatch = { exclusive = true }\n')
    argv = ["submit", "--json", "--site", "full.toml", "--nodes", "5", "--run-dir", "waits", "--", "true"]
    facts = json.loads(runs.transom(*argv).stdout)
    answer = runs.transom("stop", facts["run_dir"])
    assert f"job {facts['job_id']} is cancelled: stopped by a person while it waited" in answer.stdout
    status = json.loads(runs.transom("status", "--json", facts["run_dir"], check=False).stdout)
    assert status["phase"] == "stopped"
    # The request is a file: where Slurm's programs are not there, the launcher hears of it all the same.
    argv = ["env", "PATH=/nowhere", *PYTHON, "-m", "transom_hpc", "stop", "--no-wait", str(blocker.path)]
    assert "is not known" in runs.lab.run("login", argv, cwd=runs.folder, timeout=60).stdout
    blocker.wait_end("stopped")
    missing = runs.transom("stop", "424242", check=False)
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1


def test_a_job_that_may_not_be_requeued_is_followed_by_another(
    runs: Runs, unhurt: Callable[..., Any], identical: Callable[..., bool]
) -> None:
    site = (Path(HEAT).parents[1] / "site_configs" / "lab.toml").read_text()
    (runs.folder / "once.toml").write_text(f"{site}\n[sbatch]\nno-requeue = true\n")
    run = runs.heat("--site", "once.toml", *TWO, "--exclude", "n5", steps=160, sleep=0.03)
    run.wait_saved(20)
    answer = runs.transom("requeue", str(run.path))
    other = run.wait_entry("follow-up").facts["job_id"]
    assert f"job {run.job_id} may not be requeued: job {other} goes on" in answer.stdout
    assert RunDir(run.path).submitted().job_id == other
    follow(run, other)
    assert run.slurm()["ExcNodeList"] == "n5"
    again = run.wait_entry("start", 2, 40)
    assert (again.facts["job_id"], again.facts["ended_by"]) == (int(other), "requeued by a person")
    status = json.loads(runs.transom("status", "--json", str(run.path)).stdout)
    assert status["job_id"] == other
    run.wait_end()
    assert identical(run.field(), unhurt(160, 2))


def test_a_batch_script_with_arguments_is_followed_too(
    runs: Runs, unhurt: Callable[..., Any], identical: Callable[..., bool]
) -> None:
    """What sbatch's command line said goes over to the new job: nodes, tasks, time, output, and each argument."""
    script = shutil.copy(TEMPLATE, runs.folder / "my train.sbatch")
    shutil.copy(HEAT, runs.folder / "heat mpi.py")
    program = [*PYTHON, "heat mpi.py", *runs.heat_program(160, 0.03)[2:]]
    environment = {"TRANSOM_SITE": "lab", "TRANSOM_SAVE_EVERY": "20", "TRANSOM_SPARES": "0"}
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    options = ["--no-requeue", "-N2", "--time=30", "--output=out-%j.log", "--exclude=n5"]
    argv = ["sbatch", "--parsable", *options, str(script), *program]
    job_id = runs.lab.run("login", argv, cwd=runs.folder, env=environment).stdout.strip()
    final = runs.folder / f"final{runs.count + 1}.npy"
    run = Submitted(runs.lab, runs.folder / "transom-runs" / job_id, int(job_id), final)
    run.wait("its journal", lambda: (run.path / "spec.json").exists(), 30)
    run.wait_saved(20)
    runs.transom("requeue", str(run.path))
    other = run.wait_entry("follow-up").facts["job_id"]
    follow(run, other)
    facts = run.slurm()
    assert (facts["NumNodes"][0], facts["TimeLimit"], facts["ExcNodeList"]) == ("2", "00:30:00", "n5")
    assert facts["StdOut"] == str(runs.folder / f"out-{other}.log")
    run.wait_end()
    assert identical(run.field(), unhurt(160, 2))
    assert [path.name for path in run.path.parent.iterdir()] == [job_id], "no second run directory"


def test_preempted(runs: Runs) -> None:
    run = runs.heat("--nodes", "5", "--cpus-per-task", "4", "--save-every", "20", steps=5000, sleep=0.05)
    run.wait_saved(20)
    runs.lab.run("login", ["sbatch", "-N1", "--partition=urgent", "--output=/dev/null", "--wrap", "sleep 1"])
    run.wait_entry("end", 1, 30)
    run.release()
    assert run.wait_entry("start", 2).facts["ended_by"] == "preempted"
    runs.transom("stop", "--no-wait", str(run.path))
    run.wait_end("stopped")


@pytest.mark.soak
def test_requeued_by_scontrol(runs: Runs) -> None:
    run = runs.heat(*TWO, steps=5000, sleep=0.05)
    run.wait_saved(20)
    runs.lab.run("login", ["scontrol", "requeue", str(run.job_id)])
    run.wait_entry("end", 1, 30)
    run.release()
    assert run.wait_entry("start", 2).facts["ended_by"] == "requeued by a person"
    runs.transom("stop", "--no-wait", str(run.path))
    run.wait_end("stopped")
