"""The state machine as a table and a drawing for people, made from the table that it runs by.

`python -m transom_hpc.tol.drawing docs/architecture.md` puts both into the page, between their marks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import get_args

from transom_hpc.tol.events import Event
from transom_hpc.tol.phases import AGAIN, LEADS, TABLE
from transom_hpc.tol.state import Phase

_BEGIN, _END = "<!-- drawn by transom_hpc.tol.drawing -->", "<!-- end -->"


def table() -> str:
    """Events by phases, in Markdown: the rule that answers, and nothing where nothing changes."""
    phases = [phase for phase in Phase if phase is not Phase.OVER]
    lines = [f"| | {' | '.join(phases)} |", f"| --- |{' --- |' * len(phases)}"]
    for kind in get_args(Event):
        rules = [TABLE[phase, kind] for phase in phases]
        lines.append(f"| `{kind.__name__}` | {' | '.join('' if rule == '-' else rule for rule in rules)} |")
    return "\n".join(lines)


def drawing() -> str:
    """The ways from phase to phase, as a Mermaid state diagram: an arrow names the events that may lead along it."""
    order = [*(str(phase) for phase in Phase), _CHOICE]
    ways: dict[tuple[str, str], list[str]] = {(_CHOICE, str(way)): [] for way in AGAIN}
    for (phase, kind), rule in TABLE.items():
        leads: list[str] = list(LEADS.get(rule, ()))
        if set(AGAIN) <= set(leads):
            leads = [*(way for way in leads if way not in AGAIN), _CHOICE]
        for to in leads:
            if to != phase:
                ways.setdefault((str(phase), str(to)), []).append(kind.__name__)
    lines = ["stateDiagram-v2", f"    state {_CHOICE} <<choice>>", f"    [*] --> {Phase.STARTING}"]
    for (source, to), kinds in sorted(ways.items(), key=lambda item: [order.index(name) for name in item[0]]):
        events = f": {', '.join(sorted(kinds))}" if kinds else ""
        lines.append(f"    {source} --> {to}{events}".replace("standing by", "standing_by"))
    return "\n".join([*lines, f"    {Phase.OVER} --> [*]"])


_CHOICE = "again"


def put_into(page: str) -> str:
    """A page with both in it, where its marks are.

    Raises:
        ValueError: it has no such marks.
    """
    text = f"{_BEGIN}\n\n{table()}\n\n```mermaid\n{drawing()}\n```\n\n{_END}"
    page, count = re.subn(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", lambda _: text, page, count=1, flags=re.DOTALL)
    if not count:
        raise ValueError(f"no marks {_BEGIN} ... {_END}")
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(put_into(path.read_text()))
