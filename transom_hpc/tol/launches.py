"""The launches of a run: when each began, how it ended, and why. Pure: the journal's entries in, facts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.causes import Cause
from transom_hpc.tol.goodput import seconds
from transom_hpc.tol.journal import Entry


@dataclass(frozen=True, slots=True)
class LaunchFacts:
    """One start of the program.

    Args:
        attempt: attempt and launch.
        began: ISO date and time of its start.
        first_step_s: seconds from then to the first step; None where no step was seen.
        ended: ISO date and time of the decision that ended it; None while it runs, or where nobody wrote it down.
        cause: why it ended; for one that ended with its launcher, and for no cause that is known, how: "ended well",
            "ended badly", "stopped" or "left"; "" while it runs, or where nobody knows.
        host_out: hosts that were taken out meanwhile, joined by commas.
        evidence: one sentence on the cause.
        from_step: the step that it began from, 0 for none; None where it is not known.
        to_step: the newest step that was seen of it; None for none.
        hosts: in order of rank.
        restored_from: the checkpoint's folder, or memory and whose; "" for nothing.
    """

    attempt: Attempt
    began: str
    first_step_s: float | None = None
    ended: str | None = None
    cause: str = ""
    host_out: str = ""
    evidence: str = ""
    from_step: int | None = None
    to_step: int | None = None
    hosts: tuple[str, ...] = ()
    restored_from: str = ""

    @property
    def duration_s(self) -> float | None:
        """Seconds from its start to its end, never negative; None where it has no end."""
        return None if self.ended is None else _between(self.began, self.ended)


_ENDS = frozenset(("restart", "stopped", "gave up", "standing by"))


def launches(entries: Sequence[Entry]) -> tuple[LaunchFacts, ...]:
    """A run's launches, oldest first.

    Args:
        entries: of its journal, as read_journal gives them. What is damaged is passed over.
    """
    found: dict[Attempt, LaunchFacts] = {}
    heirs: set[int] = set()
    for entry in entries:
        attempt = entry.attempt
        if not isinstance(entry.kind, str):
            continue
        if entry.kind == "start" and entry.facts.get("succeeds"):
            heirs.add(attempt.number)
        if entry.kind == "launch":
            names = entry.facts.get("hosts")
            hosts = tuple(map(str, names)) if isinstance(names, (list, tuple)) else ()
            found[attempt] = LaunchFacts(attempt, str(entry.time), hosts=hosts)
            continue
        if not attempt.launch and (entry.kind == "start" or attempt.number in heirs):
            # A launcher that has started nothing yet speaks of the launch before.
            attempt = max((known for known in found if known < attempt), default=attempt)
        if attempt in found:
            found[attempt] = _take(found[attempt], entry)
    return tuple(found[attempt] for attempt in sorted(found))


def _take(launch: LaunchFacts, entry: Entry) -> LaunchFacts:
    facts = entry.facts
    match entry.kind:
        case "running" | "progress":
            launch = _reached(launch, facts)
            if launch.first_step_s is None:
                launch = replace(launch, first_step_s=_between(launch.began, entry.time))
        case "restored":
            launch = replace(launch, from_step=_step(facts, "step"), restored_from=_text(facts, "source"))
        case "host out":
            launch = _host_out(launch, facts)
        case "start":
            cause = _text(facts, "ended_by")
            if cause and launch.cause in ("", Cause.TERMINATED):  # only the job's next life knew it
                launch = replace(launch, cause=cause)
        case "end":
            if launch.ended is None:
                cause = launch.cause or _text(facts, "ending")
                launch = replace(launch, ended=str(entry.time), cause=cause, evidence=_text(facts, "why"))
        case kind if kind in _ENDS and launch.ended is None:
            from_step = launch.from_step if launch.from_step is not None else _step(facts, "restored")
            launch = replace(
                _host_out(_reached(launch, facts), facts),
                ended=str(entry.time),
                cause=_text(facts, "cause"),
                evidence=_text(facts, "evidence"),
                from_step=from_step,
            )
    return launch


def _reached(launch: LaunchFacts, facts: Mapping[str, Any]) -> LaunchFacts:
    step = _step(facts, "step")
    return replace(launch, to_step=max(launch.to_step or 0, step)) if step else launch


def _host_out(launch: LaunchFacts, facts: Mapping[str, Any]) -> LaunchFacts:
    names = [name for name in (*launch.host_out.split(","), _text(facts, "host_out")) if name]
    return replace(launch, host_out=",".join(dict.fromkeys(names)))


def _step(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(facts: Mapping[str, Any], name: str) -> str:
    value = facts.get(name)
    return value if isinstance(value, str) else ""


def _between(before: str, after: str) -> float | None:
    begin, end = seconds(before), seconds(after)
    return None if begin is None or end is None else max(0.0, end - begin)
