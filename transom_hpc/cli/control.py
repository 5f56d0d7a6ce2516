"""stop, requeue and watch: what a person does to runs from outside."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from transom_hpc.base.clock import SystemClock

if TYPE_CHECKING:
    from transom_hpc.tol.requests import What


def _options(command: Callable[..., Any]) -> Any:
    for option in (
        click.argument("target", metavar="RUN|JOBID"),
        click.option("--json", "as_json", is_flag=True, help="Print JSON."),
        click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait until it is done."),
        click.option("--no-wait", is_flag=True, help="Ask, and don't wait."),
    ):
        command = option(command)
    return command


@click.command()
@_options
def stop(target: str, no_wait: bool, timeout: float, as_json: bool) -> None:
    """Let a run save and end.

    Nothing starts it again but a new submission with the same --run-dir. A job that waits in the queue is cancelled.
    """
    _request("stop", target, no_wait, timeout, as_json)


@click.command()
@_options
def requeue(target: str, no_wait: bool, timeout: float, as_json: bool) -> None:
    """Let a run save and go back into the queue.

    When Slurm starts it again, it goes on from there. Where the job may not be requeued, another one is submitted.
    """
    _request("requeue", target, no_wait, timeout, as_json)


@click.command()
@click.argument("targets", nargs=-1, metavar="[RUN|JOBID]...")
@click.option("--once", is_flag=True, help="Let go what is held now, and end.")
def watch(targets: tuple[str, ...], once: bool) -> None:
    """Start requeued jobs at once, where Slurm would hold them for two minutes; until Ctrl-C.

    It runs outside of the jobs, on a login node. Without an argument, for all your runs. Nothing depends on it.
    """
    from transom_hpc.slurm.commands import SlurmCommands
    from transom_hpc.status import find
    from transom_hpc.watching import Watch

    runs = [run for target in targets for run in find(target)] if targets else None
    clock = SystemClock()
    watching = Watch(runs, SlurmCommands(), clock, click.echo)
    try:
        while True:
            pause_s = watching.look()
            if once and (watching.silent or not watching.waiting):
                raise SystemExit(1 if watching.silent else 0)
            clock.sleep(pause_s)
    except KeyboardInterrupt:
        return


def _request(what: What, target: str, no_wait: bool, timeout: float, as_json: bool) -> None:
    from transom_hpc.control import Control
    from transom_hpc.slurm.commands import SlurmCommands
    from transom_hpc.status import find

    (run,) = find(target)
    control = Control(run, what, SlurmCommands(), SystemClock())
    outcome = control.send()
    if not outcome.done and not no_wait:
        if not as_json:
            click.echo(f"{outcome.message}; waiting for it (Ctrl-C leaves it asked)")
        with _progress() as tell:
            try:
                outcome = control.wait(timeout, tell)
            except KeyboardInterrupt:
                click.echo("transom: it stays asked", err=True)
                raise SystemExit(130) from None
    if as_json:
        facts = {"run_dir": str(run.path), "job_id": outcome.job_id, "asked": what, "done": outcome.done}
        click.echo(json.dumps({**facts, "message": outcome.message}))
    else:
        click.echo(outcome.message)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that shows what is waited for, on a terminal; elsewhere nothing."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("waiting") as status:
        yield status.update
