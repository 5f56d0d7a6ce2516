"""How Open MPI is set up and started for what runs beside a program: the sidecar, the checkpoint server."""

from __future__ import annotations

import os
import time
from collections.abc import MutableMapping

# What suits processes that mostly sleep. TCP needs no pinned memory and no helper threads, and survives the loss of a
# peer.
_SETTINGS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader,tcp",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_warn_on_fork": "0",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what is not set: a site or user who has set one keeps it. Called before MPI starts; other MPIs don't look."""
    for name, value in _SETTINGS.items():
        environment.setdefault(name, value)


SETTLE_S = 0.25
"""Under Slurm 22.05, MPI_Init of Open MPI 4.1 returns on one rank before another can take messages, and the first one
kills that other: a call through a null pointer. Tried with three steps started side by side on four hosts: 9 of 90
starts died or hung; after this pause none of 90."""


def settle() -> None:
    """Wait until the other ranks can take messages. Called after MPI has started, before the first message."""
    time.sleep(SETTLE_S)
