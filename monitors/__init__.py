"""TEE, eagle eye: watches every node of a job and names the one that is not well.

Usable without the rest of transom_hpc and without Slurm. It never ends a job and never talks to Slurm: it reports
verdicts, with evidence, to whoever started it.

Names are loaded when they are first used: a program that only writes its heartbeat loads nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not __name__.startswith("transom_hpc."):
    raise ImportError("import transom_hpc.monitors, not monitors: a second copy of every class would be made")

if TYPE_CHECKING:
    from transom_hpc.monitors.heartbeat import Heartbeat, HeartbeatWriter, beat_path, read_heartbeats
    from transom_hpc.monitors.processes import end_program
    from transom_hpc.monitors.reading import Reading
    from transom_hpc.monitors.sidecar import Sidecar, SidecarConfig, SidecarHooks
    from transom_hpc.monitors.store import load_readings
    from transom_hpc.monitors.verdict import Message, Verdict, parse_line

_HOMES = {
    "Heartbeat": "heartbeat",
    "HeartbeatWriter": "heartbeat",
    "Message": "verdict",
    "Reading": "reading",
    "Sidecar": "sidecar",
    "SidecarConfig": "sidecar",
    "SidecarHooks": "sidecar",
    "Verdict": "verdict",
    "beat_path": "heartbeat",
    "end_program": "processes",
    "load_readings": "store",
    "parse_line": "verdict",
    "read_heartbeats": "heartbeat",
}

__all__ = [
    "Heartbeat",
    "HeartbeatWriter",
    "Message",
    "Reading",
    "Sidecar",
    "SidecarConfig",
    "SidecarHooks",
    "Verdict",
    "beat_path",
    "end_program",
    "load_readings",
    "parse_line",
    "read_heartbeats",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
