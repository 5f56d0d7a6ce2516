"""What is kept on disk about a lab: its folder, its facts, and the lock that makes changes take turns."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transom_hpc.base.atomic import write_bytes
from transom_hpc.base.errors import LabError, UsageError

SYSTEM_ROOT = Path("/var/lib/transom-lab")
MARK = "TRANSOM_LAB_STATE"  # in the environment of every process that a lab starts
LOGIN = "login"


def own_root() -> Path:
    """The folder of all labs that this user starts."""
    return SYSTEM_ROOT if os.geteuid() == 0 else Path(f"/var/tmp/transom-lab-{os.geteuid()}")


def roots() -> tuple[Path, ...]:
    """Where labs can be found, one's own first."""
    own = own_root()
    return (own,) if own == SYSTEM_ROOT else (own, SYSTEM_ROOT)


def boot_id() -> str:
    """Which start of the machine this is; pids mean nothing across two of them."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def check_name(name: str) -> str:
    """A lab's name is part of folder, socket and cluster names.

    Raises:
        UsageError: it can't be.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise UsageError(f"a lab's name is 1 to 32 of a-z, 0-9 and -, and starts with a letter; {name!r} is not")
    return name


@dataclass(frozen=True, slots=True)
class Record:
    """The facts of one lab, as lab.json holds them.

    Args:
        name: the lab's name.
        kind: "namespaces" (each host has network, processes and memory of its own; needs root) or "processes".
        ready: False while it is being started.
        boot: the machine's boot id when it was started.
        user: whose jobs it runs.
        nodes: names of the compute hosts, in order.
        addresses: host name to address, login too.
        slurmd_timeout_s: seconds of silence after which Slurm sets a host down.
        version: what `slurmctld -V` says.
        ports: "slurmctld", "slurmdbd" and each host's, where they are not Slurm's default.
        accounting: whether sacct works.
        notices: what this lab can't do, one sentence each.
    """

    name: str
    kind: str
    ready: bool
    boot: str
    user: str
    nodes: tuple[str, ...]
    addresses: dict[str, str]
    slurmd_timeout_s: int
    version: str
    ports: dict[str, int]
    accounting: bool
    notices: tuple[str, ...]


def save(state: Path, record: Record) -> None:
    """Write lab.json whole."""
    write_bytes(state / "lab.json", json.dumps(asdict(record), indent=1).encode() + b"\n")


def load(state: Path) -> Record | None:
    """Read lab.json; None where there is none that can be read (a lab that got no further, or a reboot's torn file)."""
    try:
        facts: dict[str, Any] = json.loads((state / "lab.json").read_bytes())
        facts["nodes"] = tuple(facts["nodes"])
        facts["notices"] = tuple(facts["notices"])
        return Record(**facts)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def locate(name: str) -> Path | None:
    """The folder of the lab of that name, or None."""
    check_name(name)
    for root in roots():
        if (root / name).is_dir():
            return root / name
    return None


def others(state: Path) -> list[Path]:
    """The folders of all other labs under the same root."""
    try:
        return sorted(path for path in state.parent.iterdir() if path.is_dir() and path != state)
    except OSError:
        return []


def make_root() -> Path:
    """Make the folder of all labs; it must be ours, since daemons trust what is in it.

    Raises:
        LabError: somebody else made it.
    """
    root = own_root()
    root.mkdir(mode=0o755, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.geteuid():
        raise LabError(f"{root} belongs to somebody else; remove it")
    root.chmod(0o755)
    return root


@contextlib.contextmanager
def lock(folder: Path, seconds: float) -> Iterator[None]:
    """Hold a folder's lock: changes to a lab take turns, and the lock leaves no file behind.

    Raises:
        LabError: somebody else held it all that time, or the folder went away.
    """
    deadline = time.monotonic() + seconds
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as error:
        raise LabError(f"lab {folder.name!r} is gone") from error
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LabError(f"another process is busy with lab {folder.name!r}; try again") from None
                time.sleep(0.05)
        if not folder.exists() or os.fstat(handle).st_ino != folder.stat().st_ino:
            raise LabError(f"lab {folder.name!r} is gone")
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def lock_root(seconds: float) -> Iterator[Path]:
    """Hold the lock of all labs, for what they share: addresses, the account. Makes their folder first.

    Raises:
        LabError: somebody else held it all that time.
    """
    for last in (False, False, True):
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock(make_root(), seconds))
            except LabError:
                if last or own_root().exists():
                    raise
                continue  # the last other lab went down in this very moment, and took the folder along
            yield own_root()
            return


def remove(state: Path) -> None:
    """Remove a lab's folder."""
    shutil.rmtree(state, ignore_errors=True)
    if state.exists():  # something was written meanwhile
        shutil.rmtree(state)


def remove_root() -> None:
    """Remove the folder of all labs, if none is left."""
    with contextlib.suppress(OSError):
        own_root().rmdir()
