"""What a run does and why, from its journal and one question to Slurm. It only reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from transom_hpc.base.errors import RunDirError, SlurmError, SlurmMissing, UsageError
from transom_hpc.slurm.commands import Slurm
from transom_hpc.slurm.jobid import parse_job_id
from transom_hpc.slurm.states import JobState
from transom_hpc.slurm.text import AccountRow, QueueRow
from transom_hpc.tol.exclusion import Incident, choose
from transom_hpc.tol.history import History, RestartFacts, fold
from transom_hpc.tol.rundir import RunDir, registered
from transom_hpc.tol.spec import Submitted


@dataclass(frozen=True, slots=True)
class JobNow:
    """What Slurm says of the job.

    Args:
        state: one of the six.
        text: Slurm's own word, "" where it did not answer.
        reason: Slurm's reason for a job that waits.
        start: when Slurm means to start it, ISO, "" when not known.
        problem: why the state is unknown, "" when it is known.
    """

    state: JobState
    text: str = ""
    reason: str = ""
    start: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One run, now.

    Args:
        run: its directory.
        submitted: what was submitted.
        job_id: Slurm's id, "" when it has none.
        job: what Slurm says.
        history: what the journal says.
        committed: newest committed step, 0 for none.
        committed_age_s: seconds since it was committed, by this machine's clock; None for none.
        excluded: hosts that the run stays away from now, with the evidence; what is old is not among them.
        advice: why it waits or has stopped, and what to type; empty when there is nothing to do.
    """

    run: RunDir
    submitted: Submitted
    job_id: str
    job: JobNow
    history: History
    committed: int
    committed_age_s: float | None
    excluded: tuple[Incident, ...]
    advice: tuple[str, ...]

    @property
    def phase(self) -> str:
        """Where the run is: the launcher's phase while its job runs, else what Slurm says."""
        if self.submitted.spec.local:
            return "local"
        if self.history.ending and self.history.phase == "over" and self.history.ending[0] != "left":
            return self.history.ending[0]
        if self.job.state is JobState.RUNNING:
            fresh = self.history.phase in ("requeued", "submitted") and self.job.text != "COMPLETING"
            return "starting" if fresh else self.history.phase
        if self.job.state is JobState.UNKNOWN:
            return self.history.phase
        return str(self.job.state)

    @property
    def step(self) -> int:
        """Newest step that is known of; what was reported last may be older than the newest checkpoint."""
        return max(self.history.step, self.committed)

    @property
    def at_risk(self) -> tuple[int, float | None]:
        """Work that a fault now would cost: steps, and seconds where the step time is known."""
        steps = max(0, self.step - self.committed)
        return steps, None if self.history.step_s is None else steps * self.history.step_s

    @property
    def output(self) -> Path | None:
        """The file with what the program and the launcher print; None where sbatch was told another, or none yet."""
        path = self.run.logs / f"{self.submitted.job_id}_0_log.out"
        return path if self.submitted.submitit and path.exists() else None

    @property
    def restarts(self) -> tuple[RestartFacts, ...]:
        """All restarts."""
        return self.history.restarts


def find(target: str | None) -> list[RunDir]:
    """The runs that a person means.

    Args:
        target: a run directory or a job id; None: all of the user's runs, newest first.

    Raises:
        RunDirError: there is no such run.
    """
    if target is None:
        return registered()
    path = RunDir.at(target)
    try:
        if path.spec.exists():
            return [path]
    except OSError as error:
        raise RunDirError(f"can't read run directory {path.path}: {error.strerror}", path=path.path) from error
    try:
        job_id = str(parse_job_id(target).job)
    except UsageError:
        raise RunDirError(f"{target}: neither a run directory nor a job id", path=target) from None
    for run in registered():
        try:
            if run.submitted().job_id == job_id or job_id in fold(run.entries()).job_ids:
                return [run]
        except RunDirError:  # not the one, as far as anybody can tell
            continue
    raise RunDirError(f"no run with job id {job_id} on this user's list; give the run directory instead", path=target)


