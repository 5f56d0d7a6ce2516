"""A program that goes astray once: `python astray.py HOW STEPS FOLDER`. `trained` says how it should end.

HOW is "nan": at step AT one of its weights becomes NaN, and from the next step on all of them and the loss; or
"poison": what it saves at step AT makes every start from it die at once. Each happens once to a rank: a file in FOLDER
tells.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy

AT = 60
STEP_S = 0.05


def beginning() -> numpy.ndarray:
    """The weights before the first step."""
    return numpy.random.default_rng(7).random(20_000)


def train(weights: numpy.ndarray, step: int) -> float:
    """One step, in place; the loss before it."""
    target = numpy.sin(numpy.arange(weights.size) * 0.01 * step)
    loss = float(numpy.square(weights - target).mean())
    weights -= 0.05 * (weights - target)
    weights -= 0.01 * weights.mean()  # what is wrong with one of them is wrong with all a step later
    return loss


def trained(steps: int) -> numpy.ndarray:
    """The weights of a run that was left alone."""
    weights = beginning()
    for step in range(1, steps + 1):
        train(weights, step)
    return weights


def main(how: str, steps: int, folder: Path) -> None:
    """Train."""
    import transom_hpc as transom

    with transom.Checkpointer.from_env() as ckpt:
        marker = folder / f"astray-{ckpt.rank}"
        state = {"weights": beginning(), "poison": 0}
        start = ckpt.restore(state)
        if state["poison"]:
            sys.exit("this checkpoint is not good")
        for step in range(start + 1, steps + 1):
            loss = train(state["weights"], step)
            time.sleep(STEP_S)
            if step == AT and not marker.exists():
                marker.touch()
                if how == "nan":  # as one bit of an exponent can
                    state["weights"][123] = numpy.nan
                else:
                    state["poison"] = 1
            ckpt.step(step, state, loss=loss)
            if state["poison"] and step == AT + 5:
                ckpt.wait()
                sys.exit("something else went wrong")
        if ckpt.rank == 0:
            numpy.save(folder / "final.npy", state["weights"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
