"""The processes of this host: who still runs, and ending a program that must not go on. Owns psutil's process side.

Never touches a process of another user or of another attempt.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from transom_hpc.monitors.heartbeat import start_ticks

_PROGRAM = "TRANSOM_ATTEMPT"
_SERVER = "TRANSOM_SERVER"
_MEMORY = "TRANSOM_SHM"


def is_running(pid: int, started: int) -> bool:
    """Whether the process that had this pid and start (`heartbeat.start_ticks`; 0 if unknown) still runs.

    A zombie does not run.
    """
    if not psutil.pid_exists(pid):
        return False
    now = start_ticks(pid)
    if started and now and now != started:
        return False
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it is there, and its state can't be read
        return True


def end_program(attempt: str, exclude_pids: Collection[int] = (), deadline_s: float = 3.0) -> list[int]:
    """Kill this user's processes on this host whose environment says that they belong to an attempt.

    It looks again until nothing is left, since a process may have forked meanwhile. The caller, its ancestors and its
    descendants are spared.

    Args:
        attempt: value of TRANSOM_ATTEMPT, as "A0002-L03".
        exclude_pids: further processes to spare.
        deadline_s: when to stop looking.

    Returns:
        the pids that were sent SIGKILL, in order.
    """
    return _end(lambda entries: f"{_PROGRAM}={attempt}".encode() in entries, exclude_pids, deadline_s)


def end_server(shm: Path) -> list[int]:
    """Kill this user's checkpoint server of a folder in shared memory, in the same way.

    Returns:
        the pids that were sent SIGKILL, in order.
    """
    return _end(lambda entries: f"{_SERVER}={shm}".encode() in entries, (), 3.0)


def end_older_steps(job_id: int, step_id: int, shm: Path, deadline_s: float = 5.0) -> list[int]:
    """Kill this user's processes on this host that belong to a folder in shared memory and to an older step of a job.

    Those are programs, sidecars and checkpoint servers; the steps of a job are numbered in the order of their start.

    Args:
        job_id: the job.
        step_id: the caller's step: it, and later ones, are spared.
        shm: value of TRANSOM_SHM or TRANSOM_SERVER.
        deadline_s: when to stop looking.

    Returns:
        the pids that were sent SIGKILL, in order.
    """
    marks = {f"{_MEMORY}={shm}".encode(), f"{_SERVER}={shm}".encode()}

    def older(entries: list[bytes]) -> bool:
        if marks.isdisjoint(entries) or f"SLURM_JOB_ID={job_id}".encode() not in entries:
            return False
        number = next((entry[14:] for entry in entries if entry.startswith(b"SLURM_STEP_ID=")), b"")
        return number.isdigit() and int(number) < step_id

    return _end(older, (), deadline_s)


_Mark = Callable[[list[bytes]], bool]


def _end(mark: _Mark, exclude_pids: Collection[int], deadline_s: float) -> list[int]:
    me = psutil.Process()
    spared = {me.pid, *exclude_pids, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    killed: set[int] = set()
    until = time.monotonic() + deadline_s
    empty = 0
    while True:
        found = {pid for pid in _own_pids() - spared if _kill_if_of(pid, mark)}
        killed |= found
        empty = 0 if found else empty + 1
        if empty >= (3 if killed else 1) or time.monotonic() >= until:  # one may have slipped through while we looked
            return sorted(killed)
        time.sleep(0.05)


def program_pids(attempt: str) -> list[int]:
    """This user's processes on this host that belong to an attempt, in order; this one is not among them."""
    return sorted(pid for pid in _own_pids() - {os.getpid()} if f"{_PROGRAM}={attempt}".encode() in _environment(pid))


def _own_pids() -> set[int]:
    uid = os.getuid()
    found = set()
    with os.scandir("/proc") as entries:
        for entry in entries:
            try:
                if entry.name.isdigit() and entry.stat().st_uid == uid:
                    found.add(int(entry.name))
            except OSError:  # gone meanwhile
                continue
    return found


def _kill_if_of(pid: int, mark: _Mark) -> bool:
    """Kill a process if it has the mark. It is held by a descriptor: its number may pass to another."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # gone meanwhile
        return False
    try:
        if not mark(_environment(pid)):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except OSError:  # gone meanwhile, or not ours to read
        return False
    finally:
        os.close(handle)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")  # empty for a zombie
    except OSError:  # gone meanwhile, or not ours to read
        return []
