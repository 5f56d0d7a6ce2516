"""What the journal says happened, folded into facts. Pure: entries in, facts out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
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
        phase: where it is: "submitted", "starting", "launching", "running", "pausing", "stopping", "standing by",
            "requeued", "over".
        hosts: hosts of the newest launch, in order of rank.
        spares: hosts that stand by.
        step, total, step_s, loss, committed: newest figures that the program reported.
        progress_time: ISO time of those figures.
        restarts: all, in order.
        incidents: hosts taken out, in order.
        ending: (how, why) of the newest attempt's end, when it has ended.
        excluded: hosts in the job's ExcNodeList as last written by us.
        let_back: hosts that were taken out, and that need not be avoided any more.
        monitoring: "" while the sidecar works, else what is wrong with it.
        server: "" while the checkpoint server works, or will again; else what is wrong with it.
        memory: "" while hosts keep copies of each other's memory, or are not asked to; else what is wrong.
        restored: the step that the program began from, and where it was; None before that.
        pause: why the program is not started again just now, and until when (ISO), while that is so.
        stacks: where the ranks of a program that hung stood, and which one is behind; of the newest hang.
        loss_note: what is wrong with the losses of the newest launch.
        distrusted: what is not to be restored any more, in words; the newest.
        succeeds: the attempt that the newest launcher took over from, in this job; "" for none.
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
    let_back: tuple[str, ...] = ()
    monitoring: str = ""
    server: str = ""
    memory: str = ""
    restored: tuple[int, str] | None = None
    pause: tuple[str, str] | None = None
    stacks: tuple[str, str] | None = None
    loss_note: str = ""
    distrusted: str = ""
    succeeds: str = ""


_PHASES = {
    "start": "starting",
    "launch": "launching",
    "running": "running",
    "progress": "running",
    "pause": "pausing",
    "request": "stopping",
    "stop asked": "stopping",
    "standing by": "standing by",
    "requeue": "requeued",
    "end": "over",
}


_SPEAKS_OF_AN_END = frozenset(("start", "restart", "stopped", "gave up", "standing by", "end"))


def _restart(facts: dict[str, Any]) -> Restart:
    return Restart(
        Cause(facts["cause"]),
        int(facts.get("committed", 0)),
        facts.get("host_out", ""),
        facts.get("evidence", ""),
        int(facts.get("step", 0)),
        int(facts.get("restored", 0)),
    )


def _because(stopped: RestartFacts, ended_by: str) -> RestartFacts:
    """A restart of which only the job's next life knew the cause."""
    cause = _cause(ended_by)
    if cause is None or stopped.restart.cause is not Cause.TERMINATED:
        return stopped
    return replace(stopped, restart=replace(stopped.restart, cause=cause))


def _cause(text: str) -> Cause | None:
    """A cause; None for none, and for one that only another version knows."""
    with suppress(ValueError):
        return Cause(text)
    return None


