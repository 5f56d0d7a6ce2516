"""What Slurm's words for the state of a job or a node mean. The one table; nothing else interprets them.

Done-ness is never concluded from a word that is not in the table: such a word is UNKNOWN.
Sources: JOB STATE CODES of squeue(1) and sacct(1), NODE STATE CODES of sinfo(1), job_state_string() in Slurm's
slurm_protocol_defs.c; words of versions up to 25.05.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """What a job is doing, as far as a decision needs to know."""

    WAITING = "waiting"
    """Not running, and nobody has to type anything for it to go on: queued, being set up, suspended by Slurm."""
    RUNNING = "running"
    """It has hosts, and processes of it may be alive: COMPLETING too, whatever it will end as."""
    ENDED_WELL = "ended well"
    ENDED_BADLY = "ended badly"
    """This life of the job ended, and not well. PREEMPTED and NODE_FAIL (and BOOT_FAIL) are not the job's last word:
    where Slurm requeues, the same job is in the queue again. So the queue is asked first, and the accounting only
    about what is not in the queue; nobody says 'will be requeued' from the word alone."""
    HELD = "held"
    """In the queue, and it never starts until somebody releases it."""
    UNKNOWN = "unknown"
    """No answer, or a word that we do not know: neither finished nor healthy."""


_W, _R, _G, _B, _H, _U = JobState

# Long name, short code, meaning. In the order in which a later word of a list-valued state gives way to an earlier
# one: a held job is held whatever else is said; while anything is completing its processes may be alive; 'requeued'
# means more than the 'pending' or 'failed' beside it.
_JOB_TABLE: tuple[tuple[str, str, JobState], ...] = (
    ("REQUEUE_HOLD", "RH", _H),
    ("SPECIAL_EXIT", "SE", _H),  # requeued and held, with a mark
    ("RESV_DEL_HOLD", "RD", _H),
    ("COMPLETING", "CG", _R),
    ("STAGE_OUT", "SO", _R),
    ("SIGNALING", "SI", _R),
    ("RESIZING", "RS", _R),
    ("CONFIGURING", "CF", _W),  # it has hosts, they are being booted: the batch script has not started
    ("POWER_UP_NODE", "", _W),
    ("REQUEUED", "RQ", _W),
    ("REQUEUE_FED", "RF", _W),
    ("EXPEDITING", "EX", _W),
    ("STOPPED", "ST", _W),
    ("SUSPENDED", "S", _W),
    ("REVOKED", "RV", _U),  # it goes on in another cluster of the federation, which we did not ask
    ("PENDING", "PD", _W),
    ("RUNNING", "R", _R),
    ("COMPLETED", "CD", _G),
    ("CANCELLED", "CA", _B),
    ("FAILED", "F", _B),
    ("TIMEOUT", "TO", _B),
    ("NODE_FAIL", "NF", _B),
    ("PREEMPTED", "PR", _B),
    ("BOOT_FAIL", "BF", _B),
    ("DEADLINE", "DL", _B),
    ("OUT_OF_MEMORY", "OOM", _B),
)
# Marks beside a state that say nothing about it (slurm.h: JOB_STATE_FLAGS).
_JOB_MARKS = frozenset({"LAUNCH_FAILED", "UPDATE_DB", "RECONFIG_FAIL"})

_RANK = {word: rank for rank, row in enumerate(_JOB_TABLE) for word in row[:2] if word}
_ENDED = (JobState.ENDED_WELL, JobState.ENDED_BADLY)

# 'JobHeldUser', 'JobHeldAdmin', and what a failed launch leaves behind: 'launch_failed_requeued_held',
# 'job_requeued_in_held_state', 'user_env_retrieval_failed_requeued_held' (also written with blanks).
_HOLDS = re.compile(r"\bJobHeld(User|Admin)\b|requeued[ _](in[ _])?held(\b|_)", re.IGNORECASE)


def job_state(text: str | Sequence[str], reason: str = "") -> JobState:
    """Say what Slurm's state of a job means.

    Args:
        text: a long name, a short code, a form cut by a column ('OUT_OF_ME+'), 'CANCELLED by 1000', several words
            with '+' or ',' between them, or the list that `--json` gives.
        reason: Slurm's reason; it tells a held pending job from one that waits.

    Returns:
        The state; UNKNOWN for everything that is not in the table.
    """
    words = [text] if isinstance(text, str) else list(text)
    ranks: list[int] = []
    unknown = False
    for word in (part for whole in words for part in _split_words(whole)):
        rank = _job_rank(word)
        if rank is not None:
            ranks.append(rank)
        elif word not in _JOB_MARKS:
            unknown = True
    if not ranks:
        return JobState.UNKNOWN
    state = _JOB_TABLE[min(ranks)][2]
    if unknown and state in _ENDED:
        return JobState.UNKNOWN
    if state is JobState.WAITING and _HOLDS.search(reason):
        return JobState.HELD
    return state


def _split_words(text: str) -> list[str]:
    text = re.sub(r"(?i)^\s*(CANCELLED)\s+by\s+\S+\s*$", r"\1", text)
    return re.findall(r"[^\s,+]+\+?(?=$|[\s,])|[^\s,+]+", text.strip().upper())


def _job_rank(word: str) -> int | None:
    if word in _RANK:
        return _RANK[word]
    if not word.endswith("+"):
        return None
    # Cut by a column: what is left fits one name only, or names that all mean the same.
    fits = [rank for rank, (name, _, _) in enumerate(_JOB_TABLE) if name.startswith(word[:-1])]
    if not word[:-1] or len({_JOB_TABLE[rank][2] for rank in fits}) != 1:
        return None
    return fits[0]


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What Slurm's state of a node says."""

    base: str
    """IDLE, MIXED, ALLOCATED, DOWN, ERROR, FUTURE, UNKNOWN; or DRAINED, DRAINING, FAIL, FAILING, COMPLETING,
    RESERVED, MAINT, PLANNED and the like where Slurm prints only that, and hides what is below."""
    flags: frozenset[str]
    """What else is said, in Slurm's long words: DRAIN, NOT_RESPONDING, COMPLETING, POWERED_DOWN…"""
    usable: bool | None
    """Whether Slurm gives this node work: an allocated node is usable, a drained one is not. None: not known, as
    for a reserved node, which is usable for some."""
    responding: bool | None
    """Whether its slurmd answers the controller. None: not known, as for one that is switched off."""


