"""Being told to end, by a closed terminal or `timeout`: what a command has started is taken down first."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_ENDS = (signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, with 128 + signal, so that `finally` blocks run.

    Only the first counts: `timeout` sends two, and the second must not stop the tidying. A signal that is ignored, as
    under nohup, stays ignored.
    """
    before = {number: signal.getsignal(number) for number in _ENDS}

    def leave(number: int, _frame: FrameType | None) -> None:
        for each in _ENDS:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
