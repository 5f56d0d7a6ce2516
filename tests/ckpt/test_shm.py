"""Segments: what they say about themselves, and whose they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.shm import Folder, Segment, reclaim


def made(folder: Path, name: str = "a") -> Segment:
    segment = Segment(folder / name, Files())
    segment.reserve(100_000)
    segment.array(0, 4)[:] = [1, 2, 3, 4]
    segment.declare_whole(7, "A1", 50_000, b"{}")
    return segment


def opened(path: Path) -> Segment:
    segment = Segment(path, Files())
    segment.open()
    return segment


def test_a_whole_segment_outlives_its_program(staging: Path) -> None:
    made(staging)
    again = opened(staging / "a")
    header = again.header()
    assert header is not None
    assert (header.step, header.attempt, header.table) == (7, "A1", b"{}")
    assert bytes(again.data(0, 4)) == b"\1\2\3\4"
    assert (staging / "a").stat().st_mode & 0o777 == 0o600
    (staging / "a").unlink()


def test_a_segment_in_work_is_not_whole(staging: Path) -> None:
    segment = made(staging)
    segment.forget()
    assert opened(staging / "a").header() is None
    (staging / "a").unlink()


@pytest.mark.parametrize("offset", [0, 9, 20, 30, 50, 100, 150, 160, 4096 + 53_248])
def test_a_changed_header_or_table_is_not_trusted(staging: Path, offset: int) -> None:
    made(staging)
    with (staging / "a").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    assert opened(staging / "a").header() is None
    (staging / "a").unlink()


def test_no_room_is_an_error_not_a_signal(staging: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        Segment(staging / "a", Files()).reserve(1 << 50)
    (staging / "a").unlink()


def test_a_link_is_not_followed(staging: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x")
    (staging / "a").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        Segment(staging / "a", Files()).reserve(100)
    (staging / "a").unlink()


def test_only_dead_folders_of_ours_are_reclaimed(tmp_path: Path) -> None:
    me = os.getuid()
    live = Folder(tmp_path / f"transom-{me}-live", True, Files())
    live.open()
    dead = Folder(tmp_path / f"transom-{me}-dead", True, Files())
    dead.open()
    assert dead._lock is not None
    os.close(dead._lock)
    mine = tmp_path / f"transom-{me}-mine"
    mine.mkdir()
    (mine / ".lives").touch()
    (tmp_path / f"transom-{me + 1}-other").mkdir()
    (tmp_path / f"transom-{me + 1}-other" / ".lives").touch()
    assert reclaim(mine, Files(), tmp_path) == [tmp_path / f"transom-{me}-dead"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [f"transom-{me}-live", f"transom-{me}-mine", f"transom-{me + 1}-other"]
    )
    live.close()
    assert not live.path.exists()
