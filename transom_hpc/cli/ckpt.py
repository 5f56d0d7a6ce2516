"""ckpt: look at checkpoints, check their bytes, remove them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from transom_hpc.base.errors import CorruptCheckpoint, RunDirError, UsageError
from transom_hpc.cli.text import duration, size

if TYPE_CHECKING:
    from transom_hpc.ckpt.catalog import Checkpoint

_TARGET = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def ckpt() -> None:
    """Checkpoints of a run: list, show, verify, remove.

    RUN is a run directory, the id of its job, or the folder that holds the step-* folders.
    """


def _directory(run: Path) -> Path:
    """The folder with the step-* folders."""
    if str(run).isdigit() and not run.exists():
        from transom_hpc.status import find

        run = find(str(run))[0].path
    inner = run / "checkpoints"
    directory = inner if inner.is_dir() else run
    if not directory.is_dir():
        raise RunDirError(f"no run directory at {run}", path=run)
    return directory


def _folders(run: Path) -> list[tuple[int, Path]]:
    from transom_hpc.ckpt.catalog import folders

    found = folders(_directory(run))
    if not found:
        raise UsageError(f"no checkpoint in {_directory(run)}", path=run)
    return found


def _chosen(run: Path, steps: tuple[int, ...]) -> list[tuple[int, Path]]:
    found = dict(_folders(run))
    unknown = [step for step in steps if step not in found]
    if unknown:
        there = ", ".join(map(str, found))
        raise UsageError(f"no checkpoint of step {unknown[0]} in {_directory(run)}; there are {there}", path=run)
    return [(step, found[step]) for step in steps] or [max(found.items())]


def _read(path: Path) -> tuple[Checkpoint | None, str]:
    from transom_hpc.ckpt.catalog import read_checkpoint

    try:
        return read_checkpoint(path), ""
    except CorruptCheckpoint as error:
        return None, str(error)


@ckpt.command()
@_TARGET
@_JSON
def ls(run: Path, as_json: bool) -> None:
    """List what is committed, oldest first. Sizes and manifests are checked, the data is not read."""
    rows: list[dict[str, Any]] = []
    for step, path in _folders(run):
        found, problem = _read(path)
        row: dict[str, Any] = {"step": step, "path": str(path), "problem": problem}
        if found is not None:
            manifest = found.manifest
            row |= {
                "bytes": manifest.nbytes,
                "world_size": manifest.world_size,
                "attempt": manifest.attempt,
                "saved_at": manifest.saved_at,
                "metrics": dict(manifest.metrics),
            }
        rows.append(row)
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("STEP", "SIZE", "RANKS"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("SAVED", no_wrap=True)
    table.add_column("ATTEMPT", no_wrap=True)
    table.add_column("STATE", overflow="fold")
    now = datetime.now(timezone.utc)
    for row in rows:
        if row["problem"]:
            table.add_row(str(row["step"]), "-", "-", "-", "-", Text(row["problem"], style="red"))
            continue
        age = max(0.0, (now - datetime.fromisoformat(row["saved_at"])).total_seconds())
        facts = (size(row["bytes"]), str(row["world_size"]), f"{duration(age)} ago", row["attempt"])
        table.add_row(str(row["step"]), *facts, "whole")
    Console(highlight=False).print(table)


@ckpt.command()
@_TARGET
@click.argument("step", type=int, required=False)
@_JSON
def show(run: Path, step: int | None, as_json: bool) -> None:
    """Show what is in a checkpoint; without STEP, the newest."""
    from transom_hpc.ckpt import names

    (_, path), *_ = _chosen(run, () if step is None else (step,))
    found, problem = _read(path)
    if found is None:
        raise CorruptCheckpoint(problem, path=path)
    manifest = found.manifest
    arrays: list[dict[str, Any]] = [
        {
            "name": names.shown(item.entry.name),
            "dtype": item.entry.dtype,
            "shape": list(item.entry.shape),
            "bytes": item.entry.nbytes,
            "rank": item.rank,
            "dataset": item.path,
            "file": item.file,
            "offset": item.offset,
        }
        for item in manifest.stored
    ]
    if as_json:
        facts = {
            "step": manifest.step,
            "path": str(path),
            "attempt": manifest.attempt,
            "world_size": manifest.world_size,
            "saved_at": manifest.saved_at,
            "writer": manifest.writer,
            "metrics": dict(manifest.metrics),
            "files": dict(manifest.files),
            "arrays": arrays,
        }
        click.echo(json.dumps(facts, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    metrics = "".join(f", {name} {value:.6g}" for name, value in manifest.metrics.items())
    console.print(Text(f"step {manifest.step}, {size(manifest.nbytes)}, {manifest.world_size} ranks{metrics}"))
    into = ", ".join(manifest.files) if len(manifest.files) < 4 else f"{len(manifest.files)} files"
    console.print(Text(f"written by {manifest.attempt} at {manifest.saved_at}"))
    console.print(Text(f"with the {manifest.writer} writer into {into}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", overflow="fold")
    table.add_column("TYPE", no_wrap=True)
    table.add_column("SHAPE", no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("OF", no_wrap=True)
    for array in arrays:
        whose = "all ranks" if array["rank"] is None else f"rank {array['rank']}"
        shape = "x".join(map(str, array["shape"])) or "scalar"
        table.add_row(Text(array["name"]), array["dtype"], shape, size(array["bytes"]), whose)
    console.print(table)


@ckpt.command()
@_TARGET
@click.argument("steps", type=int, nargs=-1, metavar="[STEP]...")
@click.option("--all", "everything", is_flag=True, help="Every step.")
@_JSON
def verify(run: Path, steps: tuple[int, ...], everything: bool, as_json: bool) -> None:
    """Read checkpoints whole and compare every byte with the checksums; without STEP, the newest.

    Exit status 0 only if all is as it was written.
    """
    import threading

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from transom_hpc.ckpt.catalog import verify as check

    chosen = _folders(run) if everything else _chosen(run, steps)
    total = sum(found.manifest.nbytes for _, path in chosen if (found := _read(path)[0]) is not None)
    faults: dict[int, list[Any]] = {}
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    console = Console(stderr=True)
    lock = threading.Lock()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("verifying", total=total)

        def advance(count: int) -> None:
            with lock:
                bar.advance(task, count)

        for step, path in chosen:
            bar.update(task, description=f"step {step}")
            faults[step] = check(path, advance)
    if as_json:
        report = [
            {
                "step": step,
                "faults": [
                    {"file": f.file, "name": f.name, "rank": f.rank, "offset": f.offset, "what": f.what} for f in listed
                ],
            }
            for step, listed in faults.items()
        ]
        click.echo(json.dumps(report, indent=2))
    else:
        for step, listed in faults.items():
            click.echo(f"step {step}: {'as it was written' if not listed else f'{len(listed)} faults'}")
            for fault in listed:
                click.echo(f"  {fault}")
    if any(faults.values()):
        raise SystemExit(1)


@ckpt.command()
@_TARGET
@click.argument("steps", type=int, nargs=-1, required=True, metavar="STEP...")
@click.option("--yes", is_flag=True, help="Don't ask.")
@_JSON
def rm(run: Path, steps: tuple[int, ...], yes: bool, as_json: bool) -> None:
    """Remove checkpoints. The newest whole one can only go together with all the others."""
    from transom_hpc.ckpt.files import Files

    chosen = _chosen(run, steps)
    whole = [step for step, path in _folders(run) if _read(path)[0] is not None]
    if whole and whole[-1] in steps and set(whole) - set(steps):
        left = max(set(whole) - set(steps))
        raise UsageError(
            f"step {whole[-1]} is the newest whole checkpoint, and a run would fall back to step {left}: "
            "name all steps to begin anew"
        )
    if not yes:
        what = ", ".join(str(step) for step, _ in chosen)
        click.confirm(f"remove step {what} of {_directory(run)} for good?", abort=True, err=True)
    files = Files()
    for _, path in chosen:
        trash = path.with_name(f".trash-{path.name}")  # a half-removed one is never taken for a checkpoint
        files.rename(path, trash)
        files.remove(trash)
    if as_json:
        click.echo(json.dumps([step for step, _ in chosen]))
    else:
        click.echo(f"removed {len(chosen)}")