def collect(
    runs: Sequence[RunDir],
    slurm: Slurm,
    now: datetime | None = None,
    leave_out: Callable[[str], None] | None = None,
) -> list[RunStatus]:
    """The status of some runs: one squeue, and at most one sacct, whatever their number.

    Args:
        runs: their directories.
        slurm: Slurm's commands.
        now: the time to take ages from; None: now.
        leave_out: told why, for each run that can't be read, and the others are shown; None: that is an error.

    Raises:
        RunDirError: a run can't be read.
    """
    now = now or datetime.now(timezone.utc)
    read = []
    for run in runs:
        try:
            read.append((run, run.submitted(), fold(run.entries())))
        except RunDirError as error:
            if leave_out is None:
                raise
            leave_out(str(error))
    ids = [_job_id(submitted, history) for _, submitted, history in read]
    answer = _ask(sorted({int(job_id) for job_id in ids if job_id.isdigit()}), slurm)
    return [
        _status(run, submitted, history, job_id, _now(job_id, submitted, answer), now)
        for (run, submitted, history), job_id in zip(read, ids, strict=True)
    ]


def _job_id(submitted: Submitted, history: History) -> str:
    if submitted.spec.local:
        return ""
    return submitted.job_id or (history.job_ids[-1] if history.job_ids else "")


@dataclass(frozen=True, slots=True)
class _Answer:
    """What Slurm said of some jobs: its rows by job id, and why others are not known."""

    rows: Mapping[str, QueueRow | AccountRow]
    problem: str = "Slurm does not know this job any more"


def _ask(ids: Sequence[int], slurm: Slurm) -> _Answer:
    if not ids:
        return _Answer({})
    try:
        rows: dict[str, QueueRow | AccountRow] = {str(row.job_id): row for row in slurm.queue(ids)}
    except SlurmMissing:
        return _Answer({}, "there is no Slurm on this machine")
    except SlurmError as error:
        return _Answer({}, str(error))
    missing = [job_id for job_id in ids if str(job_id) not in rows]
    if missing:
        try:
            for row in slurm.accounting(missing):  # in order of time: the last row of a job is its newest life
                if row.id.step is None:
                    rows[str(row.job_id)] = row
        except SlurmError as error:
            return _Answer(rows, f"Slurm has forgotten the job, and its accounting can't be asked ({error})")
    return _Answer(rows)


def _now(job_id: str, submitted: Submitted, answer: _Answer) -> JobNow | None:
    if not job_id.isdigit():
        return None
    row = answer.rows.get(job_id)
    if row is None:
        return JobNow(JobState.UNKNOWN, problem=answer.problem)
    # Job ids are a cluster's own. The accounting keeps no comments, so there the name has to do.
    ours = row.comment == submitted.comment if isinstance(row, QueueRow) else row.name == submitted.spec.name
    if submitted.comment and not ours:
        problem = f"job {job_id} of this cluster is another one: this run was submitted to another cluster or lab"
        return JobNow(JobState.UNKNOWN, problem=problem)
    start = row.start_time if isinstance(row, QueueRow) else ""
    return JobNow(row.state, row.state_text, row.reason, start)


def _status(
    run: RunDir, submitted: Submitted, history: History, job_id: str, job: JobNow | None, now: datetime
) -> RunStatus:
    job = job or JobNow(JobState.UNKNOWN, problem=_no_job(run, submitted))
    steps = run.committed_steps()
    committed = steps[-1] if steps else 0
    age_s = None
    if committed:
        manifest = run.checkpoints / f"step-{committed:09d}" / "manifest.json"
        try:
            age_s = max(0.0, now.timestamp() - manifest.stat().st_mtime)
        except OSError:
            pass
    excluded = tuple(bad for bad in choose(history.incidents, now).avoid if bad.host not in history.let_back)
    return RunStatus(run, submitted, job_id, job, history, committed, age_s, excluded, advise(job_id, job, history))


