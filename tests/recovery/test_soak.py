"""Random faults at random moments, many seeds: run by scripts/soak, not by scripts/test."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy
import pytest

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(600)]

STEPS = 500
FAULTS = ("crash", "freeze", "cut", "kill a rank", "stop a rank", "kill a sidecar", "requeue")


def hurt(runs: Runs, run: Submitted, fault: str, host: str) -> None:
    """Let one thing happen to the run."""
    if fault in ("crash", "freeze", "cut"):
        getattr(runs.lab, fault)(host)
    elif fault == "requeue":
        runs.lab.run("login", ["scontrol", "requeue", str(run.job_id)], check=False)
    else:
        signal = "-STOP" if fault == "stop a rank" else "-KILL"
        what = "transom_hpc.tol.sidecar" if fault == "kill a sidecar" else "heat_mpi.py --steps"
        runs.lab.run(host, ["pkill", signal, "-f", what], check=False)


@pytest.mark.parametrize("seed", range(20))
def test_random_faults(runs: Runs, unhurt: Callable[..., numpy.ndarray], seed: int) -> None:
    chance = random.Random(seed)
    # All but the first host may be lost; two spares, and a requeue finds at least three healthy hosts.
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", "--hang-after", "8", steps=STEPS)
    done: list[str] = []
    well = {"n2", "n3", "n4", "n5"}
    for _ in range(chance.randint(1, 3)):
        saved = 20 * chance.randint(1, STEPS // 40)
        run.wait("the next moment", lambda s=saved: over(run) or let_start(run) or saved_step(run) >= s, 200)
        time.sleep(chance.random() * 2)
        fault = chance.choice(FAULTS if len(well) > 2 else FAULTS[3:])
        host = chance.choice(sorted(well))
        if fault in FAULTS[:3]:
            well.discard(host)
        if over(run):
            break
        done.append(f"{fault} on {host} at step {saved_step(run)}")
        hurt(runs, run, fault, host)
    print(f"seed {seed}: {', '.join(done)}")
    run.wait("the end", lambda: over(run) or let_start(run), 300)
    run.wait_end()
    assert same_bits(run.field(), unhurt(STEPS, 3)), f"{done}\n{run.story()}"


def over(run: Submitted) -> bool:
    """Whether the run has come to an end of its own."""
    return any(entry.facts["ending"] != "left" for entry in run.entries("end"))


def saved_step(run: Submitted) -> int:
    """The newest committed step."""
    return max((int(path.name[5:]) for path in (run.path / "checkpoints").glob("step-*")), default=0)


def let_start(run: Submitted) -> None:
    """Where Slurm holds the requeued job, let it go."""
    if run.slurm()["JobState"] == "PENDING":
        run.lab.run("login", ["scontrol", "update", f"jobid={run.job_id}", "StartTime=now"], check=False)
