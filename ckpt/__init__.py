"""TCE, the checkpoint engine: memory first, written in the background, committed last.

Usable without the rest of transom_hpc and without Slurm. It never starts processes, talks to Slurm or decides
whether a run goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if not __name__.startswith("transom_hpc."):
    raise ImportError("import transom_hpc.ckpt, not ckpt: a second copy of every class would be made")

if TYPE_CHECKING:
    from transom_hpc.ckpt.block import Block
    from transom_hpc.ckpt.catalog import Checkpoint, Fault, list_checkpoints, read_checkpoint, verify
    from transom_hpc.ckpt.checkpointer import Checkpointer, SaveWarning
    from transom_hpc.ckpt.retention import Keep
    from transom_hpc.ckpt.rng import RngState, rng_state

_WHERE = {
    "Block": "block",
    "Checkpoint": "catalog",
    "Checkpointer": "checkpointer",
    "Fault": "catalog",
    "Keep": "retention",
    "RngState": "rng",
    "SaveWarning": "checkpointer",
    "list_checkpoints": "catalog",
    "read_checkpoint": "catalog",
    "rng_state": "rng",
    "verify": "catalog",
}

__all__ = [
    "Block",
    "Checkpoint",
    "Checkpointer",
    "Fault",
    "Keep",
    "RngState",
    "SaveWarning",
    "list_checkpoints",
    "read_checkpoint",
    "rng_state",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Public names, each loaded when it is first asked for: listing checkpoints needs no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
