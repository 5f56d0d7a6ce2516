"""One rank that saves: what training waits for, and how long until the bytes are on disk."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from checkpointing import background, contenders
from checkpointing.background import Asynchronous
from checkpointing.contenders import Contender
from checkpointing.figures import Bar, Figure, figure, ratios
from checkpointing.ground import Ground, gone
from checkpointing.limits import Copy, Disk, rate
from checkpointing.ours import Ours, server
from checkpointing.rounds import Job, Rounds
from checkpointing.scale import Scale, say
from checkpointing.state import State, Train
from checkpointing.wall_time import wall_time
from transom_hpc.ckpt import Checkpointer


def measure(scale: Scale, ground: Ground) -> list[Figure]:
    """Stall, durable save, wall time."""
    state = State(scale.elements)
    plain = state.plain()
    train = Train(state.optimizer)
    copy = Copy(list(state.flat().values()))
    disk = Disk(ground.path / "limit", state.nbytes)
    background.join_alone(ground.fresh())
    ways = background.all_ways()
    others, missing = contenders.found()
    for name in missing:
        say(f"{name} is not installed, so it is left out; pip install 'transom-hpc[bench]' brings it")
    products = train.products_in(max(0.2, 2.5 * copy.seconds(1)))
    rounds = Rounds(scale.pause_s)
    shm = ground.memory()
    with (
        server(shm),
        Checkpointer(ground.fresh(), keep=1) as alone,
        Checkpointer(ground.fresh(), keep=1, shm=shm) as ckpt,
        Checkpointer(ground.fresh(), keep=1) as least,
    ):
        ours, served = Ours(alone, state), Ours(ckpt, state)
        tiny = Ours(least, State(1))
        jobs: dict[str, Job] = {
            "disk": disk.write_seconds,
            "copy": copy.seconds,
            "stall": lambda: ours.stall(train, products),
            "short stall": lambda: ours.stall(train, 0),
            "tiny": lambda: tiny.stall(train, products),
            "durable": ours.durable,
            "stall, served": lambda: served.stall(train, products),
            "durable, served": served.durable,
        }
        jobs |= {other.name: partial(durable, ground, other, state) for other in others}
        jobs |= {way.name: partial(stall, ground, way, plain, train, products) for way in ways}
        rounds.run(scale.rounds, jobs, "stall and durable save")
        best = rounds.best([way.name for way in ways])
        found = _stalls(rounds, [way.name for way in ways], best, [o.name for o in others], state.nbytes)
        found += _durables(rounds, [other.name for other in others], state.nbytes)
        chosen = [way for way in ways if way is ways[0] or way.name == best]
        begins = {"ours": ours.begin, "ours, with a server": served.begin}
        found += wall_time(scale, ground, begins, chosen, plain, train, products)
    for way in ways:
        way.close()
    return found


def durable(ground: Ground, other: Contender, state: State) -> float:
    """Seconds of another's durable save."""
    path = ground.fresh()
    before = time.perf_counter()
    other.save(state, path)
    seconds = time.perf_counter() - before
    gone(path)
    return seconds


def stall(ground: Ground, way: Asynchronous, plain: dict[str, Any], train: Train, products: int) -> float:
    """Seconds that training stands still for DCP, in the call and before the optimizer's step."""
    path: Path = ground.fresh()
    before = time.perf_counter()
    under = way.begin(plain, path)
    seconds = time.perf_counter() - before
    train.compute(products)
    before = time.perf_counter()
    under.staged()
    seconds += time.perf_counter() - before
    under.done()
    gone(path)
    return seconds


def _stalls(rounds: Rounds, ways: list[str], best: str, others: list[str], nbytes: int) -> list[Figure]:
    part, values = "stall of a save, one rank", rounds.values
    copy = f"copy {rate(nbytes, rounds.middle('copy'))}"
    ours = values["stall"]
    found = [figure(part, "ours", [s * 1e3 for s in ours], "ms", None, copy)]
    found.append(figure(part, "ours, arrays of one element", [s * 1e3 for s in values["tiny"]], "ms", None, copy))
    served = [s * 1e3 for s in values["stall, served"]]
    found.append(figure(part, "ours, with a checkpoint server", served, "ms", None, copy))
    for way in ways:  # at its default, and at its best
        bar = Bar(20) if way in (ways[0], best) else None
        found.append(figure(part, f"{way}{_mark(way, best)} / ours", ratios(values[way], ours), "x", bar, copy))
    first = rounds.best([name for name in others if name.startswith("torch.save")])
    found.append(figure(part, f"{first} / ours", ratios(values[first], ours), "x", Bar(100), copy))
    short = ratios(values["short stall"], values["copy"])
    return [*found, figure(part, "no forward, backward: copies", short, "x", Bar(1, at_least=False), copy)]


def _durables(rounds: Rounds, others: list[str], nbytes: int) -> list[Figure]:
    part, values = "durable save, one rank", rounds.values
    disk = f"disk {rate(nbytes, rounds.middle('disk'))}"
    ours = values["durable"]
    found = [figure(part, "share of the disk's rate", ratios(values["disk"], ours), "", Bar(0.85), disk)]
    served = ratios(values["disk"], values["durable, served"])
    found.append(figure(part, "the same with a checkpoint server", served, "", None, disk))
    best = rounds.best(others)
    for other in others:
        bar = Bar(1.5) if other == best else None
        found.append(figure(part, f"{other}{_mark(other, best)} / ours", ratios(values[other], ours), "x", bar, disk))
    return found


def _mark(name: str, best: str) -> str:
    return " (best)" if name == best else ""
