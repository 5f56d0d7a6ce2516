"""Which host keeps a copy of which other's segments, and what is brought where after a loss. Pure: every server that
knows the same computes the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holders:
    """Who keeps copies.

    Args:
        of: for each host with ranks, the hosts that keep copies of its segments, the first one first.
        complaint: why that is not what was asked for; empty where it is.
    """

    of: Mapping[str, tuple[str, ...]]
    complaint: str = ""


def holders(
    serving: Sequence[str], spares: Sequence[str], switches: Mapping[str, str], copies: int, distance: int
) -> Holders:
    """Decide who keeps copies.

    Hosts form a ring: those with ranks in order of rank, then the spares. A host's copies go to those that come
    `distance` and more places after it; where switches are known, to the first ones that share none with the host, nor
    with each other, the least laden before the nearest.

    Args:
        serving: hosts with ranks, in order of rank.
        spares: hosts without.
        switches: the switch of each host; hosts that are not in it count as having one of their own.
        copies: of each segment.
        distance: the k of (h + k) mod N, at least 1.
    """
    ring = [*serving, *spares]
    number = min(copies, len(ring) - 1)
    if number <= 0:
        return Holders(dict.fromkeys(serving, ()))
    load: Counter[str] = Counter()
    found: dict[str, tuple[str, ...]] = {}
    close: list[str] = []
    for at, host in enumerate(serving):
        taken: list[str] = []
        used = {_switch(host, switches)}
        left = {ring[(at + step) % len(ring)]: (step - distance) % len(ring) for step in range(1, len(ring))}
        for _ in range(number):
            best = min(
                left,
                key=lambda name: (_switch(name, switches) in used, load[name] if switches else 0, left[name]),
            )
            if _switch(best, switches) in used:
                close.append(host)
            taken.append(best)
            used.add(_switch(best, switches))
            load[best] += 1
            del left[best]
        found[host] = tuple(taken)
    complaint = ""
    if close:
        shown = ", ".join(dict.fromkeys(close[:4]))
        complaint = f"too few switches: copies of {shown}{' and more' if len(close) > 4 else ''} share one"
    elif number < copies:
        complaint = f"{len(ring)} hosts can't keep {copies} copies of each other's memory: {number} it is"
    return Holders(found, complaint)


def _switch(host: str, switches: Mapping[str, str]) -> str:
    return switches.get(host) or f"only {host}'s"


def switch_of(address: str) -> str:
    """The switch that a host hangs on, as Slurm tells a task (SLURM_TOPOLOGY_ADDR: "core.leaf3.n17"); empty where it
    knows of none."""
    return address.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Item:
    """A whole segment in a host's memory.

    Args:
        host: whose memory.
        name: of the file.
        whose: how the names of its rank's segments begin.
        rank: the rank whose state it is.
        world_size: ranks of that attempt.
        step: the training step.
        attempt: who took it.
        copy: whether it is a copy for another host.
    """

    host: str
    name: str
    whose: str
    rank: int
    world_size: int
    step: int
    attempt: str
    copy: bool

    @property
    def group(self) -> str:
        """What segments of one checkpoint directory have in common."""
        return self.whose.partition("-")[0]


@dataclass(frozen=True, slots=True)
class Move:
    """A segment that is to be where its rank will run.

    Args:
        item: where it is now.
        target: the host that needs it; the one that has it already where a copy only changes its name.
    """

    item: Item
    target: str


@dataclass(frozen=True, slots=True)
class Gathering:
    """What is to be brought where.

    Args:
        moves: all of them.
        steps: for each group, the step that all ranks can have from memory then.
        lost: for each group that can't have its newest step from memory, why.
    """

    moves: tuple[Move, ...]
    steps: Mapping[str, int]
    lost: Mapping[str, str]


def gather(items: Iterable[Item], homes: Sequence[str], floors: Mapping[str, int]) -> Gathering:
    """Find the newest step that all ranks can have from some memory, and what has to be moved for it.

    Args:
        items: what the hosts have.
        homes: for each rank, the host on which it will run.
        floors: for each group, the newest step that is committed: nothing older is worth a move.
    """
    groups: dict[str, dict[tuple[int, str], dict[int, list[Item]]]] = {}
    for item in items:
        if item.world_size == len(homes) and 0 <= item.rank < len(homes):
            there = groups.setdefault(item.group, {}).setdefault((item.step, item.attempt), defaultdict(list))
            there[item.rank].append(item)
    moves: list[Move] = []
    steps: dict[str, int] = {}
    lost: dict[str, str] = {}
    load: Counter[str] = Counter()
    for group, found in sorted(groups.items()):
        newest = max(found)
        whole = [key for key, held in found.items() if len(held) == len(homes) and key[0] >= floors.get(group, -1)]
        if newest not in whole and newest[0] >= floors.get(group, -1):
            missing = [str(rank) for rank in range(len(homes)) if rank not in found[newest]]
            shown = ", ".join(missing[:8]) + (" and more" if len(missing) > 8 else "")
            lost[group] = f"no memory has step {newest[0]} of rank {shown}"
        if not whole:
            continue
        best = max(whole)
        steps[group] = best[0]
        for rank, held in sorted(found[best].items()):
            here = [item for item in held if item.host == homes[rank]]
            if any(not item.copy for item in here):
                continue
            # A copy that is here already costs nothing; another host's is read where least is read so far.
            source = here[0] if here else min(held, key=lambda item: (load[item.host], item.host, item.name))
            load[source.host] += 0 if here else 1
            moves.append(Move(source, homes[rank]))
    return Gathering(tuple(moves), steps, lost)


def superfluous(mine: Iterable[Item], kept_for: Iterable[str], newest: int) -> list[Item]:
    """Copies that this host keeps and nobody needs: of ranks that it keeps copies of no more, when something newer is
    safe elsewhere.

    Args:
        mine: what this host has.
        kept_for: how the names of the segments begin of which it is to keep copies now.
        newest: a step that is committed, or that has come as a whole copy.
    """
    wanted = set(kept_for)
    return [item for item in mine if item.copy and item.whose not in wanted and item.step < newest]


def room(
    free: int,
    configured: int | None,
    own: Mapping[str, Sequence[int]],
    copies: int,
    ranks: int,
    slots: int,
    likely: int,
) -> int:
    """Bytes by which the copies on a host may still grow.

    What the ranks of this host will yet need for slots of their own is left to them.

    Args:
        free: bytes that are free on the host.
        configured: limit for all segments of the host together; None for none.
        own: for each rank of this host that has segments, the bytes of each.
        copies: bytes of the copies.
        ranks: that run on this host.
        slots: segments that a rank comes to have.
        likely: bytes of a segment of a rank that has none yet.
    """
    coming = sum(max(0, slots - len(sizes)) * max(sizes) for sizes in own.values() if sizes)
    coming += max(0, ranks - len(own)) * slots * likely
    grow = free - coming
    if configured is not None:
        grow = min(grow, configured - sum(map(sum, own.values())) - coming - copies)
    return max(0, grow)
