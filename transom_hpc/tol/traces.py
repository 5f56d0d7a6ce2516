"""Where the threads of a rank stand: the program offers it, and answers a signal by writing it into shared memory.

Owns the signal and the file. faulthandler's handler is plain C: it also answers while C code keeps the interpreter's
lock. To a process that does not catch the signal it would be deadly, so whoever sends it looks first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from transom_hpc.monitors.heartbeat import start_ticks
from transom_hpc.tol.last_words import is_foreign

SIGNAL = signal.SIGRTMIN + 13
"""A real-time signal: neither Slurm nor MPI, NCCL or a shell gives these a meaning."""

_file: IO[bytes] | None = None


@dataclass(frozen=True, slots=True)
class Frame:
    """A place in a Python program.

    Args:
        path: source file.
        line: its line.
        function: name of the function.
    """

    path: str
    line: int
    function: str


def offer(shm: Path, rank: int) -> None:
    """Answer the signal from now on, by the stacks of all threads. Where that can't be had, nothing happens.

    Args:
        shm: the job's folder in shared memory.
        rank: this process's rank.
    """
    global _file
    with contextlib.suppress(Exception):  # the edge to the user's program, which must go on without us
        if _file is None and _is_caught(os.getpid()):
            return  # the program has a use of its own for this signal
        path = trace_path(shm, rank)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        file = temporary.open("wb", buffering=0)
        file.write(_head(os.getpid()))
        temporary.replace(path)
        faulthandler.register(SIGNAL, file, all_threads=True, chain=False)
        before, _file = _file, file
        if before is not None:
            before.close()


def ask(shm: Path, rank: int, pid: int, until: float) -> str:
    """The stacks of a rank of this host, by its own word.

    Args:
        shm: the job's folder in shared memory.
        rank: the rank.
        pid: its process.
        until: when to give up, on the monotonic clock.

    Returns:
        What faulthandler writes; "" where the process offers none, or does not answer in time.
    """
    path = trace_path(shm, rank)
    try:
        handle = os.pidfd_open(pid)
    except OSError:  # gone
        return ""
    try:
        head = _head(pid)
        before = path.read_bytes()
        if not before.startswith(head) or not _is_caught(pid):
            return ""
        signal.pidfd_send_signal(handle, SIGNAL)
        return _answer(path, len(before), until)
    except OSError:  # gone meanwhile, or it has never offered any
        return ""
    finally:
        os.close(handle)


def _answer(path: Path, start: int, until: float) -> str:
    """What is new in the file, once it has stopped growing."""
    found = b""
    while time.monotonic() < until:
        time.sleep(0.05)
        new = path.read_bytes()[start:]
        if new and new == found:
            break
        found = new
    return found.decode(errors="replace")


def trace_path(shm: Path, rank: int) -> Path:
    """The file of a rank."""
    return shm / f"trace-{rank:06d}"


def place(text: str) -> str:
    """Where the main thread stands, from what faulthandler or py-spy wrote: "train.py:88 in all_reduce".

    The line is the deepest one of the program itself, the function the one that runs. "" where there is none.
    """
    frames = _main_thread(text)
    if not frames:
        return ""
    own = next((frame for frame in frames if not is_foreign(frame.path)), frames[0])
    return f"{Path(own.path).name}:{own.line} in {frames[0].function}"


def _main_thread(text: str) -> list[Frame]:
    """Its frames, deepest first. faulthandler writes the main thread last, py-spy names it."""
    threads: list[tuple[bool, list[Frame]]] = []
    for line in text.splitlines():
        if re.match(r"(Current t|T)hread ", line):
            threads.append(("MainThread" in line, []))
        elif threads and (match := _FRAME.match(line)):
            path, number, function = match["path"], match["line"], match["function"]
            threads[-1][1].append(Frame(path, int(number), function))
        elif threads and (match := _PY_SPY_FRAME.match(line)):
            threads[-1][1].append(Frame(match["path"], int(match["line"]), match["function"]))
    named = [frames for is_main, frames in threads if is_main]
    return named[0] if named else threads[-1][1] if threads else []


def _head(pid: int) -> bytes:
    return f"pid {pid} {start_ticks(pid)}\n".encode()


def _is_caught(pid: int) -> bool:
    """Whether a process has a handler for the signal."""
    match = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> (SIGNAL - 1) & 1)


_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+) in (?P<function>.*)')
_PY_SPY_FRAME = re.compile(r" {4}(?P<function>.+) \((?P<path>[^()]+):(?P<line>\d+)\)$")
