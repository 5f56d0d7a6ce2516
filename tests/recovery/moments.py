"""The heat equation, held at a moment: `python moments.py MOMENT FOLDER heat_mpi.py ARGUMENTS`.

Its second rank stands still there, once, until FOLDER/struck appears: at "start" before MPI, while the others are in
MPI_Init; at "restoring" before it takes part in the first restore of a later launch, while the others wait for it. It
leaves FOLDER/here. Besides, that rank fails where FOLDER/fail is, and its weights become NaN where FOLDER/nan is, once.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import numpy

import transom_hpc as transom

MOST_S = 40.0  # nobody holds a run for ever, whatever becomes of the test


def take(marker: Path) -> bool:
    """Whether a marker is there; it is there for one only."""
    try:
        marker.rename(marker.with_suffix(".taken"))
    except OSError:
        return False
    return True


def hold(folder: Path) -> None:
    """Stand still, the first time that anybody does."""
    try:
        (folder / "here").touch(exist_ok=False)
    except FileExistsError:
        return
    until = time.monotonic() + MOST_S
    while not (folder / "struck").exists() and time.monotonic() < until:
        time.sleep(0.05)
    if take(folder / "fail"):
        sys.exit("told to fail")


class Held(transom.Checkpointer):
    """A Checkpointer at which things happen."""

    moment = ""
    folder = Path()

    def restore(self, *arguments: Any, **options: Any) -> int:
        if self.moment == "restoring" and self.rank == 1 and not os.environ["TRANSOM_ATTEMPT"].endswith("A0001-L01"):
            hold(self.folder)
        return super().restore(*arguments, **options)

    def step(self, step: int, state: Any, **options: Any) -> Any:
        if self.rank == 1 and take(self.folder / "fail"):
            sys.exit("told to fail")
        if self.rank == 1 and take(self.folder / "nan"):
            state["plate"].array[...] = numpy.nan
        return super().step(step, state, **options)


def main() -> None:
    Held.moment, Held.folder = sys.argv[1], Path(sys.argv[2])
    if Held.moment == "start" and os.environ["RANK"] == "1":
        hold(Held.folder)
    transom.Checkpointer = Held  # type: ignore[misc]
    sys.argv = sys.argv[3:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
