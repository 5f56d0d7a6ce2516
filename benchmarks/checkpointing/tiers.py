"""A run in the lab that loses a process or a host: how long until it trains again, by where its state came from.

The hosts share this machine's cores, its memory and its disk; the network between them is this machine's own memory,
behind the network stack, and is measured beside. A state of one field of double precision, a third of it on each host.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from checkpointing.figures import Bar, Figure, figure
from checkpointing.ground import Ground
from checkpointing.limits import rate
from checkpointing.scale import FULL, Scale, say
from transom_hpc.lab import Lab, take_down
from transom_hpc.tol.journal import Entry
from transom_hpc.tol.rundir import RunDir

_NAME = "restore-bench"
_HEAT = Path(__file__).resolve().parents[2] / "examples" / "heat_mpi.py"
_HOSTS, _VICTIM = 3, "n2"
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and from where the state comes back.

    Args:
        tier: for people.
        copies: of each host's memory.
        every: steps between two saves.
        strike: does it.
        mended: what makes the lab whole again.
    """

    tier: str
    copies: int
    every: int
    strike: Callable[[Lab], object]
    mended: Callable[[Lab], object]


def _kill(lab: Lab) -> None:
    lab.run(_VICTIM, ["pkill", "-KILL", "-f", "heat_mpi.py --steps"])


FAULTS = (
    Fault("own memory", 1, 10, _kill, lambda _: None),
    Fault("neighbour's memory", 1, 1, lambda lab: lab.crash(_VICTIM), lambda lab: lab.boot(_VICTIM)),
    Fault("files", 0, 10, lambda lab: lab.crash(_VICTIM), lambda lab: lab.boot(_VICTIM)),
)


def measure(scale: Scale, ground: Ground) -> list[Figure]:  # noqa: ARG001 (the lab has a folder of its own)
    """Bring a lab up, measure by turns, take it down."""
    size = 6000 if scale is FULL else 2000
    say(f"tiers: starting a lab of {_HOSTS + 1} hosts, which share this machine's cores and disk")
    take_down(_NAME)
    lab = Lab.up(_NAME, nodes=_HOSTS + 1)
    found: dict[str, list[float]] = {}
    try:
        for number in range(scale.rounds):
            network = _network(lab)
            found.setdefault("network", []).append(network)
            for fault in FAULTS:
                say(f"tiers, round {number + 1} of {scale.rounds}: {fault.tier}")
                values = _once(lab, fault, size)
                if "gathering" in values:
                    values["share"] = network / values["gathering"]
                for name, value in values.items():
                    found.setdefault(name, []).append(value)
        say("tiers: how often it is best to save to the disk alone")
        best_s = _best_interval(lab, size)
    finally:
        take_down(_NAME)
    return _figures(found, size, best_s)


def _figures(found: dict[str, list[float]], size: int, best_s: float) -> list[Figure]:
    part = f"state of {size * size * 8 / 1e6:.0f} MB on {_HOSTS} hosts"
    network = f"network {rate(1, statistics.median(found['network']))}"
    limit = f"the program's first start {statistics.median(found['start']):.2f} s"
    figures = [
        figure(
            part,
            "gathering from a neighbour, share of the network's rate",
            found["share"],
            "",
            Bar(0.7),
            network,
        )
    ]
    for fault in FAULTS:
        figures.append(figure(part, f"start again from {fault.tier}", found[fault.tier], "s", None, limit))
        every = f"saved every {fault.every}" if fault.every > 1 else "saved every step"
        name = f"steps redone, {fault.tier}, {every}"
        figures.append(figure(part, name, found[f"redone {fault.tier}"], "", None, limit))
    lost = found["lost"]
    best = f"half of the best interval for files alone {best_s / 2:.0f} s"
    figures.append(figure(part, "work lost with a host, in memory at every step", lost, "s", None, best))
    return figures


