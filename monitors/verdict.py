"""What the sidecar says to whoever started it: typed messages, one JSON object a line, behind a marker.

Pure. The marker lets a reader tell our lines from what MPI and Slurm write on the same stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

import msgspec

MARKER = "@transom "
"""Every line of ours begins with it, perhaps behind a label that srun or MPI put before it."""

Severity: TypeAlias = Literal["watch", "act-at-checkpoint", "act"]
"""What a verdict asks for: look at it; act when the next checkpoint is committed; act now."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Every rank was heard, or the deadline for the first sign has passed.

    Attributes:
        hosts: those that were heard, in the order of their ranks.
        missing: those that were not.
    """

    hosts: tuple[str, ...]
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Behind:
    """The program rank that is furthest behind."""

    host: str
    rank: int


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the program is, from the heartbeats on all hosts that are heard; said every period.

    Attributes:
        ranks: program ranks that run.
        ended: program ranks whose process has ended.
        step_min: lowest finished step of all ranks; None while one has none.
        step_max: highest finished step.
        age_s: seconds since the oldest of the ranks' last signs of life.
        step_s: duration of the last step, the slowest rank's.
        loss: mean of the finite last losses.
        bad_losses: ranks whose last loss is NaN or infinite.
        saved_step: newest step known to be committed.
        stall_s: seconds that saving held up the program since its start.
        phase: what the rank furthest behind does, see `heartbeat.PHASES`.
        behind: that rank.
        hosts: hosts that are heard.
        bad_since: of the ranks whose last loss is bad, the first step since which none was finite; else None.
        bad_count: of those, how many losses each has given since then, the fewest.
        good_step: of those, the last step whose loss was finite, or that the program began from; the lowest.
    """

    ranks: int
    ended: int = 0
    step_min: int | None = None
    step_max: int | None = None
    age_s: float | None = None
    step_s: float | None = None
    loss: float | None = None
    bad_losses: int = 0
    saved_step: int | None = None
    stall_s: float | None = None
    phase: str | None = None
    behind: Behind | None = None
    hosts: int = 0
    bad_since: int | None = None
    bad_count: int = 0
    good_step: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A host is not well.

    Attributes:
        host: which.
        cause: "silent" (not heard), "missing" (never heard), "isolated" (the sidecar's own host is cut off).
        severity: what it asks for.
        evidence: one sentence for a person.
        readings: the last figures of that host, by name, see `reading.METRICS`.
    """

    host: str
    cause: str
    severity: Severity
    evidence: str
    readings: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a verdict said of a host no longer holds."""

    host: str
    cause: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Alone:
    """Rank 0 hears nobody. With two hosts it can't be known which of them is cut off.

    Attributes:
        hosts: how many sidecars there should be, this one included.
        for_s: seconds since the last of the others was heard.
    """

    hosts: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Replaced:
    """While this host was not heard, another one has spoken for the job: whoever reads this should stop.

    Attributes:
        by: the host that spoke.
    """

    by: str


@dataclass(frozen=True, slots=True)
class Bye:
    """The last line of a sidecar that leaves in order.

    Attributes:
        reason: why, in a few words.
    """

    reason: str


Message: TypeAlias = Ready | Progress | Verdict | Cleared | Alone | Replaced | Bye

_KINDS: dict[str, type[Message]] = {
    "ready": Ready,
    "progress": Progress,
    "verdict": Verdict,
    "cleared": Cleared,
    "alone": Alone,
    "replaced": Replaced,
    "bye": Bye,
}
_NAMES = {cls: kind for kind, cls in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class _Kind:
    kind: str


def format_line(message: Message) -> str:
    """Write a message as one line, marker first, newline last. Seconds and losses are rounded for people."""
    members = {item.name: _rounded(getattr(message, item.name)) for item in fields(message)}
    return MARKER + msgspec.json.encode({"kind": _NAMES[type(message)], **members}).decode() + "\n"


def parse_line(text: str) -> Message | None:
    """Read a line of the sidecar's output.

    Args:
        text: any line; what is before the marker is passed over, unknown members likewise.

    Returns:
        the message; None for every line that is not one of ours, or not whole.
    """
    at = text.find(MARKER)
    if at < 0:
        return None
    body = text[at + len(MARKER) :].strip()
    try:
        cls = _KINDS.get(msgspec.json.decode(body, type=_Kind).kind)
        if cls is None:
            return None
        message: Message = msgspec.json.decode(body, type=cls)
    except (msgspec.DecodeError, UnicodeError):
        return None
    return message


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
