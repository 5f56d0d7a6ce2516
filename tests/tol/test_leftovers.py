from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from transom_hpc.tol.leftovers import reclaim


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
            folder(tmp_path, f"{mine}-0123456789abcdef"),  # of a program without a job
            folder(tmp_path, "transom-4000000000-900000001"),
            folder(tmp_path, "other"),
        ]
        link = tmp_path / f"{mine}-900000004"
        link.symlink_to(kept[-1])
        try:
            assert reclaim(900000002, tmp_path) == [dead]
        finally:
            process.kill()
    assert not dead.exists()
    assert all((path / "stop").exists() for path in (*kept, link))


def test_a_program_that_can_not_be_seen_holds_its_folder(tmp_path: Path) -> None:
    path = folder(tmp_path, f"transom-{os.getuid()}-900000001")
    fd = os.open(path / ".lives", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert reclaim(1, tmp_path) == []
    os.close(fd)
    assert reclaim(1, tmp_path) == [path]


def test_no_such_place(tmp_path: Path) -> None:
    assert reclaim(1, tmp_path / "none") == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a folder of somebody else's")
def test_a_folder_with_our_name_and_another_owner_stays(tmp_path: Path) -> None:
    path = folder(tmp_path, f"transom-{os.getuid()}-900000001")
    os.chown(path, 65534, 65534)
    assert reclaim(1, tmp_path) == []
