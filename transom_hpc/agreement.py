"""How the ranks of a program agree, without waiting for each other, that a step is the one to stop at.

Each rank posts a flag after a step and reads what all ranks posted there after its next step. The exchange runs while
that next step is computed, so nobody waits, and all ranks act on it at the same step.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from transom_hpc.base.errors import UsageError


class Agreement(Protocol):
    """The largest value that any rank posted, one round later."""

    def exchange(self, flag: int) -> int:
        """Post a flag and return the largest of the round before, 0 in the first. All ranks must call it, in step."""

    def close(self) -> None:
        """Finish the round under way. All ranks must call it."""


class Alone:
    """One rank agrees with itself."""

    def __init__(self) -> None:
        self._posted = 0

    def exchange(self, flag: int) -> int:
        before, self._posted = self._posted, flag
        return before

    def close(self) -> None:
        pass


class TorchAgreement:
    """Through torch.distributed, in a gloo group of its own, whatever the program's backend is.

    All ranks must construct it, at the same place of the program (torch.distributed.new_group).
    """

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.new_group(backend="gloo")
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None

    def exchange(self, flag: int) -> int:
        before = 0
        if self._work is not None:
            self._work.wait()
            before = int(self._flag.item())
        self._flag.fill_(flag)
        self._work = self._dist.all_reduce(self._flag, op=self._dist.ReduceOp.MAX, group=self._group, async_op=True)
        return before

    def close(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class MpiAgreement:
    """Through mpi4py, on a communicator of its own.

    All ranks must construct it, at the same place of the program (MPI_Comm_dup).
    """

    def __init__(self) -> None:
        import numpy
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self._sent = numpy.zeros(1, dtype=numpy.int32)
        self._received = numpy.zeros(1, dtype=numpy.int32)
        self._request: Any = None

    def exchange(self, flag: int) -> int:
        before = 0
        if self._request is not None:
            self._request.Wait()
            before = int(self._received[0])
        self._sent[0] = flag
        self._request = self._comm.Iallreduce(self._sent, self._received, op=self._mpi.MAX)
        return before

    def close(self) -> None:
        if self._request is not None:
            self._request.Wait()
            self._request = None
            self._comm.Free()


def find_agreement(world_size: int) -> Agreement | None:
    """The way in which this program's ranks already talk to each other; None where they don't.

    Raises:
        UsageError: the program was started as several ranks, and its MPI sees only one.
    """
    if world_size == 1:
        return Alone()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return TorchAgreement()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        size = mpi.COMM_WORLD.Get_size()
        if size == world_size:
            return MpiAgreement()
        raise UsageError(
            f"{world_size} processes were started, but MPI sees {size}: each would take itself for rank 0. "
            "Set `mpi` in the site config to a type that `srun --mpi=list` shows and that your MPI was built for",
            world_size=world_size,
        )
    return None
