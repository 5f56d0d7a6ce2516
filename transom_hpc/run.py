"""A run: its directory on the shared file system, read from outside."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transom_hpc.base.errors import RunDirError
from transom_hpc.tol import goodput as breakdown
from transom_hpc.tol.goodput import Goodput
from transom_hpc.tol.journal import Entry
from transom_hpc.tol.launches import launches
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
        return _frame(event_rows(RunDir(self.path).entries()), EVENTS, times=("time",))

    def attempts(self) -> pandas.DataFrame:
        """The starts of the program, one row each, oldest first.

        Returns:
            Columns attempt and launch (numbers), began and ended (UTC), first_step_s (seconds from began to the first
            step), duration_s (seconds from began to ended), cause (why it ended, or how: "ended well", "ended badly",
            "stopped", "left"; "" while it runs or where nobody knows), host_out (hosts that were taken out, joined by
            commas), evidence (one sentence), from_step (that it began from, 0 for none), to_step (the newest that was
            seen of it), hosts (a list, in order of rank), restored_from (a checkpoint's folder, or memory and whose).
            What is not known is missing.

        Raises:
            RunDirError: the journal can't be read.
        """
        return _frame(attempt_rows(RunDir(self.path).entries()), ATTEMPTS, times=("began", "ended"))

    def checkpoints(self) -> pandas.DataFrame:
        """The committed checkpoints that are there, one row each, oldest first. Those that are not whole are left out.

        Returns:
            Columns step, attempt (as text, "A0001-L02"), ranks (that took part), bytes (of state), committed (UTC), and
            folder (a text).

        Raises:
            OSError: they can't be read.
        """
        return _frame(checkpoint_rows(RunDir(self.path)), CHECKPOINTS, times=("committed",))

    def goodput(self) -> Goodput:
        """Where the run's time went, in seconds, from its submission to the last entry of the journal.

        Raises:
            RunDirError: the journal can't be read.
        """
        run = RunDir(self.path)
        return goodput(run, run.entries())


EVENTS = ("time", "attempt", "launch", "host", "kind")
ATTEMPTS = (
    "attempt",
    "launch",
    "began",
    "first_step_s",
    "ended",
    "duration_s",
    "cause",
    "host_out",
    "evidence",
    "from_step",
    "to_step",
    "hosts",
    "restored_from",
)
CHECKPOINTS = ("step", "attempt", "ranks", "bytes", "committed", "folder")


def event_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The journal as Run.history has it, without pandas; times as they were written."""
    rows = []
    for entry in entries:
        own = (entry.time, entry.attempt.number, entry.attempt.launch, entry.host, entry.kind)
        always = dict(zip(EVENTS, own, strict=True))
        rows.append({**always, **entry.facts, **always})  # no fact takes the place of these
    return rows


def attempt_rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """The starts of the program as Run.attempts has them, without pandas; times as they were written."""
    return [
        {
            "attempt": facts.attempt.number,
            "launch": facts.attempt.launch,
            "began": facts.began,
            "first_step_s": facts.first_step_s,
            "ended": facts.ended,
            "duration_s": facts.duration_s,
            "cause": facts.cause,
            "host_out": facts.host_out,
            "evidence": facts.evidence,
            "from_step": facts.from_step,
            "to_step": facts.to_step,
            "hosts": list(facts.hosts),
            "restored_from": facts.restored_from,
        }
        for facts in launches(entries)
    ]


def checkpoint_rows(run: RunDir) -> list[dict[str, Any]]:
    """The checkpoints as Run.checkpoints has them, without pandas; times as they were written.

    Raises:
        OSError: they can't be read.
    """
    from transom_hpc.ckpt.catalog import list_checkpoints

    return [
        {
            "step": found.step,
            "attempt": found.manifest.attempt,
            "ranks": found.manifest.world_size,
            "bytes": found.manifest.nbytes,
            "committed": found.manifest.saved_at,
            "folder": str(found.path),
        }
        for found in list_checkpoints(run.checkpoints)
    ]


def goodput(run: RunDir, entries: Sequence[Entry]) -> Goodput:
    """Where a run's time went, from its entries and from when it was submitted last."""
    try:
        submitted = datetime.fromtimestamp(run.spec.stat().st_mtime, timezone.utc)
    except OSError:
        submitted = None
    return breakdown.goodput(entries, submitted)


def _frame(rows: list[dict[str, Any]], columns: tuple[str, ...], times: tuple[str, ...]) -> pandas.DataFrame:
    import pandas

    frame = pandas.DataFrame(rows, columns=None if rows else list(columns))
    for name in times:  # a damaged one is missing
        texts = pandas.Series([time if isinstance(time, str) else None for time in frame[name]], dtype=object)
        frame[name] = pandas.to_datetime(texts, utc=True, format="ISO8601", errors="coerce")
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
