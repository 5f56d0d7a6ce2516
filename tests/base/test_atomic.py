import os
from pathlib import Path

import pytest

from transom_hpc.base import atomic


def test_a_file_is_written_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    target = tmp_path / "spec.json"
    atomic.write_bytes(target, b"old")
    atomic.write_bytes(target, b"x" * 3_000_000)
    assert target.read_bytes() == b"x" * 3_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    target = tmp_path / "spec.json"
    atomic.write_bytes(target, b"old")

    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space"):
        atomic.write_bytes(target, b"new")
    monkeypatch.undo()
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["spec.json"]


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    atomic.write_bytes(tmp_path / "f", bytes(range(100)))
    assert (tmp_path / "f").read_bytes() == bytes(range(100))


def test_order_is_file_then_name_then_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        done.append("fsync " + ("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"))  # noqa: PTH112
        fsync(fd)

    def note_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    atomic.write_bytes(tmp_path / "f", b"x")
    assert done == ["fsync file", "rename", "fsync folder"]


def test_a_folder_never_replaces_one_that_has_content(tmp_path: Path) -> None:
    (tmp_path / "step-1.tmp").mkdir()
    (tmp_path / "step-1.tmp" / "manifest.json").write_text("new")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "manifest.json").write_text("old")
    with pytest.raises(OSError, match="not empty"):
        atomic.rename_dir(tmp_path / "step-1.tmp", tmp_path / "step-1")
    assert (tmp_path / "step-1" / "manifest.json").read_text() == "old"
    atomic.rename_dir(tmp_path / "step-1.tmp", tmp_path / "step-2")
    assert (tmp_path / "step-2" / "manifest.json").read_text() == "new"
