"""submit, render and launch."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from transom_hpc.base.errors import UsageError
from transom_hpc.tol.spec import JobSpec, Submitted

_HELP = {
    "nodes": "Nodes that the program runs on.",
    "min_nodes": "The fewest nodes that it can go on with.",
    "spares": "Nodes that stand by, for when one fails.",
    "tasks_per_node": "Program processes a node.",
    "time": "Time limit, as for sbatch (2:00:00).",
    "name": "Job name.",
    "site": "Site config: a name or a path.",
    "cpus_per_task": "Processors a task.",
    "gpus_per_node": "GPUs a node.",
    "mem": "Memory a node, as for sbatch.",
    "partition": "Partition.",
    "account": "Account.",
    "qos": "Quality of service.",
    "constraint": "Node features, as for sbatch.",
    "exclude": "Hosts never to run on.",
    "run_dir": "Run directory; an old one goes on from its checkpoint.",
    "save_every": "Steps between checkpoints, or auto.",
    "keep": "Checkpoints to keep.",
    "copies": "Nodes that keep a copy of a node's staged state.",
    "start_deadline_s": "Seconds until the first step.",
    "hang_after_s": "Seconds without a step that mean a hang.",
    "divergence": "Start again from before a loss that is NaN, also one far too high, or never.",
    "local": "Run here, without Slurm, for debugging.",
}


def _steps(value: str | int) -> int | str:
    """A number of steps, or auto."""
    try:
        return value if value == "auto" else int(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no number of steps, nor auto") from None


def _spec_options(command: Any) -> Any:
    types: dict[str, Any] = {"int": int, "int | None": int, "float": float, "float | None": float}
    for field in reversed(dataclasses.fields(JobSpec)):
        flag = "--" + field.name.removesuffix("_s").replace("_", "-")
        if field.name == "local":
            option = click.option(flag, field.name, is_flag=True, help=_HELP[field.name])
        else:
            default = field.default
            shown = default not in (None, "")
            option = click.option(
                flag,
                field.name,
                type=_steps if field.name == "save_every" else types.get(str(field.type), str),
                metavar="STEPS|auto" if field.name == "save_every" else None,
                default=default,
                show_default=shown,
                help=_HELP[field.name],
            )
        command = option(command)
    return click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)(command)


_CONTEXT = {"ignore_unknown_options": False, "allow_interspersed_args": False}


@click.command(context_settings=_CONTEXT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_spec_options
def submit(program: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Submit PROGRAM as a fault-tolerant job.

    Example: transom submit --nodes 4 --spares 1 --time 2:00:00 -- python train.py
    """
    spec = JobSpec(**values)
    from transom_hpc.submission import submit as send

    run = send(spec, program[0], *program[1:])
    assert run.job is not None
    if as_json:
        click.echo(json.dumps({"job_id": run.job.job_id, "run_dir": str(run.path)}))
        return
    click.echo(f"job {run.job.job_id}, run directory {run.path}")
    click.echo(f"its output: {run.job.paths.stdout}")
    if not spec.local:
        click.echo(f"watch it with: transom status {run.job.job_id} --watch")


@click.command(context_settings=_CONTEXT)
@_spec_options
def render(program: tuple[str, ...], **values: Any) -> None:
    """Print the batch script that submit would use for PROGRAM.

    It is for reading: the run directory that it names is made by submit.
    """
    from transom_hpc.submission import render as text

    click.echo(text(JobSpec(**values), program))


@click.command(context_settings=_CONTEXT)
@click.option(
    "--run-dir", help="Run directory. Default: TRANSOM_RUN_DIR, or transom-runs/JOBID where sbatch was called."
)
@click.option("--submitted", is_flag=True, hidden=True, help="The run directory was made by transom submit.")
@click.option("--spares", type=int, default=0, show_default=True, help="How many of the job's nodes stand by.")
@click.option("--tasks-per-node", type=int, default=1, show_default=True, help="Program processes a node.")
@click.option("--site", default="default", show_default=True, help="Site config: a name or a path.")
@click.option("--save-every", type=_steps, default=100, show_default=True, help="Steps between checkpoints, or auto.")
@click.option("--keep", type=int, default=3, show_default=True, help="Checkpoints to keep.")
@click.option("--copies", type=int, help="Nodes that keep a copy of a node's staged state.")
@click.option("--guarded", is_flag=True, hidden=True, help="A guard has started this launcher.")
@click.option("--killed", default="", hidden=True, help="Why the launcher before this one has ended.")
@click.option("--after", type=int, hidden=True, help="Take over from this attempt; the next number is claimed.")
@click.option("--lost", default="", hidden=True, help="Hosts that were lost with it.")
@click.option("--evidence", default="", hidden=True, help="Why it is taken to be lost.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def launch(program: tuple[str, ...], guarded: bool, **values: Any) -> None:
    """Supervise PROGRAM inside a Slurm job; batch scripts call this.

    Options other than --run-dir count only where the job was not submitted with transom submit.
    """
    if not guarded:
        from transom_hpc.tol.guard import Guard

        at = sys.argv.index("launch") + 1
        command = [sys.executable, "-P", "-m", "transom_hpc", "launch", "--guarded"]
        raise SystemExit(Guard([*command, *sys.argv[at:]], len(command)).run())
    raise SystemExit(_launch(program, **values))


def _launch(
    program: tuple[str, ...],
    run_dir: str | None,
    submitted: bool,
    spares: int,
    site: str,
    killed: str,
    after: int | None,
    lost: str,
    evidence: str,
    **values: Any,
) -> int:
    from transom_hpc.tol.job import job_of
    from transom_hpc.tol.rundir import RunDir, register
    from transom_hpc.tol.succession import TakeOver
    from transom_hpc.tol.supervision import supervise

    job = job_of(os.environ)
    given = run_dir or os.environ.get("TRANSOM_RUN_DIR")  # as a job that carries another one's run on is told
    run = RunDir.at(given or Path(os.environ.get("SLURM_SUBMIT_DIR", "."), "transom-runs", str(job.job_id)))
    if submitted or run.spec.exists():
        known = run.submitted()
    else:
        if spares >= len(job.hosts):
            raise UsageError(f"{spares} spares of {len(job.hosts)} nodes leave none for the program")
        spec = JobSpec(nodes=len(job.hosts) - spares, spares=spares, site=site, run_dir=str(run.path), **values)
        known = Submitted(spec, program, str(Path.cwd()), job_id=str(job.job_id))
        run.create()
        run.write(known)
        register(run)
    taken = None if after is None else TakeOver(after, tuple(filter(None, lost.split(","))), evidence)
    return supervise(run, known, program, job, taken, killed)
