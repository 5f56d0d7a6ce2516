"""One rank of several that saves, or loads on another number of ranks. Not to be called by hand: see `resharding`.

    reshard.py save|load DIRECTORY ELEMENTS ROUNDS

Started by torchrun. The model is sharded by FSDP2, the optimizer is Adam. `load` takes what `save` left, by turns with
our restore and with DCP's load, and compares the two bit by bit. Every figure is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from checkpointing.ground import chill
from checkpointing.limits import Disk
from checkpointing.rounds import rotated
from checkpointing.state import Model, State, optimizer_of
from transom_hpc.ckpt import Checkpointer

RESULT = "@result "
WAYS = ("ours", "DCP load", "disk")


class Sharded:
    """A model over all ranks, and its optimizer.

    Args:
        elements: of each parameter, all ranks together.
        trained: whether the optimizer has taken a step.
    """

    def __init__(self, elements: int, trained: bool) -> None:
        self.model = Model(elements, 1 if trained else None)
        fully_shard(self.model)
        self.optimizer = optimizer_of(self.model)  # type: ignore[arg-type]
        if trained:
            for weight in self.model.parameters():
                weight.grad = torch.randn_like(weight)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def whole(self) -> dict[str, object]:
        """As our checkpointer takes it."""
        return {"model": self.model, "optimizer": self.optimizer}

    def dcp_save(self, path: Path) -> None:
        """With DCP."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, storage_writer=FileSystemWriter(path, thread_count=4))

    def dcp_load(self, path: Path) -> None:
        """With DCP."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, storage_reader=FileSystemReader(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def parts(self) -> list[torch.Tensor]:
        """This rank's part of everything, in one order."""
        found = []
        for weight in self.model.parameters():
            held = self.optimizer.state[weight]
            found += [t.to_local() for t in (weight, held["exp_avg"], held["exp_avg_sq"])]
        return found


def save(folder: Path, elements: int) -> None:
    """Leave a checkpoint of ours and one of DCP."""
    state = Sharded(elements, trained=True)
    with Checkpointer(folder / "ours", dist.get_rank(), dist.get_world_size()) as ckpt:
        ckpt.save(1, state.whole(), block=True)
    state.dcp_save(folder / "dcp")


def load(folder: Path, elements: int, rounds: int) -> dict[str, list[float]]:
    """Both ways and the disk by turns, cold, after one round that does not count."""
    size = dist.get_world_size()
    disk = Disk(folder / f"limit{dist.get_rank()}", State.bytes_of(elements) // size)
    found: dict[str, list[float]] = {name: [] for name in (*WAYS, "needed", "read")}
    for number in range(-1, rounds):
        once: dict[str, float] = {}
        filled: dict[str, Sharded] = {}
        for name in rotated(list(WAYS), number):
            if name == "disk":
                once[name] = slowest(disk.read_seconds)
                continue
            state = filled[name] = Sharded(elements, trained=False)
            if dist.get_rank() == 0:
                chill(folder / "ours", folder / "dcp")
            dist.barrier()
            if name == "ours":
                once |= restore(folder / "ours", state)
            else:
                once[name] = slowest(lambda state=state: state.dcp_load(folder / "dcp"))
        for mine, theirs in zip(filled["ours"].parts(), filled["DCP load"].parts(), strict=True):
            if not torch.equal(mine, theirs):
                raise RuntimeError("the two do not give the same")
        if number >= 0:
            for name, value in once.items():
                found[name].append(value)
    for path in folder.glob(f"limit{dist.get_rank()}"):
        path.unlink()
    return found


def restore(path: Path, state: Sharded) -> dict[str, float]:
    """Ours; with the bytes that all ranks needed and read."""
    with Checkpointer(path, dist.get_rank(), dist.get_world_size()) as ckpt:
        seconds = slowest(lambda: ckpt.restore(state.whole()))
        outcome = ckpt.restored
    if outcome is None or outcome.step != 1:
        raise RuntimeError("nothing was restored")
    held = torch.tensor([outcome.needed_bytes, outcome.read_bytes], dtype=torch.float64)
    dist.all_reduce(held)
    return {"ours": seconds, "needed": float(held[0]), "read": float(held[1])}


def slowest(job: Callable[[], object]) -> float:
    """Seconds of a job that all ranks begin together, as the slowest has them."""
    dist.barrier()
    before = time.perf_counter()
    job()
    held = torch.tensor([time.perf_counter() - before], dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return float(held)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("act", choices=("save", "load"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("elements", type=int)
    parser.add_argument("rounds", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if given.act == "save":
        save(given.directory, given.elements)
    else:
        found = load(given.directory, given.elements, given.rounds)
        if dist.get_rank() == 0:
            print(f"{RESULT}{json.dumps(found)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
