"""What squeue, sinfo, sacct and scontrol print, read into facts.

Owns the formats that are asked for, since only a format of our own can be read back for certain, and the readers.
Never runs anything. Free text (job names, comments, reasons, paths) can hold anything, `|`, `=`, blanks and newlines
among it: records start with RS and fields end with US (the ASCII separators), free text stands last.
A field that is missing or makes no sense is an error, never a default: the caller does not know then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from transom_hpc.base.errors import JobIdError, SlurmUnreachable, TransomError
from transom_hpc.slurm.hosts import expand_hosts
from transom_hpc.slurm.jobid import JobId, parse_job_id
from transom_hpc.slurm.states import JobState, NodeFacts, job_state, node_state
from transom_hpc.slurm.times import parse_time

RS = "\x1e"
US = "\x1f"

SQUEUE_FORMAT = RS + US.join(["%i", "%A", "%T", "%r", "%D", "%S", "%e", "%N", "%x", "%k", "%j"])
"""For `squeue -o`, header included: without a header, no answer and no job look the same."""

SINFO_FORMAT = RS + US.join(["%N", "%t", "%H", "%u", "%E"])
"""For `sinfo -N -o`, header included."""

SACCT_FIELDS = "JobID,JobIDRaw,State,ExitCode,NodeList,Start,End,Reason,JobName"
"""For `sacct --parsable2 --delimiter=US -o`, header included. sacct cannot be given a start of a record."""

_Row = TypeVar("_Row")

_NO_TEXT = frozenset({"(null)", "N/A", "None", "NONE", "Unknown", "NULL"})


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A job, or the pending rest of a job array, in the queue."""

    job_id: int
    """Its own number: of an array task or a component of a heterogeneous job not that of the whole."""
    id: JobId
    """As people know it. Of an array whose tasks squeue cut short, the whole array."""
    state: JobState
    state_text: str
    """Slurm's own word."""
    reason: str
    """Why it is pending; '' otherwise."""
    nodes: int
    """How many it has, or asks for."""
    start_time: str
    """'2026-11-30T14:56:52', in the time zone of the machine; '' where there is none yet. Of a pending job, when
    Slurm expects to start it."""
    end_time: str
    """Likewise; '' without a time limit."""
    hosts: tuple[str, ...]
    exc_hosts: tuple[str, ...]
    comment: str
    name: str


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the controller knows of one job."""

    job_id: int
    id: JobId
    name: str
    state: JobState
    state_text: str
    reason: str
    failed_node: str
    """The host whose loss ended this life of the job; '' where Slurm names none."""
    restarts: int
    requeue: bool
    """Whether Slurm may requeue it at all."""
    partition: str
    nodes: int
    hosts: tuple[str, ...]
    batch_host: str
    exc_hosts: tuple[str, ...]
    submit_time: str
    eligible_time: str
    start_time: str
    end_time: str
    time_limit: timedelta | None
    """None: no limit, or the partition's."""
    comment: str
    command: str
    work_dir: str
    std_out: str
    std_err: str
    words: Mapping[str, str]
    """All of scontrol's one-word fields, as it prints them: what the job asked for beyond the above."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node of the cluster."""

    host: str
    facts: NodeFacts
    state_text: str
    reason: str
    """Why somebody took it out of service; '' otherwise."""
    user: str
    since: str


@dataclass(frozen=True, slots=True)
class AccountRow:
    """One life of a job, or of one of its steps, in the accounting.

    A requeued job has one row a life, in the order in which they began: only the last one says what the job is,
    and even that one not where the job is in the queue again.
    """

    job_id: int
    """Its own number; of a step, its job's."""
    id: JobId
    state: JobState
    state_text: str
    exit_code: int
    signal: int
    """What ended it; 0: no signal."""
    hosts: tuple[str, ...]
    start_time: str
    end_time: str
    reason: str
    name: str


def parse_squeue(text: str) -> list[QueueRow]:
    """Read `squeue -o SQUEUE_FORMAT`.

    Args:
        text: what it printed, with its header.

    Returns:
        A row a line of the queue, in Slurm's order; nothing where the queue is empty.

    Raises:
        SlurmUnreachable: not even a header, or a field that makes no sense; `answer` has it.
    """
    return _read(text, _marked(text), SQUEUE_FORMAT.count("%"), "squeue", _queue_row)


