"""drill: the whole promise, tried on this machine."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from transom_hpc.base.errors import UsageError
from transom_hpc.cli.signals import leaving_in_order
from transom_hpc.drill import Drill, Outcome, Plan, Seen
from transom_hpc.lab import Lab, take_down


@click.command()
@click.option("--steps", type=click.IntRange(min=30), default=60, show_default=True, help="Training steps of each run.")
@click.option("--program", type=click.Path(path_type=Path), help="Training program. Default: examples/train_gpt.py.")
@click.option("--name", default="drill", show_default=True, help="Name of the lab.")
@click.option("--keep", is_flag=True, help="Leave the lab up afterwards.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def drill(steps: int, program: Path | None, name: str, keep: bool, as_json: bool) -> None:
    """Train on a lab of five hosts, crash one, and see the run recover.

    Exit status 0 only if the weights are bitwise those of an undisturbed run.
    """
    program = program or Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
    if not program.is_file():
        raise UsageError(f"no training program at {program}: name one with --program", path=program)
    say = _Say(quiet=as_json)
    with leaving_in_order():
        outcome = _run(program.resolve(), steps, name, keep, say)
    if as_json:
        click.echo(json.dumps(asdict(outcome), indent=2))
    else:
        _print(outcome)
    if not outcome.identical:
        raise SystemExit(1)


def _run(program: Path, steps: int, name: str, keep: bool, say: _Say) -> Outcome:
    take_down(name)  # what an interrupted drill left
    lab = Lab.up(name, nodes=5, say=say.line)
    try:
        if not lab.is_isolated:
            say.line(
                "without root the hosts share one network and process tree: a crash ends a host's processes and its "
                "slurmd, and hosts can't fall silent; run with root for the whole drill"
            )
        return Drill(lab, Plan(program, steps=steps), say.seen).run()
    finally:
        with contextlib.suppress(OSError):  # the terminal may have gone
            say.close()
            if keep:
                click.echo(f"the lab is up: transom lab status --name {name}", err=say.quiet)
        if not keep:
            take_down(name)


class _Say:
    """Lines with the time since the start; on a terminal with a bar below them."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.quiet = quiet
        self._begun = time.monotonic()
        self._console = Console(highlight=False, quiet=quiet, file=sys.stdout)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks: dict[str, Any] = {}
        self._printed: dict[str, int] = {}
        self._bar.start()

    def line(self, text: str) -> None:
        """Say one thing."""
        self._console.print(f"{time.monotonic() - self._begun:6.1f} s  {text}", markup=False, soft_wrap=True)

    def seen(self, seen: Seen) -> None:
        """Show where a run is."""
        if seen.run not in self._tasks:
            self._tasks[seen.run] = self._bar.add_task(f"{seen.run} run", total=seen.steps)
        self._bar.update(self._tasks[seen.run], completed=seen.step)
        if seen.news:
            self.line(f"{seen.run} run: {seen.news}")
        elif not self._console.is_terminal and seen.step >= self._printed.get(seen.run, 0) + 10:
            self._printed[seen.run] = seen.step
            self.line(f"{seen.run} run: step {seen.step} of {seen.steps}")

    def close(self) -> None:
        """Take the bar away."""
        self._bar.stop()


def _print(outcome: Outcome) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("steps", str(outcome.steps))
    table.add_row("restarts", str(outcome.restarts))
    table.add_row("host lost", outcome.host)
    table.add_row("hosts excluded", ", ".join(outcome.excluded) or "none")
    table.add_row("crash to next new step", "-" if outcome.back_s is None else f"{outcome.back_s:.1f} s")
    table.add_row("work lost", f"{outcome.lost_steps} steps")
    table.add_row("checkpoint committed last", f"step {outcome.committed}")
    table.add_row("undisturbed run took", f"{outcome.seconds[0]:.0f} s")
    table.add_row("hurt run took", f"{outcome.seconds[1]:.0f} s")
    same = "[green]bitwise the same[/]" if outcome.identical else "[red]NOT the same[/]"
    table.add_row("final weights of both", same)
    Console(highlight=False).print("", table)
