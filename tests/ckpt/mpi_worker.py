"""Programs of MPI ranks for the tests of the writers: `mpirun -n N python mpi_worker.py SCENARIO FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import Checkpointer, commit, mpio, staging
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.fence import Fence
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.state import Leaf
from transom_hpc.ckpt.writers import Writers

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def state(rank: int) -> dict[str, Any]:
    """Some of everything: what all hold, large and small, what each has for itself, and every kind of dataset."""
    common, own = np.random.default_rng(5), np.random.default_rng(100 + rank)
    return {
        "large": common.random((37, 41, 900)),  # 11 MB: its parts begin in the middle of a row
        "flat": common.random(600_000, dtype="f4"),
        "odd": common.random(77).astype(">f4"),
        "own": own.random(200_000 + rank),
        "mask": np.arange(77) % 3 == 0,
        "one": np.array(3.5),
        "none": np.zeros((0, 3)),
        "dates": np.array(["2020-01-01"] * 9, "M8[s]"),
        "object": np.random.default_rng(3),
        "text": "long " * 500_000,
        "rank": rank,
    }


def checkpointer(folder: Path, attempt: str = "A1", **options: Any) -> Checkpointer:
    return Checkpointer(
        folder, RANK, SIZE, attempt=attempt, on_save_error="raise", **{"deadline_s": 60.0, "keep": 9, **options}
    )


def both(folder: Path) -> None:
    """The same state by each writer, and by both in turns, which is the measurement."""
    options: dict[str, Any] = {"data_files": SIZE, "align_bytes": 4096 * SIZE}
    for writer in ("direct", "mpio", "auto"):
        time.sleep(1.1 if writer == "mpio" else 0)  # a time stamp in the file would show
        with checkpointer(folder / writer, writer=writer, **options) as ckpt:
            ckpt.save(1, state(RANK), block=True)
            assert ckpt.restore(state(RANK)) == 1


def again(folder: Path) -> None:
    """A later start on what `both` left, with the choice that is recorded there."""
    with checkpointer(folder / "auto", "A2") as ckpt:
        ckpt.save(2, state(RANK), block=True)


def dies(folder: Path) -> None:
    """Rank 1 is killed in the middle of a collective write; rank 0 tells what it sees."""

    class Deadly(SystemClock):
        """Looked at after each part of a collective write, when the file is still open on all processes."""

        def now(self) -> float:
            inside = threading.current_thread().name == "transom-mpio" and any(
                "/data-0" in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()
            )
            if RANK == 1 and inside:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().now()

    with checkpointer(folder, writer="mpio") as ckpt:
        ckpt.save(1, state(RANK), block=True)
    ckpt = checkpointer(folder, "A2", writer="mpio", deadline_s=3.0, clock=Deadly())
    began = time.monotonic()
    told = []
    for step in (2, 3):
        try:
            ckpt.save(step, state(RANK), block=True)
        except SaveError as error:
            told.append(str(error))
    print(json.dumps({"told": told, "took": time.monotonic() - began}), flush=True)
    os._exit(0)


def lies(folder: Path) -> None:
    """On a file system where other bytes come back than were written."""

    class Lying(Files):
        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            got = super().pread(fd, into, offset)
            into[0] ^= 1
            return got

    with checkpointer(folder / "auto", writer="auto", files=Lying()) as ckpt:
        ckpt.save(1, state(RANK), block=True)
    with checkpointer(folder / "mpio", writer="mpio", files=Lying()) as ckpt:
        try:
            ckpt.save(1, state(RANK), block=True)
        except SaveError as error:
            print(json.dumps(str(error)))


def tears(folder: Path) -> None:
    """Rank 1 can't give its bytes in the middle of a collective write; the next save is as if nothing had been."""

    class Torn(staging.Straight):
        def data(self, index: int, begin: int, end: int) -> memoryview:
            if RANK == 1:
                raise SaveError("it was torn")
            return super().data(index, begin, end)

    files, clock = Files(), SystemClock()
    folder.mkdir(exist_ok=True)
    writers = Writers(files, mpio.MpioWriter(WORLD.Dup(), files, clock, 30.0), "mpio")
    fence = Fence(folder, "A1", files)
    if RANK == 0:
        fence.announce()
    WORLD.Barrier()
    array = np.random.default_rng(1).random(3_000_000)
    leaves = [Leaf("tensors/x", array, "numpy:<f8", array.shape, array.nbytes)]
    for step, source in ((1, Torn(leaves, 1)), (2, staging.Straight(leaves, 2))):
        job = commit.Job(folder, step, step, RANK, 2, "A1", {}, 30.0)
        try:
            commit.commit(job, source, writers, Blanks(files), fence, files, clock)
            said = "committed"
        except Exception as error:
            said = str(error)
        for line in WORLD.gather(said) or ():
            print(line, flush=True)


def late(folder: Path) -> None:
    """The other process comes late to open a file: does the interpreter go on meanwhile?"""
    if RANK == 0:
        folder.mkdir()
        with checkpointer_alone(folder) as ckpt:
            ckpt.save(1, {"x": np.arange(10.0)}, block=True)
    WORLD.Barrier()
    time.sleep(1.0 * RANK)
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    with mpio._Parallel(folder / "step-000000001" / "data-00000.h5", WORLD):
        pass
    over.set()
    thread.join()
    if RANK == 0:
        print(json.dumps(len(ticks)))


def checkpointer_alone(folder: Path) -> Checkpointer:
    return Checkpointer(folder, attempt="A1", writer="direct")


def server(folder: Path) -> None:
    """As a checkpoint server does: process 0 writes for ranks 0 and 1, process 2 for rank 2, process 1 for nobody."""
    held = {0: (0, 1), 1: (), 2: (2,)}[RANK]
    files, clock = Files(), SystemClock()
    for writer in ("direct", "mpio"):
        directory = folder / writer
        directory.mkdir(parents=True, exist_ok=True)
        together = mpio.MpioWriter(WORLD.Dup(), files, clock, 30.0) if writer == "mpio" else None
        writers = Writers(files, together, writer)  # type: ignore[arg-type]
        fence = Fence(directory, "A1", files)
        if RANK == 0:
            fence.announce()
        WORLD.Barrier()

        def save(rank: int, directory: Path = directory, writers: Writers = writers, fence: Fence = fence) -> None:
            job = commit.Job(directory, 1, 0, rank, 3, "A1", {}, 30.0)
            array = np.random.default_rng(1).random(1_000_000)
            own = np.full(1000 + rank, rank)
            leaves = [
                Leaf("tensors/x", array, "numpy:<f8", array.shape, array.nbytes),
                Leaf("tensors/own", own, "numpy:<i8", own.shape, own.nbytes),
            ]
            commit.commit(job, staging.Straight(leaves, 1), writers, Blanks(files), fence, files, clock)

        threads = [threading.Thread(target=save, args=(rank,)) for rank in held]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        WORLD.Barrier()


if __name__ == "__main__":
    warnings.simplefilter("error")
    globals()[sys.argv[1]](Path(sys.argv[2]))
