"""The collective writer: parallel HDF5 over MPI, into the file that is laid out already. The hand on MPI of `ckpt`.

Large arrays that all ranks hold are written by all of them together, in turns; everything else by the rank whose it is,
without regard to the others. Opening and closing is for all. The bytes go where HDF5 placed the datasets, so the file
is the one that the direct writer makes.

Nobody can be called back from MPI. So all of it runs in one thread of its own, which is given up when nothing moves
for the deadline; the save fails then, and this writer is lost for as long as the process lives.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import h5file
from transom_hpc.ckpt.direct import Batch, Piece, Target
from transom_hpc.ckpt.errand import Errands
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.layout import boxes

_CHECK_BYTES = 64 << 20
"""What a process reads back, once: there are file systems on which an MPI wrote other bytes than it was given."""

_FIRST_WAIT_S = 0.0002
_LONGEST_WAIT_S = 0.005


@dataclass(slots=True)
class _Round:
    """One write of all parties of this process.

    Args:
        parties: ranks of this process that take part, each in a thread of its own.
        moved: when there was a sign of life last.
        given: batches and progress of each party that has come.
        done: set when it is over, well or not.
    """

    parties: int
    moved: float
    given: list[tuple[Sequence[Batch], Callable[[], None]]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0
    error: BaseException | None = None


class MpioWriter:
    """Parallel HDF5.

    Args:
        comm: of all processes that may take part in a save, nobody else's, with MPI's THREAD_MULTIPLE.
        files: the hand on the file system.
        clock: for the deadline.
        deadline_s: longest time without any progress, in seconds.
    """

    def __init__(self, comm: Any, files: Files, clock: Clock, deadline_s: float) -> None:
        self.process: int = comm.Get_rank()
        self.world: int = comm.bcast(secrets.randbits(60))
        self._comm = comm
        self._crews: dict[tuple[int, ...], Any] = {tuple(range(comm.Get_size())): comm}
        self._files = files
        self._clock = clock
        self._deadline_s = deadline_s
        self._thread = Errands("transom-mpio")
        self._lock = threading.Lock()
        self._rounds: dict[Path, _Round] = {}
        self._checked = False
        self.lost = ""

    def write(
        self,
        crew: Sequence[tuple[int, int]],
        folder: Path,
        names: Sequence[str],
        batches: Sequence[Batch],
        progress: Callable[[], None],
    ) -> float:
        """See writers.Collective. Each rank of the crew calls it once, in a thread of its own.

        Raises:
            SaveError: the deadline has passed, or what is on disk is not what was written.
            OSError: HDF5 or the file system failed.
        """
        with self._lock:
            if self.lost:
                raise SaveError(self.lost, path=folder)
            if folder not in self._rounds:
                self._rounds[folder] = _Round(dict(crew)[self.process], self._clock.now())
            mine = self._rounds[folder]
            mine.given.append((batches, progress))
            mine.moved = self._clock.now()
            if len(mine.given) == mine.parties:
                del self._rounds[folder]
                self._thread.send(partial(self._run, mine, crew, folder, names))
        while not mine.done.wait(min(0.5, self._deadline_s / 4)):
            if self._clock.now() - mine.moved > self._deadline_s:
                self._lose(mine)
        if mine.error is not None:
            raise mine.error
        return mine.seconds

    def _lose(self, mine: _Round) -> None:
        """Give the thread up, and with it h5py, which it may hold."""
        with self._lock:
            if not self.lost:
                what = (
                    f"only {len(mine.given)} of {mine.parties} ranks of this process came to write together"
                    if len(mine.given) < mine.parties
                    else "a collective write did not go on: has a rank died in it?"
                )
                self.lost = f"{what} (no progress for {self._deadline_s:g} s)"
                h5file.lose(self.lost)
            mine.error = mine.error or SaveError(self.lost)
        mine.done.set()

    def _run(self, mine: _Round, crew: Sequence[tuple[int, int]], folder: Path, names: Sequence[str]) -> None:
        """All of it, in the thread that may be given up."""
        try:
            comm = self._of(tuple(process for process, _ in crew))
            self._assemble(mine, comm)
            seconds = self._write(mine, comm, max(parties for _, parties in crew), folder, names)
            if not self._checked:
                self._compare(mine, folder)
                self._checked = True
            mine.seconds = seconds
        except BaseException as error:  # handed to the parties, which wait
            mine.error = mine.error or error
        finally:
            mine.done.set()

    def _of(self, processes: tuple[int, ...]) -> Any:
        """A communicator of these, which all of them ask for now."""
        if processes not in self._crews:
            group = self._comm.Get_group().Incl(processes)
            self._crews[processes] = self._comm.Create_group(group)
        return self._crews[processes]

    def _write(self, mine: _Round, comm: Any, width: int, folder: Path, names: Sequence[str]) -> float:
        began = self._clock.now()
        given = [batches for batches, _ in mine.given]
        errors: list[Exception] = []

        def moved() -> None:
            mine.moved = self._clock.now()
            for _, progress in mine.given:
                progress()

        for name in names:
            here = [[batch for batch in batches if batch.file == name] for batches in given]
            with _Parallel(folder / name, comm) as file:
                _put_together(file, here, width, errors, moved)
                for batch in (batch for batches in here for batch in batches if not batch.turns):
                    for piece in batch.pieces:
                        _try(partial(file.put, batch.dataset, piece), errors)
                        moved()
        if errors:  # not before: whoever leaves in the middle leaves the others hanging
            raise errors[0]
        for name in sorted({batch.file for batches in given for batch in batches}):
            fd = self._files.open(folder / name, os.O_WRONLY)
            try:
                self._files.fsync(fd)
            finally:
                self._files.close(fd)
        return self._clock.now() - began

    def _assemble(self, mine: _Round, comm: Any) -> None:
        """Wait until all processes are here, without entering anything from which there is no way back.

        Raises:
            SaveError: they did not come.
        """
        request = comm.Ibarrier()
        end = self._clock.now() + self._deadline_s
        pause = _FIRST_WAIT_S
        while not request.Test():
            if self._clock.now() > end:
                self._lose(mine)
                raise SaveError(self.lost)
            self._clock.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_WAIT_S)
        mine.moved = self._clock.now()

    def _compare(self, mine: _Round, folder: Path) -> None:
        """Read back what was written first."""
        left = _CHECK_BYTES
        for batch in (batch for batches, _ in mine.given for batch in batches):
            with Target(self._files, folder / batch.file, os.O_RDONLY) as source:
                for piece in batch.pieces:
                    if left < piece.nbytes:
                        return
                    left -= piece.nbytes
                    room = np.empty(piece.nbytes, dtype=np.uint8)
                    got = source.get(room.data, batch.offset + piece.begin)
                    mine.moved = self._clock.now()
                    if got < piece.nbytes or not np.array_equal(room, np.frombuffer(piece.data(), dtype=np.uint8)):
                        raise SaveError(
                            f"{folder / batch.file}: {batch.dataset} was read back other than MPI-IO was given it; "
                            "write with writer='direct' on this file system",
                            path=folder / batch.file,
                        )


def _put_together(
    file: _Parallel,
    here: Sequence[Sequence[Batch]],
    width: int,
    errors: list[Exception],
    moved: Callable[[], None],
) -> None:
    """What all ranks write a part of: every process takes every turn, with nothing where it has nothing."""
    turning = [[batch for batch in batches if batch.turns] for batches in here]
    for number, batch in enumerate(turning[0] if turning else []):
        for party in range(width):
            pieces = turning[party][number].pieces if party < len(turning) else ()
            for turn in range(batch.turns):
                piece = pieces[turn] if turn < len(pieces) else None
                _try(partial(file.put, batch.dataset, piece, True), errors)
                moved()


def _try(call: Callable[[], None], errors: list[Exception]) -> None:
    try:
        call()
    except Exception as error:  # kept until all have done their part
        errors.append(error)


class _Parallel:
    """One HDF5 file, open on all processes."""

    def __init__(self, path: Path, comm: Any) -> None:
        self._h5py = h5file.library()
        self._path = path
        self._comm = comm
        self._file: Any = None
        self._open: tuple[str, Any] = ("", None)

    def __enter__(self) -> _Parallel:
        access = self._h5py.h5p.create(self._h5py.h5p.FILE_ACCESS)
        access.set_libver_bounds(self._h5py.h5f.LIBVER_EARLIEST, self._h5py.h5f.LIBVER_V110)
        access.set_fclose_degree(self._h5py.h5f.CLOSE_STRONG)
        # h5py's own calls keep the interpreter while these wait for the other processes: nothing of the program would
        # run meanwhile, no deadline either. Writing and closing let go of it.
        hdf5 = ctypes.CDLL(self._h5py.h5f.__file__)
        hdf5.H5Fopen.restype = ctypes.c_int64
        info = _handle(sys.modules["mpi4py.MPI"].INFO_NULL)
        with self._h5py._objects.phil:
            number = hdf5.H5Pset_fapl_mpio(ctypes.c_int64(access.id), _handle(self._comm), info)
            if number >= 0:
                path = ctypes.c_char_p(os.fsencode(self._path))
                number = hdf5.H5Fopen(path, ctypes.c_uint(self._h5py.h5f.ACC_RDWR), ctypes.c_int64(access.id))
        if number < 0:
            raise OSError(f"parallel HDF5 could not open {self._path}")
        self._file = self._h5py.h5f.FileID(number)
        return self

    def __exit__(self, *_: object) -> None:
        self._open = ("", None)
        self._file.close()

    def put(self, dataset: str, piece: Piece | None, together: bool = False) -> None:
        """Write a piece; together with all processes, of which some may have none."""
        h5s, h5fd = self._h5py.h5s, self._h5py.h5fd
        if self._open[0] != dataset:
            self._open = (dataset, self._h5py.h5d.open(self._file, dataset.encode("utf-8")))
        opened = self._open[1]
        kind, space = opened.get_type(), opened.get_space()
        how = self._h5py.h5p.create(self._h5py.h5p.DATASET_XFER)
        how.set_dxpl_mpio(h5fd.MPIO_COLLECTIVE if together else h5fd.MPIO_INDEPENDENT)
        data = np.empty(1, dtype=np.uint8)
        memory = h5s.create_simple((1,))
        problem: BaseException | None = None
        try:
            if piece is not None:
                data = np.frombuffer(piece.data(), dtype=np.uint8)
        except BaseException as error:
            problem = error
        if piece is None or problem is not None:
            space.select_none()
            memory.select_none()
        elif space.shape == ():
            memory = h5s.create(h5s.SCALAR)
        else:
            size = kind.get_size()
            memory = h5s.create_simple((piece.nbytes // size,))
            space.select_none()
            for start, count in boxes(space.shape, piece.begin // size, piece.nbytes // size):
                space.select_hyperslab(start, count, op=h5s.SELECT_OR)
        if together or problem is None:
            opened.write(memory, space, data, kind, how)
        if problem is not None:
            raise problem


def _handle(held: Any) -> Any:
    """What C calls by that name: an address or a number, as the MPI has it."""
    mpi = sys.modules["mpi4py.MPI"]
    kind = ctypes.c_void_p if mpi._sizeof(held) == ctypes.sizeof(ctypes.c_void_p) else ctypes.c_int
    return kind.from_address(mpi._addressof(held))


def find(world_size: int, sharing: bool, world: Any = None) -> tuple[Any, str]:
    """A communicator of our own of the program's ranks. All ranks must call it, at the same place of the program.

    Args:
        world_size: ranks of the program.
        world: a communicator of them; None for MPI's own of all.
        sharing: take it also where the program has loaded h5py itself. A program whose ranks write HDF5 together may
            wait for a lock of h5py's that another rank's save holds, and that one for this rank.

    Returns:
        It, and an empty text; or None and why there is none.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return None, "MPI is not started in this program (import mpi4py.MPI before)"
    if world is None:
        world = mpi.COMM_WORLD
    if world.Get_size() != world_size:
        return None, f"MPI sees {world.Get_size()} ranks and the program has {world_size}"
    why = "" if mpi.Query_thread() == mpi.THREAD_MULTIPLE else "MPI was not started with THREAD_MULTIPLE"
    if not why and not sharing and h5file.is_the_programs():
        why = "the program uses h5py itself"
    if not why:
        try:
            why = "" if h5file.library().get_config().mpi else "h5py was built without MPI"
        except ImportError:
            why = "there is no h5py"
    reasons = world.allgather(why)
    if any(reasons):
        return None, why or next(f"rank {rank}: {said}" for rank, said in enumerate(reasons) if said)
    return world.Dup(), ""
