"""A program that dies: it saves, or restores what the one before left in memory, and is killed.

    program.py save|restore DIRECTORY SHM ELEMENTS [--fresh] [--check] [--staged]

Prints what it measured as JSON and sends itself SIGKILL, so that nothing is put in order.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

HERE = Path(__file__).resolve().parent


def run(*arguments: object) -> dict[str, float]:
    """Run one to its death.

    Returns:
        What it measured.
    """
    argv = [sys.executable, str(HERE / "program.py"), *map(str, arguments)]
    # A file system check of the arguments is the program's own; what it prints last is the answer.
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != -signal.SIGKILL or not done.stdout.strip():
        raise RuntimeError(f"the program ended by itself ({done.returncode}): {' '.join(argv[1:])}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def save(directory: Path, shm: Path, state: Any) -> dict[str, float]:
    """Commit step 1."""
    from transom_hpc.ckpt import Checkpointer

    ckpt = Checkpointer(directory, shm=shm)
    ckpt.save(1, state.whole(), block=True)
    return {}


def restore(directory: Path, shm: Path, state: Any, check: bool) -> dict[str, float]:
    """Restore from memory; and the copy of as many bytes, and the least of such a restore, in the same process."""
    from checkpointing.limits import Copy
    from checkpointing.state import State
    from transom_hpc.ckpt import Checkpointer

    ckpt = Checkpointer(directory, shm=shm)
    before = time.perf_counter()
    step = ckpt.restore(state.whole())
    seconds = time.perf_counter() - before
    if step != 1 or (check and not state.same_as(State(state.elements))):
        raise RuntimeError("what was restored is not what was saved")
    tensors = list(state.flat().values())
    passes = two_passes(max(shm.iterdir(), key=lambda path: path.stat().st_size), tensors)
    copy = Copy(tensors)
    copy.seconds()
    return {"restore": seconds, "passes": passes, "copy": min(copy.seconds() for _ in range(2))}


def two_passes(segment: Path, tensors: Sequence[Any]) -> float:
    """Seconds of the least that a restore which compares every byte first can do: map the segment, read all of it for
    its checksums, copy all of it."""
    from checkpointing.limits import together

    before = time.perf_counter()
    with segment.open("rb") as file:
        held = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), dtype=np.uint8)
    targets = [t.detach().numpy().reshape(-1).view(np.uint8) for t in tensors if t.nbytes > 1 << 20]
    starts = [n * targets[0].nbytes for n in range(len(targets))]
    sources = [held[at : at + t.nbytes] for at, t in zip(starts, targets, strict=True)]
    together([partial(xxhash.xxh3_128_intdigest, s) for s in sources], 2)
    together([partial(np.copyto, t, s) for t, s in zip(targets, sources, strict=True)], 2)
    return time.perf_counter() - before


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    import torch

    from checkpointing.ground import die_with_parent
    from checkpointing.state import State

    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("act", choices=("save", "restore"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("shm", type=Path)
    parser.add_argument("elements", type=int)
    parser.add_argument("--fresh", action="store_true", help="the optimizer has not taken a step")
    parser.add_argument("--check", action="store_true", help="compare every byte")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.act == "save":
        answer = save(given.directory, given.shm, State(given.elements))
    else:
        state = State(given.elements, seed=9, fresh=given.fresh)
        answer = restore(given.directory, given.shm, state, given.check)
    print(json.dumps(answer), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
