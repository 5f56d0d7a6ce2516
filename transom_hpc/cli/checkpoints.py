"""Which checkpoints a person means, and a bar that shows how far their bytes have come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from transom_hpc.base.errors import CorruptCheckpoint, OtherFormat, RunDirError, UsageError

if TYPE_CHECKING:
    from transom_hpc.ckpt.catalog import Checkpoint

RUN = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def directory(run: Path) -> Path:
    """The folder with the step-* folders.

    Raises:
        RunDirError: there is none.
    """
    if str(run).isdigit() and not run.exists():
        from transom_hpc.status import find

        run = find(str(run))[0].path
    inner = run / "checkpoints"
    found = inner if inner.is_dir() else run
    if not found.is_dir():
        raise RunDirError(f"no run directory at {run}", path=run)
    return found


def folders(run: Path, own: bool = True) -> list[tuple[int, Path]]:
    """Step and folder of each checkpoint, oldest first.

    Args:
        own: whether the folder of a single checkpoint will do.

    Raises:
        UsageError: there is none.
    """
    from transom_hpc.ckpt import catalog, manifest

    here = run if manifest.step_of(run.name) is not None else run.resolve()
    step = manifest.step_of(here.name)
    if own and step is not None and here.is_dir():
        return [(step, here)]
    found = catalog.folders(directory(run))
    if not found:
        raise UsageError(f"no checkpoint in {directory(run)}", path=run)
    return found


def aside(run: Path) -> list[tuple[int, Path, str]]:
    """Step and folder of each checkpoint that was put aside, and why, oldest first."""
    from transom_hpc.ckpt import housekeeping
    from transom_hpc.ckpt.files import Files

    reasons = {housekeeping.DAMAGED: "it was damaged", housekeeping.DISTRUSTED: "it is not trusted"}
    found = housekeeping.aside(directory(run), Files())
    return [
        (step, path, next(why for kind, why in reasons.items() if path.name.startswith(kind))) for step, path in found
    ]


def chosen(run: Path, steps: tuple[int, ...], own: bool = True) -> list[tuple[int, Path]]:
    """Step and folder of these steps; without any, of the newest.

    Raises:
        UsageError: one of them is not there.
    """
    found = dict(folders(run, own))
    unknown = [step for step in steps if step not in found]
    if unknown:
        there = ", ".join(map(str, found))
        raise UsageError(f"no checkpoint of step {unknown[0]} in {run}; there are {there}", path=run)
    return [(step, found[step]) for step in steps] or [max(found.items())]


def read(path: Path) -> tuple[Checkpoint | None, str]:
    """A checkpoint, or why it is none."""
    from transom_hpc.ckpt.catalog import read_checkpoint

    try:
        return read_checkpoint(path), ""
    except (CorruptCheckpoint, OtherFormat) as error:
        return None, str(error)


@contextmanager
def progress(what: str, total: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """A bar on standard error while something goes on, where that is a terminal.

    Args:
        what: goes on.
        total: bytes.

    Yields:
        What is to be called with each number of bytes, from any thread, and with another name of what goes on.
    """
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    lock = threading.Lock()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total)

        def advance(count: int) -> None:
            with lock:
                bar.advance(task, count)

        yield advance, lambda text: bar.update(task, description=text)
