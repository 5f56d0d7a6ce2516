"""How the ranks of a program agree, without waiting for each other, that a step is the one to save or to stop at.

Each rank posts a number after a step and reads what all ranks posted there after its next step. The exchange runs while
that next step is computed, so nobody waits, and all ranks act on it at the same step.
"""

from __future__ import annotations

import atexit
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
        if dist.get_backend() == "gloo":
            atexit.register(_leave_torch)
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


def _leave_torch() -> None:
    """Destroy the groups of a program that does not do it itself.

    With torch 2.13 one in three such programs of three gloo ranks aborts at its end ("terminate called without an
    active exception"), after all its work: to a launcher that is a failure. Not for NCCL, where destroying may wait.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


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
    if _torch_is_up():
        return TorchAgreement()
    size = _mpi_size()
    if size == world_size:
        return MpiAgreement()
    if size is not None:
        raise UsageError(
            f"{world_size} processes were started, but MPI sees {size}: each would take itself for rank 0. "
            "Set `mpi` in the site config to a type that `srun --mpi=list` shows and that your MPI was built for",
            world_size=world_size,
        )
    return None


def say_to_all(text: str, world_size: int) -> str | None:
    """Give every rank the text of rank 0; None where the ranks don't talk to each other yet. All ranks must call it."""
    if world_size == 1:
        return text
    if _torch_is_up():
        import torch.distributed as dist

        said = [text]
        dist.broadcast_object_list(said)
        return said[0]
    if _mpi_size() == world_size:
        from mpi4py import MPI

        heard: str = MPI.COMM_WORLD.bcast(text)
        return heard
    return None


def _torch_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and bool(distributed.is_initialized())


def _mpi_size() -> int | None:
    """How many ranks the program's MPI has; None where the program has not started it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return int(mpi.COMM_WORLD.Get_size()) if mpi is not None and mpi.Is_initialized() else None
