"""Checkpoints that are whole and not to be restored: neither from files, nor from memory, nor for any rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from transom_hpc.base.errors import CorruptCheckpoint, UsageError
from transom_hpc.ckpt import Checkpointer, list_checkpoints, verify
from transom_hpc.ckpt.distrust import Distrust
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.housekeeping import aside
from transom_hpc.ckpt.retention import Keep, superfluous
from transom_hpc.ckpt.roster import Roster
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.slots import read_left

pytestmark = pytest.mark.timeout(120)

L1, L2, L3 = "A0001-L01", "A0001-L02", "A0001-L03"


# ---------------------------------------------------------------------- what is meant


@pytest.mark.parametrize(
    ("step", "attempt", "covered"),
    [
        (120, L2, True),
        (120, L1, True),
        (500, L2, True),
        (119, L2, False),
        (120, L3, False),  # saved anew since
        (120, "A0002-L01", False),
        (120, "T20260101T000000.000000", True),  # of another family: it was there before the launcher's attempts
    ],
)
def test_what_it_covers(step: int, attempt: str, covered: bool) -> None:
    assert Distrust.parse(f"120@{L2}").covers(step, attempt) == covered


def test_without_a_word_everything_is_trusted() -> None:
    assert not Distrust.parse("").covers(10**9, L1)


@pytest.mark.parametrize("text", ["120", "@A0001-L01", "120@", "x@A0001-L01", "-1@A0001-L01", "120@a b"])
def test_what_is_no_distrust(text: str, directory: Path) -> None:
    with pytest.raises(UsageError):
        Distrust.parse(text)
    with pytest.raises(UsageError):
        Checkpointer(directory, distrust=text)


def test_servers_are_told_by_their_roster() -> None:
    facts = '"attempt":"A1","serving":["a"],"spares":[],"per_host":1,"switches":{},"copies":1,"distance":1'
    assert Roster.parse(f'{{{facts},"distrust":"120@{L2}"}}').distrust == Distrust(120, L2)
    assert Roster.parse(f"{{{facts}}}").distrust == Distrust()


# ---------------------------------------------------------------------- files


def test_files_of_several_ranks_are_passed_over_and_training_is_bitwise_that_of_a_run_left_alone(
    ranks: Any, directory: Path, tmp_path: Path
) -> None:
    whole = ranks("ddp", 2, L1, directory=tmp_path / "other", total=7, patient=True)
    assert ranks("ddp", 2, L1, directory=directory, total=6, patient=True).codes == [0, 0]
    assert [found.step for found in list_checkpoints(directory)] == [2, 4, 6]
    again = ranks("ddp", 2, L2, directory=directory, total=5, patient=True, distrust=f"4@{L1}")
    assert again.codes == [0, 0], again.errors
    assert [said["start"] for said in again.said] == [2, 2]
    assert again.said[0]["last"] == 4, "what is aside is not the newest that is committed"
    assert [(step, path.name) for step, path in aside(directory, Files())] == [
        (4, f".distrusted-step-000000004.{L2}"),
        (6, f".distrusted-step-000000006.{L2}"),
    ]
    assert "step 6 of A0001-L01 is not trusted" in again.errors[0]
    assert "was put aside as" in again.errors[0]
    assert "put aside" not in again.errors[1], "rank 0 does it"
    assert {found.step: found.manifest.attempt for found in list_checkpoints(directory)} == {2: L1, 4: L2}
    last = ranks("ddp", 2, L3, directory=directory, total=7, patient=True, distrust=f"4@{L1}")
    assert [said["start"] for said in last.said] == [4, 4], "the same step, saved anew"
    for said in last.said:
        assert said["digests"]["7"] == whole.said[0]["digests"]["7"]
    assert aside(directory, Files()) == [(6, directory / f".distrusted-step-000000006.{L2}")]


def test_put_aside_until_a_later_step_is_committed(directory: Path) -> None:
    with Checkpointer(directory, attempt=L1, every=1, keep=9) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"x": torch.full((5,), float(step))}, block=True)
    state = {"x": torch.zeros(5)}
    with Checkpointer(directory, attempt=L2, distrust=f"2@{L1}", every=1) as ckpt:
        assert ckpt.last_committed == 3
        assert ckpt.restore(state) == 1
        assert ckpt.last_committed == 1
        for step, left in ((2, [2, 3]), (3, [3]), (4, [])):
            ckpt.save(step, state, block=True)
            ckpt._saver.idle()
            assert [step for step, _ in aside(directory, Files())] == left
        assert torch.equal(state["x"], torch.ones(5))
    assert all(verify(found.path) == [] for found in list_checkpoints(directory))


def test_a_damaged_one_below_is_put_aside_as_ever(directory: Path) -> None:
    with Checkpointer(directory, attempt=L1, every=1, keep=9) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, {"x": torch.full((5,), float(step))}, block=True)
    (directory / "step-000000002" / "manifest.json").write_bytes(b"{}")
    with Checkpointer(directory, attempt=L2, distrust=f"3@{L1}", every=1) as ckpt:
        assert ckpt.restore({"x": torch.zeros(5)}) == 1
    assert [path.name for _, path in aside(directory, Files())] == [
        f".damaged-step-000000002.{L2}",
        f".distrusted-step-000000003.{L2}",
    ]


@pytest.mark.parametrize(("every", "begins"), [(10, True), (9, False), ("auto", False)])
def test_where_nothing_trusted_is_left_a_run_begins_anew_only_if_that_costs_no_more_than_a_crash(
    directory: Path, every: Any, begins: bool
) -> None:
    with Checkpointer(directory, attempt=L1) as ckpt:
        ckpt.save(10, {"x": torch.ones(5)}, block=True)
    state = {"x": torch.zeros(5)}
    with Checkpointer(directory, attempt=L2, distrust=f"10@{L1}", every=every) as ckpt:
        if begins:
            assert ckpt.restore(state) == 0
        else:
            with pytest.raises(CorruptCheckpoint, match="distrust=''.* to go on from the newest"):
                ckpt.restore(state)
    assert torch.equal(state["x"], torch.zeros(5))
    assert [found.step for found in list_checkpoints(directory)] == ([] if begins else [10])
    with Checkpointer(directory, attempt=L3, distrust="", every=every) as ckpt:
        assert ckpt.restore(state) == (0 if begins else 10), "as is said: a person may trust it all the same"


def test_all_ranks_hear_that_nothing_is_left(ranks: Any, directory: Path) -> None:
    assert ranks("ddp", 2, L1, directory=directory, total=2).codes == [0, 0]
    done = ranks("ddp", 2, L2, directory=directory, total=4, distrust=f"2@{L1}", every=1, deadline_s=20)
    assert all(code != 0 for code in done.codes)
    assert all("no checkpoint is left that is trusted" in error for error in done.errors)


# ---------------------------------------------------------------------- memory


def steps_in(staging: Path) -> set[tuple[str, int]]:
    """Rank and step of each whole segment."""
    found = (read_left(Segment(path, Files())) for path in sorted(staging.glob("*-rank-*")))
    return {(left.segment.path.name.partition("-rank-")[2][:5], left.step) for left in found if left is not None}


@pytest.mark.parametrize(
    ("distrust", "start", "source"),
    [
        (None, 4, "memory:A1"),
        ("4@A1", 2, "memory:A1"),
        ("2@A1", 0, ""),
        ("5@A1", 4, "memory:A1"),
        ("4@A0", 4, "memory:A1"),
    ],
)
def test_memory_of_several_ranks(ranks: Any, directory: Path, distrust: str | None, start: int, source: str) -> None:
    """Step 2 is in a file and in memory, step 4 in memory only."""
    assert ranks("dies", 3, "A1", directory=directory).codes == [-9] * 3
    done = ranks("lives", 3, "A2", directory=directory, distrust=distrust)
    assert done.codes == [0] * 3, done.errors
    assert all(said["right"] for said in done.said)
    assert {(said["start"], said["source"]) for said in done.said} == {(start, source)}


def test_memory_of_another_number_of_ranks(directory: Path, staging: Path) -> None:
    """A rank then looks at what all ranks of the host have left."""
    before = [Checkpointer(directory, rank, 2, attempt="A1", shm=staging, deadline_s=20.0) for rank in (0, 1)]
    for step in (2, 4):
        state = {"x": torch.full((5000,), float(step)), "n": step}
        saves = [threading.Thread(target=ckpt.save, args=(step, state, True)) for ckpt in before]
        for save in saves:
            save.start()
        for save in saves:
            save.join()
    assert steps_in(staging) == {("00000", 2), ("00001", 2), ("00000", 4), ("00001", 4)}
    found = {"x": torch.zeros(5000), "n": 0}
    with Checkpointer(directory, attempt="A2", shm=staging, distrust="4@A1") as ckpt:
        assert ckpt.restore(found) == 2
        assert ckpt.restored is not None
        assert ckpt.restored.source == "memory:A1"
        assert torch.equal(found["x"], torch.full((5000,), 2.0))
        assert steps_in(staging) == {("00000", 2)}, "ranks that there are no more have left nothing either"
    for ckpt in before:
        ckpt.close()


def test_memory_is_given_up_and_found_by_nobody_later(ranks: Any, directory: Path, staging: Path) -> None:
    assert ranks("dies", 1, "A1", directory=directory).codes == [-9]
    assert steps_in(staging) == {("00000", 2), ("00000", 4)}
    died = ranks("lives", 1, "A2", directory=directory, distrust="4@A1", die=True)
    assert died.codes == [-9], died.errors
    assert steps_in(staging) == {("00000", 2)}
    later = ranks("lives", 1, "A3", directory=directory)  # with no word of what was not trusted
    assert later.said[0]["start"] == 2


# ---------------------------------------------------------------------- what is kept


def test_checkpoints_saved_with_a_loss_that_is_not_finite_push_none_out_that_are_sound() -> None:
    nan = float("nan")
    losses = {1: 3.0, 2: 2.0, 3: 1.0, 4: nan, 5: float("inf"), 6: nan, 7: nan}
    metrics = {step: {"loss": loss} for step, loss in losses.items()}
    assert superfluous(list(losses), metrics, Keep(last=2)) == (1, 4, 5)
    assert superfluous([1, 2, 3], metrics, Keep(last=2)) == (1,)
    assert superfluous(list(losses), {}, Keep(last=2)) == (1, 2, 3, 4, 5)


def test_nan_checkpoints_on_disk(directory: Path) -> None:
    with Checkpointer(directory, attempt=L1, keep=1) as ckpt:
        for step, loss in ((1, 2.0), (2, 1.0), (3, float("nan")), (4, float("nan"))):
            ckpt.save(step, {"x": loss}, block=True, metrics={"loss": loss})
            ckpt._saver.idle()
    assert [found.step for found in list_checkpoints(directory)] == [2, 4]
