"""How Open MPI is set up for what runs beside a program: the sidecar, the checkpoint server."""

from __future__ import annotations

import os
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
