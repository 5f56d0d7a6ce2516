"""A checkpoint of some ranks, loaded on other numbers of ranks: ours and DCP's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import median

from checkpointing.figures import Bar, Figure, figure, ratios
from checkpointing.ground import Ground, gone
from checkpointing.limits import rate
from checkpointing.reshard import RESULT
from checkpointing.scale import Scale, say
from checkpointing.state import State

SAVED_ON = 4
CHAIN = (2, 3, 8, 1)
_PATIENCE_S = 300.0


def measure(scale: Scale, ground: Ground) -> list[Figure]:
    """Load on every number of ranks of the chain what four have saved. A third of the state of other parts."""
    elements = scale.elements // 3
    folder = ground.fresh()
    _ranks(SAVED_ON, "save", folder, elements, 1)
    nbytes = State.bytes_of(elements)
    found: list[Figure] = []
    for ranks in CHAIN:
        say(f"FSDP2, saved on {SAVED_ON} ranks, loaded on {ranks}")
        values = _ranks(ranks, "load", folder, elements, scale.rounds)
        part = f"FSDP2, {SAVED_ON} to {ranks} ranks"
        limit = f"disk {rate(nbytes, median(values['disk']))}"
        found += [
            figure(part, "share of the disk's rate", ratios(values["disk"], values["ours"]), "", None, limit),
            figure(part, "DCP load / ours", ratios(values["DCP load"], values["ours"]), "x", None, limit),
            figure(part, "read / needed", ratios(values["read"], values["needed"]), "", Bar(1.1, False), limit),
        ]
    gone(folder)
    return found


def _ranks(number: int, act: str, folder: Path, elements: int, rounds: int) -> dict[str, list[float]]:
    program = [str(Path(__file__).with_name("reshard.py")), act, str(folder), str(elements), str(rounds)]
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", *program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{act} on {number} ranks failed: {done.stderr[-2000:]}")
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            held: dict[str, list[float]] = json.loads(line.removeprefix(RESULT))
            return held
    return {}
