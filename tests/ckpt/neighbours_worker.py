"""Hosts that keep copies of each other's memory: `mpirun -n N python neighbours_worker.py SCENARIO FACTS`.

Each process is a host with a staging folder, a checkpoint server and one rank of the program; those beyond the hosts
that serve are spares, without a rank.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from transom_hpc.base.clock import SystemClock
from transom_hpc.ckpt import Checkpointer, cargo, exchange, h5file
from transom_hpc.ckpt.company import Company
from transom_hpc.ckpt.distrust import Distrust
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.handover import GATHERING
from transom_hpc.ckpt.ring import Peer, Ring
from transom_hpc.ckpt.roster import Roster
from transom_hpc.ckpt.server import Server

FACTS = json.loads(sys.argv[2])
NUMBER = MPI.COMM_WORLD.Get_rank()
HOST = FACTS["hosts"][NUMBER]
SERVING = FACTS["serving"]
RANK = SERVING.index(HOST) if HOST in SERVING else None
FOLDER = Path(FACTS["shm"]) / HOST


def state(step: int) -> dict[str, Any]:
    own = np.random.default_rng(1000 * step + (RANK or 0))
    found = {
        "own": own.random(FACTS.get("elements", 300_000)),
        "large": own.integers(0, 255, 5_000_001, dtype="u1"),  # its end is not that of a page
        "huge": np.zeros(FACTS.get("huge", 0), dtype="u1"),
        "same": np.arange(200_000.0) + step,  # on all ranks
        "none": np.zeros((0, 3)),
        "text": f"rank {RANK}",
        "n": step,
    }
    if found["huge"].size:
        found["huge"][-2:] = step, RANK  # its last bytes
    return found


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def until(ready: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            say(error="not in time")
            os._exit(1)
        time.sleep(0.01)


def say(**facts: Any) -> None:
    os.write(1, f"{json.dumps({'host': HOST, **facts})}\n".encode())  # in one piece: others write there too


def serve() -> Company:
    files, clock = Files(), SystemClock()
    h5file.load()
    ring = Ring(Peer(HOST, FACTS.get("switches", {}).get(HOST, "")))
    spares = [host for host in FACTS["hosts"] if host not in SERVING]
    distrust = Distrust.parse(FACTS.get("distrust", ""))
    directory, copies = Path(FACTS["directory"]), FACTS.get("copies", 1)
    roster = Roster(FACTS["attempt"], SERVING, spares, 1, {}, copies, 1, directory, distrust)
    company = Company(HOST, ring.peers, ring, roster, FACTS.get("limit"), files, clock)
    server = Server(FOLDER, files, clock, ring.writer(files, clock, SERVING), "direct", company, roster)
    threading.Thread(target=server.serve, daemon=True).start()
    return company


def checkpointer() -> Checkpointer:
    assert RANK is not None
    return Checkpointer(
        FACTS["directory"],
        RANK,
        len(SERVING),
        attempt=FACTS["attempt"],
        shm=FOLDER,
        on_save_error="raise",
        keep=2,
        distrust=FACTS.get("distrust"),
    )


def leave() -> None:
    """As if the host's processes were killed; memory stays as it is."""
    MPI.COMM_WORLD.Barrier()
    sys.stdout.flush()
    os._exit(0)


def copied() -> None:
    """Save some steps; each copy arrives."""
    company = serve()
    until(lambda: company._neighbours)
    if RANK is not None:
        ckpt = checkpointer()
        for number, step in enumerate(FACTS["steps"], 1):
            ckpt.save(step, state(step), block=True)
            wanted = number * min(FACTS.get("copies", 1), len(FACTS["hosts"]) - 1)
            until(lambda wanted=wanted: company._neighbours.sent >= wanted)  # type: ignore[union-attr,misc]
    if RANK is None:
        until(lambda: len(list(FOLDER.glob("copy.*"))) == min(2, len(FACTS["steps"])))
        time.sleep(0.3)
    MPI.COMM_WORLD.Barrier()
    say(sent=company._neighbours.sent, received=company._exchange.received)  # type: ignore[union-attr]
    leave()


def kept() -> None:
    """Save a step, then have others in memory only; the copies are there when they are said to be."""
    company = serve()
    until(lambda: company._neighbours)
    if RANK is not None:
        ckpt = checkpointer()
        first, *others = FACTS["steps"]
        ckpt.save(first, state(first), block=True)
        until(lambda: not company._neighbours._busy)  # type: ignore[union-attr]
        for step in others:
            before = company._neighbours.sent  # type: ignore[union-attr]
            ckpt._asked_after = ckpt._saver.tries
            ckpt._keep_in_memory(step, state(step))
            save = ckpt._saver.kept
            assert save is not None
            until(save.done.is_set)
            say(step=save.job.step, copies=save.copies, sent=company._neighbours.sent - before, whole=save.whole)  # type: ignore[union-attr]
            MPI.COMM_WORLD.Barrier()
    leave()


def killed() -> None:
    """The host that keeps the copies dies when some of one has come; saves go on, and the trouble is said once."""
    taken = cargo.Arriving.room

    def deadly(self: cargo.Arriving, begin: int, end: int) -> memoryview:
        if begin:
            os.kill(os.getpid(), signal.SIGKILL)
        return taken(self, begin, end)

    if RANK is None:
        cargo.Arriving.room = deadly  # type: ignore[method-assign]
    exchange.STALL_S = 1.5
    company = serve()
    until(lambda: company._neighbours)
    if RANK is None:
        time.sleep(60)
    ckpt = checkpointer()
    took = []
    for step in FACTS["steps"]:
        began = time.monotonic()
        ckpt.save(step, state(step), block=True)
        took.append(time.monotonic() - began)
    until(lambda: not company._neighbours._busy)  # type: ignore[union-attr]
    say(sent=company._neighbours.sent, took=took)  # type: ignore[union-attr]
    os._exit(0)


def refused() -> None:
    """There is no memory for copies; saves go on."""
    company = serve()
    until(lambda: company._neighbours)
    ckpt = checkpointer()
    for step in FACTS["steps"]:
        ckpt.save(step, state(step), block=True)
        until(lambda: not company._neighbours._busy)  # type: ignore[union-attr]
    say(sent=company._neighbours.sent)  # type: ignore[union-attr]
    leave()


def restored() -> None:
    """Restore, from whatever memory."""
    os.environ[GATHERING] = FACTS["attempt"]
    serve()
    if RANK is not None:
        ckpt = checkpointer()
        found = {
            name: np.zeros_like(value) if isinstance(value, np.ndarray) else None for name, value in state(0).items()
        }
        began = time.monotonic()
        step = ckpt.restore(found)
        say(step=step, same=is_same(found, state(step)), seconds=time.monotonic() - began)
    leave()


if __name__ == "__main__":
    warnings.simplefilter("error")
    logging.basicConfig(level=logging.INFO, format=f"{HOST} %(message)s")
    globals()[sys.argv[1]]()
