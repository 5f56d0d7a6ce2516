"""One rank that starts again: from a cold file, and from its host's memory after the program was killed."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from checkpointing import contenders, program
from checkpointing.contenders import Load
from checkpointing.figures import Bar, Figure, figure, ratios
from checkpointing.ground import Ground, chill, gone
from checkpointing.limits import Disk, rate
from checkpointing.ours import restore
from checkpointing.rounds import Job, Rounds
from checkpointing.scale import Scale, say
from checkpointing.state import State
from transom_hpc.ckpt import Checkpointer


def measure(scale: Scale, ground: Ground) -> list[Figure]:
    """Cold restore, restore from own memory."""
    saved = State(scale.elements)
    others, _ = contenders.found()
    directory = ground.fresh()
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, saved.whole(), block=True)
    disk = Disk(ground.path / "limit", saved.nbytes)
    loads: dict[str, tuple[Load, Path]] = {"ours": (_ours, directory)}
    for other in others:
        path = ground.fresh() if other.load else None
        if path is not None:
            other.save(saved, path)
            loads |= {name: (load, path) for name, load in other.load.items()}
    jobs: dict[str, Job] = {"disk": disk.read_seconds, "fill": disk.fill_seconds}
    for name, (load, path) in loads.items():
        _check(name, load, path, saved)
        jobs[name] = partial(_cold, load, path, scale.elements)
    nbytes = saved.nbytes
    del saved
    rounds = Rounds(scale.pause_s)
    rounds.run(scale.rounds, jobs, "cold restore")
    return _cold_figures(rounds, nbytes, list(loads)) + from_memory(scale, ground, rounds.values["torch.load"])


def _ours(path: Path, state: State) -> None:
    restore(path, state)


def _check(name: str, load: Load, path: Path, saved: State) -> None:
    found = State(saved.elements, fresh=True)
    load(path, found)
    if not found.same_as(saved):
        raise RuntimeError(f"{name} did not give back what was saved")


def _cold(load: Load, path: Path, elements: int) -> float:
    state = State(elements, fresh=True)
    if not chill(path):
        say(f"{path} could not be taken out of the page cache")
    before = time.perf_counter()
    load(path, state)
    return time.perf_counter() - before


def _cold_figures(rounds: Rounds, nbytes: int, loads: list[str]) -> list[Figure]:
    part, values = "cold restore, one rank", rounds.values
    disk = f"disk {rate(nbytes, rounds.middle('disk'))}"
    fill = f"disk to new memory {rate(nbytes, rounds.middle('fill'))}"
    found = [
        figure(part, "share of the disk's rate", ratios(values["disk"], values["ours"]), "", Bar(0.85), disk),
        figure(part, "share of its rate into new memory", ratios(values["fill"], values["ours"]), "", None, fill),
    ]
    best = rounds.best([name for name in loads if name != "ours"])
    for name in loads:
        if name != "ours":
            shown = f"{name}{' (best)' if name == best else ''} / ours"
            found.append(figure(part, shown, ratios(values[name], values["ours"]), "x", None, disk))
    return found


def from_memory(scale: Scale, ground: Ground, torch_load: list[float]) -> list[Figure]:
    """Programs that die and leave their last save in memory, one after the other: each restores what is there.

    Args:
        torch_load: seconds of cold loads with torch.load, to compare.
    """
    directory, shm = ground.fresh(), ground.memory()
    say("restore from own memory, saving")
    program.run("save", directory, shm, scale.elements)
    there, started, copy, passes = [], [], [], []
    for number in range(len(torch_load)):
        say(f"restore from own memory, round {number + 1} of {len(torch_load)}")
        found = program.run("restore", directory, shm, scale.elements, *(["--check"] if number == 0 else []))
        there.append(found["restore"])
        copy.append(found["copy"])
        passes.append(found["passes"])
        started.append(program.run("restore", directory, shm, scale.elements, "--fresh")["restore"])
    gone(directory)
    gone(shm)
    part = "restore from own memory, one rank"
    nbytes = State.bytes_of(scale.elements)
    limit = f"copy {rate(nbytes, sorted(copy)[len(copy) // 2])}"
    least = f"map, sum and copy alone {rate(nbytes, sorted(passes)[len(passes) // 2])}"
    fresh = "share, optimizer without moments"
    return [
        figure(part, "share of the copy's rate", ratios(copy, there), "", Bar(0.7), limit),
        figure(part, fresh, ratios(copy, started), "", None, limit),
        figure(part, "share of map, sum and copy alone", ratios(passes, there), "", None, least),
        figure(part, "cold torch.load / ours", ratios(torch_load, there), "x", None, limit),
        figure(part, "the same, without moments", ratios(torch_load, started), "x", None, limit),
    ]
