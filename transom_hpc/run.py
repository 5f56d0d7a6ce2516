"""A run: its directory on the shared file system, read from outside."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transom_hpc.base.errors import RunDirError
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec

if TYPE_CHECKING:
    import pandas
    import submitit


@dataclass(frozen=True)
class Run:
    """A submitted run.

    Args:
        path: the run directory.
        spec: what was submitted.
        job: submitit's job, None when the run was submitted without submitit (sbatch on a template).
    """

    path: Path
    spec: JobSpec
    job: submitit.Job[Any] | None

    def history(self) -> pandas.DataFrame:
        """What happened, one row an entry of the journal.

        Returns:
            Columns time (UTC), attempt, launch, host (the writer's), kind, and one column for each fact that any entry
            has, among them step, committed, loss, cause, host_out, evidence; missing where an entry has no such fact.
            Rows are in order of attempt, then as written.

        Raises:
            RunDirError: the journal can't be read.
        """
        import pandas

        rows = [
            {
                "time": entry.time,
                "attempt": entry.attempt.number,
                "launch": entry.attempt.launch,
                "host": entry.host,
                "kind": entry.kind,
                **entry.facts,
            }
            for entry in RunDir(self.path).entries()
        ]
        frame = pandas.DataFrame(rows, columns=None if rows else ["time", "attempt", "launch", "host", "kind"])
        frame["time"] = pandas.to_datetime(frame["time"], utc=True, format="ISO8601")
        return frame


def load_run(path: str | os.PathLike[str]) -> Run:
    """A run that was submitted before, here or elsewhere.

    Args:
        path: its run directory.

    Raises:
        RunDirError: there is no run directory at that path.
    """
    run = RunDir.at(path)
    if not run.path.is_dir():
        raise RunDirError(f"no run directory at {path}", path=run.path)
    submitted = run.submitted()
    job = None
    if submitted.submitit and submitted.job_id:
        from transom_hpc.executor import TransomJob

        tasks = range(submitted.spec.nodes * submitted.spec.tasks_per_node if not submitted.program else 1)
        job = TransomJob(folder=submitted.submitit, job_id=submitted.job_id, tasks=list(tasks))
    return Run(run.path, submitted.spec, job)
