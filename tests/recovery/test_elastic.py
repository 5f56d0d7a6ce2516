"""A program that can run on fewer hosts goes on with what is left, instead of waiting in the queue."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest

from .conftest import Runs, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.slow]


def test_a_host_crashed_without_a_spare(runs: Runs, unhurt: Callable[..., numpy.ndarray]) -> None:
    run = runs.heat("--nodes", "4", "--min-nodes", "3", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.crash("n3")
    run.wait_end()
    assert [entry.facts["hosts"] for entry in run.entries("launch")] == [["n1", "n2", "n3", "n4"], ["n1", "n2", "n4"]]
    assert run.entries("requeue") == []
    assert run.entries("restored")[-1].facts["step"] >= 40
    assert same_bits(run.field(), unhurt(150)), run.story()
