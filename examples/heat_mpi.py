"""Heat spreading over a plate, on any number of MPI ranks, without torch; it survives what happens to them.

    mpirun -n 4 python examples/heat_mpi.py --steps 500 --checkpoints /tmp/heat
    transom submit --nodes 4 --spares 1 -- python examples/heat_mpi.py --steps 20000

Each rank owns some rows of the plate and sees one row of each neighbour, its halo. The edge of the plate is kept at
fixed temperatures. Only the lines that mention `ckpt` or `state` have to do with surviving: the state says which rows
of the plate a rank has. A run that was stopped and resumed, on as many ranks or on others, ends with bitwise the field
of one that was not.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import transom_hpc as transom

RATE = 0.2
"""Time step times conductivity, over the square of the grid's spacing; stable up to 0.25."""


def rows_of(rank: int, world_size: int, size: int) -> range:
    """The rows of the plate that a rank owns; the first ranks have one more where it does not come out even."""
    each, more = divmod(size, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def cold_plate(rows: range, size: int) -> np.ndarray:
    """A rank's rows of the plate at the start, shape (len(rows) + 2, size): its own between two rows of halo.

    The plate is cold, its top edge is hot, and its left edge is warm.
    """
    block = np.zeros((len(rows) + 2, size))
    block[:, 0] = 0.5
    if rows and rows[0] == 0:
        block[1] = 1.0
    return block


def exchange_halo(world: MPI.Comm, block: np.ndarray, above: int, below: int) -> None:
    """Give each neighbour the row of ours that it sees, and take theirs. All ranks call it."""
    world.Sendrecv(block[1], dest=above, recvbuf=block[-1], source=below)
    world.Sendrecv(block[-2], dest=below, recvbuf=block[0], source=above)


def spread(block: np.ndarray, rows: range, size: int) -> float:
    """Let the heat spread for one time step.

    Returns:
        The sum of the squared changes in this rank's rows.
    """
    first = 2 if rows[0] == 0 else 1  # the plate's edge stays as it is
    last = len(rows) if rows[-1] == size - 1 else len(rows) + 1
    here = block[first:last, 1:-1]
    around = block[first - 1 : last - 1, 1:-1] + block[first + 1 : last + 1, 1:-1]
    around += block[first:last, :-2] + block[first:last, 2:]
    change = RATE * (around - 4.0 * here)
    here += change
    return float(np.vdot(change, change))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--size", type=int, default=512, help="points along each side of the plate")
    parser.add_argument("--checkpoints", type=Path, help="where to save; inside a run, the run knows")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="inside a run, the run knows")
    parser.add_argument("--final", type=Path, help="write the field here at the end, as numpy's .npy")
    parser.add_argument("--print-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--sleep", type=float, default=0.0, metavar="S", help="slow each step down, to watch it")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    world = MPI.COMM_WORLD
    rank, world_size = world.rank, world.size
    if args.size < world_size:
        raise SystemExit(f"--size {args.size} is fewer rows than ranks ({world_size})")
    rows = rows_of(rank, world_size, args.size)
    above = rank - 1 if rank > 0 else MPI.PROC_NULL
    below = rank + 1 if rank < world_size - 1 else MPI.PROC_NULL
    block = cold_plate(rows, args.size)

    ckpt = transom.Checkpointer.from_env(directory=args.checkpoints, every=args.save_every)
    # Without the halo, which the next exchange brings anew. A run may go on with another number of ranks.
    state = {"plate": transom.Block(block[1:-1], (args.size, args.size), (rows.start, 0))}
    start = ckpt.restore(state)
    if rank == 0:
        print(f"{args.size} x {args.size} points, {world_size} ranks: from step {start}", flush=True)
    residual, since = float("nan"), time.monotonic()
    for step in range(start, args.steps):
        exchange_halo(world, block, above, below)
        ckpt.before_update()  # optional: lets the last save copy the field while halos are exchanged
        residual = world.allreduce(spread(block, rows, args.size)) ** 0.5
        time.sleep(args.sleep)
        ckpt.step(step + 1, state, loss=residual)
        if rank == 0 and (step + 1) % args.print_every == 0:
            each = (time.monotonic() - since) / min(args.print_every, step + 1 - start)
            print(f"step {step + 1}  residual {residual:.6f}  {each:.4f} s a step", flush=True)
            since = time.monotonic()
    ckpt.close()

    parts = world.gather(block[1:-1])
    if parts:  # on rank 0
        print(f"done: step {args.steps}, residual {residual:.6f}")
        if args.final:
            unfinished = args.final.with_name(f".{args.final.name}.tmp")
            with unfinished.open("wb") as file:
                np.save(file, np.concatenate(parts))
            unfinished.replace(args.final)


if __name__ == "__main__":
    main()
