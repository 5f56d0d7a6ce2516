"""Where the program's ranks of this host stand: run on each host of a program that hangs, as a step of its own.

Writes a file a rank, into shared memory first, since the shared disk may be what hangs; prints a line a rank. Bounded
in time whatever the ranks and the disk do: what may block runs in threads that are left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from transom_hpc.monitors.heartbeat import Heartbeat, read_heartbeats
from transom_hpc.monitors.processes import is_running, program_pids
from transom_hpc.tol import traces
from transom_hpc.tol.behind import Stand
from transom_hpc.tol.exits import parse_said

_MOST_THREADS = 64
_STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended", "X": "has ended"}
_WAITS = "waits in the kernel and can't be woken (disk or file system)"


@dataclass(frozen=True, slots=True)
class Target:
    """A rank to look at.

    Args:
        rank: its rank.
        pid: its process.
        started: when that started, in clock ticks since boot; 0 unknown.
        beat: its heartbeat; None where it has none.
    """

    rank: int
    pid: int
    started: int = 0
    beat: Heartbeat | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    """Look at the ranks of this host, say where they stand, and leave at once."""
    parser = argparse.ArgumentParser(prog="python -m transom_hpc.tol.stacks", description=__doc__)
    parser.add_argument("--attempt", required=True, help='the launch to look at, as "A0001-L01"')
    parser.add_argument("--shm", required=True, type=Path, help="the job's folder in shared memory")
    parser.add_argument("--folder", required=True, type=Path, help="where the files go in the end")
    parser.add_argument("--host", default=os.environ.get("SLURMD_NODENAME") or os.uname().nodename)
    parser.add_argument("--patience", required=True, type=float, metavar="S", help="seconds for all of it")
    given = parser.parse_args(arguments)
    until = time.monotonic() + given.patience
    # The files are brought to the shared disk in the last third.
    texts = look(given.attempt, given.shm, given.host, until - given.patience / 3)
    keep(texts, given.shm / f"stacks-{given.attempt}", given.folder, until)
    print(f"done {given.host}", flush=True)
    os._exit(0)  # not waiting for threads that hang


def look(attempt: str, shm: Path, host: str, until: float) -> dict[str, str]:
    """Look at all ranks of this host, and print a line for each.

    Args:
        attempt: the launch.
        shm: the job's folder in shared memory.
        host: this host's name.
        until: when to leave what does not answer, on the monotonic clock.

    Returns:
        What is to be written, by the file's name.
    """
    beats = read_heartbeats(shm, attempt)
    texts: dict[str, str] = {}
    lock = threading.Lock()

    def one(target: Target) -> None:
        stand, text = examine(target, attempt, shm, host, until - 0.3)
        with lock:
            if name(target) not in texts:
                texts[name(target)] = text
                print(stand.to_line(), flush=True)

    def name(target: Target) -> str:
        return f"{host}-rank{target.rank}.txt"

    def without_heartbeat() -> None:  # also of a rank that has not come so far as to make its Checkpointer
        _side_by_side([partial(one, target) for target in silent_ranks(attempt, beats)], until)

    targets = [Target(beat.rank, beat.pid, beat.start_ticks, beat) for beat in beats]
    _side_by_side([*(partial(one, target) for target in targets), without_heartbeat], until)
    with lock:
        return dict(texts)


def examine(target: Target, attempt: str, shm: Path, host: str, until: float) -> tuple[Stand, str]:
    """Where one rank stands, and all there is to say of that."""
    beat, pid = target.beat, target.pid
    stand = Stand(host, target.rank)
    if beat is not None:
        age_s = round(beat.age_s(time.monotonic_ns()), 1)
        stand = replace(stand, step=beat.step, age_s=age_s, phase=beat.phase)
    failed = _failed(shm, attempt, target.rank)
    alive = is_running(pid, target.started)
    letter = _letter(pid) if alive else "X"
    text = ""
    if alive and letter not in "Tt":  # a stopped process answers nothing
        now = time.monotonic()
        text = traces.ask(shm, target.rank, pid, now + 0.6 * (until - now))
    if alive and not text:
        text = _py_spy(pid, until)
    letters = {letter, _letter(pid) if alive else "X"}
    state = next((words for key, words in _STATES.items() if key in letters), "")
    if letters == {"D"}:  # where it is so once only, it is on its way
        state = _WAITS
    kernel = _kernel(pid) if alive else ""
    place = traces.place(text) or ("" if state else _kernel_place(pid) if alive else "")
    stand = replace(stand, state=state, place=place, failed=failed)
    return stand, _report(stand, pid, text, kernel)


def silent_ranks(attempt: str, beats: Sequence[Heartbeat]) -> Iterator[Target]:
    """Ranks of this host whose processes are there and that have no heartbeat."""
    heard = {beat.rank for beat in beats}
    above = {pid for beat in beats for pid in _ancestors(beat.pid)}  # as torchrun, which has a rank of its own
    members: dict[int, list[int]] = {}
    for pid in program_pids(attempt):
        text = _environment(pid, "RANK")
        if text.isdecimal() and int(text) not in heard and pid not in above:
            members.setdefault(int(text), []).append(pid)
    for rank, pids in sorted(members.items()):
        yield Target(rank, _foremost(pids))


def keep(texts: dict[str, str], memory: Path, folder: Path, until: float) -> None:
    """Write the files into shared memory, and from there to the shared disk as far as that answers in time."""
    with contextlib.suppress(OSError):
        memory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in texts.items():
            (memory / name).write_text(text)

    def copy() -> None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text)

    _side_by_side([copy], until)


def _side_by_side(calls: Sequence[Callable[[], None]], until: float) -> None:
    """Make calls in a thread each, and leave behind those that have not returned in time."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _report(stand: Stand, pid: int, text: str, kernel: str) -> str:
    lines = [f"{stand.name}, process {pid}"]
    if stand.age_s is not None:
        lines.append(f"last finished step: {stand.step}; {stand.phase}; last heartbeat {stand.age_s:.1f} s ago")
    if stand.failed:
        lines.append(f"it has failed and does not end: {stand.failed}")
    if stand.state:
        lines.append(f"it {stand.state}")
    lines += ["", text.rstrip() or "no Python stacks: it offers none, or does not answer, and py-spy is not to be had"]
    if kernel:
        lines += ["", "its threads as the kernel sees them (thread, name, state, waits in, system call):", kernel]
    return "\n".join(lines) + "\n"


