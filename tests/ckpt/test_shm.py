"""Segments: what they say about themselves, and whose they are."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from transom_hpc.base.errors import CheckpointError
from transom_hpc.ckpt import Checkpointer
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.shm import Folder, Segment, default_path, reclaim


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


def name(kind: str, uid: int = -1) -> str:
    """A folder's name as default_path makes it."""
    return f"transom-{os.getuid() if uid < 0 else uid}-{default_path(Path('/' + kind)).name.rpartition('-')[2]}"


def test_only_dead_folders_of_ours_are_reclaimed(tmp_path: Path) -> None:
    live, dead = (Folder(tmp_path / name(kind), True, Files()) for kind in ("live", "dead"))
    live.open()
    dead.open()
    assert dead._lock is not None
    os.close(dead._lock)
    (tmp_path / name("killed early")).mkdir()  # before it could make its file
    (tmp_path / f"{name('killed late')}.gone-1-2").mkdir()  # while it was taken away
    other = os.getuid() + 1
    kept = [name("mine"), name("other", other), f"transom-{os.getuid()}-1234567", f"transom-{os.getuid()}-{'x' * 16}"]
    for left in kept:  # this program's; another user's; a launcher's, whose program is down just now; a stranger's
        (tmp_path / left).mkdir()
        (tmp_path / left / ".lives").touch()
    gone = reclaim(tmp_path / name("mine"), Files(), tmp_path)
    assert sorted(gone) == sorted([dead.path, tmp_path / name("killed early")])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name("live"), *kept])
    live.close()
    assert not live.path.exists()


def test_a_folder_of_another_user_with_our_name_is_not_touched(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root, to give a folder away")
    path = tmp_path / name("given")
    path.mkdir()
    (path / ".lives").touch()
    os.chown(path, 12345, 12345)
    assert reclaim(tmp_path / "mine", Files(), tmp_path) == []
    with pytest.raises(CheckpointError, match="not a private folder"):
        Folder(path, True, Files()).open()


def test_a_folder_that_is_taken_away_while_a_program_comes_in(tmp_path: Path) -> None:
    """A newcomer that waits for the lock of one who tidies up has its own folder afterwards."""
    path = tmp_path / name("raced")
    path.mkdir()
    fd = os.open(path / ".lives", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    newcomer = Folder(path, True, Files())
    thread = threading.Thread(target=newcomer.open)
    thread.start()
    time.sleep(0.2)
    shutil.rmtree(path)
    os.close(fd)
    thread.join(10)
    assert (path / ".lives").exists()
    assert reclaim(tmp_path / "mine", Files(), tmp_path) == [], "it is held"
    newcomer.close()
    assert not path.exists()


def test_programs_that_come_and_go_at_once(tmp_path: Path) -> None:
    path = tmp_path / name("busy")
    failed = []

    def live() -> None:
        try:
            for _ in range(30):
                folder = Folder(path, True, Files())
                folder.open()
                (path / f"{threading.get_ident()}").write_bytes(b"x")
                (path / f"{threading.get_ident()}").unlink()
                reclaim(tmp_path / "mine", Files(), tmp_path)
                folder.close()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=live) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert not path.exists()


KILLED = """
import os, sys
import numpy as np
from transom_hpc.ckpt import Checkpointer
ckpt = Checkpointer(sys.argv[1])
ckpt.save(1, {"x": np.zeros(100_000)})
os.kill(os.getpid(), 9)
"""


def test_nothing_stays_after_kills_and_the_next_start(tmp_path: Path) -> None:
    """Five programs are killed in a save, each on a directory of its own; any next start of ours tidies up."""
    folders = [tmp_path / str(i) for i in range(5)]
    started = [subprocess.Popen([sys.executable, "-c", KILLED, str(folder)]) for folder in folders]
    assert [process.wait(60) for process in started] == [-9] * 5
    assert any(default_path(folder).is_dir() for folder in folders)
    Checkpointer(tmp_path / "next").close()
    assert not [folder for folder in (*folders, tmp_path / "next") if default_path(folder).exists()]


def test_two_that_remove_the_same_folder_are_in_nobodys_way(tmp_path: Path) -> None:
    """As a program that closes, and one that starts and finds what it takes for another's leftovers."""
    failed: list[BaseException] = []

    def remove(path: Path, both: threading.Barrier) -> None:
        both.wait()
        try:
            Files().remove(path)
        except BaseException as error:
            failed.append(error)

    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in range(50):
            (folder / str(name)).touch()
        both = threading.Barrier(2)
        threads = [threading.Thread(target=remove, args=(folder, both)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not folder.exists()
    assert failed == []