def _no_job(run: RunDir, submitted: Submitted) -> str:
    if submitted.spec.local:
        return f"a local run is known to submitit only; its output is in {run.logs}"
    if submitted.comment:
        look = f"squeue --me -o '%i %T %k' | grep {submitted.comment}"
        return f"Slurm gave no answer when it was submitted. To see whether it took the job: {look}"
    return "it was not submitted to Slurm"


_REASONS = {
    "JobHeldUser": "held by its user. To let it go: scontrol release {job}",
    "JobHeldAdmin": "held by an administrator: ask them why; they let it go with: scontrol release {job}",
    "BeginTime": "Slurm holds a requeued job for a while, until {start}. To start it at once: "
    "scontrol update jobid={job} StartTime=now",
    "Dependency": "waits for another job. To see which: scontrol show job {job}",
    "DependencyNeverSatisfied": "waits for a job that failed, and will never start. To give it up: scancel {job}",
    "Resources": "waits for free nodes. Expected start: {start}",
    "Priority": "waits behind jobs of higher priority. Expected start: {start}",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved. To see them: sinfo -R",
    "PartitionTimeLimit": "asks for more time than the partition gives. To see the limit: sinfo -o '%P %l'",
    "PartitionNodeLimit": "asks for more nodes than the partition gives. To see the limit: scontrol show partition",
    "PartitionDown": "the partition is down. To see its state: sinfo",
    "PartitionInactive": "the partition is inactive. To see its state: sinfo",
    "BadConstraints": "no node fits what it asks for. To see what that is: scontrol show job {job}",
    "launch failed requeued held": "could not be started on a node and is held. To let it go: scontrol release {job}",
}


def advise(job_id: str, job: JobNow, history: History) -> tuple[str, ...]:
    """Why a run does not run, and what to type. Empty when there is nothing to do."""
    lines: list[str] = []
    if job.state in (JobState.WAITING, JobState.HELD) and job.reason not in ("", "None"):
        reason = job.reason.split(",")[0].strip()
        text = _REASONS.get(reason) or _REASONS.get(reason.replace("_", " "))
        if text is None and job.state is JobState.HELD:
            text = "held. To let it go: scontrol release {job}"
        if text is None and reason.startswith(("QOS", "Assoc", "MaxJobs")):
            text = "over a limit of its account or QOS. To see the limits: sacctmgr show assoc user=$USER"
        text = text or "to see what Slurm knows: scontrol show job {job}"
        start = job.start if job.start and not job.start.startswith("N/A") else "not known"
        lines.append(f"{reason}: {text.format(job=job_id, start=start)}")
    elif job.state is JobState.HELD:
        lines.append(f"held. To let it go: scontrol release {job_id}")
    if job.problem:
        lines.append(f"state unknown: {job.problem}")
    if history.ending and history.ending[0] == "ended badly":
        lines.append(f"stopped for good: {history.ending[1]}")
    elif history.ending and history.ending[0] == "stopped":
        lines.append(history.ending[1])
    elif job.state is JobState.ENDED_BADLY and (history.ending is None or history.ending[0] == "left"):
        lines.append(
            f"Slurm ended the job ({job.text}) and nothing will restart it. To go on from the last checkpoint, "
            "submit again with --run-dir"
        )
    if history.phase == "pausing" and history.pause is not None:
        cause, until = history.pause
        lines.append(f"waits until {until} before the next start, since {cause} came again")
    if history.phase == "standing by":
        lines.append("the launcher's host was cut off; its program was ended, and another host may take over")
    if history.loss_note and history.phase in ("launching", "running"):
        lines.append(f"loss: {history.loss_note}")
    if history.monitoring and history.phase in ("launching", "running"):
        lines.append(f"monitoring: {history.monitoring}")
    if history.server and history.phase in ("launching", "running"):
        lines.append(f"checkpoints: {history.server}")
    if history.memory and history.phase in ("launching", "running"):
        lines.append(f"memory: {history.memory}")
    return tuple(lines)
