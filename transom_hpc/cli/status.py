"""status: what runs do, as a table, a screen or JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import click

from transom_hpc.cli.text import duration
from transom_hpc.slurm.commands import SlurmCommands
from transom_hpc.slurm.hosts import fold_hosts
from transom_hpc.slurm.states import JobState
from transom_hpc.status import RunStatus, collect, find

_SHOWN = 20
_EVERY_S = 2.0
_FILE_WIDTH = 1000
_CODES = {"ended badly": 3, "held": 4, "unknown": 5}


@click.command()
@click.argument("target", required=False, metavar="[RUN|JOBID]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--watch", is_flag=True, help="Show it anew every two seconds, until Ctrl-C or the run's end.")
def status(target: str | None, as_json: bool, watch: bool) -> None:
    """Show what a run does, and why; without an argument, all your runs.

    Exit status for one run: 0 it waits, runs, has ended well or was stopped; 3 ended badly; 4 held; 5 not known.
    """
    slurm = SlurmCommands()
    found = find(target)
    leave_out: Callable[[str], None] | None = None
    if target is None:
        found, leave_out = found[:_SHOWN], _leave_out
    if as_json:
        statuses = collect(found, slurm, leave_out=leave_out)
        facts = [_facts(item) for item in statuses]
        click.echo(json.dumps(facts[0] if target is not None else facts, indent=2))
    elif watch:
        statuses = _watch(found, target is not None)
    else:
        statuses = collect(found, slurm, leave_out=leave_out)
        _print(statuses, target is not None)
    if target is not None:
        raise SystemExit(exit_code(statuses[0]))


def _leave_out(why: str) -> None:
    click.echo(f"transom: left out: {why}", err=True)


def exit_code(item: RunStatus) -> int:
    """The exit status that tells scripts how a run is."""
    phase = item.phase
    if phase == "ended badly" or (item.job.state is JobState.ENDED_BADLY and phase not in ("ended well", "stopped")):
        return 3
    if item.job.state is JobState.HELD:
        return 4
    return 5 if item.job.state is JobState.UNKNOWN and phase not in ("ended well", "stopped", "local") else 0


def _watch(found: Any, single: bool) -> list[RunStatus]:
    from rich.live import Live

    slurm = SlurmCommands()
    leave_out = None if single else (lambda _: None)  # said above the screen it would stay there for ever
    statuses = collect(found, slurm, leave_out=leave_out)
    try:
        with Live(_renderable(statuses, single), auto_refresh=False) as live:
            while not (single and statuses[0].phase in _OVER):
                time.sleep(_EVERY_S)
                statuses = collect(found, slurm, leave_out=leave_out)
                live.update(_renderable(statuses, single), refresh=True)
    except KeyboardInterrupt:
        pass
    return statuses


def _print(statuses: list[RunStatus], single: bool) -> None:
    from rich.console import Console

    if not statuses:
        click.echo("no runs yet: transom submit starts one; transom status RUN shows one that somebody else started")
        return
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_WIDTH  # a path in a file or a pipe is not to be broken
    console.print(_renderable(statuses, single))


def _renderable(statuses: list[RunStatus], single: bool) -> Any:
    return _screen(statuses[0]) if single else _table(statuses)


_OVER = ("ended well", "ended badly", "stopped")
_COLOURS = {"running": "green", "ended well": "green", "ended badly": "red", "held": "yellow", "unknown": "yellow"}


def _coloured(phase: str) -> Any:
    from rich.text import Text

    return Text(phase, style=_COLOURS.get(phase, "cyan"))


def _table(statuses: list[RunStatus]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", width=None)
    table.add_column("JOB", no_wrap=True)
    table.add_column("RUN", overflow="fold")
    table.add_column("PHASE", no_wrap=True)
    for name in ("STEP", "SAVED", "RESTARTS"):
        table.add_column(name, justify="right")
    for item in statuses:
        table.add_row(
            item.job_id or "-",
            item.run.path.name,
            _coloured(item.phase),
            str(item.step),
            str(item.committed or "-"),
            str(len(item.restarts)),
        )
    return table


def _screen(item: RunStatus) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    history = item.history
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("run", Text(str(item.run.path)))
    slurm_word = f" ({item.job.text}{', ' + item.job.reason if item.job.reason not in ('', 'None') else ''})"
    grid.add_row("job", f"{item.job_id or '-'} {item.job.state}{slurm_word if item.job.text else ''}")
    grid.add_row("phase", _coloured(item.phase))
    if history.succeeds and history.attempt is not None:
        before = history.succeeds.split("-")[0].removeprefix("A").lstrip("0")
        grid.add_row("launcher", f"of attempt {history.attempt.number}; it took over from that of attempt {before}")
    if history.hosts:
        spares = f", spare {fold_hosts(history.spares)}" if history.spares else ""
        grid.add_row("hosts", f"{fold_hosts(history.hosts)}{spares}")
    rate = f", {history.step_s:.2f} s a step" if history.step_s else ""
    loss = f", loss {history.loss:.4g}" if history.loss is not None else ""
    grid.add_row("step", f"{item.step}{rate}{loss}")
    if item.committed:
        age = f", {duration(item.committed_age_s)} ago" if item.committed_age_s is not None else ""
        grid.add_row("checkpoint", f"step {item.committed}{age}")
    else:
        grid.add_row("checkpoint", "none yet")
    if history.restored is not None and history.restored[0]:
        step, source = history.restored
        grid.add_row("restored", f"step {step} from {'memory' if source.startswith('memory:') else 'disk'}")
    steps, seconds = item.at_risk
    if item.phase not in (*_OVER, "local"):
        grid.add_row("at risk", f"{steps} steps" + (f", {duration(seconds)}" if seconds else ""))
    if history.distrusted:
        grid.add_row("not trusted", history.distrusted)
    if history.stacks is not None:
        folder, behind = history.stacks
        grid.add_row("last hang", Text(f"{behind}; stacks: {folder}"))
    if item.output is not None:
        grid.add_row("output", Text(str(item.output)))
    parts: list[Any] = [grid]
    for line in item.advice:
        parts.append(Text(f"! {line}", style="yellow"))
    if item.restarts:
        table = Table(title="Restarts", title_justify="left", box=None, pad_edge=False, header_style="bold")
        for name in ("ATTEMPT", "CAUSE", "HOST", "FROM", "BACK"):
            table.add_column(name, no_wrap=True)
        table.add_column("EVIDENCE", overflow="fold")
        for facts in item.restarts[-10:]:
            table.add_row(
                str(facts.attempt),
                str(facts.restart.cause),
                facts.restart.host or "-",
                f"step {facts.restart.committed}",
                "-" if facts.back_s is None else duration(facts.back_s),
                Text(facts.restart.evidence),
            )
        parts += [Text(""), table]
    if item.excluded:
        table = Table(title="Hosts left out", title_justify="left", box=None, pad_edge=False, header_style="bold")
        for name in ("HOST", "CAUSE", "SINCE"):
            table.add_column(name, no_wrap=True)
        table.add_column("EVIDENCE", overflow="fold")
        for incident in item.excluded:
            age = duration(max(0.0, (datetime.now(timezone.utc) - incident.when).total_seconds()))
            table.add_row(incident.host, str(incident.cause), age, Text(incident.evidence))
        parts += [Text(""), table]
    return Group(*parts)


def _facts(item: RunStatus) -> dict[str, Any]:
    steps, seconds = item.at_risk
    history = item.history
    return {
        "run_dir": str(item.run.path),
        "name": item.submitted.spec.name,
        "output": None if item.output is None else str(item.output),
        "job_id": item.job_id,
        "job_state": str(item.job.state),
        "slurm_state": item.job.text,
        "reason": item.job.reason,
        "phase": item.phase,
        "attempt": str(history.attempt) if history.attempt else None,
        "hosts": list(history.hosts),
        "spares": list(history.spares),
        "step": item.step,
        "step_s": history.step_s,
        "loss": history.loss,
        "committed": item.committed,
        "committed_age_s": item.committed_age_s,
        "at_risk_steps": steps,
        "at_risk_s": seconds,
        "restored": None if history.restored is None else dict(zip(("step", "source"), history.restored, strict=True)),
        "restarts": [
            {
                "attempt": str(facts.attempt),
                "time": facts.time,
                "cause": str(facts.restart.cause),
                "host": facts.restart.host,
                "evidence": facts.restart.evidence,
                "step": facts.step,
                "committed": facts.restart.committed,
                "back_s": facts.back_s,
            }
            for facts in item.restarts
        ],
        "excluded": [
            {
                "host": incident.host,
                "cause": str(incident.cause),
                "evidence": incident.evidence,
                "time": incident.when.isoformat(),
            }
            for incident in item.excluded
        ],
        "pause": None if history.pause is None else dict(zip(("cause", "until"), history.pause, strict=True)),
        "stacks": None if history.stacks is None else dict(zip(("folder", "behind"), history.stacks, strict=True)),
        "loss_note": history.loss_note,
        "not_trusted": history.distrusted,
        "takes_over_from": history.succeeds,
        "ending": None if history.ending is None else {"how": history.ending[0], "why": history.ending[1]},
        "advice": list(item.advice),
    }
