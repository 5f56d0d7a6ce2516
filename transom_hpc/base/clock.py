"""Time, passed in. Decisions never read a clock themselves; tests pass one that stands still."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import Protocol


class Clock(Protocol):
    """What a part needs of time."""

    def now(self) -> float:
        """Seconds on a clock that never jumps; only differences on one host mean anything."""

    def wall(self) -> datetime:
        """The date and time, in UTC, for people. Never used for order."""

    def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> datetime:
        return datetime.now(timezone.utc)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
