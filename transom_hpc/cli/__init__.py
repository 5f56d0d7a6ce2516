"""The command line. One file a command group; each is imported only when it is called for."""

from __future__ import annotations

import importlib
import sys

import click

from transom_hpc.base.errors import TransomError

# name -> (module, attribute, one line for --help): the help needs no import of the command itself.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "submit": ("transom_hpc.cli.run", "submit", "Submit a program as a fault-tolerant job."),
    "render": ("transom_hpc.cli.run", "render", "Print the batch script that submit would use."),
    "status": ("transom_hpc.cli.status", "status", "Show what a run does, and why."),
    "history": ("transom_hpc.cli.history", "history", "Show what a run has gone through, and where its time went."),
    "stop": ("transom_hpc.cli.control", "stop", "Let a run save and end."),
    "requeue": ("transom_hpc.cli.control", "requeue", "Let a run save and go back into the queue."),
    "watch": ("transom_hpc.cli.control", "watch", "Start requeued jobs at once, where Slurm would hold them."),
    "ckpt": ("transom_hpc.cli.ckpt", "ckpt", "List, show, verify, compare, export, import checkpoints."),
    "launch": ("transom_hpc.cli.run", "launch", "Supervise a program inside a job (batch scripts call it)."),
    "drill": ("transom_hpc.cli.drill", "drill", "Train in a lab, crash a host, and see the run recover."),
    "lab": ("transom_hpc.cli.lab", "lab", "A real Slurm of several hosts on this machine."),
}


class _LazyGroup(click.Group):
    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="transom-hpc")
def transom() -> None:
    """Fault-tolerant training and HPC runs on Slurm."""


def main() -> None:
    """Run the command line; an error of ours is one line and an exit code, never a traceback."""
    try:
        transom.main(prog_name="transom")
    except TransomError as error:
        click.echo(f"transom: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if sys.argv[1:2] == ["launch"]:  # in a job nobody is there to try again: tell all
            raise
        where = f": {error.filename}" if error.filename else " (is the current folder still there?)"
        click.echo(f"transom: {error.strerror or error}{where}", err=True)
        sys.exit(TransomError.exit_code)
