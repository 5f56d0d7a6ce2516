"""diff: what differs between two checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from transom_hpc.base.errors import TransomError, UsageError
from transom_hpc.cli.checkpoints import JSON, chosen, progress
from transom_hpc.cli.text import size

if TYPE_CHECKING:
    from transom_hpc.ckpt.compare import Change, Comparison

_TROUBLE = 2


@click.command()
@click.argument("what", nargs=-1, required=True, metavar="RUN STEP_A STEP_B")
@click.option("--all", "everything", is_flag=True, help="Show every difference, not the largest 30.")
@JSON
def diff(what: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Compare two steps of a run, or two checkpoints by their folders (diff FOLDER_A FOLDER_B).

    Shows for each array that differs by how much, the largest difference first: absolute, relative
    (|a - b| / max(|a|, |b|)), and in how many elements. Two NaNs are the same value; one NaN is infinitely far from
    everything else. What has equal checksums is not read.

    Exit status as of diff(1): 0 all bits are equal, 1 something differs, 2 trouble.
    """
    from transom_hpc.ckpt import compare
    from transom_hpc.ckpt.catalog import read_checkpoint

    try:
        a, b = map(read_checkpoint, _folders(what))
        with progress("comparing", compare.to_read(a, b)) as (advance, _):
            found = compare.compare(a, b, advance)
    except (TransomError, OSError) as error:
        click.echo(f"transom: {error}", err=True)
        raise SystemExit(_TROUBLE) from error
    if as_json:
        facts = {"a": str(a.path), "b": str(b.path), "same": found.same, "equal": found.equal}
        facts |= {"arrays": [_to_json(change) for change in found.changes]}
        facts |= {"others": [_to_json(change) for change in found.others]}
        click.echo(json.dumps(facts, indent=2, allow_nan=False))
    else:
        _print(found, everything)
    if not found.same:
        raise SystemExit(1)


def _folders(what: tuple[str, ...]) -> tuple[Path, Path]:
    if len(what) == 2:
        return chosen(Path(what[0]), ())[0][1], chosen(Path(what[1]), ())[0][1]
    if len(what) != 3:
        raise UsageError("diff takes RUN STEP_A STEP_B, or two folders of checkpoints")
    if not (what[1].isdecimal() and what[2].isdecimal()):
        raise UsageError(f"{what[1]} and {what[2]} must be steps: whole numbers")
    (_, a), (_, b) = chosen(Path(what[0]), (int(what[1]), int(what[2])))
    return a, b


def _to_json(change: Change) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": change.name, "rank": change.rank, "what": change.what}
    facts |= {"a": change.a, "b": change.b}
    if change.apart is not None:
        facts |= {"elements": change.apart.elements, "differing": change.apart.differing, "nans": change.apart.nans}
        facts |= {"max_abs": _finite(change.apart.max_abs), "max_rel": _finite(change.apart.max_rel)}
    return facts


def _finite(value: float | int | None) -> float | int | str | None:
    """JSON has no infinity."""
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _print(found: Comparison, everything: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    most = None if everything else 30
    if found.changes:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("ARRAY", overflow="fold")
        for name in ("MAX ABS", "MAX REL", "DIFFER", "NAN"):
            table.add_column(name, justify="right", no_wrap=True)
        for change in found.changes[:most]:
            name = _of_rank(change)
            if change.apart is None:
                table.add_row(Text(f"{name}: {change.what} ({' / '.join(filter(None, (change.a, change.b)))})"))
                continue
            share = f"{change.apart.differing / change.apart.elements:.1%}"
            gaps = ["-" if v is None else f"{v:.3g}" for v in (change.apart.max_abs, change.apart.max_rel)]
            table.add_row(Text(name), *gaps, share, str(change.apart.nans or ""))
        console.print(table)
    for change in found.others[:most]:
        values = f": {change.a or 'nothing'} / {change.b or 'nothing'}" if change.a or change.b else f": {change.what}"
        console.print(Text(_of_rank(change) + values))
    hidden = sum(max(0, len(rows) - most) for rows in (found.changes, found.others)) if most else 0
    if hidden:
        console.print(f"and {hidden} more; --all shows them")
    others = f", {len(found.others)} other things too" if found.others else ""
    differ = f"{len(found.changes)} arrays differ{others}" if found.changes or others else "nothing differs"
    console.print(f"{found.equal} arrays are bitwise equal, {differ} ({size(2 * found.nbytes)} read)")


def _of_rank(change: Change) -> str:
    return change.name if change.rank is None else f"{change.name} (rank {change.rank})"
