"""Which checkpoint all ranks restore from: rank 0 proposes, every rank examines, rank 0 decides.

Owns the order of proposals and the decision. What examining means is in `restore`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transom_hpc.base.errors import CorruptCheckpoint, StateError
from transom_hpc.ckpt.meeting import Meeting

log = logging.getLogger("transom_hpc.ckpt")


MEMORY = "memory:"
"""How the source of a proposal begins that is in the memory of hosts; the attempt follows."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A place to restore from.

    Args:
        step: the training step.
        source: the folder's name, or "memory:ATTEMPT" for what each rank's own host still holds.
        broken: why the manifest is no good; empty where it is.
    """

    step: int
    source: str
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Mates:
    """The ranks of one host that examine a proposal.

    Args:
        token: the same for them, and for nothing else.
        ranks: all of them, ascending.
    """

    token: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was agreed.

    Args:
        step: restored step; 0 where there is nothing.
        source: of the proposal that was taken; empty where there is nothing.
        damaged: folders that were passed over since their bytes have changed.
        left_out: what did not fit and is not taken, on which ranks.
        borrowed: whether some rank takes it from segments of others.
        needed_bytes: of what this rank restored.
        read_bytes: read by this rank: from files, or compared in memory.
        handed_bytes: of files, that others of its host have read for this rank.
    """

    step: int
    source: str
    damaged: tuple[str, ...]
    left_out: str = ""
    borrowed: bool = False
    needed_bytes: int = 0
    read_bytes: int = 0
    handed_bytes: int = 0


def proposals(committed: Sequence[tuple[int, Path, str]], held: Sequence[Sequence[tuple[int, str]]]) -> list[Proposal]:
    """What can be tried, best first.

    Args:
        committed: step, folder and what is wrong with the manifest, oldest first.
        held: for each rank, step and attempt of the whole segments on its node.

    Returns:
        Memory that every rank has comes before the file of the same step, and is left out when a newer step is
        committed.
    """
    common = {(step, attempt) for step, attempt in held[0]}
    for mine in held[1:]:
        common &= {(step, attempt) for step, attempt in mine}
    newest = max((step for step, _, broken in committed if not broken), default=-1)
    tries = [Proposal(step, f"{MEMORY}{attempt}") for step, attempt in sorted(common, reverse=True) if step >= newest]
    return tries + [Proposal(step, path.name, broken) for step, path, broken in reversed(committed)]


def agree(
    meeting: Meeting,
    rank: int,
    propose: Callable[[list[Any]], Sequence[Proposal]],
    held: Sequence[tuple[int, str]],
    host: str,
    examine: Callable[[Proposal, Mates], dict[str, Any]],
) -> Outcome:
    """Find the newest place that every rank can restore from. All ranks must call it.

    Args:
        meeting: of the ranks.
        rank: this one.
        propose: from what each rank holds to the places to try; called on rank 0 only.
        held: whole segments on this host.
        host: the same for all ranks that see the same shared memory.
        examine: this rank's finding about one place, as Found.to_json.

    Raises:
        StateError: the live state of a rank can't take it.
        CorruptCheckpoint: there are checkpoints, and none is whole. Facts: step, path.
        Overdue, Abandoned: a rank did not take part.
    """
    meeting.tell("memory", [[list(item) for item in held], host])
    if rank == 0:
        said = meeting.hear_all("memory")
        proposed = [[p.step, p.source, p.broken] for p in propose([mine for mine, _ in said])]
        hosts = {where: number for number, (_, where) in enumerate(said)}
        meeting.tell("tries", [proposed, [hosts[where] for _, where in said], secrets.token_hex(6)])
    proposed, homes, token = meeting.hear("tries", 0)
    tries = [Proposal(*item) for item in proposed]
    mates = tuple(number for number, home in enumerate(homes) if home == homes[rank])
    damaged: list[str] = []
    reasons: list[str] = []
    unfit: StateError | None = None
    for number, proposal in enumerate(tries):
        decision = _one(meeting, rank, number, proposal, Mates(f"{token}.{number}", mates), examine)
        if decision["take"]:
            return Outcome(proposal.step, proposal.source, tuple(damaged), decision["left_out"], decision["borrowed"])
        if decision["unfit"]:
            unfit = StateError(f"step {proposal.step}: {decision['unfit']}", name=proposal.source, step=proposal.step)
            if not proposal.source.startswith(MEMORY):
                raise unfit
            # Memory of this host need not hold what a state wants that is cut otherwise now; files do.
        if rank == 0:
            log.warning("step %d is not restored from %s: %s", proposal.step, proposal.source, decision["why"])
        reasons.append(f"{proposal.source}: {decision['why']}")
        if decision["damaged"] and not proposal.source.startswith(MEMORY):
            damaged.append(proposal.source)
    on_disk = [p for p in tries if not p.source.startswith(MEMORY)]
    if on_disk:
        raise CorruptCheckpoint(
            f"no checkpoint of {len(on_disk)} is whole: {'; '.join(reasons[-3:])}; "
            "move them away to begin from nothing",
            step=on_disk[0].step,
            path=on_disk[0].source,
        )
    if unfit is not None:
        raise unfit
    return Outcome(0, "", ())


def _one(
    meeting: Meeting,
    rank: int,
    number: int,
    proposal: Proposal,
    mates: Mates,
    examine: Callable[[Proposal, Mates], dict[str, Any]],
) -> dict[str, Any]:
    """One proposal: this rank's finding, and what rank 0 makes of everybody's."""
    if proposal.broken:
        return {"take": False, "unfit": "", "damaged": True, "why": proposal.broken}
    meeting.tell(f"finding{number}", examine(proposal, mates))
    if rank == 0:
        meeting.tell(f"decision{number}", decide(meeting.hear_all(f"finding{number}")))
    found: dict[str, Any] = meeting.hear(f"decision{number}", 0)
    return found


def decide(findings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """From what each rank found to what all do. Pure."""
    faults = [f"rank {r}: {fault}" for r, f in enumerate(findings) for fault in f["faults"]]
    unreadable, unfit, left_out = (_each([f[kind] for f in findings]) for kind in ("unreadable", "unfit", "left_out"))
    if places := nowhere(findings):
        text = f"only in the checkpoint: {', '.join(places)}"
        if any(f["strict"] for f in findings):
            unfit.append(f"the checkpoint does not fit the state: {text}; strict=False takes what fits")
        else:
            left_out.append(text)
    return {
        "take": not (faults or unreadable or unfit),
        "unfit": "" if faults or unreadable else "; ".join(unfit[:4]),
        "damaged": bool(faults),
        "why": "; ".join((faults + unreadable + unfit)[:4]),
        "left_out": "; ".join(left_out[:4]),
        "borrowed": any(f["borrowed"] for f in findings),
    }


def nowhere(findings: Sequence[dict[str, Any]]) -> list[str]:
    """Places that are stored and that no rank's state has. Pure.

    A rank that has not looked at what others saved had a place for all that it saved itself, and wants nothing else.
    """
    looked = [set(f["extra"]) for f in findings if f["looked"]]
    return sorted(set.intersection(*looked)) if looked else []


def _each(said: Sequence[str]) -> list[str]:
    """What ranks have to say, with their numbers; without, where all say the same."""
    if len(set(said)) == 1:
        return [said[0]] if said[0] else []
    return [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
