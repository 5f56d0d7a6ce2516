"""The hand on MPI of a job's checkpoint servers. The only place in ckpt that starts MPI.

Nothing in a save waits for MPI: where it shows a server only itself, that one serves its node all the same.
"""

from __future__ import annotations

import logging
import os

from transom_hpc.base.clock import Clock
from transom_hpc.ckpt import mpio
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.mpio import MpioWriter

log = logging.getLogger("transom_hpc.ckpt")

DEADLINE_S = 60.0
"""Longest time in which nothing moves while servers write together."""

# What suits processes that mostly sleep, and survives the loss of a peer; a site or user who has set one keeps it.
_SETTINGS = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,vader,tcp",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_mpi_warn_on_fork": "0",
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
}


class Ring:
    """The servers of one step. Making one initialises MPI, which waits for all ranks of the step.

    Leave the process by os._exit: MPI_Finalize would wait for the dead.
    """

    def __init__(self) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        import mpi4py

        mpi4py.rc.finalize = False
        mpi4py.rc.initialize = False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.size: int = MPI.COMM_WORLD.Get_size()

    def writer(self, files: Files, clock: Clock) -> MpioWriter | None:
        """What writes together with the other servers; None where that can't be. All ranks must call it."""
        comm, why = mpio.find(self.size, sharing=True)
        if comm is None:
            log.info("checkpoints are written directly: %s", why)
            return None
        return MpioWriter(comm, files, clock, DEADLINE_S)
