"""Runs that go astray once, and from what they save then, go on from before: on a real Slurm, as an ordinary user."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest

from . import astray
from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(200)]

STEPS = 150


def submit(runs: Runs, how: str, *options: str) -> Submitted:
    program = [sys.executable, str(Path(astray.__file__)), how, str(STEPS), str(runs.folder)]
    return runs.submit("--nodes", "2", "--save-every", "10", *options, program=program)


def final(runs: Runs) -> numpy.ndarray:
    found: numpy.ndarray = numpy.load(runs.folder / "final.npy")
    return found


def test_a_flipped_bit_that_makes_everything_nan(runs: Runs) -> None:
    run = submit(runs, "nan")
    run.wait_end()
    assert same_bits(final(runs), astray.trained(STEPS)), run.story()
    (restart,) = run.entries("restart")
    assert restart.facts["cause"] == "diverged", run.story()
    assert "NaN or infinite since step 61" in restart.facts["evidence"]
    (distrust,) = run.entries("distrust")
    assert (distrust.facts["below"], distrust.facts["upto"]) == (60, "A0001-L01"), "its loss was still good"
    assert [entry.facts["step"] for entry in run.entries("restored")] == [0, 50], run.story()


@pytest.mark.soak
def test_a_checkpoint_that_kills_every_start_from_it(runs: Runs) -> None:
    run = submit(runs, "poison")
    run.wait_end()
    assert same_bits(final(runs), astray.trained(STEPS)), run.story()
    assert [entry.facts["cause"] for entry in run.entries("restart")] == ["program error"] * 3, run.story()
    (distrust,) = run.entries("distrust")
    assert (distrust.facts["below"], distrust.facts["upto"]) == (60, "A0001-L03"), run.story()
    assert [entry.facts["step"] for entry in run.entries("restored")] == [0, 60, 60, 50], run.story()
