"""A thread that runs errands one after the other, started once: starting a thread waits for it to come alive, and a
save must not wait for anything."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Errands:
    """A background thread with a queue.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None

    def send(self, errand: Callable[[], None]) -> None:
        """Have it run, after those sent before. It must not raise."""
        self._queue.put(errand)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def idle(self, timeout_s: float | None = None) -> bool:
        """Wait until everything sent so far has run; False where that took longer."""
        if self._thread is None:
            return True
        reached = threading.Event()
        self._queue.put(reached.set)
        return reached.wait(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Let it run what was sent, then end it; False where that took longer."""
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (errand := self._queue.get()) is not None:
            errand()
            del errand  # what it holds on to is big
