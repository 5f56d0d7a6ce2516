"""One rank of several, started by srun on a host of the lab. Not to be called by hand: see `lab_ranks`.

    rank.py measure|save|restore DIRECTORY ELEMENTS ROUNDS [--alike] [--mpio]

`measure` goes through all ways of saving and loading by turns. `save` commits one step and is killed; `restore` takes
what a killed program left in its host's memory, and is killed too. Every figure is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from checkpointing import background, contenders
from checkpointing.ground import chill, gone
from checkpointing.limits import Copy, Disk
from checkpointing.ours import Ours
from checkpointing.rounds import Job, rotated
from checkpointing.state import State, Train
from transom_hpc.ckpt import Checkpointer

PROGRESS, RESULT = "@progress ", "@result "


class Ranks:
    """What ranks do together.

    Args:
        directory: that all ranks see, empty.
        elements: of each parameter of a rank.
        alike: whether all ranks hold the same (data parallel); otherwise each has its own part.
    """

    def __init__(self, directory: Path, elements: int, alike: bool) -> None:
        self.rank, self.size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.size), MASTER_PORT="29517", MASTER_ADDR="n1")
        dist.init_process_group("gloo")
        self.directory, self.elements, self.alike = directory, elements, alike
        self._count = 0

    def say(self, text: str) -> None:
        """Progress, once."""
        if self.rank == 0:
            print(f"{PROGRESS}{text}", flush=True)

    def slowest(self, seconds: float) -> float:
        """Of all ranks."""
        held = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(held, dist.ReduceOp.MAX)
        return float(held)

    def timed(self, job: Callable[[], object]) -> float:
        """Seconds of a job that all ranks begin together."""
        dist.barrier()
        before = time.perf_counter()
        job()
        return time.perf_counter() - before

    def fresh(self) -> Path:
        """A new folder for all ranks."""
        self._count += 1
        path = self.directory / f"c{self._count}"
        if self.rank == 0:
            path.mkdir()
        dist.barrier()
        return path

    def own(self, path: Path) -> Path:
        """A rank's folder within."""
        mine = path / str(0 if self.alike else self.rank)
        mine.mkdir(exist_ok=True)
        return mine

    def gone(self, path: Path) -> None:
        """Remove a folder of all ranks."""
        dist.barrier()
        if self.rank == 0:
            gone(path)

    def state(self, fresh: bool = False) -> State:
        """This rank's."""
        return State(self.elements, 1 if self.alike else 1 + self.rank, fresh)

    def named(self, held: dict[str, Any]) -> dict[str, Any]:
        """A state dict for DCP: by rank where ranks hold different things, so that it keeps them all."""
        return held if self.alike else {f"rank{self.rank}": held}

    # -- other ways

    def torch_save(self, state: State, path: Path) -> None:
        """One file a rank; rank 0's alone where all hold the same."""
        if not self.alike or self.rank == 0:
            contenders.torch_save(crc=False)(state, self.own(path))
        dist.barrier()  # a checkpoint is there when all of it is

    def torch_load(self, path: Path, state: State) -> None:
        contenders.torch_load()(self.own(path), state)

    def dcp_save(self, state: State, path: Path, threads: int) -> None:
        dcp.save(self.named(state.plain()), storage_writer=FileSystemWriter(path, thread_count=threads))
        contenders.sync(path)

    def dcp_load(self, path: Path, state: State) -> None:
        held = state.room()
        dcp.load(self.named(held), storage_reader=FileSystemReader(path))
        state.fill(held)


def saving(ranks: Ranks, ckpt: Checkpointer, mpio: Checkpointer | None, disk: Disk) -> dict[str, Job]:
    """Stalls and durable saves.

    Args:
        mpio: that writes with parallel HDF5, where MPI can be had.
    """
    state = ranks.state()
    train = Train(state.optimizer)
    ours = Ours(ckpt, state)
    copy = Copy(list(state.flat().values()))
    copy.seconds(1)
    products = train.products_in(max(0.2, 2.5 * copy.seconds(1)))

    def durable(save: Callable[[Path], None]) -> float:
        path = ranks.fresh()
        seconds = ranks.timed(lambda: save(path))
        ranks.gone(path)
        return seconds

    def stall(way: background.Asynchronous) -> float:
        path = ranks.fresh()
        under: list[background.Under] = []
        seconds = ranks.timed(lambda: under.append(way.begin(ranks.named(state.plain()), path)))
        train.compute(products)
        before = time.perf_counter()
        under[0].staged()
        seconds += time.perf_counter() - before
        under[0].done()
        ranks.gone(path)
        return seconds

    def our_stall() -> float:
        dist.barrier()
        return ours.stall(train, products)

    def our_durable(one: Ours) -> float:
        dist.barrier()
        return one.durable()

    ways = background.all_ways(alone=False)
    jobs: dict[str, Job] = {
        "disk write": lambda: ranks.timed(disk.write_seconds),
        "copy": lambda: ranks.timed(lambda: copy.seconds(1)),
        "stall": our_stall,
        "durable": lambda: our_durable(ours),
        "torch.save": lambda: durable(lambda path: ranks.torch_save(state, path)),
        "DCP, 1 thread": lambda: durable(lambda path: ranks.dcp_save(state, path, 1)),
        "DCP, 4 threads": lambda: durable(lambda path: ranks.dcp_save(state, path, 4)),
    }
    if mpio is not None:
        collective = Ours(mpio, state)
        jobs["mpio"] = lambda: our_durable(collective)
    return jobs | {way.name: lambda way=way: stall(way) for way in ways if "process" not in way.name}