def _once(lab: Lab, fault: Fault, size: int) -> dict[str, float]:
    """One run with one fault.

    Returns:
        Seconds from the launch to the first step, before and after the fault; steps redone; and seconds a byte of what
        came over the network.
    """
    run, job = _submit(lab, size, str(fault.every), fault.copies)
    try:
        _wait("three checkpoints", lambda: len(RunDir(run).committed_steps()) >= 3)
        fault.strike(lab)
        _wait("the next step", lambda: len(_entries(run, "running")) >= 2)
        again = _entries(run, "running")[1]
        found = {fault.tier: _between(_entries(run, "launch")[1], again)}
        steps, step_s = _redone(run / "logs" / f"{job}_0_log.out")
        found[f"redone {fault.tier}"] = float(steps)
        if fault is FAULTS[0]:
            found["start"] = _between(_entries(run, "launch")[0], _entries(run, "running")[0])
        if fault is FAULTS[1]:
            found["lost"] = steps * step_s
            gathered = [entry.facts for entry in _entries(run, "gathered")]
            moved = [facts for facts in gathered if facts["bytes"]]
            if moved:
                found["gathering"] = moved[0]["seconds"] / moved[0]["bytes"]
            else:  # a step was saved and not copied everywhere: it is read from its file
                say(f"nothing was gathered this time: {gathered}")
        return found
    finally:
        lab.run("login", ["scancel", job])
        fault.mended(lab)
        _idle(lab)


def _best_interval(lab: Lab, size: int) -> float:
    """Seconds between two saves to the disk that lose least, for what a save costs here."""
    run, job = _submit(lab, size, "auto", 0)
    record = run / "checkpoints" / ".interval.json"
    try:
        _wait("what a save costs", record.exists)
        return float(json.loads(record.read_text())["interval_s"])
    finally:
        lab.run("login", ["scancel", job])
        _idle(lab)


def _submit(lab: Lab, size: int, every: str, copies: int) -> tuple[Path, str]:
    """Run directory and job."""
    folder = lab.shared / "run"
    shutil.rmtree(folder, ignore_errors=True)
    lab.run("login", ["mkdir", "-p", str(folder)])
    run = folder / "run"
    options = ["--nodes", str(_HOSTS), "--spares", "1", "--site", "lab", "--save-every", every]
    options += ["--run-dir", str(run), "--copies", str(copies)]
    program = [sys.executable, str(_HEAT), "--steps", "100000", "--size", str(size), "--sleep", "0.05"]
    program += ["--print-every", "1"]
    argv = [sys.executable, "-P", "-m", "transom_hpc", "submit", "--json", *options, "--", *program]
    return run, str(json.loads(lab.run("login", argv, cwd=folder).stdout)["job_id"])


def _idle(lab: Lab) -> None:
    _wait("an idle lab", lambda: all(h.slurm == "idle" for h in lab.status().hosts if h.name != "login"))


def _redone(log: Path) -> tuple[int, float]:
    """Steps that the program printed before the fault and had to do again; and seconds of one."""
    first, second = log.read_text(errors="replace").split("from step ")[1:3]
    printed = re.findall(r"step (\d+)  residual \S+  (\S+) s a step", first)
    steps = max(int(step) for step, _ in printed) - int(second.split()[0])
    return steps, statistics.median(float(seconds) for _, seconds in printed)


def _network(lab: Lab) -> float:
    """Seconds a byte of MPI between two hosts, in pieces as large as ours."""
    program = [sys.executable, str(Path(__file__).with_name("network.py"))]
    text = lab.run("login", ["srun", "--mpi=pmix", "-N", "2", "-n", "2", *program]).stdout
    return float(text.split()[-1])


def _entries(run: Path, kind: str) -> list[Entry]:
    return [entry for entry in RunDir(run).entries() if entry.kind == kind]


def _between(first: Entry, second: Entry) -> float:
    """Seconds between two entries of one writer."""
    return (datetime.fromisoformat(second.time) - datetime.fromisoformat(first.time)).total_seconds()


def _wait(what: str, ready: Callable[[], Any]) -> None:
    until = time.monotonic() + _PATIENCE_S
    while not ready():
        if time.monotonic() > until:
            raise RuntimeError(f"{what}: not within {_PATIENCE_S:.0f} s")
        time.sleep(0.1)
