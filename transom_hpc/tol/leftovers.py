"""Shared memory of jobs that have ended: given back by a job that Slurm ends, and what killed ones left on this host.

Never touches a folder of another user, or of a job that lives.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from transom_hpc.base.errors import SlurmError
from transom_hpc.slurm.commands import Slurm


def live_jobs(slurm: Slurm) -> str:
    """My jobs in the queue, separated by commas; "" when Slurm does not answer."""
    try:
        return ",".join(str(row.job_id) for row in slurm.queue())
    except SlurmError:
        return ""


def give_back(shm: Path, pids: Callable[[], Collection[int]], patience_s: float = 30.0) -> None:
    """Remove a job's folder as soon as its program has ended here, or leave it to `reclaim` after so many seconds."""
    until = time.monotonic() + patience_s
    while pids():
        if time.monotonic() >= until:
            return
        time.sleep(0.1)
    shutil.rmtree(shm, ignore_errors=True)


def reclaim(root: Path, job_id: int, live: str) -> list[Path]:
    """Remove the folders of my jobs that have ended.

    Args:
        root: where the folders are: /dev/shm.
        job_id: this job, whose folder stays.
        live: what `live_jobs` found; "": only jobs without a process on this host have ended for certain.

    Returns:
        What was removed.
    """
    form = re.compile(rf"transom-{os.getuid()}-(\d{{1,10}})")
    removed = []
    try:
        found = {int(match[1]): path for path in root.iterdir() if (match := form.fullmatch(path.name))}
        for alive in (job_id, *map(int, filter(None, live.split(","))), *(_jobs_here() if found else ())):
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
