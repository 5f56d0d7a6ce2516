"""`transom lab`: bring a lab up and down, look at it, hurt it, and run things in it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import click

from transom_hpc.base.errors import LabError
from transom_hpc.cli.signals import leaving_in_order
from transom_hpc.lab import Lab, take_down

_name = click.option("--name", default="lab", show_default=True, help="Which lab; several can be up at once.")
_host = click.argument("host")


@click.group()
def lab() -> None:
    """A real Slurm of several hosts on this machine.

    Hosts are n1, n2, … and login. As root each has its own network, processes and memory, and can lose its power or
    its network like a real one. Without root they are only processes, and can't be cut off.
    """


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Show the log of the part that failed, above the one line that says what happened."""
    try:
        yield
    except LabError as error:
        if log := error.facts.get("log"):
            click.echo(click.style(log, dim=True), err=True)
        raise


@lab.command()
@_name
@click.option("--nodes", default=5, show_default=True, help="Compute hosts.")
@click.option(
    "--slurmd-timeout", default=30, show_default=True, help="Seconds of silence until Slurm sets a host down."
)
@click.option("--user", help="Whose jobs it runs.  [default: who called sudo, or an account made for it]")
def up(name: str, nodes: int, slurmd_timeout: int, user: str | None) -> None:
    """Start a lab."""
    begin = time.monotonic()
    with _explained(), leaving_in_order():
        started = Lab.up(name, nodes, slurmd_timeout, user, lambda line: click.echo(f"lab {name}: {line}"))
    option = "" if name == "lab" else f" --name {name}"
    click.echo(f"lab {name}: up after {time.monotonic() - begin:.1f} s; shared folder {started.shared}")
    click.echo(f"try it: transom lab exec{option} login -- srun -N {nodes} hostname")


@lab.command()
@_name
def down(name: str) -> None:
    """End a lab, whole or broken, and leave nothing behind."""
    with _explained():
        was_there = take_down(name)
    click.echo(f"lab {name}: down" if was_there else f"lab {name}: nothing to take down")


@lab.command()
@_name
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(name: str, as_json: bool) -> None:
    """Show a lab and its hosts."""
    facts = Lab.find(name).status()
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(facts), default=str, indent=1))
        return
    from rich.console import Console  # here: the other commands do without it
    from rich.table import Table

    kind = "" if facts.kind == "namespaces" else ", without root"
    click.echo(f"lab {facts.name}{kind}: {facts.version}, jobs of user {facts.user}")
    for notice in facts.notices:
        click.echo(f"  {notice}")
    table = Table(box=None, pad_edge=False)
    for column in ("host", "address", "state", "Slurm says"):
        table.add_column(column)
    for host in facts.hosts:
        colour = "" if host.state == "up" else "red"
        table.add_row(host.name, host.address, f"[{colour}]{host.state}[/]" if colour else host.state, host.slurm)
    Console().print(table)
    click.echo(f"logs    {facts.state / 'logs'}\nshared  {facts.shared}")


def _fault(verb: str, text: str, after: str) -> None:
    @lab.command(name=verb, help=text)
    @_name
    @_host
    def command(name: str, host: str) -> None:
        with _explained():
            getattr(Lab.find(name), verb)(host)
        click.echo(f"lab {name}: {host} {after}")


_fault("crash", "Take a host's power away.", "has lost its power")
_fault("freeze", "Stop everything on a host, without ending it.", "is frozen")
_fault("thaw", "Let a frozen host go on.", "goes on")
_fault("cut", "Cut a host off the network; what runs on it goes on.", "is cut off the network")
_fault("mend", "Connect a host to the network again.", "is on the network")
_fault("boot", "Start a host again and wait until Slurm counts on it.", "is up")


@lab.command(name="exec", context_settings={"ignore_unknown_options": True})
@_name
@click.option("--root", is_flag=True, help="As root instead of the lab's user.")
@_host
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def execute(name: str, root: bool, host: str, command: tuple[str, ...]) -> None:
    """Run a command on a host, as at a fresh login there.

    In the current folder, or at home where the user can't enter it. The exit code is the command's.
    """
    found = Lab.find(name)
    # Ctrl-C is for the command. The program that waits for it outside of the host must live on: with it the command
    # would be killed before it could answer.
    argv = found.argv(host, ["env", "--default-signal=INT", "--", *command], root=root, cwd=Path.cwd())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.execvpe(argv[0], argv, found.environment(root=root))


@lab.command()
@_name
def env(name: str) -> None:
    """Print what a shell needs to use Slurm's commands with this lab: eval "$(transom lab env)"."""
    click.echo(f"export SLURM_CONF={shlex.quote(str(Lab.find(name).slurm_conf))}")
