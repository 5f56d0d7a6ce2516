"""The hand on MPI of a job's checkpoint servers. The only place in ckpt that starts MPI.

Nothing in a save waits for MPI: where it shows a server only itself, that one serves its node all the same. After the
start there are only Isend, Irecv, Improbe and Test: no call waits for another server, and no error ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from transom_hpc.base import openmpi
from transom_hpc.base.clock import Clock
from transom_hpc.ckpt import mpio
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.mpio import MpioWriter

log = logging.getLogger("transom_hpc.ckpt")

DEADLINE_S = 60.0
"""Longest time in which nothing moves while servers write together."""

_MESSAGES = 1  # the tag of messages; those of bytes lie above it
_TAGS = 2**14


@dataclass(frozen=True, slots=True)
class Peer:
    """A server of the step.

    Args:
        host: its host, as Slurm calls it.
        switch: the switch that the host hangs on; empty where nobody knows.
    """

    host: str
    switch: str


class Request(Protocol):
    """Something that is on its way."""

    def over(self) -> bool:
        """Whether it has arrived, or left.

        Raises:
            ConnectionError: it never will.
        """


class Post(Protocol):
    """What the exchange needs of a network. No call waits for another process."""

    rank: int
    size: int

    def tell(self, target: int, body: bytes) -> Request:
        """Send a message."""

    def heard(self) -> list[tuple[int, bytes]]:
        """The messages that have come: from whom, and what."""

    def send(self, target: int, number: int, data: memoryview) -> Request:
        """Send bytes under a number. They must not change before they have left."""

    def receive(self, source: int, number: int, room: memoryview) -> Request:
        """Have the next bytes under this number put there."""


class Ring:
    """The servers of one step. Making one initialises MPI, which waits for all ranks of the step.

    Leave the process by os._exit: MPI_Finalize would wait for the dead.

    Args:
        me: what this server is.
    """

    def __init__(self, me: Peer) -> None:
        openmpi.prepare()
        import mpi4py

        mpi4py.rc.finalize = False
        mpi4py.rc.initialize = False
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        self._mpi: Any = MPI
        self._world: Any = MPI.COMM_WORLD
        self._world.Set_errhandler(MPI.ERRORS_RETURN)
        openmpi.settle()
        self.rank: int = self._world.Get_rank()
        self.size: int = self._world.Get_size()
        self.peers = [Peer(*told) for told in self._world.allgather((me.host, me.switch))]
        """All servers, in the order of MPI's ranks."""
        self._coming: list[tuple[Any, int, bytearray]] = []

    def writer(self, files: Files, clock: Clock, serving: Collection[str]) -> MpioWriter | None:
        """What writes together with the other servers; None where that can't be. All ranks on these hosts must call it.

        Args:
            serving: hosts with ranks of the program.
        """
        members = [rank for rank, peer in enumerate(self.peers) if peer.host in serving]
        if self.rank not in members:
            return None
        world = self._world
        if len(members) < self.size:
            world = world.Create_group(world.Get_group().Incl(members))
        comm, why = mpio.find(len(members), sharing=True, world=world)
        if comm is None:
            log.info("checkpoints are written directly: %s", why)
            return None
        return MpioWriter(comm, files, clock, DEADLINE_S)

    # ------------------------------------------------------------------ Post

    def tell(self, target: int, body: bytes) -> Request:
        return self._isend(body, target, _MESSAGES)

    def send(self, target: int, number: int, data: memoryview) -> Request:
        return self._isend(data, target, _MESSAGES + 1 + number % _TAGS)

    def receive(self, source: int, number: int, room: memoryview) -> Request:
        try:
            tag = _MESSAGES + 1 + number % _TAGS
            return _Request(self._mpi, self._world.Irecv([room, self._mpi.BYTE], source=source, tag=tag), room)
        except self._mpi.Exception as error:
            return _Request(self._mpi, None, room, str(error))

    def heard(self) -> list[tuple[int, bytes]]:
        try:
            while (message := self._probe()) is not None:
                status, found = message
                body = bytearray(status.Get_count(self._mpi.BYTE))
                self._coming.append((found.Irecv([body, self._mpi.BYTE]), status.Get_source(), body))
        except self._mpi.Exception as error:
            log.info("MPI: %s", error)
        arrived, left = [], []
        for request, source, body in self._coming:
            try:
                if request.Test():
                    arrived.append((source, bytes(body)))
                else:
                    left.append((request, source, body))
            except self._mpi.Exception as error:
                log.info("MPI: %s", error)
        self._coming = left
        return arrived

    def _probe(self) -> tuple[Any, Any] | None:
        status = self._mpi.Status()
        found = self._world.Improbe(source=self._mpi.ANY_SOURCE, tag=_MESSAGES, status=status)
        return None if found is None else (status, found)

    def _isend(self, data: bytes | memoryview, target: int, tag: int) -> Request:
        try:
            return _Request(self._mpi, self._world.Isend([data, self._mpi.BYTE], dest=target, tag=tag), data)
        except self._mpi.Exception as error:
            return _Request(self._mpi, None, data, str(error))


class _Request:
    """One of MPI's, with the memory that it uses."""

    __slots__ = ("_data", "_mpi", "_request", "_why")

    def __init__(self, mpi: Any, request: Any, data: Any, why: str = "") -> None:
        self._mpi = mpi
        self._request = request
        self._data = data
        self._why = why

    def over(self) -> bool:
        if self._request is None:
            raise ConnectionError(self._why)
        try:
            return bool(self._request.Test())
        except self._mpi.Exception as error:
            raise ConnectionError(str(error)) from error
