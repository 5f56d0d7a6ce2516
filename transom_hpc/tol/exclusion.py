"""Which hosts a run stays away from. Pure: evidence in, host names out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from transom_hpc.tol.causes import Cause

LIFETIME = timedelta(hours=24)
"""Evidence older than this counts no more: hosts are repaired, and a list that only grows empties the partition."""

_STRENGTH = {Cause.HOST_LOST: 2, Cause.HOST_SILENT: 1}


@dataclass(frozen=True, slots=True)
class Incident:
    """A host was taken out of a run.

    Args:
        host: its name.
        cause: why.
        evidence: one sentence.
        when: date and time, UTC.
        attempt: number of the attempt that took it out.
    """

    host: str
    cause: Cause
    evidence: str
    when: datetime
    attempt: int


@dataclass(frozen=True, slots=True)
class Choice:
    """Whom to avoid.

    Args:
        avoid: the incident of each host to stay away from, the strongest evidence first.
        let_back: those that were let back in, so that the job can start, or since their evidence is old.
    """

    avoid: tuple[Incident, ...]
    let_back: tuple[Incident, ...] = ()


def choose(
    incidents: Sequence[Incident], now: datetime, *, usable: Collection[str] | None = None, needed: int = 0
) -> Choice:
    """Choose the hosts to avoid, never more than leaves room for the job.

    Args:
        incidents: all that is on record, in order of time.
        now: date and time, UTC.
        usable: the hosts that the job could run on if none were avoided; None when that is not known.
        needed: how many hosts the job asks for.

    Returns:
        The choice. Where room is short, the weakest evidence is let back first, then the oldest.
    """
    newest = {incident.host: incident for incident in incidents}
    current = [incident for incident in newest.values() if now - incident.when < LIFETIME]
    ranked = sorted(current, key=lambda item: (_STRENGTH.get(item.cause, 0), item.attempt, item.when), reverse=True)
    avoid: list[Incident] = []
    room = len(ranked) if usable is None else max(0, len(usable) - needed)
    for incident in ranked:
        cost = 1 if usable is None or incident.host in usable else 0  # a host that is down already takes no room
        if cost <= room:
            avoid.append(incident)
            room -= cost
    names = {incident.host for incident in avoid}
    return Choice(tuple(avoid), tuple(item for item in newest.values() if item.host not in names))
