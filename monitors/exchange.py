"""Messages between the sidecars over MPI. The only place that imports mpi4py.

Only Isend, Irecv and Test after the start: no call waits for another rank, and no error ends the process. Received
messages are copied; whatever MPI still holds when the process leaves is dropped with it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from transom_hpc.base import openmpi

MAX_BYTES = 1024
"""Longest message."""

_SLOTS = 8  # receives that are posted at any time
_OUTSTANDING = 2  # unfinished sends to one rank; more would only pile up on the way to a dead one
_TAGS = 2**10  # our tags lie above this


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message that has arrived.

    Attributes:
        source: rank of the sender.
        kind: what it is, a small number chosen by the sender.
        body: its bytes.
    """

    source: int
    kind: int
    body: bytes


class Exchange(Protocol):
    """What the sidecar needs of a network."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def send(self, target: int, kind: int, body: bytes) -> bool:
        """Send without waiting; False where it was not taken: earlier ones are still on their way, or MPI failed."""

    def receive(self) -> list[Parcel]:
        """Take what has arrived, without waiting."""


class MpiExchange:
    """Messages over MPI_COMM_WORLD. Making one initialises MPI, which waits for all ranks of the step.

    Leave the process with `leave`: MPI_Finalize would wait for the dead.
    """

    def __init__(self) -> None:
        openmpi.prepare()
        import mpi4py  # here, since importing MPI starts it

        mpi4py.rc.thread_level = "funneled"
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self._world.Set_errhandler(MPI.ERRORS_RETURN)
        openmpi.settle()
        self._rank: int = self._world.Get_rank()
        self._size: int = self._world.Get_size()
        self._sends: dict[int, list[tuple[Any, bytes]]] = {}
        self._status: Any = MPI.Status()
        self._buffers = [bytearray(MAX_BYTES) for _ in range(_SLOTS)]
        self._receives: list[Any] = [self._post(buffer) for buffer in self._buffers]
        self._next = 0

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def send(self, target: int, kind: int, body: bytes) -> bool:
        under_way = [pair for pair in self._sends.get(target, ()) if not self._done(pair[0])]
        self._sends[target] = under_way
        if len(under_way) >= _OUTSTANDING or len(body) > MAX_BYTES:
            return False
        try:
            request = self._world.Isend([body, self._mpi.BYTE], dest=target, tag=_TAGS + kind)
        except self._mpi.Exception:  # a broken connection is the same as silence, and is told as that
            return False
        under_way.append((request, body))
        return True

    def receive(self) -> list[Parcel]:
        parcels = []
        for _ in range(10 * _SLOTS + self._size):  # a flood must not keep the caller here
            parcel, arrived = self._take(self._next)
            if parcel is not None:
                parcels.append(parcel)
            if not arrived:
                break
            self._next = (self._next + 1) % _SLOTS
        return parcels

    def _take(self, slot: int) -> tuple[Parcel | None, bool]:
        """Look at the receive that was posted first: messages are matched in that order."""
        request = self._receives[slot]
        status = self._status
        parcel = None
        try:
            if request is not None:
                if not request.Test(status):
                    return None, False
                body = bytes(self._buffers[slot][: status.Get_count(self._mpi.BYTE)])
                parcel = Parcel(status.Get_source(), status.Get_tag() - _TAGS, body)
        except self._mpi.Exception:  # this receive failed; the next one may not
            parcel = None
        self._receives[slot] = self._post(self._buffers[slot])
        return parcel, parcel is not None

    def _post(self, buffer: bytearray) -> Any:
        try:
            return self._world.Irecv([buffer, self._mpi.BYTE], source=self._mpi.ANY_SOURCE, tag=self._mpi.ANY_TAG)
        except self._mpi.Exception:
            return None

    def _done(self, request: Any) -> bool:
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return True


def leave(code: int) -> NoReturn:
    """End this process at once, without MPI_Finalize.

    Args:
        code: its exit status.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads any more
            pass
    os._exit(code)
