"""The heat equation under MPI: right, the same on any number of ranks, and the same whatever happens on the way."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine (scripts/setup)"),
]

SIZE = 41  # three ranks get 14, 14 and 13 rows
STEPS = 120


def reference() -> np.ndarray:
    """The plate after STEPS, computed in one piece."""
    plate = np.zeros((SIZE, SIZE))
    plate[:, 0], plate[0] = 0.5, 1.0
    for _ in range(STEPS):
        around = plate[:-2, 1:-1] + plate[2:, 1:-1]
        around = around + plate[1:-1, :-2] + plate[1:-1, 2:]
        plate[1:-1, 1:-1] += 0.2 * (around - 4.0 * plate[1:-1, 1:-1])
    return plate


def options(final: Path, sleep_s: float) -> list[str]:
    return ["--size", str(SIZE), "--steps", str(STEPS), "--final", str(final), "--sleep", str(sleep_s)]


@pytest.mark.parametrize("ranks", [2, 5])
def test_field_is_that_of_one_piece(ranks: int, new_job: Callable[[int], Any], tmp_path: Path) -> None:
    launch = new_job(ranks).mpi("heat_mpi.py", *options(tmp_path / "field.npy", 0.0))
    assert launch.wait() == {0}, launch.output
    np.testing.assert_allclose(np.load(tmp_path / "field.npy"), reference(), rtol=1e-12)


def test_killed_and_stopped_it_ends_bitwise_the_same(new_job: Callable[[int], Any], tmp_path: Path) -> None:
    undisturbed = new_job(3).mpi("heat_mpi.py", *options(tmp_path / "undisturbed.npy", 0.0))
    assert undisturbed.wait() == {0}, undisturbed.output

    job = new_job(3)
    disturbed = options(tmp_path / "disturbed.npy", 0.03)
    first = job.mpi("heat_mpi.py", *disturbed)
    first.until_saved(15)
    first.kill_ranks()
    assert 0 not in first.wait()

    second = job.mpi("heat_mpi.py", *disturbed)
    resumed = int(re.search(r"from step (\d+)", _until(second, "from step")).group(1))  # type: ignore[union-attr]
    assert resumed >= 15
    assert resumed % 5 == 0
    second.until_step(resumed + 8)
    job.ask_to_stop()
    assert second.wait() == {75}, second.output
    saved = re.search(r"saved step (\d+) and left", second.output)
    assert saved, second.output
    assert {(beat.step, beat.phase) for beat in second.beats()} == {(int(saved[1]) - 1, "stopping")}

    last = job.mpi("heat_mpi.py", *options(tmp_path / "disturbed.npy", 0.0))
    assert last.wait() == {0}, last.output
    assert f"from step {saved[1]}\n" in last.output
    assert (tmp_path / "disturbed.npy").read_bytes() == (tmp_path / "undisturbed.npy").read_bytes()


def test_without_a_job_and_on_another_number_of_ranks(tmp_path: Path) -> None:
    """As the first lines of the example say: mpirun and a folder, started three times."""

    def run(ranks: int, folder: str, steps: int, start: int) -> bytes:
        command = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", str(ranks), sys.executable]
        command += [str(Path(__file__).parents[2] / "examples/heat_mpi.py"), "--size", "16", "--save-every", "10"]
        command += ["--checkpoints", str(tmp_path / folder), "--final", str(tmp_path / "field.npy")]
        done = subprocess.run(
            [*command, "--steps", str(steps)], capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"from step {start}\n" in done.stdout
        return (tmp_path / "field.npy").read_bytes()

    whole = run(2, "whole", 30, 0)
    run(2, "heat", 10, 0)
    run(3, "heat", 20, 10)
    assert run(1, "heat", 30, 20) == whole


def _until(launch: Any, words: str) -> str:
    launch.until_step(1)
    assert words in launch.output
    return str(launch.output)
