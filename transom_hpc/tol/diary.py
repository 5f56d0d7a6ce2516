"""What a supervisor tells people: entries in the journal, and lines in the job's output.

A full disk, or one that does not answer, never ends a run: what can't be written is kept, or at worst lost.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Journal


class Diary:
    """One writer's words.

    Args:
        journal: its file; None as long as there is none: nothing is recorded then.
        output: file descriptor of the job's output.
    """

    def __init__(self, journal: Journal | None = None, output: int = 1) -> None:
        self._journal = journal
        self._output = output
        self._failing = False

    def record(self, attempt: Attempt, kind: str, **facts: Any) -> None:
        """Write an entry, or keep it until there is room again."""
        if self._journal is None:
            return
        try:
            self._journal.append(attempt, kind, **facts)
        except OSError as error:
            if not self._failing:
                self.say(f"the journal can't be written ({error.strerror}); the run goes on, and entries are kept")
            self._failing = True
        else:
            self._failing = False

    def say(self, text: str) -> None:
        """Write a line into the job's output, past any buffer: one that is left full would fail again at the exit."""
        with suppress(OSError):
            os.write(self._output, f"transom: {text}\n".encode())

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()
