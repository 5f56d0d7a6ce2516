"""A job that carries a run on, where this one may not be requeued: the same batch script, submitted again.

It begins when this job has ended, in whatever way. It keeps the run directory, the script's arguments and all that
scontrol shows of what was asked for.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from transom_hpc.base.clock import Clock
from transom_hpc.base.errors import SlurmError, SlurmUnreachable
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.environment import environment_of_a_new_job
from transom_hpc.slurm.hosts import expand_hosts, fold_hosts
from transom_hpc.slurm.lookup import find_unheard
from transom_hpc.slurm.resubmission import arguments, options
from transom_hpc.tol.job import Job
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import Submitted

PATIENCE_S = 3600.0
"""For a Slurm that does not answer; the hosts are ours meanwhile."""
_PAUSE_S = 10.0
# What a person said to the batch script by its environment.
_SETTINGS = ("TRANSOM_SITE", "TRANSOM_SPARES", "TRANSOM_SAVE_EVERY", "TRANSOM_KEEP")

_Answer = TypeVar("_Answer")


def submit_followup(
    run: RunDir,
    submitted: Submitted,
    job: Job,
    exclude: Sequence[str],
    slurm: Slurm,
    environment: Mapping[str, str],
    clock: Clock,
    patience_s: float = PATIENCE_S,
) -> str:
    """Submit the job that carries the run on after this one.

    The caller survives SIGTERM, and so do the children of `slurm`. spec.json names the new job afterwards, so that the
    status follows it.

    Args:
        run: the run directory.
        submitted: what was submitted.
        job: this job.
        exclude: hosts to stay away from, beside those in the spec; names that Slurm does not know are left out.
        slurm: Slurm's commands.
        environment: the launcher's.
        clock: time.
        patience_s: how long a Slurm that does not answer is asked again.

    Returns:
        The new job's id.

    Raises:
        SlurmError: there is no such job: Slurm says no, or this job has no batch script (salloc).
        SlurmUnreachable: no answer in all that time; not known.
    """
    until = clock.now() + patience_s
    facts = _patiently(lambda: slurm.show_job(job.job_id), clock, until)
    text = _patiently(lambda: slurm.script(job.job_id), clock, until)
    wanted = dict.fromkeys([*expand_hosts(submitted.spec.exclude), *exclude])
    known = {row.host for row in _patiently(lambda: slurm.nodes(list(wanted)), clock, until)}
    avoid = [host for host in wanted if host in known]
    mark = f"transom:{uuid.uuid4().hex[:12]}"
    spec = submitted.spec
    asked = [
        *options(facts),
        f"--nodes={spec.nodes + spec.spares}",
        f"--ntasks-per-node={spec.tasks_per_node}",
        f"--dependency=afterany:{job.job_id}",
        f"--comment={mark}",
        *([f"--exclude={fold_hosts(avoid)}"] if avoid else []),
    ]
    words = [] if submitted.submitit else arguments(facts.command, submitted.program, lambda path: Path(path).is_file())
    inherited = environment_of_a_new_job(environment)
    inherited |= {name: environment[name] for name in _SETTINGS if name in environment}
    inherited["TRANSOM_RUN_DIR"] = str(run.path)
    # As in a first submission: from now on a job with this mark is the run's, also where sbatch is never answered.
    _write(run, dataclasses.replace(submitted, comment=mark, job_id=""))
    try:
        with tempfile.NamedTemporaryFile("w", prefix="transom-", suffix=".sh") as script:
            script.write(text)
            script.flush()

            def send() -> int:
                return slurm.submit(asked, Path(script.name), words, inherited)

            job_id = _send(send, slurm, mark, clock, until)
    except OSError as error:
        _write(run, submitted)
        raise SlurmError(f"the batch script can't be handed on: {error}", command="sbatch") from error
    except SlurmUnreachable:
        raise
    except SlurmError:
        _write(run, submitted)
        raise
    if submitted.submitit:
        _hand_on_pickle(Path(submitted.submitit), job.job_id, job_id)
    _write(run, dataclasses.replace(submitted, comment=mark, job_id=str(job_id)))
    return str(job_id)


def _send(send: Callable[[], int], slurm: Slurm, mark: str, clock: Clock, until: float) -> int:
    """sbatch, until it is answered; what it may have done unheard is looked up before it is tried again."""
    while True:
        try:
            return send()
        except SlurmUnreachable:
            found = _patiently(lambda: find_unheard(slurm, mark, clock), clock, until)
            if found is not None:
                return found
            if clock.now() >= until:
                raise
        clock.sleep(_PAUSE_S)


def _patiently(ask: Callable[[], _Answer], clock: Clock, until: float) -> _Answer:
    while True:
        try:
            return ask()
        except SlurmUnreachable:
            if clock.now() >= until:
                raise
        clock.sleep(_PAUSE_S)


def _write(run: RunDir, submitted: Submitted) -> None:
    with suppress(OSError):  # a full disk: the journal names the new job too, as soon as it begins
        run.write(submitted)


def _hand_on_pickle(folder: Path, old: int, new: int) -> None:
    """submitit's tasks look for the function that they are to call by the id of their job."""
    for name in ("submitted.pkl", "submission.sh"):
        with suppress(OSError):  # a command needs neither
            shutil.copyfile(folder / f"{old}_{name}", folder / f"{new}_{name}")