def _failed(shm: Path, attempt: str, rank: int) -> str:
    """What the rank has said of its end."""
    try:
        said = parse_said((shm / f"died-{attempt}-{rank}").read_text(errors="replace"))
    except OSError:
        return ""
    return said[2] if said else ""


def _py_spy(pid: int, until: float) -> str:
    program = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    command = [program, "dump", "--pid", str(pid), "--nonblocking", "--full-filenames"]
    try:
        timeout_s = max(0.1, until - time.monotonic())
        answer = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _kernel(pid: int) -> str:
    lines = []
    try:
        threads = sorted(os.listdir(f"/proc/{pid}/task"), key=int)  # noqa: PTH208  (names are all that is wanted)
    except OSError:
        return ""
    for thread in threads[:_MOST_THREADS]:
        facts = [_proc(pid, name, thread) for name in ("comm", "stat", "wchan", "syscall")]
        letter = _letter_of(facts[1])
        lines.append(f"{thread:>8} {facts[0]:15} {letter} {facts[2] or '-':24} {facts[3] or '-'}")
        stack = _proc(pid, "stack", thread)  # for root only
        lines += [f"         {line}" for line in stack.splitlines()]
    if len(threads) > _MOST_THREADS:
        lines.append(f"         and {len(threads) - _MOST_THREADS} more")
    return "\n".join(lines)


def _kernel_place(pid: int) -> str:
    comm, waits = _proc(pid, "comm"), _proc(pid, "wchan")
    if _letter(pid) == "R":
        return f"{comm} is computing"
    return f"{comm} waits in {waits}" if waits not in ("", "0") else f"{comm} sleeps"


def _proc(pid: int, name: str, thread: str = "") -> str:
    part = f"task/{thread}/{name}" if thread else name
    try:
        return Path(f"/proc/{pid}/{part}").read_text(errors="replace").strip()
    except OSError:  # gone, or not ours to read
        return ""


def _letter(pid: int) -> str:
    """The state of a process, as proc(5) abbreviates it: that of its first thread."""
    return _letter_of(_proc(pid, "stat"))


def _letter_of(facts: str) -> str:
    match = re.search(r"\) (\S) [^)]*$", facts)
    return match[1] if match else "X"


def _environment(pid: int, name: str) -> str:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    mark = f"{name}=".encode()
    return next((entry[len(mark) :].decode(errors="replace") for entry in entries if entry.startswith(mark)), "")


def _ancestors(pid: int) -> list[int]:
    try:
        return [process.pid for process in psutil.Process(pid).parents()]
    except psutil.Error:
        return []


def _foremost(pids: Sequence[int]) -> int:
    """Of the processes of one rank the one that does the work: the oldest, or what a shell that is that has started."""
    parents = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            parents[pid] = psutil.Process(pid).ppid()
    tops = [pid for pid in pids if parents.get(pid) not in pids]
    pid = min(tops or pids)
    while len(below := [child for child, parent in parents.items() if parent == pid]) == 1:
        pid = below[0]
    return pid


if __name__ == "__main__":
    main()
