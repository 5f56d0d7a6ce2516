"""One of Slurm's two central daemons, and what can happen to it: it dies, it stands still, it is started again."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from transom_hpc.base.errors import UsageError
from transom_hpc.lab import processes
from transom_hpc.lab.processes import Process, wait_until
from transom_hpc.lab.record import MARK

DaemonName = Literal["slurmctld", "slurmdbd"]


class Daemon:
    """slurmctld or slurmdbd of a lab. Get it with `Lab.daemon`.

    Args:
        name: which.
        state: the lab's folder.
        begin: starts it and waits until it answers.
    """

    def __init__(self, name: DaemonName, state: Path, begin: Callable[[], None]) -> None:
        self.name = name
        self._state = state
        self._begin = begin

    @property
    def state(self) -> str:
        """One of "up", "dead", "still"."""
        facts = [facts for process in self._processes() if (facts := processes.look(process.pid))]
        if not facts:
            return "dead"
        return "still" if all(one.state in "Tt" for one in facts) else "up"

    def kill(self) -> None:
        """End it with SIGKILL: it saves nothing and says nothing."""

        def gone() -> bool:
            mine = self._processes()
            processes.send(mine, signal.SIGKILL)
            return not mine

        wait_until(gone, f"{self.name} is not gone", 10)

    def pause(self) -> None:
        """Let it stand still: who asks it is connected, and hears nothing."""
        processes.send(self._processes(), signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `pause`."""
        processes.send(self._processes(), signal.SIGCONT)

    def start(self) -> None:
        """Start it again after `kill`, and wait until it answers.

        Raises:
            UsageError: it is not dead.
            LabError: it did not come up.
        """
        if (now := self.state) != "dead":
            raise UsageError(f"{self.name} is {now} already")
        self._begin()

    def heal(self) -> None:
        """Let it work again, whatever was done to it.

        Raises:
            LabError: it did not come up.
        """
        self.go_on()
        if self.state == "dead":
            self._begin()

    def _processes(self) -> list[Process]:
        return [one for one in processes.marked(MARK, str(self._state)) if _name(one.pid) == self.name]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
