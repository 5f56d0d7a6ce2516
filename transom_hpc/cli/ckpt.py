"""ckpt: look at checkpoints, check their bytes, remove them."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from transom_hpc.base.errors import CorruptCheckpoint, UsageError
from transom_hpc.cli.checkpoints import JSON, RUN, aside, chosen, directory, folders, progress, read
from transom_hpc.cli.diff import diff
from transom_hpc.cli.exchange import export, import_
from transom_hpc.cli.text import duration, size


@click.group()
def ckpt() -> None:
    """Checkpoints of a run: list, show, verify, remove, compare, export, import.

    RUN is a run directory, the id of its job, or the folder that holds the step-* folders; to look at one checkpoint,
    its own folder will do.
    """


ckpt.add_command(diff)
ckpt.add_command(export)
ckpt.add_command(import_)


@ckpt.command()
@RUN
@JSON
def ls(run: Path, as_json: bool) -> None:
    """List what is committed, oldest first, and then what was put aside and is not restored.

    Sizes and manifests are checked, the data is not read.
    """
    from transom_hpc.ckpt import catalog

    rows: list[dict[str, Any]] = []
    gone = aside(run)
    for step, path in folders(run) if not gone or catalog.folders(directory(run)) else ():
        found, problem = read(path)
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
    for step, path, why in gone:
        rows.append({"step": step, "path": str(path), "problem": f"put aside as {path.name}: {why}"})
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
@RUN
@click.argument("step", type=int, required=False)
@JSON
def show(run: Path, step: int | None, as_json: bool) -> None:
    """Show what is in a checkpoint; without STEP, the newest."""
    from transom_hpc.ckpt import names

    (_, path), *_ = chosen(run, () if step is None else (step,))
    found, problem = read(path)
    if found is None:
        raise CorruptCheckpoint(problem, path=path)
    manifest = found.manifest
    arrays: list[dict[str, Any]] = [
        {
            "name": names.shown(item.entry.name),
            "dtype": item.entry.dtype,
            "shape": list(item.entry.shape),
            "bytes": item.entry.nbytes,
            "global_shape": list(item.entry.global_shape),
            "start": list(item.entry.start),
            "rank": item.rank,
            "holders": list(item.holders),
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
            "written_bytes": list(manifest.written),
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
    if manifest.world_size > 1:
        even = manifest.balance
        console.print(
            Text(f"each rank wrote {size(even.least)} to {size(even.most)}, {size(round(even.mean))} on average")
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("NAME", overflow="fold")
    table.add_column("TYPE", no_wrap=True)
    table.add_column("SHAPE", no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("OF", no_wrap=True)
    for array in arrays:
        whose = "all ranks" if array["rank"] is None else f"rank {array['rank']}"
        if array["holders"]:
            whose = f"{len(array['holders'])} ranks from {array['holders'][0]} on"
        shape = "x".join(map(str, array["shape"])) or "scalar"
        if array["shape"] != array["global_shape"]:
            shape += f" of {'x'.join(map(str, array['global_shape']))}"
        table.add_row(Text(array["name"]), array["dtype"], shape, size(array["bytes"]), whose)
    console.print(table)


@ckpt.command()
@RUN
@click.argument("steps", type=int, nargs=-1, metavar="[STEP]...")
@click.option("--all", "everything", is_flag=True, help="Every step.")
@JSON
def verify(run: Path, steps: tuple[int, ...], everything: bool, as_json: bool) -> None:
    """Read checkpoints whole and compare every byte with the checksums; without STEP, the newest.

    Exit status 0 only if all is as it was written.
    """
    from transom_hpc.ckpt.catalog import verify as check

    wanted = folders(run) if everything else chosen(run, steps)
    total = sum(found.manifest.nbytes for _, path in wanted if (found := read(path)[0]) is not None)
    faults: dict[int, list[Any]] = {}
    with progress("verifying", total) as (advance, say):
        for step, path in wanted:
            say(f"step {step}")
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
@RUN
@click.argument("steps", type=int, nargs=-1, required=True, metavar="STEP...")
@click.option("--yes", is_flag=True, help="Don't ask.")
@JSON
def rm(run: Path, steps: tuple[int, ...], yes: bool, as_json: bool) -> None:
    """Remove checkpoints. The newest whole one can only go together with all the others."""
    from transom_hpc.ckpt.files import Files

    doomed = chosen(run, steps, own=False)
    whole = [step for step, path in folders(run, own=False) if read(path)[0] is not None]
    if whole and whole[-1] in steps and set(whole) - set(steps):
        left = max(set(whole) - set(steps))
        raise UsageError(
            f"step {whole[-1]} is the newest whole checkpoint, and a run would fall back to step {left}: "
            "name all steps to begin anew"
        )
    if not yes:
        what = ", ".join(str(step) for step, _ in doomed)
        click.confirm(f"remove step {what} of {directory(run)} for good?", abort=True, err=True)
    files = Files()
    for _, path in doomed:
        trash = path.with_name(f".trash-{path.name}")  # a half-removed one is never taken for a checkpoint
        files.rename(path, trash)
        files.remove(trash)
    if as_json:
        click.echo(json.dumps([step for step, _ in doomed]))
    else:
        click.echo(f"removed {len(doomed)}")
