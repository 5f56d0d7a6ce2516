"""The GPT under DistributedDataParallel: whatever happens on the way, the weights are those of an undisturbed run."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from os import kill
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parents[2] / "examples/train_gpt.py"
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "16", "--batch", "2", "--print-every", "1"]


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gpt = load_example()


def deal(count: int, batch: int, world_size: int, seed: int, steps: int, state: dict[str, int]) -> list[int]:
    """What all ranks together are dealt in so many steps, in the order of the steps."""
    ranks = [gpt.Windows(count, batch, rank, world_size, seed) for rank in range(world_size)]
    for rank in ranks:
        rank.load_state_dict(state)
    dealt = []
    for _ in range(steps):
        hands = [rank.next() for rank in ranks]
        dealt += [hand[turn] for turn in range(batch) for hand in hands]
    state |= ranks[0].state_dict()
    assert all(rank.state_dict() == state for rank in ranks)
    return dealt


@given(
    count=st.integers(1, 40),
    plan=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_each_window_once_an_epoch(count: int, plan: list[tuple[int, int, int]]) -> None:
    """Also when the run goes on with another number of ranks, or another batch, in the middle of an epoch."""
    state = {"taken": 0}
    dealt: list[int] = []
    for batch, world_size, steps in plan:
        dealt += deal(count, batch, world_size, 7, steps, state)
    for first in range(0, len(dealt) - count + 1, count):
        assert sorted(dealt[first : first + count]) == list(range(count))
    tail = dealt[len(dealt) // count * count :]
    assert len(set(tail)) == len(tail)


def test_epochs_differ() -> None:
    dealt = deal(50, 5, 2, 7, 10, {"taken": 0})
    assert dealt[:50] != dealt[50:]
    assert dealt[:50] != sorted(dealt[:50])


def test_text_is_the_same_each_time(tmp_path: Path) -> None:
    assert torch.equal(gpt.read_text(None), gpt.read_text(None))
    assert len(gpt.read_text(None)) > 1_000_000
    (tmp_path / "text").write_bytes(b"\x00\xffab")
    assert gpt.read_text(tmp_path / "text").tolist() == [0, 255, 97, 98]


def test_alone_without_a_job(tmp_path: Path) -> None:
    """As the first lines of the example say, in one go and in two."""

    def train(folder: str, steps: int) -> str:
        where = ["--checkpoints", str(tmp_path / folder), "--final", str(tmp_path / f"{folder}.pt")]
        command = [sys.executable, str(SCRIPT), *TINY, *where, "--steps", str(steps), "--save-every", "3"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "from step 0\n" in train("once", 6)
    train("twice", 3)
    assert "from step 3\n" in train("twice", 6)
    assert_same_weights(tmp_path / "once.pt", tmp_path / "twice.pt")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_stopped_and_signalled_it_ends_bitwise_the_same(new_job: Callable[[int], Any], tmp_path: Path) -> None:
    """Four ranks, since with three or more the order of additions shows in the last bits."""
    steps = 40
    options = [*TINY, "--steps", str(steps), "--final"]
    undisturbed = new_job(4).torch("train_gpt.py", *options, str(tmp_path / "undisturbed.pt"))
    assert undisturbed.wait() == {0}, undisturbed.output

    job = new_job(4)
    options.append(str(tmp_path / "disturbed.pt"))
    first = job.torch("train_gpt.py", *options, "--sleep", "0.1")
    first.until_saved(5)
    first.kill_ranks()
    assert first.wait() == {-signal.SIGKILL}

    second = job.torch("train_gpt.py", *options, "--sleep", "0.1")
    resumed = started_from(second)
    assert resumed >= 5
    assert resumed % 5 == 0
    second.until_step(resumed + 2)
    job.ask_to_stop()
    stopped = left_at(second)

    third = job.torch("train_gpt.py", *options, "--sleep", "0.1")
    assert started_from(third) == stopped
    one_of_them = third.until_step(stopped + 2)[2]
    kill(one_of_them.pid, signal.SIGUSR1)
    stopped = left_at(third)
    assert stopped < steps - 2

    last = job.torch("train_gpt.py", *options)
    assert last.wait() == {0}, last.output
    assert f"from step {stopped}\n" in last.output
    assert_same_weights(tmp_path / "undisturbed.pt", tmp_path / "disturbed.pt")


def started_from(launch: Any) -> int:
    launch.until_step(1)
    found = re.search(r"from step (\d+)\n", launch.output)
    assert found, launch.output
    return int(found[1])


def left_at(launch: Any) -> int:
    """The step at which all ranks left, each with exit status 75."""
    assert launch.wait() == {75}, launch.output
    found = re.findall(r"saved step (\d+) and left", launch.output)
    assert len(found) == 1, launch.output
    assert {(beat.step, beat.phase) for beat in launch.beats()} == {(int(found[0]) - 1, "stopping")}
    return int(found[0])


def assert_same_weights(left: Path, right: Path) -> None:
    a, b = torch.load(left), torch.load(right)
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert left.read_bytes() == right.read_bytes()  # so that `cmp` can tell, too