def parse_sinfo(text: str) -> list[NodeRow]:
    """Read `sinfo -N -o SINFO_FORMAT`: a row a node, also where it is in several partitions.

    Raises:
        SlurmUnreachable: not even a header, or a field that makes no sense; `answer` has it.
    """
    rows = _read(text, _marked(text), SINFO_FORMAT.count("%"), "sinfo", _node_row)
    return list({row.host: row for row in rows}.values())


def parse_sacct(text: str) -> list[AccountRow]:
    """Read `sacct --parsable2 --delimiter=US -o SACCT_FIELDS`.

    Returns:
        A row a life of a job (with `--duplicates`) and of a step, oldest first as sacct gives them.

    Raises:
        SlurmUnreachable: not even a header, or a field that makes no sense; `answer` has it.
    """
    # A line without any separator is the rest of a name that has a newline.
    records = re.split(rf"\n(?=[^\n{US}]*{US})", text.removesuffix("\n")) if text.strip() else []
    return _read(text, records, SACCT_FIELDS.count(",") + 1, "sacct", _account_row)


def _marked(text: str) -> list[str]:
    """Records, the header first. A cluster's name before them (SLURM_CLUSTERS is set) is no record."""
    return re.split(rf"(?:\A|\n){RS}", text.removesuffix("\n"))[1:]


def _read(text: str, records: Sequence[str], width: int, program: str, row: Callable[[list[str]], _Row]) -> list[_Row]:
    if not records:
        raise SlurmUnreachable(
            f"{program} gave an empty answer: the state is unknown, ask again later", command=program, answer=text
        )
    table = [record.split(US, width - 1) for record in records]
    for fields in table:
        if len(fields) != width:
            raise _strange(program, US.join(fields), f"{len(fields)} columns instead of {width}")
    if not re.match(r"(JOBID|NODELIST|JobID)\b", table[0][0]):
        raise _strange(program, US.join(table[0]), "no header")
    rows = []
    for fields in table[1:]:
        try:
            rows.append(row(fields))
        except (TransomError, ValueError) as error:
            raise _strange(program, US.join(fields), str(error)) from error
    return rows


def _strange(program: str, record: str, why: str) -> SlurmUnreachable:
    shown = record.replace(US, "|")
    return SlurmUnreachable(
        f"{program} printed a line that can't be read ({why}): {shown[:200]!r}", command=program, answer=record
    )


def _queue_row(fields: list[str]) -> QueueRow:
    shown, raw, state, reason, nodes, start, end, hosts, excluded, comment, name = fields
    return QueueRow(
        job_id=int(raw),
        id=_shown_id(shown),
        state=job_state(state, reason),
        state_text=_needed(state, "state"),
        reason=_or_empty(reason),
        nodes=int(nodes),
        start_time=_or_empty(start),
        end_time=_or_empty(end),
        hosts=tuple(expand_hosts(hosts)),
        exc_hosts=tuple(expand_hosts(excluded)),
        comment=_or_empty(comment),
        name=name,
    )


def _node_row(fields: list[str]) -> NodeRow:
    host, state, since, user, reason = fields
    return NodeRow(
        host=_needed(host, "node name"),
        facts=node_state(_needed(state, "state")),
        state_text=state,
        reason="" if reason == "none" else reason,
        user=_or_empty(user),
        since=_or_empty(since),
    )


def _account_row(fields: list[str]) -> AccountRow:
    shown, raw, state, code, hosts, start, end, reason, name = fields
    code, _, signal = code.partition(":")
    return AccountRow(
        job_id=parse_job_id(raw).job,
        id=_shown_id(shown),
        state=job_state(state, reason),
        state_text=_needed(state, "state"),
        exit_code=int(code or 0),  # a step of a lost host has none
        signal=int(signal or 0),
        hosts=tuple(expand_hosts(hosts)),
        start_time=_or_empty(start),
        end_time=_or_empty(end),
        reason=_or_empty(reason),
        name=name,
    )


