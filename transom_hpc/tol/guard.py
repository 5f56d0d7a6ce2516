"""The guard: starts the launcher as its child, and another one in its place when that one is killed.

It is the process that Slurm knows as the batch script, so it must outlive the launcher: it is small, waits, and passes
on signals. It decides nothing about the run and reads nothing of it. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, prctl(2)
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LAST_WORDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Whoever sends these wants an end."""
_PID = "TRANSOM_GUARD"
_SHORT_S = 5.0
_MOST_SHORT = 3
"""After so many launchers in a row that were killed within _SHORT_S, no other is started: the journal may know of none
of them, so its budgets would not end this."""
_PATIENCE_S = 1.5


def supervisor() -> int:
    """The process whose end is the end of supervision: the guard of this launcher, or the launcher without one."""
    guard = os.environ.get(_PID, "")
    return os.getppid() if guard == str(os.getppid()) else os.getpid()


class Guard:
    """Runs a launcher for as long as it takes.

    Args:
        argv: the launcher's command line. One that takes over gets `--killed=REASON` in front of its other arguments.
        at: how many words of argv stand before those arguments.
    """

    def __init__(self, argv: Sequence[str], at: int) -> None:
        self._argv = list(argv)
        self._at = at
        self._child: int | None = None
        self._asked = 0  # the last signal that wants an end

    def run(self) -> int:
        """Run launchers, one after the other, until one of them exits by itself.

        Returns:
            Its exit status; 128 + signal where none is started any more.
        """
        _become_subreaper()
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        reason, short = "", 0
        while True:
            begun = time.monotonic()
            died = self._launch(reason)
            if died >= 0:
                return died
            name = _name(-died)
            short = short + 1 if time.monotonic() - begun < _SHORT_S else 0
            end_children()  # its sruns: each would keep its step
            reason = f"the launcher's process on {os.uname().nodename.partition('.')[0]} was killed ({name})"
            if self._asked or -died in _LAST_WORDS or short >= _MOST_SHORT:
                _say(f"{reason}; no other is started")
                return 128 + (self._asked or -died)
            _say(f"{reason}; another one takes over")

    def _launch(self, reason: str) -> int:
        """Start a launcher and wait for its end: its exit status, or minus the signal that killed it."""
        argv = [*self._argv[: self._at], *([f"--killed={reason}"] if reason else []), *self._argv[self._at :]]
        # What is passed on too early would kill it: it listens as soon as it has begun. Python's own children inherit
        # what is ignored, and no handler.
        process = subprocess.Popen(argv, env={**os.environ, _PID: str(os.getpid())}, preexec_fn=_ignore_pokes)
        self._child = process.pid
        if self._asked:  # between the end of one and the start of the next
            process.terminate()
        while True:
            pid, status = os.wait()  # orphans of a launcher that was killed come to us, too
            if pid == process.pid:
                self._child = None
                process.returncode = os.waitstatus_to_exitcode(status)
                return process.returncode

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if number in _LAST_WORDS:
            self._asked = number
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, number)


def end_children(patience_s: float = _PATIENCE_S) -> None:
    """End all children of this process: politely first, by force after so many seconds; none is left as a zombie."""
    until = time.monotonic() + patience_s
    number = signal.SIGTERM
    told: set[int] = set()
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = children()
        if not left:
            return
        if time.monotonic() >= until:
            if number == signal.SIGKILL:  # they hang in a dead file system, or so
                return
            number, told, until = signal.SIGKILL, set(), time.monotonic() + patience_s
        for pid in left - told:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        told |= left
        time.sleep(0.02)


def children() -> set[int]:
    """The children of this process that have not ended."""
    me, found = str(os.getpid()), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
                if parent == me and state != "Z":
                    found.add(int(entry.name))
    return found


def _become_subreaper() -> None:
    with contextlib.suppress(
        OSError, AttributeError
    ):  # no such call here: srun's then go to Slurm, and end with the job
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def _ignore_pokes() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"transom: {text}\n".encode())