def loading(ranks: Ranks, directory: Path, disk: Disk) -> dict[str, Job]:
    """Cold restores. Every rank takes its own files out of the page cache, and rank 0 those of all."""
    state = ranks.state()
    torch_path, dcp_path = ranks.fresh(), ranks.fresh()
    ranks.torch_save(state, torch_path)
    ranks.dcp_save(state, dcp_path, 4)

    def cold(path: Path, load: Callable[[Path, State], object]) -> float:
        fresh = ranks.state(fresh=True)
        dist.barrier()
        if ranks.rank == 0 and not chill(path):
            ranks.say(f"{path} could not be taken out of the page cache")
        seconds = ranks.timed(lambda: load(path, fresh))
        if not fresh.same_as(state):
            raise RuntimeError("what was loaded is not what was saved")
        return seconds

    def ours(path: Path, fresh: State) -> None:
        with Checkpointer(path, ranks.rank, ranks.size, keep=10) as ckpt:
            if ckpt.restore(fresh.whole()) == 0:
                raise RuntimeError("nothing was restored")

    return {
        "disk read": lambda: ranks.timed(disk.read_seconds),
        "restore": lambda: cold(directory, ours),
        "torch.load": lambda: cold(torch_path, ranks.torch_load),
        "DCP load": lambda: cold(dcp_path, ranks.dcp_load),
    }


def run(ranks: Ranks, jobs: dict[str, Job], rounds: int, what: str) -> dict[str, list[float]]:
    """All jobs by turns."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for number in range(-1, rounds):
        ranks.say(f"{what}, round {number + 1} of {rounds}" if number >= 0 else f"{what}, warming up")
        for name in rotated(list(jobs), number):
            time.sleep(0.1)
            if ranks.rank == 0:
                os.sync()
            dist.barrier()
            seconds = ranks.slowest(jobs[name]())
            if number >= 0:
                found[name].append(seconds)
    return found


def measure(ranks: Ranks, rounds: int, with_mpio: bool) -> dict[str, list[float]]:
    """Everything, by turns."""
    what = f"{ranks.size} ranks, {'replicated' if ranks.alike else 'sharded'}"
    disk = Disk(
        ranks.directory / f"limit{ranks.rank}", State.bytes_of(ranks.elements) // (ranks.size if ranks.alike else 1)
    )
    directory, other = ranks.fresh(), ranks.fresh()
    with contextlib.ExitStack() as stack:
        ckpt = stack.enter_context(Checkpointer(directory, ranks.rank, ranks.size, keep=1, writer="direct"))
        mpio = Checkpointer(other, ranks.rank, ranks.size, keep=1, writer="mpio") if with_mpio else None
        if mpio is not None:
            stack.enter_context(mpio)
        found = run(ranks, saving(ranks, ckpt, mpio, disk), rounds, f"{what}, saving")
    return found | run(ranks, loading(ranks, directory, disk), rounds, f"{what}, loading")


def restore(ranks: Ranks) -> dict[str, list[float]]:
    """From memory; and a copy of as many bytes by all ranks at once."""
    state = State(ranks.elements, 99)
    with Checkpointer(ranks.directory / "memory", ranks.rank, ranks.size) as ckpt:
        steps: list[int] = []
        seconds = ranks.slowest(ranks.timed(lambda: steps.append(ckpt.restore(state.whole()))))
        if steps[0] != 1 or not state.same_as(ranks.state()):
            raise RuntimeError("what was restored is not what was saved")
        copy = Copy(list(state.flat().values()))
        copies = [ranks.slowest(ranks.timed(lambda: copy.seconds(1))) for _ in range(3)]
        end(ranks, {"memory": [seconds], "memory copy": [min(copies)]})
    raise AssertionError


def end(ranks: Ranks, found: dict[str, list[float]]) -> None:
    """Be killed, all ranks at once, after the result is out."""
    if ranks.rank == 0:
        print(f"{RESULT}{json.dumps(found)}", flush=True)
    dist.barrier()
    time.sleep(0.2)  # srun passes it on
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("act", choices=("measure", "save", "restore"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("elements", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--mpio", action="store_true", help="the step was started with MPI: parallel HDF5 as well")
    given = parser.parse_args()
    if given.mpio:
        from mpi4py import MPI  # noqa: F401 (starts it)
    torch.set_num_threads(1)
    ranks = Ranks(given.directory, given.elements, given.alike)
    if given.act == "measure":
        found = measure(ranks, given.rounds, given.mpio)
        if ranks.rank == 0:
            print(f"{RESULT}{json.dumps(found)}", flush=True)
        dist.destroy_process_group()
    elif given.act == "save":
        ckpt = Checkpointer(given.directory / "memory", ranks.rank, ranks.size)
        ckpt.save(1, ranks.state().whole(), block=True)
        end(ranks, {})
    else:
        restore(ranks)


if __name__ == "__main__":
    main()
