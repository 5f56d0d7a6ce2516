"""Attempts: names, their order, whose a folder is."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from pathlib import Path

import pytest

from transom_hpc.base.errors import CheckpointError, SaveError, UsageError
from transom_hpc.ckpt.fence import Fence, attempt_of, check_name, choose, fresh, from_environment, is_before
from transom_hpc.ckpt.files import Files

NOW = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc)


def test_names_from_slurm_sort_within_a_job() -> None:
    slurm = {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}
    first = from_environment(slurm)
    assert first == "J000000000099-R0002-S000000"
    assert is_before(first, from_environment({**slurm, "SLURM_STEP_ID": "1"}) or "")
    assert not is_before(first, from_environment({**slurm, "SLURM_RESTART_COUNT": ""}) or "")
    assert from_environment({"SLURM_JOB_ID": "99"}) is None, "a batch script, no step"
    elsewhere = from_environment({**slurm, "SLURM_CLUSTER_NAME": "blue gene"}) or ""
    assert elsewhere == "J000000000099+blue_gene-R0002-S000000"
    check_name(elsewhere)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("J000000000100-R0000-S000000", "J000000000099-R0000-S000000"),  # it had to wait longer; or the numbers wrapped
        ("J000000000099+a-R0001-S000000", "J000000000099+b-R0000-S000000"),
        ("T20260102T030405.000678", "A0001-L01"),  # tried by hand, then submitted
        ("A0001-L01", "T20260102T030405.000678"),
        ("A1767000000-L01", "A0001-L01"),  # on this machine, then on the cluster
        ("zzz", "J000000000099-R0000-S000000"),
    ],
)
def test_between_families_the_newcomer_is_the_newer(tmp_path: Path, old: str, new: str) -> None:
    assert is_before(old, new)
    Fence(tmp_path, old, Files()).announce()
    Fence(tmp_path, new, Files()).announce()
    assert Fence(tmp_path, "", Files()).newest()[0] == new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A1", "A2"),
        ("A0001-L09", "A0002-L01"),
        ("J000000000099-R0000-S000003", "J000000000099-R0001-S000000"),
        ("T20260102T030405.000678", "T20260102T030405.000679"),
    ],
)
def test_within_a_family_the_text_decides(old: str, new: str) -> None:
    assert is_before(old, new)
    assert not is_before(new, old)
    assert not is_before(new, new)


def test_a_fresh_name_is_always_a_later_one() -> None:
    for newest in ("", "A0002-L03", "T20990101T000000.000000", "zzz", "~" * 40):
        for _ in range(3):
            name = fresh(newest, NOW)
            check_name(name)
            assert is_before(newest, name)
            newest = name


def test_who_has_a_name_already() -> None:
    assert choose("A1", 2, {}) == "A1"
    assert choose(None, 1, {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0"}) is None
    assert choose(None, 2, {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0"}) == "J000000000099-R0000-S000000"
    assert choose(None, 2, {}) is None
    with pytest.raises(UsageError, match="63 letters"):
        choose("a/b", 2, {})


def test_a_name_that_an_earlier_start_had_is_refused(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        Fence(tmp_path, "A1", Files()).announce()
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(CheckpointError, match="A1 of .* was used before, by .*another attempt="):
        Fence(tmp_path, "A1", Files()).announce()
    Fence(tmp_path, "A2", Files()).announce()
    Fence(tmp_path, "A2", Files()).announce()  # the same program makes another Checkpointer


def test_whose_a_folder_is() -> None:
    assert attempt_of(".step-000000002.A0001-L02.7") == "A0001-L02"
    assert attempt_of(".restore.T2026.5.0") == "T2026.5"
    assert attempt_of(".trash-step-000000002.A1.7") == "A1"
    for name in (".attempt", "step-000000002", ".damaged-step-000000002.A1", ".step-x.A.1"):
        assert attempt_of(name) is None


def test_the_newer_wins(tmp_path: Path) -> None:
    old, new = Fence(tmp_path, "A1", Files()), Fence(tmp_path, "A2", Files())
    old.announce()
    old.check()
    new.announce()
    new.check()
    with pytest.raises(SaveError, match="A1 may not write .*A2"):
        old.check()
    with pytest.raises(CheckpointError, match="newer than A1"):
        old.announce()


def test_a_file_that_cannot_be_read_is_no_permission(tmp_path: Path) -> None:
    (tmp_path / ".attempt").write_text("{")
    with pytest.raises(CheckpointError, match="can't be read"):
        Fence(tmp_path, "A1", Files()).check()