class _Folding:
    """A history under way."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"phase": "submitted"}
        self.jobs: list[str] = []
        self.restarts: list[RestartFacts] = []
        self.incidents: list[Incident] = []
        self.memory: dict[str, str] = {}
        self.stopped: RestartFacts | None = None
        self.under_way: Entry | None = None  # the last word of a launch that, by what was written, has not ended

    def take(self, entry: Entry) -> None:
        """Take in the next entry.

        Raises:
            KeyError, TypeError, ValueError: it lacks what its kind has, or was damaged.
        """
        facts, values = entry.facts, self.values
        under_way = self.under_way
        self.under_way = None if entry.kind in _SPEAKS_OF_AN_END else under_way and entry
        if facts.get("host_out") and entry.kind in ("restart", "host out"):
            self.incidents.append(
                Incident(
                    str(facts["host_out"]),
                    Cause(facts["cause"]),
                    str(facts.get("evidence", "")),
                    _when(entry.time),
                    entry.attempt.number,
                )
            )
            values["let_back"] = tuple(host for host in values.get("let_back", ()) if host != facts["host_out"])
        match entry.kind:
            case "start":
                values["ending"], values["monitoring"] = None, ""
                values["succeeds"] = str(facts.get("succeeds", ""))
                if self.stopped is not None:  # Slurm ended that life of the job, and this is its next
                    self.restarts.append(_because(self.stopped, facts.get("ended_by", "")))
                    self.stopped = None
                elif under_way is not None and not values["succeeds"] and (cause := _cause(facts.get("ended_by", ""))):
                    why = "Slurm ended this life of the job before the launcher could say so"
                    step, committed = values.get("step", 0), values.get("committed", 0)
                    unsaid = Restart(cause, committed, evidence=why, step=step)
                    self.restarts.append(RestartFacts(under_way.attempt, under_way.time, unsaid, step, None))
                if not self.jobs or self.jobs[-1] != str(facts["job_id"]):
                    self.jobs.append(str(facts["job_id"]))
            case "launch":
                values["hosts"], values["spares"] = tuple(facts["hosts"]), tuple(facts["spares"])
                values["server"] = values["memory"] = values["loss_note"] = ""
                values["restored"] = values["pause"] = None
                self.memory.clear()
                self.under_way = entry
            case "copies":
                if facts["of"]:
                    self.memory[facts["of"]] = facts["problem"]
                values["memory"] = "; ".join(filter(None, self.memory.values()))
            case "pause":
                until = _when(entry.time) + timedelta(seconds=float(facts.get("seconds", 0.0)))
                values["pause"] = (str(facts["cause"]), until.isoformat(timespec="seconds"))
            case "stacks":
                values["stacks"] = (str(facts["folder"]), str(facts["behind"]))
            case "loss":
                values["loss_note"] = str(facts["evidence"])
            case "distrust":
                values["distrusted"] = f"step {facts['below']} and later ones saved by {facts['upto']} or before"
            case "follow-up":
                self.jobs.append(str(facts["job_id"]))
            case "restored":
                values["restored"] = (int(facts["step"]), str(facts["source"]))
            case "running":
                values["step"] = int(facts["step"])
                last = self.restarts[-1] if self.restarts else None
                if last is not None and last.back_s is None:
                    seconds = (_when(entry.time) - _when(last.time)).total_seconds()
                    self.restarts[-1] = RestartFacts(last.attempt, last.time, last.restart, last.step, seconds)
            case "progress":
                values.update(
                    step=int(facts["step"]),
                    step_s=facts.get("step_s"),
                    loss=facts.get("loss"),
                    progress_time=entry.time,
                )
                values["committed"] = max(values.get("committed", 0), facts.get("committed") or 0)
            case "restart" | "stopped":
                values["step"] = int(facts.get("step", 0)) or values.get("step", 0)
                found = RestartFacts(entry.attempt, entry.time, _restart(facts), values["step"], None)
                if entry.kind == "restart":
                    self.restarts.append(found)
                else:
                    self.stopped = found
            case "requeue":
                values["let_back"] = tuple(map(str, facts.get("let_back", ())))
            case "requeued":
                values["excluded"] = tuple(facts.get("excluded", ()))
            case "monitoring":
                values["monitoring"] = facts["problem"]
            case "server":
                values["server"] = facts["problem"] if facts["lasting"] else ""
            case "end":
                values["ending"] = (facts["ending"], facts["why"])
        attempt = values.get("attempt")
        values["attempt"] = entry.attempt if attempt is None else max(attempt, entry.attempt)
        if entry.kind == "end" and (facts["why"] == "requeued" or "carries the run on" in facts["why"]):
            values["phase"] = "requeued"
        elif entry.kind in _PHASES and not (entry.kind == "progress" and values["phase"] == "stopping"):
            values["phase"] = _PHASES[entry.kind]


_BROKEN = (KeyError, TypeError, ValueError, AttributeError)
"""What an entry raises that another version wrote, or that was damaged: it is passed over, the run goes on."""


def fold(entries: Sequence[Entry]) -> History:
    """Fold a run's entries, in the order that read_journal gives them, into its history."""
    folding = _Folding()
    for entry in entries:
        with suppress(*_BROKEN):
            folding.take(entry)
    return History(
        job_ids=tuple(folding.jobs),
        restarts=tuple(folding.restarts),
        incidents=tuple(folding.incidents),
        **folding.values,
    )


def restarts_of_job(entries: Sequence[Entry], job_id: str) -> tuple[Restart, ...]:
    """Restarts that count against the budgets of a job: a new submission, made by a person, starts anew.

    A job that was submitted by the one before it, to carry the run on, goes on with that one's budgets.
    """
    jobs = _chain(entries, job_id)
    number = -1
    counted: list[Restart] = []
    for entry in entries:
        if entry.kind == "start":
            number = entry.attempt.number if str(entry.facts.get("job_id")) in jobs else -1
        elif entry.kind == "restart" and entry.attempt.number == number:
            with suppress(*_BROKEN):
                counted.append(_restart(entry.facts))
    return tuple(counted)


def _chain(entries: Sequence[Entry], job_id: str) -> set[str]:
    """A job, and those that it carries on."""
    before: dict[str, str] = {}
    current = ""
    for entry in entries:
        if entry.kind == "start":
            current = str(entry.facts.get("job_id"))
        elif entry.kind == "follow-up":
            before[str(entry.facts.get("job_id"))] = current
    jobs = {job_id}
    while job_id in before and before[job_id] not in jobs:
        job_id = before[job_id]
        jobs.add(job_id)
    return jobs


def _when(text: str) -> datetime:
    """A time stamp; one without a time zone is UTC."""
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)
