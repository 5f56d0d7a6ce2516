"""Processes of this machine: who is alive, who belongs to a lab, and ending exactly those.

A process is known by its number and its start time, so that a number that was given out again is never killed.
Never decides what to end: callers name it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transom_hpc.base.errors import LabError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """One process, for as long as it lives.

    Args:
        pid: its number, as this process sees it.
        start: clock ticks between the start of the machine and its own (proc(5), field 22).
    """

    pid: int
    start: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What /proc/PID/stat says: the process, its parent, and its state's letter (Z is dead, T is stopped)."""

    process: Process
    parent: int
    state: str


def look(pid: int) -> Facts | None:
    """Read a process's facts; None where there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return Facts(Process(pid, int(fields[19])), int(fields[1]), fields[0])


def is_alive(process: Process) -> bool:
    """Whether it still runs. One that is dead and only waits for its parent to notice is not alive."""
    facts = look(process.pid)
    return facts is not None and facts.process == process and facts.state not in "ZX"


def everyone() -> list[Facts]:
    """All processes that this one can see, the dead that nobody has collected yet left out."""
    found = (look(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [facts for facts in found if facts is not None and facts.state not in "ZX"]


def environment(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty where it can't be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def marked(name: str, value: str) -> list[Process]:
    """All processes of our own user that were started with NAME=VALUE in their environment.

    Others' processes don't count: anybody can put any variable into their own environment.
    """
    found = []
    for facts in everyone():
        try:
            owner = Path(f"/proc/{facts.process.pid}").stat().st_uid
        except OSError:
            continue
        if owner == os.geteuid() and environment(facts.process.pid).get(name) == value:
            found.append(facts.process)
    return found


def children(pid: int) -> list[Process]:
    """The processes whose parent is `pid`."""
    return [facts.process for facts in everyone() if facts.parent == pid]


def descendants(roots: Iterable[Process]) -> set[Process]:
    """The given processes and all that descend from them."""
    by_parent: dict[int, list[Process]] = {}
    for facts in everyone():
        by_parent.setdefault(facts.parent, []).append(facts.process)
    found: set[Process] = set()
    waiting = list(roots)
    while waiting:
        process = waiting.pop()
        if process not in found:
            found.add(process)
            waiting.extend(by_parent.get(process.pid, ()))
    return found


def same_pid_namespace(pid: int) -> list[Process]:
    """All processes in the PID namespace of `pid`, itself too."""
    try:
        wanted = Path(f"/proc/{pid}/ns/pid").readlink()
    except OSError:
        return []
    found = []
    for facts in everyone():
        try:
            if Path(f"/proc/{facts.process.pid}/ns/pid").readlink() == wanted:
                found.append(facts.process)
        except OSError:
            continue
    return found


def send(processes: Iterable[Process], number: signal.Signals) -> None:
    """Send a signal to those that still live; never to a newer process of the same number."""
    for process in processes:
        try:
            handle = os.pidfd_open(process.pid)
        except OSError:
            continue
        try:
            if is_alive(process):
                signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


def stop_all(members: Callable[[], Iterable[Process]]) -> bool:
    """Stop a changing set of processes, those that they start meanwhile too.

    Args:
        members: who belongs to the set now.

    Returns:
        Whether all stand still; False after 10 s without that.
    """
    told: set[Process] = set()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        now = set(members())
        send(now - told, signal.SIGSTOP)
        # Who waits in the kernel (D) stops before it runs again. A parent in vfork waits so for a child that stands.
        moving = [p for p in now if (facts := look(p.pid)) and facts.process == p and facts.state not in "TtDZX"]
        if not moving and now <= told:
            return True
        told |= now
        time.sleep(0.01)
    return False


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log, for an error message; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def wait_until(check: Callable[[], bool], what: str, seconds: float, *logs: Path) -> None:
    """Wait until `check` is true.

    Args:
        check: asked again and again, 20 times a second.
        what: completes the sentence "… after N s", for the error.
        seconds: the deadline.
        logs: the logs whose last lines explain a failure.

    Raises:
        LabError: the deadline is over. Its fact `log` holds the tails of the logs.
    """
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            tails = [(log, tail(log)) for log in logs]
            last = [f"{log.name}: {text.splitlines()[-1].strip()}" for log, text in tails if text]
            words = f" ({'; '.join(last)})" if last else ""
            raise LabError(
                f"{what} after {seconds:g} s{words}",
                log="\n".join(f"--- {log}\n{text}" for log, text in tails if text),
            )
        time.sleep(POLL_S)


def call(
    argv: Sequence[str],
    *,
    timeout_s: float = 30,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
) -> str:
    """Run one of the machine's programs to its end and return its standard output.

    Raises:
        LabError: it is missing, failed, or did not end in time. Facts: command, code.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env=dict(env) if env is not None else {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise LabError(f"{argv[0]} is missing on this machine", command=list(argv)) from error
    except subprocess.TimeoutExpired as error:
        raise LabError(f"`{' '.join(argv)}` did not end within {timeout_s:g} s", command=list(argv)) from error
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise LabError(f"`{' '.join(argv)}` failed: {words}", command=list(argv), code=done.returncode)
    return done.stdout
