"""How much memory staging may take: read from the kernel, decided purely.

Looked at before a segment grows, so that a save never ends in SIGBUS or in the arms of the OOM killer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MARGIN_BYTES = 64 << 20
"""Left free whatever the figures say: they are read once, and others allocate too."""

_HUGE = 1 << 60


@dataclass(frozen=True, slots=True)
class Memory:
    """What is free.

    Args:
        shared_bytes: in the file system of the shared memory folder.
        machine_bytes: of the machine, as MemAvailable tells; None where unknown.
        group_bytes: below the control group's limit, its reclaimable file cache counted as free; None without limit.
    """

    shared_bytes: int
    machine_bytes: int | None
    group_bytes: int | None

    @property
    def free_bytes(self) -> int:
        """The least of them."""
        return min(n for n in (self.shared_bytes, self.machine_bytes, self.group_bytes) if n is not None)


def room(memory: Memory, ranks: int, configured: int | None, held: int) -> int:
    """Bytes that one rank's segments may still grow by.

    Args:
        memory: what is free on the node.
        ranks: of this program on the node, each of which will ask the same.
        configured: limit for this rank's segments together; None for none.
        held: what this rank's segments have already.
    """
    grow = max(0, memory.free_bytes - MARGIN_BYTES) // max(1, ranks)
    return grow if configured is None else max(0, min(grow, configured - held))


def read(shared: Path, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Ask the kernel."""
    facts = os.statvfs(shared)
    return Memory(facts.f_bavail * facts.f_frsize, _available(proc / "meminfo"), _group(proc, groups))


def _available(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _group(proc: Path, groups: Path) -> int | None:
    """Free bytes of the tightest control group from ours up to the root, version 1 or 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[int] = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "":
            found += _levels(groups, place, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = groups / "memory"
            found += _levels(root, place, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(found) if found else None


def _levels(root: Path, place: str, limit: str, usage: str, cache: str) -> list[int]:
    found = []
    folder = root / place.lstrip("/")
    while True:
        free = _free(folder, limit, usage, cache)
        if free is not None:
            found.append(free)
        if folder == root or root not in folder.parents:
            return found
        folder = folder.parent


def _free(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        bound = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max", or not there: no limit at this level
        return None
    return None if bound >= _HUGE else max(0, bound - used + int(stat.get(cache, 0)))
