from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from transom_hpc.tol.leftovers import give_back, reclaim


def folder(root: Path, name: str) -> Path:
    path = root / name
    path.mkdir()
    (path / "stop").write_text("")
    return path


def test_only_what_dead_jobs_of_ours_left_is_removed(tmp_path: Path) -> None:
    mine = f"transom-{os.getuid()}"
    dead = folder(tmp_path, f"{mine}-900000001")
    environment = {**os.environ, "SLURM_JOB_ID": "900000003"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        kept = [
            folder(tmp_path, f"{mine}-900000002"),  # this job
            folder(tmp_path, f"{mine}-900000003"),  # has a process
            folder(tmp_path, f"{mine}-900000005"),  # Slurm knows it
            folder(tmp_path, f"{mine}-0123456789abcdef"),  # of a program without a job
            folder(tmp_path, "transom-4000000000-900000001"),
            folder(tmp_path, "other"),
        ]
        link = tmp_path / f"{mine}-900000004"
        link.symlink_to(kept[-1])
        try:
            assert reclaim(tmp_path, 900000002, "900000005,900000006") == [dead]
        finally:
            process.kill()
    assert not dead.exists()
    assert all((path / "stop").exists() for path in (*kept, link))


def test_a_program_that_can_not_be_seen_holds_its_folder(tmp_path: Path) -> None:
    path = folder(tmp_path, f"transom-{os.getuid()}-900000001")
    fd = os.open(path / ".lives", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert reclaim(tmp_path, 1, "") == []
    os.close(fd)
    assert reclaim(tmp_path, 1, "") == [path]


def test_no_such_place(tmp_path: Path) -> None:
    assert reclaim(tmp_path / "none", 1, "") == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a folder of somebody else's")
def test_a_folder_with_our_name_and_another_owner_stays(tmp_path: Path) -> None:
    path = folder(tmp_path, f"transom-{os.getuid()}-900000001")
    os.chown(path, 65534, 65534)
    assert reclaim(tmp_path, 1, "") == []


def test_memory_is_given_back_when_the_program_has_ended(tmp_path: Path) -> None:
    alive: list[set[int]] = [{1}, {1}, set()]
    path = folder(tmp_path, "job")
    give_back(path, lambda: alive.pop(0))
    assert (path.exists(), alive) == (False, [])


def test_memory_of_a_program_that_does_not_end_is_left(tmp_path: Path) -> None:
    path = folder(tmp_path, "job")
    give_back(path, lambda: {1}, 0.0)
    assert path.exists()