_NODE_SUFFIX = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
    "+": "COMPLETING",
}

# sinfo's short and long words, as base and flags.
_NODE_WORDS: dict[str, tuple[str, str]] = {
    "ALLOC": ("ALLOCATED", ""),
    "ALLOCATED": ("ALLOCATED", ""),
    "MIX": ("MIXED", ""),
    "MIXED": ("MIXED", ""),
    "IDLE": ("IDLE", ""),
    "DOWN": ("DOWN", ""),
    "ERR": ("ERROR", ""),
    "ERROR": ("ERROR", ""),
    "UNK": ("UNKNOWN", ""),
    "UNKNOWN": ("UNKNOWN", ""),
    "FUTR": ("FUTURE", ""),
    "FUTURE": ("FUTURE", ""),
    "COMP": ("COMPLETING", "COMPLETING"),
    "DRAIN": ("DRAINED", "DRAIN"),
    "DRAINED": ("DRAINED", "DRAIN"),
    "DRNG": ("DRAINING", "DRAIN"),
    "DRAINING": ("DRAINING", "DRAIN"),
    "FAILG": ("FAILING", "FAIL"),
    "FAILING": ("FAILING", "FAIL"),
    "INVAL": ("INVAL", "INVALID_REG"),
    "MAINT": ("MAINT", "MAINTENANCE"),
    "RESV": ("RESERVED", "RESERVED"),
    "PLND": ("PLANNED", "PLANNED"),
    "NPC": ("PERFCTRS", "PERFCTRS"),
    "BLOCK": ("BLOCKED", "BLOCKED"),
    "BOOT": ("POWERING_UP", "POWERING_UP"),
    "REBOOT": ("REBOOT_ISSUED", "REBOOT_ISSUED"),
    "POW_DN": ("POWERING_DOWN", "POWERING_DOWN"),
    "POW_UP": ("POWERING_UP", "POWERING_UP"),
}

_BASES = frozenset(base for base, flag in _NODE_WORDS.values() if not flag)
# A node that is switched off to save power is usable: Slurm switches it on for a job. One that is being switched off
# is not now, and will be.
_YES = frozenset({"COMPLETING", "PLANNED", "REBOOT_REQUESTED", "POWERED_DOWN", "POWERING_UP", "POWER_UP"}) | {
    "CLOUD",
    "DYNAMIC_NORM",
    "DYNAMIC_FUTURE",
}
_NO = frozenset({"DRAIN", "FAIL", "NOT_RESPONDING", "INVALID_REG", "REBOOT_ISSUED", "PERFCTRS", "BLOCKED"})
_MAYBE = frozenset({"MAINTENANCE", "RESERVED", "POWER_DRAIN", "POWER_DOWN", "POWERING_DOWN"})
_ASLEEP = frozenset({"POWERED_DOWN", "POWERING_UP", "POWERING_DOWN", "REBOOT_ISSUED"})


def node_state(text: str | Sequence[str]) -> NodeFacts:
    """Say what Slurm's state of a node means.

    Args:
        text: as sinfo prints it, short or long, with the characters at its end ('mix*', 'down~', 'alloc+'), as
            scontrol does ('IDLE+DRAIN', 'MIXED+NOT_RESPONDING'), or the list that `--json` gives.

    Returns:
        The facts; `usable` and `responding` are None where a word is not known.
    """
    base, flags = "", set[str]()
    for whole in [text] if isinstance(text, str) else text:
        stem, marks = _strip_marks(whole.strip().upper())
        flags.update(marks)
        for part in stem.split("+"):
            word, marks = _strip_marks(part)
            flags.update(marks)
            word_base, flag = _NODE_WORDS.get(word, ("", word))
            if not base:
                base = word_base or word
            if flag:
                flags.add(flag)
    strange = bool(flags - _YES - _NO - _MAYBE) or not (base in _BASES or flags)
    usable: bool | None = True
    if base in {"DOWN", "ERROR", "FUTURE"} or flags & _NO:
        usable = False
    elif strange or base == "UNKNOWN" or flags & _MAYBE:
        usable = None
    responding: bool | None = True
    if "NOT_RESPONDING" in flags:
        responding = False
    elif strange or base in {"UNKNOWN", "FUTURE"} or flags & _ASLEEP:
        responding = None
    return NodeFacts(base or "UNKNOWN", frozenset(flags), usable, responding)


def _strip_marks(text: str) -> tuple[str, list[str]]:
    marks = []
    while text and text[-1] in _NODE_SUFFIX:
        marks.append(_NODE_SUFFIX[text[-1]])
        text = text[:-1]
    return text, marks
