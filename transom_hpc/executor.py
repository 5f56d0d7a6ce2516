"""submitit's executor, told to start our launcher: the one place that knows how submitit works inside."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import submitit

from transom_hpc.base.errors import SlurmRefused, SlurmUnreachable
from transom_hpc.slurm.commands import SlurmCommands
from transom_hpc.slurm.environment import environment_of_a_new_job
from transom_hpc.slurm.lookup import find_unheard
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec

# What sbatch says when the controller has not answered, and may have taken the job all the same.
_SILENCE = re.compile(r"timed out|unable to contact|connect|communication|zero bytes|sense of sbatch", re.IGNORECASE)


class TransomJob(submitit.SlurmJob[Any]):
    """submitit's job; with several ranks, `result()` is rank 0's and `results()` has them all."""

    def result(self) -> Any:
        return self.results()[0]


class LauncherExecutor(submitit.SlurmExecutor):
    """Submits jobs whose batch script is our launcher.

    Args:
        run: the run directory; submitit's files go to its logs.
        spec: what to submit.
        site: the site config.
        ranks: how many results the job leaves: one a rank for a function, one for a command.
        cwd: folder that the program runs in.
        comment: the unique mark that the job carries in Slurm.
    """

    job_class = TransomJob

    def __init__(self, run: RunDir, spec: JobSpec, site: SiteConfig, ranks: int, cwd: str, comment: str) -> None:
        # -P: a file of the user's that is called like a standard module must not replace it in the launcher.
        launcher = [sys.executable, "-P", "-m", "transom_hpc", "launch", "--submitted", f"--run-dir={run.path}", "--"]
        launcher += [sys.executable]
        # exec: the launcher takes the place of the batch shell, so signals for that shell reach it.
        # trap: Slurm may send its signal before the launcher has begun to listen, and that would end it.
        super().__init__(folder=run.logs, python=f"trap '' {site.signal}; exec {shlex.join(launcher)}")
        self._ranks = ranks
        self._timed = spec.time is not None or "time" in site.sbatch
        parameters = {
            "job_name": spec.name,
            "nodes": spec.nodes + spec.spares,
            "ntasks_per_node": spec.tasks_per_node,
            "cpus_per_task": spec.cpus_per_task,
            "gpus_per_node": spec.gpus_per_node,
            "mem": spec.mem,
            "partition": spec.partition or site.partition,
            "account": spec.account or site.account,
            "qos": spec.qos or site.qos,
            "constraint": spec.constraint or site.constraint,
            "exclude": spec.exclude or None,
            "comment": comment,
            "use_srun": False,
            "stderr_to_stdout": True,
            "setup": [*site.setup, *(f"export {name}={shlex.quote(value)}" for name, value in site.env.items())],
            "additional_parameters": {
                **({} if "no-requeue" in site.sbatch else {"requeue": True}),
                "no-kill": True,
                "signal": f"B:{site.signal}@{site.signal_lead_s}",
                "chdir": cwd,
                **({"time": spec.time} if spec.time else {}),
                **site.sbatch,
            },
        }
        self.parameters = {name: value for name, value in parameters.items() if value is not None}

    def _num_tasks(self) -> int:
        return self._ranks

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        # submitit always asks for five minutes and a workload key of its own; we leave both to the site.
        unwanted = ["#SBATCH --wckey="] + ([] if self._timed else ["#SBATCH --time="])
        text: str = super()._make_submission_file_text(command, uid)
        return "\n".join(line for line in text.split("\n") if not line.startswith(tuple(unwanted)))

    def script(self) -> str:
        """The batch script that submit would hand to sbatch."""
        return self._make_submission_file_text(self._submitit_command_str, "")

    def send(self, function: Any, *args: Any, **kwargs: Any) -> submitit.Job[Any]:
        """Submit, from a clean environment.

        Raises:
            SlurmRefused: sbatch said no; the error has its words.
            SlurmUnreachable: sbatch was not answered, and it can't be found out whether the job was taken.
        """
        with _outside_of_jobs():
            return self.submit(function, *args, **kwargs)

    def _submit_command(self, command: str) -> submitit.Job[Any]:
        try:
            job: submitit.Job[Any] = super()._submit_command(command)
            return job
        except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
            answer = " ".join(str(error).replace("sbatch: error:", "").split())
            job_id = self._unheard(answer)
            if job_id is None:
                raise SlurmRefused(f"sbatch refused the job: {answer}", command="sbatch", answer=answer) from error
        job = self.job_class(folder=self.folder, job_id=str(job_id), tasks=list(range(self._num_tasks())))
        for script in self.folder.glob(".submission_file_*.sh"):
            job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job

    def _unheard(self, answer: str) -> int | None:
        """The id of a job that Slurm took although sbatch was not answered, None when it did not."""
        if not _SILENCE.search(answer):
            return None
        mark = str(self.parameters["comment"])
        try:
            return find_unheard(SlurmCommands(), mark)
        except SlurmUnreachable as error:
            raise SlurmUnreachable(
                f"Slurm did not answer sbatch, so it is not known whether it took the job. Before you submit again, "
                f"look for {mark} in: squeue --me -o '%i %T %k'",
                command="sbatch",
                answer=answer,
            ) from error


@contextmanager
def _outside_of_jobs() -> Iterator[None]:
    hidden = {name: os.environ[name] for name in os.environ.keys() - environment_of_a_new_job(os.environ).keys()}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def run_command(argv: Sequence[str], cwd: str) -> int:
    """What is pickled for a command. The launcher starts the command itself and leaves this aside.

    Raises:
        subprocess.CalledProcessError: it ended with another status than 0.
    """
    return subprocess.run(argv, cwd=cwd, check=True).returncode


def run_locally(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """What is pickled for a local run: a task of submitit's local executor, with the names that a rank expects."""
    task = submitit.JobEnvironment()
    os.environ.update(environment)
    os.environ.update(
        RANK=str(task.global_rank),
        WORLD_SIZE=str(task.num_tasks),
        LOCAL_RANK=str(task.local_rank),
        LOCAL_WORLD_SIZE=str(task.num_tasks),
    )
    return function(*args, **kwargs)
