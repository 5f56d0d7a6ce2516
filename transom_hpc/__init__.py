"""Fault-tolerant training and HPC runs on Slurm.

Names are loaded when they are first used, so `import transom_hpc` is instant and needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transom_hpc.base.errors import TransomError
    from transom_hpc.ckpt import Block, rng_state
    from transom_hpc.program import Checkpointer
    from transom_hpc.run import Run, load_run
    from transom_hpc.slurm.hosts import expand_hosts, fold_hosts
    from transom_hpc.slurm.jobid import JobId, parse_job_id
    from transom_hpc.slurm.states import JobState, job_state
    from transom_hpc.submission import render, submit
    from transom_hpc.tol.spec import JobSpec

_HOMES = {
    "Block": "transom_hpc.ckpt",
    "Checkpointer": "transom_hpc.program",
    "JobId": "transom_hpc.slurm.jobid",
    "JobSpec": "transom_hpc.tol.spec",
    "JobState": "transom_hpc.slurm.states",
    "Run": "transom_hpc.run",
    "TransomError": "transom_hpc.base.errors",
    "expand_hosts": "transom_hpc.slurm.hosts",
    "fold_hosts": "transom_hpc.slurm.hosts",
    "job_state": "transom_hpc.slurm.states",
    "load_run": "transom_hpc.run",
    "parse_job_id": "transom_hpc.slurm.jobid",
    "render": "transom_hpc.submission",
    "rng_state": "transom_hpc.ckpt",
    "submit": "transom_hpc.submission",
}

__all__ = [
    "Block",
    "Checkpointer",
    "JobId",
    "JobSpec",
    "JobState",
    "Run",
    "TransomError",
    "expand_hosts",
    "fold_hosts",
    "job_state",
    "load_run",
    "parse_job_id",
    "render",
    "rng_state",
    "submit",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
