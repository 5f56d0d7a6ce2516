"""What servers and the program tell of memory, for the journal, for people, and for the state machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transom_hpc.tol.events import Event, Restored


def tell(news: Mapping[str, Any], record: Callable[..., None], say: Callable[[str], None]) -> list[Event]:
    """Write down one piece of news: copies of hosts' memory, what was brought after a loss, where a restore came from.

    Args:
        news: `kind` and facts, as the keeper reads them.
        record: writes into the journal: record(kind, **facts).
        say: writes a line for people.

    Returns:
        The events that it is.
    """
    match news["kind"]:
        case "copies":
            problem, host = str(news.get("problem", "")), str(news.get("host", ""))
            record("copies", problem=problem, of=host)
            say(problem or f"copies of {host} are made again")
        case "gathered":
            record("gathered", **{name: news.get(name) for name in ("steps", "moved", "bytes", "seconds", "lost")})
            spoilt = news.get("spoilt") or {}
            for text in [*news.get("lost", ()), *(f"{place}: {why}" for place, why in spoilt.items())]:
                record("copies", problem=text, of="")
                say(text)
        case "restored":
            record("restored", **{name: news.get(name) for name in ("step", "source")})
            return [Restored(int(news.get("step") or 0))]
    return []
