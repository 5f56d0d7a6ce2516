"""What the journal says happened, folded into facts. Pure: entries in, facts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.causes import Cause, Restart
from transom_hpc.tol.exclusion import Incident
from transom_hpc.tol.journal import Entry


@dataclass(frozen=True, slots=True)
class RestartFacts:
    """One restart, as the journal has it.

    Args:
        attempt: the attempt that ended by it.
        time: ISO date and time.
        restart: cause, committed step, host, evidence.
        step: newest step of the program at that moment.
        back_s: seconds from the decision to the next new step; None when it never came.
    """

    attempt: Attempt
    time: str
    restart: Restart
    step: int
    back_s: float | None


@dataclass(frozen=True, slots=True)
class History:
    """A run's life.

    Args:
        job_ids: Slurm's ids, in order; a requeue keeps the id.
        attempt: the newest attempt, None before the first.
        phase: where it is: "submitted", "starting", "launching", "running", "stopping", "requeued", "over".
        hosts: hosts of the newest launch, in order of rank.
        spares: hosts that stand by.
        step, total, step_s, loss, committed: newest figures that the program reported.
        progress_time: ISO time of those figures.
        restarts: all, in order.
        incidents: hosts taken out, in order.
        ending: (how, why) of the newest attempt's end, when it has ended.
        excluded: hosts in the job's ExcNodeList as last written by us.
        monitoring: "" while the sidecar works, else what is wrong with it.
    """

    job_ids: tuple[str, ...] = ()
    attempt: Attempt | None = None
    phase: str = "submitted"
    hosts: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    step: int = 0
    step_s: float | None = None
    loss: float | None = None
    committed: int = 0
    progress_time: str = ""
    restarts: tuple[RestartFacts, ...] = ()
    incidents: tuple[Incident, ...] = ()
    ending: tuple[str, str] | None = None
    excluded: tuple[str, ...] = ()
    monitoring: str = ""


_PHASES = {
    "start": "starting",
    "launch": "launching",
    "running": "running",
    "progress": "running",
    "stop asked": "stopping",
    "requeue": "requeued",
    "end": "over",
}


def _restart(facts: dict[str, Any]) -> Restart:
    return Restart(
        Cause(facts["cause"]), int(facts.get("committed", 0)), facts.get("host_out", ""), facts.get("evidence", "")
    )


def fold(entries: Sequence[Entry]) -> History:
    """Fold a run's entries, in the order that read_journal gives them, into its history."""
    values: dict[str, Any] = {"phase": "submitted"}
    jobs: list[str] = []
    restarts: list[RestartFacts] = []
    incidents: list[Incident] = []
    stopped: RestartFacts | None = None
    for entry in entries:
        facts = entry.facts
        attempt = values.get("attempt")
        values["attempt"] = entry.attempt if attempt is None else max(attempt, entry.attempt)
        if entry.kind in _PHASES and not (entry.kind == "progress" and values["phase"] == "stopping"):
            values["phase"] = _PHASES[entry.kind]
        if entry.kind == "start":
            values["ending"], values["monitoring"] = None, ""
            if stopped is not None:  # Slurm ended that life of the job, and this is its next
                restarts.append(stopped)
                stopped = None
            if not jobs or jobs[-1] != str(facts["job_id"]):
                jobs.append(str(facts["job_id"]))
        elif entry.kind == "launch":
            values["hosts"], values["spares"] = tuple(facts["hosts"]), tuple(facts["spares"])
        elif entry.kind == "running":
            values["step"] = facts["step"]
            last = restarts[-1] if restarts else None
            if last is not None and last.back_s is None:
                seconds = _seconds(last.time, entry.time)
                restarts[-1] = RestartFacts(last.attempt, last.time, last.restart, last.step, seconds)
        elif entry.kind == "progress":
            values.update(
                step=facts["step"], step_s=facts.get("step_s"), loss=facts.get("loss"), progress_time=entry.time
            )
            values["committed"] = max(values.get("committed", 0), facts.get("committed") or 0)
        elif entry.kind in ("restart", "stopped"):
            values["step"] = int(facts.get("step", 0)) or values.get("step", 0)
            found = RestartFacts(entry.attempt, entry.time, _restart(facts), values["step"], None)
            if entry.kind == "restart":
                restarts.append(found)
            else:
                stopped = found
        elif entry.kind == "requeued":
            values["excluded"] = tuple(facts.get("excluded", ()))
        elif entry.kind == "monitoring":
            values["monitoring"] = facts["problem"]
        elif entry.kind == "end":
            values["ending"] = (facts["ending"], facts["why"])
            if facts["why"] == "requeued":
                values["phase"] = "requeued"
        if facts.get("host_out") and entry.kind in ("restart", "host out"):
            incidents.append(
                Incident(
                    facts["host_out"],
                    Cause(facts["cause"]),
                    facts.get("evidence", ""),
                    datetime.fromisoformat(entry.time),
                    entry.attempt.number,
                )
            )
    return History(job_ids=tuple(jobs), restarts=tuple(restarts), incidents=tuple(incidents), **values)


def restarts_of_job(entries: Sequence[Entry], job_id: str) -> tuple[Restart, ...]:
    """Restarts that count against the budgets of a job: a new submission, made by a person, starts anew."""
    number = -1
    counted: list[Restart] = []
    for entry in entries:
        if entry.kind == "start":
            number = entry.attempt.number if str(entry.facts["job_id"]) == job_id else -1
        elif entry.kind == "restart" and entry.attempt.number == number:
            counted.append(_restart(entry.facts))
    return tuple(counted)


def _seconds(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
