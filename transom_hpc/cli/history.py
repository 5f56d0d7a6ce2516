"""history: what a run has gone through, and where its time went, as a screen, JSON or CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from transom_hpc.cli.text import duration, size

if TYPE_CHECKING:
    from transom_hpc.tol.goodput import Goodput
    from transom_hpc.tol.rundir import RunDir

_BAR = 30
_COLOURS = {"training": "green", "saving": "cyan", "waiting": "blue", "pausing": "blue"}
_Rows = list[dict[str, Any]]


@click.command()
@click.argument("target", metavar="RUN|JOBID")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all, or what --what names.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a table as CSV: the attempts, or what --what names.")
@click.option("--what", type=click.Choice(["attempts", "events", "checkpoints"]), help="This table only.")
def history(target: str, as_json: bool, as_csv: bool, what: str | None) -> None:
    """Show what a run has gone through, and where its time went.

    Exit status: 0; 1 something can't be read; 2 there is no such run.
    """
    from transom_hpc.run import attempt_rows, checkpoint_rows, event_rows, goodput
    from transom_hpc.status import find

    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other.")
    run = find(target)[0]
    run.submitted()  # refuses what is no run of ours
    entries = run.entries()
    tables: dict[str, Callable[[], _Rows]] = {
        "attempts": lambda: attempt_rows(entries),
        "events": lambda: event_rows(entries),
        "checkpoints": lambda: checkpoint_rows(run),
    }
    if as_csv:
        _csv(what or "attempts", tables[what or "attempts"]())
    elif as_json and what is not None:
        _json(tables[what]())
    elif as_json:
        _json({"goodput": _facts(goodput(run, entries)), **{name: rows() for name, rows in tables.items()}})
    elif what is not None:
        _console().print(_TABLES[what](tables[what]()))
    else:
        _screen(run, goodput(run, entries), tables["attempts"]())


def _facts(found: Goodput) -> dict[str, float | None]:
    return {"goodput": found.goodput, "wall_s": found.wall_s, **asdict(found)}


def _json(value: Any) -> None:
    click.echo(json.dumps(_plain(value), indent=2))


def _plain(value: Any) -> Any:
    """Without the numbers that JSON has no words for, as the loss of a run that diverges."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _csv(what: str, rows: _Rows) -> None:
    import csv
    import io

    from transom_hpc import run

    always = {"attempts": run.ATTEMPTS, "events": run.EVENTS, "checkpoints": run.CHECKPOINTS}[what]
    names = dict.fromkeys((*always, *(name for row in rows for name in row)))
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    click.echo(text.getvalue(), nl=False)


def _cell(value: Any) -> Any:
    """A list of hosts as words, what is deeper as JSON."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return json.dumps(_plain(value)) if isinstance(value, (list, dict)) else value


def _console() -> Any:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def _screen(run: RunDir, found: Goodput, attempts: _Rows) -> None:
    from rich.text import Text

    console = _console()
    console.print(Text(f"run       {run.path}", overflow="fold"), soft_wrap=True)
    if found.goodput is None:
        console.print(Text("nothing has happened yet: the journal is empty"))
    else:
        console.print(Text(f"goodput   {_percent(found.goodput)} of {duration(found.wall_s)}"))
        console.print(_bars(found, "█" if console.encoding.startswith("utf") else "#"))
        if not found.training_s and attempts:
            console.print(Text("no step was reported: a program without a Checkpointer, or it has not got that far"))
    if attempts:
        console.print("")
        console.print(_attempts(attempts))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _bars(found: Goodput, mark: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    for word, share in found.shares.items():
        bar = mark * max(1 if share else 0, round(share * _BAR))
        style = _COLOURS.get(word, "yellow")
        grid.add_row(f"  {word}", _percent(share), duration(found.seconds[word]), Text(bar, style=style))
    return grid


def _columns(*names: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names[:-1]:
        table.add_column(name, no_wrap=True)
    table.add_column(names[-1], overflow="fold")
    return table


def _attempts(rows: _Rows) -> Any:
    from rich.text import Text

    from transom_hpc.tol.attempt import Attempt

    table = _columns("ATTEMPT", "STEPS", "LASTED", "HOST", "ENDED BY")
    for row in rows:
        steps = f"{_known(row['from_step'])} to {_known(row['to_step'])}"
        why = Text(row["cause"] or ("not known, or it runs" if row["ended"] is None else "not known"), style="bold")
        if row["evidence"]:
            why = Text.assemble(why, f": {row['evidence']}")
        attempt = str(Attempt(row["attempt"], row["launch"]))
        table.add_row(attempt, steps, duration(row["duration_s"]), Text(row["host_out"] or "-"), why)
    return table


def _known(step: int | None) -> str:
    return "?" if step is None else str(step)


def _events(rows: _Rows) -> Any:
    from rich.text import Text

    from transom_hpc.run import EVENTS
    from transom_hpc.tol.attempt import Attempt

    table = _columns("TIME", "ATTEMPT", "KIND", "FACTS")
    for row in rows:
        facts = ", ".join(f"{name} {_cell(value)}" for name, value in row.items() if name not in EVENTS)
        attempt = str(Attempt(row["attempt"], row["launch"]))
        table.add_row(Text(str(row["time"])[:19]), attempt, Text(str(row["kind"])), Text(facts))
    return table


def _checkpoints(rows: _Rows) -> Any:
    from rich.text import Text

    table = _columns("STEP", "SIZE", "RANKS", "COMMITTED", "ATTEMPT")
    for row in rows:
        facts = (str(row["step"]), size(row["bytes"]), str(row["ranks"]), row["committed"])
        table.add_row(*facts, Text(row["attempt"]))
    return table


_TABLES: dict[str, Callable[[_Rows], Any]] = {
    "attempts": _attempts,
    "events": _events,
    "checkpoints": _checkpoints,
}
