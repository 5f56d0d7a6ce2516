"""The hand on MPI: which of a job's checkpoint servers this one is. The only place in ckpt that starts MPI.

Nothing in a save waits for MPI: where it shows a server only itself, that one serves its node all the same.
"""

from __future__ import annotations

import os

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
        from mpi4py import MPI

        if not MPI.Is_initialized():  # h5py has loaded it without starting it
            MPI.Init_thread(MPI.THREAD_FUNNELED)
        MPI.COMM_WORLD.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank: int = MPI.COMM_WORLD.Get_rank()
        self.size: int = MPI.COMM_WORLD.Get_size()
