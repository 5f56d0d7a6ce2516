"""How a lab and its hosts are, as facts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostStatus:
    """One host: what the lab knows of it ("up", "crashed", "frozen", "cut", "slow"), and what Slurm believes."""

    name: str
    address: str
    state: str
    slurm: str


@dataclass(frozen=True, slots=True)
class LabStatus:
    """A lab at a glance.

    Args:
        kind: "namespaces", or "processes" for the one without root.
        state: the lab's folder; its logs are in `logs` there.
        shared: a folder that the user can write and all hosts see.
        notices: what this lab can't do.
    """

    name: str
    kind: str
    user: str
    version: str
    slurmd_timeout_s: int
    accounting: bool
    state: Path
    shared: Path
    notices: tuple[str, ...]
    hosts: tuple[HostStatus, ...]