# `scontrol show job`: the job's name ends where the line of the user begins; then come words without blanks
# (scontrol writes '_' for them in a reason); then, one a line, what can be free text.
_JOB = re.compile(
    r"JobId=(?P<job>[0-9]+) "
    r"(?:ArrayJobId=(?P<array>[0-9]+) ArrayTaskId=(?P<tasks>\S+) (?:ArrayTaskThrottle=(?P<throttle>[0-9]+) )?)?"
    r"(?:HetJobId=(?P<het>[0-9]+) HetJobOffset=(?P<component>[0-9]+) )?"
    r"JobName=(?P<name>.*?)\n {3}(?P<words>UserId=.*?)(?P<lines>\n {3}(?:Command|WorkDir)=.*)?",
    re.DOTALL,
)
_LINE = re.compile(r"\n {3}(?P<key>[A-Za-z][A-Za-z0-9_/:]*)=")


def parse_show_job(text: str) -> list[JobFacts]:
    """Read `scontrol show job`: one record a job, an array task or a component.

    Raises:
        SlurmUnreachable: no record, or a field that is missing or makes no sense; `answer` has it.
    """
    records = [part for part in re.split(r"(?:\A|\n\s*\n)(?=JobId=[0-9]+ )", text) if part.strip()]
    if not records:
        raise SlurmUnreachable("scontrol gave an empty answer: ask again later", command="scontrol", answer=text)
    facts = []
    for record in records:
        try:
            facts.append(_job_facts(record.rstrip()))
        except KeyError as error:
            raise _strange("scontrol", record, f"{error.args[0]} is missing") from error
        except (TransomError, ValueError) as error:
            raise _strange("scontrol", record, str(error)) from error
    return facts


def _job_facts(record: str) -> JobFacts:
    found = _JOB.fullmatch(record)
    if not found:
        raise ValueError("no record of a job")
    words = dict(word.split("=", 1) for word in reversed(found["words"].split()) if "=" in word)
    lines = _free_lines(found["lines"] or "")
    return JobFacts(
        job_id=int(found["job"]),
        id=_whole_id(found),
        name=found["name"],
        state=job_state(words["JobState"], words["Reason"]),
        state_text=words["JobState"],
        reason=_or_empty(words["Reason"]),
        failed_node=_or_empty(words.get("FailedNode", "")),
        restarts=int(words["Restarts"]),
        requeue=words["Requeue"] == "1",
        partition=words["Partition"],
        nodes=int(words["NumNodes"].partition("-")[0]),  # 2-2: at least and at most, while pending
        hosts=tuple(expand_hosts(words["NodeList"])),
        batch_host=words.get("BatchHost", ""),
        exc_hosts=tuple(expand_hosts(words["ExcNodeList"])),
        submit_time=_or_empty(words["SubmitTime"]),
        eligible_time=_or_empty(words["EligibleTime"]),
        start_time=_or_empty(words["StartTime"]),
        end_time=_or_empty(words["EndTime"]),
        time_limit=None if words["TimeLimit"] == "Partition_Limit" else parse_time(words["TimeLimit"]),
        comment=lines.get("Comment", ""),
        command=lines.get("Command", ""),
        work_dir=lines.get("WorkDir", ""),
        std_out=lines.get("StdOut", ""),
        std_err=lines.get("StdErr", ""),
        words=words,
    )


def _whole_id(found: re.Match[str]) -> JobId:
    if found["array"]:
        throttle = f"%{found['throttle']}" if found["throttle"] and not found["tasks"].isdigit() else ""
        return _shown_id(f"{found['array']}_[{found['tasks']}{throttle}]")
    if found["het"]:
        return JobId(int(found["het"]), component=int(found["component"]))
    return JobId(int(found["job"]))


def _free_lines(text: str) -> dict[str, str]:
    """Key and value a line; what does not start a line of its own is the rest of the value before it."""
    starts = list(_LINE.finditer(text))
    lines: dict[str, str] = {}
    for at, start in enumerate(starts):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(text)
        # Slurm writes the comment before the output files: a comment with such a line in it is not believed.
        if start["key"].startswith("Std") or start["key"] not in lines:
            lines[start["key"]] = _or_empty(text[start.end() : end].strip())
    return lines


def _shown_id(shown: str) -> JobId:
    """An array whose tasks were cut short stands for the whole array: better than a part taken for all of it."""
    try:
        return parse_job_id(shown)
    except JobIdError:
        array = re.match(r"([0-9]+)_\[", shown)
        if not array:
            raise
        return JobId(int(array[1]))


def _or_empty(text: str) -> str:
    return "" if text in _NO_TEXT else text


def _needed(text: str, what: str) -> str:
    if not text:
        raise ValueError(f"the {what} is empty")
    return text
