"""Saving and restoring where shared storage gives each rank 140 MB/s, as the published system's users had it.

One emulation for everybody: a file system that hands everything on at a capped rate (passthrough). What is compared is
what a user waits for: with torch.save and torch.load the storage, with us the stall, and after the program was killed
the restore from its host's memory.
"""

from __future__ import annotations

import os
import time

from checkpointing import capped, contenders, program
from checkpointing.figures import Bar, Figure, figure, ratios
from checkpointing.ground import Ground, chill, gone, settle
from checkpointing.limits import Copy, rate
from checkpointing.ours import Ours
from checkpointing.scale import Scale, say
from checkpointing.state import State, Train
from transom_hpc.ckpt import Checkpointer

CAP_BYTES_PER_S = 140e6
_PART = "storage at 140 MB/s, one rank"


def measure(scale: Scale, ground: Ground) -> list[Figure]:
    """The stall against torch.save, the restore from memory against a cold torch.load."""
    folder = ground.fresh()
    with capped.storage(folder, CAP_BYTES_PER_S) as front:
        return _measure(scale, ground.inside(front))


def _measure(scale: Scale, ground: Ground) -> list[Figure]:
    elements = scale.elements // 2  # what is compared are rates, and at this one a whole state takes long
    state = State(elements)
    copy = Copy(list(state.flat().values()))
    copy.seconds()
    train = Train(state.optimizer)
    products = train.products_in(max(0.2, 2.5 * copy.seconds(1)))
    say("storage at 140 MB/s: measuring the cap, and a first save")
    write, read = _cap(ground, state.nbytes // 4)
    save, load = contenders.torch_save(crc=False), contenders.torch_load()
    memory_directory, shm = ground.fresh(), ground.memory()
    program.run("save", memory_directory, shm, elements)
    times: dict[str, list[float]] = {name: [] for name in ("save", "load", "stall", "restore", "copy")}
    for number in range(scale.rounds):
        say(f"storage at 140 MB/s, round {number + 1} of {scale.rounds}")
        path = ground.fresh()
        settle(scale.pause_s)
        before = time.perf_counter()
        save(state, path)
        times["save"].append(time.perf_counter() - before)
        fresh = State(elements, fresh=True)
        chill(path)
        before = time.perf_counter()
        load(path, fresh)
        times["load"].append(time.perf_counter() - before)
        del fresh
        gone(path)
        times["restore"].append(program.run("restore", memory_directory, shm, elements)["restore"])
        times["copy"].append(copy.seconds())
    gone(shm)
    with Checkpointer(ground.fresh(), keep=1) as ckpt:
        ours = Ours(ckpt, state, warm=2)
        for number in range(scale.rounds):
            say(f"storage at 140 MB/s, stall {number + 1} of {scale.rounds}")
            settle(scale.pause_s)
            times["stall"].append(ours.stall(train, products))
    nbytes = state.nbytes
    limit = f"copy {rate(nbytes, sorted(times['copy'])[scale.rounds // 2])}"
    cap = "cap 140 MB/s"
    return [
        figure(_PART, "cap as measured: a plain write", write, "MB/s", None, cap),
        figure(_PART, "cap as measured: a plain read", read, "MB/s", None, cap),
        figure(_PART, "torch.save / our stall", ratios(times["save"], times["stall"]), "x", Bar(20), limit),
        figure(_PART, "torch.load / ours from memory", ratios(times["load"], times["restore"]), "x", Bar(20), limit),
    ]


def _cap(ground: Ground, nbytes: int) -> tuple[list[float], list[float]]:
    """What a plain write with fsync, and a plain cold read, get, in MB/s; three times."""
    data = os.urandom(nbytes)
    write, read = [], []
    for _ in range(3):
        path = ground.fresh() / "plain"
        before = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for at in range(0, nbytes, 4 << 20):
                file.write(data[at : at + (4 << 20)])
            os.fsync(file.fileno())
        write.append(nbytes / (time.perf_counter() - before) / 1e6)
        chill(path)
        before = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(4 << 20):
                pass
        read.append(nbytes / (time.perf_counter() - before) / 1e6)
        gone(path.parent)
    return write, read
