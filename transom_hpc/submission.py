"""Submission: from a job spec and a program to a job and its run directory."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transom_hpc.base.errors import RunDirError, SlurmError, SlurmMissing, SlurmRefused, SlurmUnreachable, SpecError
from transom_hpc.run import Run
from transom_hpc.slurm.commands import SlurmCommands
from transom_hpc.slurm.lookup import find_job
from transom_hpc.slurm.site import SiteConfig, load_site
from transom_hpc.slurm.times import parse_time
from transom_hpc.tol.history import fold
from transom_hpc.tol.rundir import RunDir, register
from transom_hpc.tol.spec import JobSpec, Submitted


def submit(spec: JobSpec, program: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Run:
    """Submit a program, or a Python function, as a fault-tolerant job.

    Args:
        spec: nodes, spares, time and the rest.
        program: a command, or a function that every rank calls.
        args: the command's arguments, or the function's.
        kwargs: the function's named arguments.

    Returns:
        The run. `run.job` is a submitit job: `state`, `cancel()`; `result()` waits for what rank 0's function returned,
        or for the command's exit status.

    Raises:
        SpecError: the spec or the program can't be run; nothing was submitted.
        SiteError: the site config has a wrong key or value.
        RunDirError: the run directory can't be used.
        SlurmMissing, SlurmRefused, SlurmUnreachable: as their names say.
    """
    if not isinstance(spec, JobSpec):
        raise SpecError(f"submit() takes a JobSpec and then the program; the first is {spec!r}", field="spec")
    site = load_site(spec.site)
    command = _command(program, args, kwargs)
    if not spec.local:
        _check_time(spec, site)
        _check_slurm(spec, site)
    run = RunDir(_run_path(spec) if spec.run_dir is not None else _own_folder(_run_path(spec)))
    before = run.submitted() if _is_run(run) else None
    if before is not None:
        _refuse_second_job(run, before)
    run.create()
    mark = f"transom:{uuid.uuid4().hex[:12]}"
    cwd = str(Path.cwd())
    submitted = Submitted(
        spec, tuple(command), cwd, submitit=str(run.logs), comment=mark, version=version("transom-hpc")
    )
    run.write(submitted)
    try:
        job = (_send_local if spec.local else _send)(run, submitted, site, program, args, kwargs)
    except SlurmRefused:
        if before is None:  # there is no run, so no trace of one either
            shutil.rmtree(run.path, ignore_errors=True)
        else:
            run.write(before)
        raise
    except SlurmUnreachable:
        register(run)  # there may be a job, and it will need what was written
        raise
    register(run)
    run.write(dataclasses.replace(submitted, job_id=job.job_id))
    return Run(run.path, spec, job)


def render(spec: JobSpec, program: Sequence[str]) -> str:
    """The batch script that submit would use, as text. Nothing is written or submitted.

    Args:
        spec: as for submit.
        program: the command and its arguments.

    Raises:
        SpecError, SiteError, SlurmMissing: as for submit.
    """
    site = load_site(spec.site)
    _command(program[0], program[1:], {})
    from transom_hpc.executor import LauncherExecutor

    if shutil.which("srun") is None:
        raise SlurmMissing(_NO_SLURM, command="srun")
    return LauncherExecutor(RunDir(_run_path(spec)), spec, site, 1, str(Path.cwd()), "transom:ID").script()


_NO_SLURM = "no Slurm on this machine: log in to a cluster's login node, or start one here with `transom lab up`"
_NO_CLUSTER = (
    "Slurm's commands are here, but no cluster is set up for them: log in to a cluster's login node; or start a lab "
    "with `transom lab up` and submit inside it: transom lab exec login -- transom submit --site lab ..."
)


def _command(program: str | Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    if not isinstance(program, (str, os.PathLike)):
        if not callable(program):
            raise SpecError(f"neither a command nor a function: {program!r}", field="program")
        return []
    if kwargs:
        raise SpecError("named arguments are for functions, not for commands", field="program")
    argv = [os.fspath(program), *(os.fspath(arg) if isinstance(arg, os.PathLike) else str(arg) for arg in args)]
    if shutil.which(argv[0]) is None:
        raise SpecError(f"no such program: {argv[0]!r} is not on PATH, nor an executable file", field="program")
    name = Path(argv[0]).name
    if name.startswith("python"):
        script = next((arg for arg in argv[1:] if not arg.startswith("-")), None)
        named = script is not None and argv[1] == script and script.endswith(".py")
        if named and script is not None and not Path(script).is_file():
            raise SpecError(f"no such program: there is no file {script!r} in {Path.cwd()}", field="program")
    return argv


def _check_time(spec: JobSpec, site: SiteConfig) -> None:
    limit = parse_time(spec.time) if spec.time is not None else None
    if not limit:  # none, or 0, which means none to Slurm
        return
    minutes = -(-limit // timedelta(minutes=1))  # Slurm rounds up
    if 60 * minutes <= site.signal_lead_s:  # the program would be asked to stop as soon as it has started
        raise SpecError(
            f"a time limit of {spec.time!r} leaves no time to work: the program is asked to save and leave "
            f"{site.signal_lead_s} s before the end (signal_lead_s in the site config)",
            field="time",
        )


def _check_slurm(spec: JobSpec, site: SiteConfig) -> None:
    if shutil.which("sbatch") is None:
        raise SlurmMissing(_NO_SLURM, command="sbatch")
    slurm = SlurmCommands()
    try:
        there, asked = len(slurm.nodes()), spec.nodes + spec.spares
    except SlurmError as error:
        if "configuration source" in str(error):
            raise SlurmMissing(_NO_CLUSTER, command="sinfo") from error
        raise
    if asked > there:  # Slurm would take the job, and let it wait for ever
        raise SpecError(f"{asked} nodes are asked for and there are {there} here", field="nodes")
    partition = spec.partition or site.partition
    if partition is None:
        return
    known = slurm.partitions()
    unknown = [name for name in partition.split(",") if name not in known]
    if unknown:
        raise SpecError(f"no partition {unknown[0]!r} here; there are {', '.join(sorted(known))}", field="partition")


def _run_path(spec: JobSpec) -> Path:
    if spec.run_dir is not None:
        return Path(spec.run_dir).expanduser().absolute()
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return Path.cwd() / "transom-runs" / f"{spec.name}-{stamp}"


def _own_folder(path: Path) -> Path:
    """Make a folder that nobody else has: runs that are submitted in the same second must not share one."""
    for number in itertools.count(2):
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = path.with_name(f"{path.name if number == 2 else path.name.rpartition('-')[0]}-{number}")
        except OSError as error:
            raise RunDirError(f"can't write run directory {path}: {error.strerror}", path=path) from error
    return path


def _is_run(run: RunDir) -> bool:
    try:
        return run.spec.exists()
    except OSError as error:
        raise RunDirError(f"can't read run directory {run.path}: {error.strerror}", path=run.path) from error


def _refuse_second_job(run: RunDir, before: Submitted) -> None:
    if before.spec.local:
        return
    history = fold(run.entries())
    job_id = before.job_id or (history.job_ids[-1] if history.job_ids else "")
    slurm = SlurmCommands()
    if not before.job_id and before.comment:  # sbatch was not answered then
        job_id = str(find_job(slurm, before.comment) or job_id)
    if not job_id.isdigit():
        return
    rows = slurm.queue([int(job_id)])
    if any(row.state_text.startswith("COMPLETING") for row in rows):
        raise SpecError(f"job {job_id}, which used {run.path}, is just ending: try again in a moment", field="run_dir")
    if any(row.state in ("running", "waiting", "held") for row in rows):
        raise SpecError(
            f"job {job_id} uses the run directory {run.path} already: cancel it (scancel {job_id}) or choose another",
            field="run_dir",
        )


def _send(
    run: RunDir,
    submitted: Submitted,
    site: SiteConfig,
    program: str | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    from transom_hpc.executor import LauncherExecutor, run_command

    spec = submitted.spec
    ranks = 1 if submitted.program else spec.nodes * spec.tasks_per_node
    executor = LauncherExecutor(run, spec, site, ranks, submitted.cwd, submitted.comment)
    if submitted.program:
        return executor.send(run_command, submitted.program, submitted.cwd)
    return executor.send(program, *args, **kwargs)


def _send_local(
    run: RunDir,
    submitted: Submitted,
    site: SiteConfig,
    program: str | Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    import submitit

    from transom_hpc.executor import run_command, run_locally

    executor = submitit.LocalExecutor(folder=run.logs)
    executor.update_parameters(tasks_per_node=submitted.spec.tasks_per_node, timeout_min=60 * 24 * 365)
    environment = {
        **site.env,
        "TRANSOM_RUN_DIR": str(run.path),
        "TRANSOM_ATTEMPT": f"A{int(time.time())}-L01",
        "TRANSOM_SAVE_EVERY": str(submitted.spec.save_every),
        "TRANSOM_KEEP": str(submitted.spec.keep),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(_free_port()),
    }
    if submitted.program:
        return executor.submit(run_locally, run_command, (submitted.program, submitted.cwd), {}, environment)
    return executor.submit(run_locally, program, args, kwargs, environment)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
