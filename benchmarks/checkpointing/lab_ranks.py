"""Four ranks on four hosts of the lab, a real Slurm: sharded state, replicated state, restore from memory.

The hosts share the machine's cores and its disk, so that a rank has half a core or so: ratios to others hold, since
they have no more; times and bandwidths are not those of four machines.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import threading
from pathlib import Path

from checkpointing.figures import Bar, Figure, figure, ratios
from checkpointing.ground import Ground
from checkpointing.limits import rate
from checkpointing.rank import PROGRESS, RESULT
from checkpointing.scale import Scale, say
from checkpointing.state import State
from transom_hpc.lab import Lab, take_down

RANKS = 4
_NAME = "checkpoint-bench"
_PATIENCE_S = 400.0

Values = dict[str, list[float]]


def measure(scale: Scale, ground: Ground) -> list[Figure]:  # noqa: ARG001 (the lab has a folder of its own)
    """Bring a lab up, measure, take it down."""
    say(f"{RANKS} ranks: starting a lab of {RANKS} hosts, which share this machine's cores and disk")
    take_down(_NAME)
    lab = Lab.up(_NAME, nodes=RANKS)
    try:
        quarter = scale.elements // RANKS
        sharded = _srun(lab, "measure", quarter, scale.rounds, *_mpio())
        figures = _saving(sharded, "sharded", State.bytes_of(quarter) * RANKS)
        alike = _srun(lab, "measure", 2 * quarter, scale.rounds, "--alike")
        figures += _saving(alike, "replicated", State.bytes_of(2 * quarter), copies=RANKS)
        return figures + _from_memory(lab, scale, quarter, sharded["torch.load"])
    finally:
        take_down(_NAME)


def _from_memory(lab: Lab, scale: Scale, quarter: int, torch_load: list[float]) -> list[Figure]:
    folder = lab.shared / "memory"
    say(f"{RANKS} ranks, restore from own memory, saving")
    _srun(lab, "save", quarter, 1, keep=folder)
    found: Values = {"memory": [], "memory copy": []}
    for number in range(scale.rounds):
        say(f"{RANKS} ranks, restore from own memory, round {number + 1} of {scale.rounds}")
        once = _srun(lab, "restore", quarter, 1, keep=folder)
        for name in found:
            found[name] += once[name]
    part = f"restore from own memory, {RANKS} ranks"
    limit = f"copy {rate(State.bytes_of(quarter) * RANKS, statistics.median(found['memory copy']))}"
    return [
        figure(part, "share of the copy's rate", ratios(found["memory copy"], found["memory"]), "", None, limit),
        figure(part, "cold torch.load / ours", ratios(torch_load, found["memory"]), "x", None, limit),
    ]


def _mpio() -> list[str]:
    """The option for parallel HDF5, where it can be had."""
    try:
        import h5py

        if h5py.get_config().mpi:
            return ["--mpio"]
    except ImportError:
        pass
    say("h5py is built without MPI, so that mpio is left out")
    return []


def _saving(values: Values, kind: str, nbytes: int, copies: int = 1) -> list[Figure]:
    """The figures of one kind of state.

    Args:
        nbytes: that a checkpoint takes on disk.
        copies: how often all ranks together hold them.
    """

    def middle(name: str) -> float:
        return statistics.median(values[name])

    where = f"{RANKS} ranks, {kind}"
    stall, durable, restore = values["stall"], values["durable"], values["restore"]
    copy, disk = f"copy {rate(copies * nbytes, middle('copy'))}", f"disk {rate(nbytes, middle('disk write'))}"
    part = f"stall of a save, {where}"
    found = [figure(part, "ours", [s * 1e3 for s in stall], "ms", None, copy)]
    for way in [name for name in values if name.startswith("DCP async_save")]:
        found.append(figure(part, f"{way} / ours", ratios(values[way], stall), "x", None, copy))
    found.append(figure(part, "torch.save / ours", ratios(values["torch.save"], stall), "x", None, copy))
    part = f"durable save, {where}"
    found.append(figure(part, "share of the disk's rate", ratios(values["disk write"], durable), "", Bar(0.85), disk))
    others = ["torch.save", "DCP, 1 thread", "DCP, 4 threads"]
    best = min(others, key=middle)
    for name in others:
        mark, bar = (" (best)", Bar(1.5)) if name == best else ("", None)
        found.append(figure(part, f"{name}{mark} / ours", ratios(values[name], durable), "x", bar, disk))
    if "mpio" in values:
        found.append(figure(part, "our mpio writer / our direct one", ratios(values["mpio"], durable), "x", None, disk))
    part = f"cold restore, {where}"
    disk = f"disk {rate(nbytes, middle('disk read'))}"
    if kind == "sharded":  # otherwise every rank reads everything, and the page cache serves all hosts of the lab
        found.append(
            figure(part, "share of the disk's rate", ratios(values["disk read"], restore), "", Bar(0.85), disk)
        )
    for name in ("torch.load", "DCP load"):
        found.append(figure(part, f"{name} / ours", ratios(values[name], restore), "x", None, disk))
    return found


def _srun(lab: Lab, act: str, elements: int, rounds: int, *more: str, keep: Path | None = None) -> Values:
    """Run the ranks, and wait for rank 0's result.

    Args:
        keep: the folder to work in, which stays; None: one that goes afterwards.
    """
    folder = keep or lab.shared / "ranks"
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    lab.run("login", ["mkdir", "-p", str(folder)])
    program = [sys.executable, str(Path(__file__).with_name("rank.py")), act, str(folder), str(elements), str(rounds)]
    mpi = "pmix" if "--mpio" in more else "none"
    options = [
        f"--mpi={mpi}",
        "-N",
        str(RANKS),
        "-n",
        str(RANKS),
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--unbuffered",
    ]
    process = lab.popen(
        "login", ["srun", *options, *program, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path("/")
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or []), daemon=True)
    reader.start()
    alarm = threading.Timer(_PATIENCE_S, process.kill)
    alarm.start()
    result: Values | None = None
    try:
        for line in process.stdout:
            if line.startswith(PROGRESS):
                say(line.removeprefix(PROGRESS).rstrip())
            elif line.startswith(RESULT):
                result = json.loads(line.removeprefix(RESULT))
        process.wait()
        reader.join(5)
    finally:
        alarm.cancel()
        process.kill()
    if result is None:
        raise RuntimeError(f"the ranks came to no result: {''.join(errors[-20:])}")
    if keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return result
