"""What MPI moves between two hosts: prints seconds a byte. Started by srun on two hosts; see `tiers`."""

from __future__ import annotations

import time

import numpy as np

from transom_hpc.base import openmpi

PIECE_BYTES, PIECES, IN_FLIGHT = 4 << 20, 64, 4


def main() -> None:
    openmpi.prepare()  # as the checkpoint servers have it
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rooms = [np.ones(PIECE_BYTES, dtype=np.uint8) for _ in range(IN_FLIGHT)]
    best = float("inf")
    for _ in range(4):
        comm.Barrier()
        began = time.perf_counter()
        begin = comm.Isend if comm.rank == 0 else comm.Irecv
        flying = [begin(room, 1 - comm.rank) for room in rooms]
        for number in range(IN_FLIGHT, PIECES):
            slot = number % IN_FLIGHT
            flying[slot].Wait()
            flying[slot] = begin(rooms[slot], 1 - comm.rank)
        MPI.Request.Waitall(flying)
        comm.Barrier()
        best = min(best, (time.perf_counter() - began) / (PIECES * PIECE_BYTES))
    if comm.rank == 0:
        print(best)


if __name__ == "__main__":
    main()
