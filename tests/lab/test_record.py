"""The record and the lock of a lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import record
from transom_hpc.lab.record import Record


@pytest.mark.parametrize("name", ["", "Lab", "1lab", "a/b", "..", "a" * 33, "a b", "lab\n"])
def test_names_that_can_not_be_part_of_a_path_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        record.check_name(name)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    facts = Record("x", "processes", True, "b", "me", ("n1",), {"n1": "127.0.0.1"}, 30, "v", {"n1": 1}, False, ("no",))
    record.save(tmp_path, facts)
    assert record.load(tmp_path) == facts


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}', '{"nodes": 1, "notices": []}'])
def test_a_torn_record_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "lab.json").write_text(text)
    assert record.load(tmp_path) is None


def test_changes_take_turns(tmp_path: Path) -> None:
    with record.lock(tmp_path, 0), pytest.raises(LabError, match="busy"), record.lock(tmp_path, 0.1):
        pass
    with record.lock(tmp_path, 0):
        assert list(tmp_path.iterdir()) == []


def test_a_lab_that_is_gone_can_not_be_locked(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="gone"), record.lock(tmp_path / "x", 0):
        pass


def test_sockets_of_the_longest_name_fit_into_their_108_bytes() -> None:
    for root in (record.SYSTEM_ROOT, Path("/var/tmp/transom-lab-4294967294")):
        # The longest are those of slurmd's steps: the host, the job and the step in its spool folder.
        assert len(str(root / ("a" * 32) / "spool" / "n200" / "n200_4294967295.4294967295")) < 108
