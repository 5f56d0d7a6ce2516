"""A Slurm of few jobs, whose answers a test chooses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from transom_hpc.base.errors import SlurmUnreachable
from transom_hpc.slurm.jobid import JobId
from transom_hpc.slurm.states import JobState, NodeFacts, job_state
from transom_hpc.slurm.text import AccountRow, JobFacts, NodeRow, QueueRow, parse_show_job

RUNNING = parse_show_job((Path(__file__).parents[1] / "recorded/slurm-22.05.8/1-mixed-show-job.txt").read_text())[0]
SILENT = SlurmUnreachable("no answer", answer="")


class StillClock:
    """Time passes by sleeping only; what is to happen meanwhile happens at its time."""

    def __init__(self) -> None:
        self.time = 1_000_000.0
        self.plans: list[tuple[float, Callable[[], object]]] = []

    def after(self, seconds: float, what: Callable[[], object]) -> None:
        self.plans.append((self.time + seconds, what))

    def now(self) -> float:
        return self.time

    def wall(self) -> datetime:
        return datetime.fromtimestamp(self.time, timezone.utc)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        due = [plan for plan in self.plans if plan[0] <= self.time]
        self.plans = [plan for plan in self.plans if plan[0] > self.time]
        for _, what in due:
            what()


def facts(job_id: int = 1, state: str = "RUNNING", **changes: object) -> JobFacts:
    """What the controller knows of a job; fields as of JobFacts."""
    plain: dict[str, object] = {"exc_hosts": (), "restarts": 0, "requeue": True, "comment": "", "partition": "main"}
    known = {**plain, "job_id": job_id, "id": JobId(job_id), "state": job_state(state), "state_text": state, **changes}
    return dataclasses.replace(RUNNING, **known)  # type: ignore[arg-type]


def life(job_id: int, state: str, end_time: str = "2026-12-01T00:00:00") -> AccountRow:
    """One life of a job in the accounting."""
    return AccountRow(job_id, JobId(job_id), job_state(state), state, 0, 0, (), "", end_time, "", "")


def node(host: str, usable: bool = True) -> NodeRow:
    """A node of the cluster."""
    return NodeRow(host, NodeFacts("IDLE", frozenset(), usable, True), "idle", "", "", "")


class FakeSlurm:
    """Some jobs. Each call first takes its next scripted error, if there is one left.

    Args:
        jobs: what is in the queue.
    """

    def __init__(self, *jobs: JobFacts) -> None:
        self.jobs = {job.job_id: job for job in jobs}
        self.errors: dict[str, list[Exception | None]] = {}
        self.cluster = [node(f"n{number}") for number in range(1, 9)]
        self.lives: list[AccountRow] = []
        self.calls: list[str] = []
        self.sent: list[tuple[list[str], str, list[str], dict[str, str]]] = []
        self.unheard = False  # sbatch takes the job and does not say so
        self.partition_asked = ""

    def _call(self, name: str) -> None:
        self.calls.append(name)
        script = self.errors.get(name, [])
        error = script.pop(0) if script else None
        if error is not None:
            raise error

    def queue(self, job_ids: Sequence[int] | None = None) -> list[QueueRow]:
        self._call("queue")
        return [
            QueueRow(
                job.job_id,
                job.id,
                job.state,
                job.state_text,
                job.reason,
                job.nodes,
                "",
                "",
                job.hosts,
                job.exc_hosts,
                job.comment,
                job.name,
            )
            for job in self.jobs.values()
            if job_ids is None or job.job_id in job_ids
        ]

    def accounting(self, job_ids: Sequence[int], *, duplicates: bool = True) -> list[AccountRow]:
        self._call("accounting")
        assert duplicates
        assert job_ids
        return self.lives  # of an array, sacct shows all tasks

    def show_job(self, job_id: int) -> JobFacts:
        self._call("show_job")
        return self.jobs[job_id]

    def nodes(self, hosts: Sequence[str] | None = None, *, partition: str = "") -> list[NodeRow]:
        self._call("nodes")
        self.partition_asked = partition or self.partition_asked
        return [row for row in self.cluster if hosts is None or row.host in hosts]

    def partitions(self) -> list[str]:
        return ["main"]

    def requeue(self, job_id: int) -> None:
        self._call("requeue")
        job = self.jobs[job_id]
        self.jobs[job_id] = dataclasses.replace(
            job, state=JobState.WAITING, state_text="PENDING", restarts=job.restarts + 1
        )

    def exclude(self, job_id: int, hosts: Sequence[str]) -> list[str]:
        self._call("exclude")
        self.jobs[job_id] = dataclasses.replace(self.jobs[job_id], exc_hosts=tuple(hosts))
        return []

    def release_now(self, job_id: int) -> None:
        self._call("release_now")
        self.jobs[job_id] = dataclasses.replace(
            self.jobs[job_id], state=JobState.RUNNING, state_text="RUNNING", reason=""
        )

    def cancel(self, job_id: int) -> None:
        self._call("cancel")
        self.jobs.pop(job_id, None)

    def signal_step(self, job_id: int, step: int | str, signal_name: str) -> None:
        raise NotImplementedError

    def script(self, job_id: int) -> str:
        self._call("script")
        assert job_id in self.jobs
        return "#!/bin/bash\n"

    def submit(
        self, options: Sequence[str], script: Path, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> int:
        if self.unheard:
            self.unheard = False
            self._take(options)
            raise SILENT
        self._call("submit")
        self.sent.append((list(options), script.read_text(), list(arguments), dict(environment)))
        return self._take(options)

    def _take(self, options: Sequence[str]) -> int:
        job_id = max(self.jobs) + 1
        mark = next(option for option in options if option.startswith("--comment=")).partition("=")[2]
        self.jobs[job_id] = facts(job_id, "PENDING", comment=mark)
        return job_id

    def version(self) -> str:
        return "22.05.8"
