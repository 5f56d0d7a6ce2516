"""A fault at every file call of a save, a commit and a delete: what was committed stays, and the next save works."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import Checkpointer, SaveWarning, commit, list_checkpoints, staging, verify
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.commit import Job
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.meeting import FileMeeting
from transom_hpc.ckpt.state import Leaf
from transom_hpc.ckpt.writers import Writers

sys.path.insert(0, str(Path(__file__).parent))
from faulty import Faulty

pytestmark = pytest.mark.timeout(300)

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES)


def state_at(step: int) -> dict[str, Any]:
    return {"same": torch.arange(300_000.0) + step, "n": step}


def save(ckpt: Checkpointer, step: int) -> None:
    ckpt.save(step, state_at(step), block=True)
    ckpt._saver.idle()


def restored(directory: Path) -> int:
    """The step that a new start finds, whole and right, with nothing of the old one left beside it."""
    state = state_at(0)
    with Checkpointer(directory, keep=1) as ckpt:
        step = ckpt.restore(state)
    assert state["n"] == step
    assert torch.equal(state["same"], state_at(step)["same"])
    assert not [p.name for p in directory.iterdir() if p.name.startswith((".step", ".trash", ".restore"))]
    return step


def calls_of_a_save(directory: Path, before: Sequence[int]) -> list[str]:
    hand = Faulty(where=directory)
    with Checkpointer(directory, keep=1, files=hand) as ckpt:
        for step in before:
            save(ckpt, step)
        hand.calls.clear()
        save(ckpt, 4)
        return list(hand.calls)


def test_everything_is_on_disk_before_what_names_it(tmp_path: Path) -> None:
    calls = calls_of_a_save(tmp_path / "run", (2,))
    unfinished, temporary = ".manifest.json.tmp", next(c.split()[1] for c in calls if c.startswith("make_dir"))
    wanted = [
        "fsync data-00000.h5",
        f"open {unfinished}",
        f"pwrite {unfinished}",
        f"fsync {unfinished}",
        "rename manifest.json",
        f"fsync_dir {temporary}",
        "rename step-000000004",
        "fsync_dir run",
    ]
    assert [call for call in calls if call in wanted][-len(wanted) :] == wanted
    assert not [call for call in calls[calls.index(wanted[0]) :] if call == "pwrite data-00000.h5"]


@pytest.mark.parametrize(
    ("before", "how", "errors"),
    [((2,), "allocate", ERRORS), ((1, 2), "remove", (errno.EIO,))],
    ids=["anew", "files taken again"],
)
def test_an_error_at_every_call(tmp_path: Path, before: Sequence[int], how: str, errors: Sequence[int]) -> None:
    calls = calls_of_a_save(tmp_path / "clean", before)
    assert {c.split()[0] for c in calls} >= {"pwrite", "fsync", "rename", how, "open"}
    points = 0
    for at, call in enumerate(calls):
        for number in errors:
            points += 1
            directory = tmp_path / f"{at}-{number}"
            hand = Faulty(where=directory)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SaveWarning)
                with Checkpointer(directory, keep=1, files=hand) as ckpt:
                    for step in before:
                        save(ckpt, step)
                    hand.aim(at, number)
                    told = []
                    try:
                        save(ckpt, 4)
                    except SaveError as error:
                        told.append(str(error))
                    assert all("step 4" in message for message in told), call
                    assert [c.step for c in list_checkpoints(directory)][-1] in (2, 4), call
                    assert all(verify(c.path) == [] for c in list_checkpoints(directory)), call
                    save(ckpt, 6)
                    assert ckpt.last_committed == 6, call
            assert restored(directory) == 6, call
    assert points >= 20 * len(errors), points


@pytest.mark.soak  # test_syscalls does the same, one floor below
def test_killed_at_every_call(ranks: Any, tmp_path: Path) -> None:
    clean = ranks("faulty", 1, "A1", directory=tmp_path / "clean", total=4, keep=1)
    calls = clean.said[0]["calls4"]
    seen = set()
    for at, call in enumerate(calls):
        for fault in ("kill", "killed-after"):
            directory = tmp_path / f"{at}-{fault}"
            facts = {"directory": directory, "keep": 1}
            done = ranks("faulty", 1, "A1", total=6, rank=0, at=at, fault=fault, **facts)
            assert done.codes == [-9], (call, done.errors)
            assert all(verify(c.path) == [] for c in list_checkpoints(directory)), call
            again = ranks("faulty", 1, "A2", total=6, **facts)
            assert again.codes == [0], (call, again.errors)
            seen.add(again.said[0]["start"])
            assert again.said[0]["last"] == 6, call
            assert [p.name for p in directory.iterdir() if p.name[0] == "." and p.name != ".attempt"] == [], call
    assert seen == {2, 4}, "before the rename the old one is found, after it the new one"


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_fault_on_one_of_two_ranks(ranks: Any, tmp_path: Path, victim: int) -> None:
    clean = ranks("faulty", 2, "A1", directory=tmp_path / "clean", total=4, keep=1)
    assert clean.codes == [0, 0], clean.errors
    calls = clean.said[victim]["calls4"]
    assert len(calls) > 8
    for at, call in enumerate(calls):
        fault = (errno.EIO, "kill")[at % 2]
        directory = tmp_path / f"{at}"
        facts = {"directory": directory, "keep": 1}
        done = ranks("faulty", 2, "A1", total=4, rank=victim, at=at, fault=fault, deadline_s=0.7, **facts)
        if fault == "kill":
            assert done.codes[victim] == -9, call
        else:
            assert done.codes == [0, 0], (call, done.errors)
        assert all(verify(c.path) == [] for c in list_checkpoints(directory)), call
        again = ranks("faulty", 2, "A2", total=6, **facts)
        assert again.codes == [0, 0], (call, again.errors)
        starts = [said["start"] for said in again.said]
        assert starts[0] == starts[1] >= 2, call
        assert [said["last"] for said in again.said] == [6, 6], call


def test_a_fault_on_one_rank_is_told_to_the_others_at_once(ranks: Any, directory: Path) -> None:
    before = time.monotonic()
    done = ranks("faulty", 2, "A1", directory=directory, total=4, rank=1, at=5, fault=errno.EIO, deadline_s=60.0)
    assert time.monotonic() - before < 40
    assert done.codes == [0, 0], done.errors
    assert "rank 1 gave up" in done.said[0]["errors"][0]


def test_a_rank_that_hears_late_finds_the_step_committed(directory: Path) -> None:
    """Its own part is in the committed file already, so giving up would be wrong."""
    with Checkpointer(directory, attempt="A1") as ckpt:
        save(ckpt, 2)
    job = Job(directory, 2, 1, 1, 2, "A1", {}, 5.0)
    files, clock = Files(), SystemClock()
    FileMeeting(job.temporary, 0, 2, files, clock, 5.0, "x").give_up("fsync of the folder failed")
    source = staging.Straight([Leaf("tensors/x", b"1", "uint8", (1,), 1)], 2)
    fence = Fence(directory, "A1", files)
    assert commit.commit(job, source, Writers(files), Blanks(files), fence, files, clock) == 0


def test_short_writes(directory: Path) -> None:
    for at, call in enumerate(calls_of_a_save(directory / "clean", (2,))):
        if call.startswith("pwrite"):
            hand = Faulty(where=directory)
            with Checkpointer(directory / str(at), keep=1, files=hand) as ckpt:
                save(ckpt, 2)
                hand.aim(at, "short")
                save(ckpt, 4)
            assert restored(directory / str(at)) == 4


def test_policy_raise_reports_at_the_next_call(directory: Path) -> None:
    hand = Faulty(where=directory)
    ckpt = Checkpointer(directory, every=1, files=hand, on_save_error="raise")
    hand.aim(6, errno.ENOSPC)
    ckpt.step(1, state_at(1))
    ckpt._saver.idle()
    with pytest.raises(SaveError, match="step 1 was not saved.*No space left"):
        ckpt.step(2, state_at(2))
    ckpt.step(2, state_at(2))
    assert ckpt.wait()
    assert ckpt.last_committed == 2
    ckpt.close()


def test_policy_warn_goes_on(directory: Path) -> None:
    hand = Faulty(where=directory)
    with Checkpointer(directory, every=1, files=hand) as ckpt:
        hand.aim(6, errno.ENOSPC)
        ckpt.step(1, state_at(1))
        ckpt._saver.idle()
        with pytest.warns(SaveWarning, match="step 1 was not saved"):
            ckpt.step(2, state_at(2))
        assert ckpt.wait()


def test_what_failed_is_said_once(ranks: Any, directory: Path) -> None:
    """By the rank that has the reason and by rank 0, and not through the log as well."""
    done = ranks("warned", 4, "A1", directory=directory, rank=2, on_save_error="warn")
    assert done.codes == [0] * 4, done.errors
    assert [len(said) for said in done.said] == [1, 0, 1, 0], done.said
    assert "rank 2 gave up: OSError: [Errno 28] No space left" in done.said[0][0]
    assert "step 2 was not saved: [Errno 28] No space left" in done.said[2][0]
    assert "the figure loss='none' is no number" in done.errors[0]
    assert [error for error in done.errors[1:] if error] == []


END = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from worker import Faulty, Full
from transom_hpc.ckpt import Checkpointer
ckpt = Checkpointer(sys.argv[1], files={"full": Full, "fine": Faulty}[sys.argv[3]]())
ckpt.save(2, {"x": torch.ones(3)})
"""


@pytest.mark.parametrize("disk", ["full", "fine"])
def test_a_program_that_ends_in_its_first_save(directory: Path, disk: str) -> None:
    """The save is finished while the interpreter ends; where it fails, that is told, though nobody asks any more."""
    done = subprocess.run(
        [sys.executable, "-c", END, str(directory), str(Path(__file__).parent), disk],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert [c.step for c in list_checkpoints(directory)] == ([2] if disk == "fine" else [])
    told = "step 2 was not saved: [Errno 28] No space left on device"
    assert done.stderr.splitlines() == ([told] if disk == "full" else [])


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(directory: Path) -> None:
    class Full(Faulty):
        def free_bytes(self, path: Path) -> int:
            return 0 if path.name.startswith(".step") else super().free_bytes(path)

    with Checkpointer(directory, files=Full()) as ckpt, pytest.raises(SaveError, match=r"0\.00 GB left"):
        ckpt.save(1, state_at(1), block=True)
    assert not list(directory.glob(".step*"))
