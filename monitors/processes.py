"""The processes of this host: who still runs, and ending a program that must not go on. Owns psutil's process side.

Never touches a process of another user or of another attempt.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection

import psutil

from transom_hpc.monitors.heartbeat import start_ticks

_MARK = "TRANSOM_ATTEMPT"


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
    me = psutil.Process()
    spared = {me.pid, *exclude_pids, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    killed: set[int] = set()
    until = time.monotonic() + deadline_s
    empty = 0
    while True:
        found = [process for process in _processes_of(attempt) if process.pid not in spared]
        for process in found:
            try:
                process.kill()
                killed.add(process.pid)
            except psutil.Error:  # gone meanwhile
                pass
        empty = 0 if found else empty + 1
        if empty >= (2 if killed else 1) or time.monotonic() >= until:  # one may have slipped through while we looked
            return sorted(killed)
        time.sleep(0.02)


def _processes_of(attempt: str) -> list[psutil.Process]:
    found = []
    uid = os.getuid()
    for process in psutil.process_iter():
        try:
            if (
                process.uids().real == uid
                and process.environ().get(_MARK) == attempt
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.Error, OSError):  # gone, or not ours to read
            continue
    return found
