"""Which rank holds the others up, from where each of them stands. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Stand:
    """Where a rank stands.

    Args:
        host: its host.
        rank: its rank.
        step: the last step that it finished; None before the first, and of a program that says none.
        age_s: seconds since it last said something; None where it has said nothing.
        phase: what it does by its own word ("restoring", "training", …); "" where it says nothing.
        state: what keeps it from running, for people ("is stopped (SIGSTOP)", "has ended"); "" where nothing does.
        place: where its main thread stands, as "train.py:88 in all_reduce"; "" unknown.
        failed: the exception that has ended it, though its process is still there; "" none.
    """

    host: str
    rank: int
    step: int | None = None
    age_s: float | None = None
    phase: str = ""
    state: str = ""
    place: str = ""
    failed: str = ""

    def to_line(self) -> str:
        """One line of text, for `parse_stand`."""
        return json.dumps(asdict(self))

    @property
    def name(self) -> str:
        """Rank and host, for people."""
        return f"rank {self.rank} on {self.host}"


def parse_stand(line: str) -> Stand | None:
    """Read what `Stand.to_line` wrote; None for any other text."""
    try:
        return Stand(**json.loads(line))
    except (ValueError, TypeError):
        return None


def who_is_behind(stands: Sequence[Stand], unheard: Collection[str] = ()) -> str:
    """One sentence that names the rank that is behind, and where it stands.

    That is the one at the lowest step; among those at the same step one that can't go on, else the only one that
    stands at another place than all others, else the one that was not heard for longest.

    Args:
        stands: the ranks, in any order.
        unheard: hosts that have not answered.
    """
    without = f"; no answer from {', '.join(sorted(unheard))}" if unheard else ""
    if not stands:
        return f"no rank was found{without}"
    lowest = min(_step(stand) for stand in stands)
    last = [stand for stand in stands if _step(stand) == lowest]
    stuck = [stand for stand in last if stand.state or stand.failed]
    chosen = stuck or _odd_one(last) or last
    first = max(chosen, key=lambda stand: (stand.age_s or 0.0, -stand.rank))
    if len(chosen) == len(stands) > 1 and not stuck:
        who = f"{_all(len(stands), first)}; longest without a sign is {first.name}"
    elif len(stands) == 1:
        who = f"{first.name} is {_at(first)}"
    else:
        who = f"{first.name} is behind, {_at(first)}"
    return f"{who}: {_where(first)}{_also(chosen, first)}{without}"


def _step(stand: Stand) -> int:
    return -1 if stand.step is None else stand.step


def _odd_one(stands: Sequence[Stand]) -> list[Stand]:
    """The only one that stands where nobody else does, when the others all stand at one place."""
    places = Counter(stand.place for stand in stands if stand.place)
    if len(stands) < 3 or len(places) != 2 or sorted(places.values()) != [1, len(stands) - 1]:
        return []
    return [stand for stand in stands if places[stand.place] == 1]


def _all(count: int, stand: Stand) -> str:
    return f"all {count} ranks are {_at(stand)}"


def _at(stand: Stand) -> str:
    if stand.step is not None:
        return f"at step {stand.step}"
    return f"before its first step ({stand.phase})" if stand.phase else "where no step is known"


def _where(stand: Stand) -> str:
    if stand.failed:
        return f"it has failed and does not end ({stand.failed})"
    if stand.state:
        return ", ".join(filter(None, (f"it {stand.state}", stand.place)))
    return stand.place or "where it stands is not known"


def _also(chosen: Sequence[Stand], first: Stand) -> str:
    others = [stand for stand in chosen if stand is not first and (stand.state or stand.failed)]
    names = [stand.name for stand in sorted(others, key=lambda stand: stand.rank)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"; the same of {', '.join(names[:3])}{more}" if names else ""
