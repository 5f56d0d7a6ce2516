"""Hosts that are only processes of this machine: a slurmd each, with a port each (no root needed).

They share the machine's network, process tree and /dev/shm. What belongs to a host is found by its environment.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import processes
from transom_hpc.lab.account import Account, as_user
from transom_hpc.lab.hosts import here
from transom_hpc.lab.processes import SYSTEM_PATH, Process, call, wait_until
from transom_hpc.lab.record import LOGIN, MARK

HOST = "TRANSOM_LAB_HOST"  # in the environment of a host's daemons


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


class PlainHosts:
    """See the module.

    Args:
        state: the lab's folder.
        cluster: the cluster's name, which Slurm writes into the environment of every job.
    """

    def __init__(self, state: Path, cluster: str) -> None:
        self._state = state
        self._cluster = cluster

    def start(self, names: Iterable[str]) -> None:
        """Nothing to switch on: a host is what is spawned for it."""

    def enter(self, name: str, argv: Sequence[str], account: Account | None, cwd: Path | None) -> list[str]:
        del name  # all hosts look the same from inside
        if account is not None and os.geteuid() == 0:
            return [*as_user(account), *here(cwd, argv)]
        return here(cwd, argv)

    def spawn(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        detach = [
            "setsid",
            "-f",
            "/bin/sh",
            "-c",
            f'umask 022; exec "$@" >>{shlex.quote(str(log))} 2>&1 </dev/null',
            "sh",
            *argv,
        ]
        call(detach, env={"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", MARK: str(self._state), HOST: name, **env})

    def is_alive(self) -> bool:
        return bool(processes.marked(MARK, str(self._state)))

    def state(self, name: str) -> str:
        daemons = self._daemons(name)
        if not daemons:
            return "crashed"
        stopped = [facts.state == "T" for p in daemons if (facts := processes.look(p.pid))]
        return "frozen" if stopped and all(stopped) else "up"

    def crash(self, name: str) -> None:
        def all_gone() -> bool:
            mine = self._all(name)
            processes.send(mine, signal.SIGKILL)
            return not mine

        wait_until(all_gone, f"host {name} is not gone", 10)

    def freeze(self, name: str) -> None:
        if not processes.stop_all(lambda: self._all(name)):
            raise LabError(f"not all processes of host {name} stand still", host=name)

    def thaw(self, name: str) -> None:
        processes.send(self._all(name), signal.SIGCONT)

    def cut(self, name: str) -> None:
        raise UsageError(f"can't cut {name}: without root the hosts of a lab have no network of their own", host=name)

    def slow(self, name: str, kbit_s: int) -> None:
        raise UsageError(
            f"can't slow {name} to {kbit_s} kbit/s: without root a host has no network of its own", host=name
        )

    def mend(self, name: str) -> None:
        raise UsageError(f"can't mend {name}: without root the hosts of a lab have no network of their own", host=name)

    def end(self) -> None:
        def all_gone() -> bool:
            mine = processes.descendants(processes.marked(MARK, str(self._state))) | self._of_jobs(None)
            processes.send(mine, signal.SIGKILL)
            return not mine

        wait_until(all_gone, "processes of the lab are not gone", 20)

    def _daemons(self, name: str) -> list[Process]:
        return [p for p in processes.marked(MARK, str(self._state)) if processes.environment(p.pid).get(HOST) == name]

    def _all(self, name: str) -> set[Process]:
        """A host's daemons, what descends from them, and the processes of jobs on it."""
        found = processes.descendants(self._daemons(name))
        return found if name == LOGIN else found | self._of_jobs(name)

    def _of_jobs(self, name: str | None) -> set[Process]:
        """The processes of this cluster's jobs, on one host or on all."""
        found = set()
        for facts in processes.everyone():
            env = processes.environment(facts.process.pid)
            host = env.get("SLURMD_NODENAME")
            if host and env.get("SLURM_CLUSTER_NAME") == self._cluster and name in (None, host):
                found.add(facts.process)
        return found
