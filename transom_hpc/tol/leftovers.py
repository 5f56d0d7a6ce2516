"""Shared memory that dead jobs of ours have left on this host: those that were killed before they could give it back.

Never touches a folder of another user, or of a job that still has a process here.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/dev/shm")


def reclaim(job_id: int, root: Path = ROOT) -> list[Path]:
    """Remove the folders of my other jobs that have no process on this host.

    Args:
        job_id: this job, whose folder stays.
        root: where the folders are.

    Returns:
        What was removed.
    """
    form = re.compile(rf"transom-{os.getuid()}-(\d{{1,10}})")
    removed = []
    try:
        found = {int(match[1]): path for path in root.iterdir() if (match := form.fullmatch(path.name))}
        found.pop(job_id, None)
        for alive in _jobs_here() if found else ():
            found.pop(alive, None)
    except OSError:  # what can't be found out is left alone
        return []
    for path in found.values():
        if _is_ours(path) and not _is_held(path):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
    return removed


def _jobs_here() -> Iterator[int]:
    """Jobs of mine that have a process on this host."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                match = re.search(rb"(?:^|\0)SLURM_JOB_ID=(\d+)(?:\0|$)", (entry / "environ").read_bytes())
            except OSError:  # gone meanwhile, or not mine
                continue
            if match:
                yield int(match[1])


def _is_ours(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _is_held(path: Path) -> bool:
    """Whether a program lives in it that we can't see: each holds this lock as long as it lives."""
    try:
        fd = os.open(path / ".lives", os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
