"""Attempts: names, their order, whose a folder is."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from transom_hpc.base.errors import CheckpointError, SaveError, UsageError
from transom_hpc.ckpt.fence import Fence, attempt_of, choose, from_environment
from transom_hpc.ckpt.files import Files

NOW = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=timezone.utc)


def test_names_from_launchers_sort_in_time() -> None:
    slurm = {"SLURM_JOB_ID": "99", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "2"}
    first = from_environment(slurm)
    assert first == "J000000000099-R0002-S000000"
    assert first < (from_environment({**slurm, "SLURM_JOB_ID": "100", "SLURM_RESTART_COUNT": ""}) or "")
    assert first < (from_environment({**slurm, "SLURM_STEP_ID": "1"}) or "")
    assert from_environment({"TORCHELASTIC_RUN_ID": "a/b", "TORCHELASTIC_RESTART_COUNT": "1"}) == "Ea_b-R0001"
    assert from_environment({"SLURM_JOB_ID": "99"}) is None, "a batch script, no step"


def test_one_rank_alone_always_gets_a_later_name() -> None:
    for newest in ("", "A0002-L03", "T20990101T000000.000000", "zzz", "~" * 40):
        assert choose(None, 1, {}, newest, NOW) > newest


def test_several_ranks_need_a_common_name() -> None:
    with pytest.raises(UsageError, match="pass attempt="):
        choose(None, 2, {}, "", NOW)
    assert choose("A1", 2, {}, "", NOW) == "A1"


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
