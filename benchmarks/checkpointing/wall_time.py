"""What a save takes from training while it is copied and written in the background, with a core to spare.

A loop of steps that begins with a save and lasts until that is on disk, against as many steps without one right after.
The difference is small and the loops are long, so the noise is measured too: the same difference without a save.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from checkpointing.background import Asynchronous, Under
from checkpointing.figures import Bar, Figure, difference_ratio, figure, noise
from checkpointing.ground import Ground, gone, settle
from checkpointing.rounds import rotated
from checkpointing.scale import Scale, say
from checkpointing.state import Train

_LEAST_STEPS = 4
_NOTHING = "nothing"


def wall_time(
    scale: Scale,
    ground: Ground,
    ours: Mapping[str, Callable[[], Under]],
    ways: list[Asynchronous],
    plain: dict[str, Any],
    train: Train,
    products: int,
) -> list[Figure]:
    """Measure it for us and for DCP.

    Args:
        ours: begins a save; the first is the one that others are compared with.
        ways: of DCP: the default, and that with the shortest stall.
        plain: the state for DCP.
        products: of one forward and backward pass, which is longer than the copy.
    """
    path = ground.fresh()
    begins: dict[str, Callable[[], Under] | None] = {_NOTHING: None, **ours}
    for way in ways:
        begins[way.name] = lambda way=way: way.begin(plain, path)  # type: ignore[misc]
    lost: dict[str, list[float]] = {name: [] for name in begins}
    steps = _LEAST_STEPS
    for number in range(scale.wall_rounds):
        say(f"wall time added, round {number + 1} of {scale.wall_rounds}")
        for name in rotated(list(begins), number):
            settle(scale.pause_s)
            seconds, done = _loop(train, products, begins[name], steps if name == _NOTHING else _LEAST_STEPS)
            gone(path)
            path.mkdir()
            settle(scale.pause_s)
            alone, _ = _loop(train, products, None, done)
            lost[name].append(seconds - alone)
            steps = done
    floor = noise(lost[_NOTHING])
    part, limit = "wall time that a save adds, one rank", f"noise {floor * 1e3:.1f} ms"
    found = [figure(part, name, [s * 1e3 for s in lost[name]], "ms", None, limit) for name in ours]
    first = lost[next(iter(ours))]
    for way in ways:
        bar = Bar(5)
        found.append(difference_ratio(part, f"{way.name} / ours", lost[way.name], first, floor, bar, limit))
    return found


def _loop(train: Train, products: int, begin: Callable[[], Under] | None, least: int) -> tuple[float, int]:
    """Steps until the save is over, and at least so many; seconds and how many."""
    before = time.perf_counter()
    under = begin() if begin is not None else None
    count = 0
    while count < least or (under is not None and not under.over()):
        train.compute(products)
        if count == 0 and under is not None:
            under.staged()
        train.step()
        count += 1
    seconds = time.perf_counter() - before
    if under is not None:
        under.done()
    return seconds, count
