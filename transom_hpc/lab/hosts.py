"""Hosts that are sets of namespaces: own network, name, process tree, /dev/shm and /run each (needs root).

What a host can suffer is here too: power loss, a freeze, a pulled cable.
"""

from __future__ import annotations

import hashlib
import shlex
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import processes
from transom_hpc.lab.account import Account, as_user
from transom_hpc.lab.network import MASK, Switch, remove_uplink
from transom_hpc.lab.processes import SYSTEM_PATH, Process, call, wait_until
from transom_hpc.lab.reach import Cover, script
from transom_hpc.lab.record import LOGIN, MARK

LOCAL = Path("/run/node")  # each host's own, for all its users
SWITCH = "switch"  # no host can have this name: hosts are login and n1, n2, …


class Hosts(Protocol):
    """The hosts of a lab, of either kind."""

    def start(self, names: Iterable[str]) -> None:
        """Switch hosts on; no daemon runs on them yet, except munged."""

    def enter(self, name: str, argv: Sequence[str], account: Account | None, cwd: Path | None) -> list[str]:
        """The command line that runs `argv` on a host, as an account, or as the daemons' user if None."""

    def spawn(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """Start a daemon on a host. It lives until the host ends."""

    def is_alive(self) -> bool:
        """Whether anything of the lab still works."""

    def state(self, name: str) -> str:
        """One of "up", "crashed", "frozen", "cut", "slow"."""

    def crash(self, name: str) -> None:
        """Take its power away."""

    def freeze(self, name: str) -> None:
        """Stop everything on it, without ending it."""

    def thaw(self, name: str) -> None:
        """Undo `freeze`."""

    def cut(self, name: str) -> None:
        """Cut it off the network."""

    def slow(self, name: str, kbit_s: int) -> None:
        """Let its cable carry no more than so much (1000 bits a second), each way."""

    def mend(self, name: str) -> None:
        """Undo `cut` and `slow`."""

    def end(self) -> None:
        """End all processes of all hosts, and what they leave on the machine's network."""


def here(cwd: Path | None, argv: Sequence[str]) -> list[str]:
    """A command line that runs `argv` in a folder, or in the home folder where that can't be entered."""
    if cwd is None:
        return list(argv)
    enter = 'cd "$1" 2>/dev/null || cd "$HOME" || exit 125; shift; exec "$@"'
    return ["/bin/sh", "-c", enter, "sh", str(cwd), *argv]


class NamespaceHosts:
    """See the module. Everything about a host is asked of the kernel; only its first process is written down.

    Args:
        state: the lab's folder.
        subnet: the first three numbers of its network.
        addresses: host name to address.
    """

    def __init__(self, state: Path, subnet: str, addresses: Mapping[str, str]) -> None:
        self._state = state
        self._subnet = subnet
        self._addresses = addresses

    @property
    def uplink(self) -> str:
        """Name of the machine's network interface into this lab."""
        return "lab" + hashlib.sha256(str(self._state).encode()).hexdigest()[:10]

    def start(self, names: Iterable[str]) -> None:
        names = list(names)
        if self._first(SWITCH) is None:
            self._launch(SWITCH, ["unshare", "--net", "sleep", "infinity"])
            self._switch().start(self._subnet)
        for name in names:
            (self._state / "hosts" / f"{name}.ready").unlink(missing_ok=True)
            isolate = [
                "unshare",
                "--net",
                "--mount",
                "--uts",
                "--ipc",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
            ]
            self._launch(name, [*isolate, "/bin/bash", str(self._program(name))])
        for name in names:
            outer = self._outer(name)
            if outer is not None:
                self._switch().plug(name, outer.pid)
        for name in names:
            ready = self._state / "hosts" / f"{name}.ready"
            wait_until(ready.exists, f"host {name} is not up", 15, self._log(name))

    def _launch(self, name: str, argv: list[str]) -> None:
        """Start a first process, written down before it can be lost, and wait until its namespaces exist."""
        note = self._state / "hosts" / f"{name}.pid"
        note.unlink(missing_ok=True)
        # proc(5): the start time is the 20th field after the command's name.
        write = 'read -r stat < /proc/$$/stat; fields=(${stat##*) }); echo "$$ ${fields[19]}" > "$NOTE"; exec "$@"'
        env = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", MARK: str(self._state), "NOTE": str(note)}
        log = shlex.quote(str(self._log(name)))
        shell = ["setsid", "-f", "/bin/bash", "-c", f"umask 022; exec >>{log} 2>&1 </dev/null; {write}", "bash", *argv]
        call(shell, env=env)
        mine = Path("/proc/self/ns/net").readlink()

        def separate() -> bool:
            outer = self._outer(name)
            try:
                return outer is not None and Path(f"/proc/{outer.pid}/ns/net").readlink() != mine
            except OSError:
                return False

        wait_until(separate, f"host {name} has no namespaces of its own", 10, self._log(name))

    def write_scripts(self, names: Iterable[str], covers: Sequence[Cover]) -> None:
        """Write what the first process of each host does, once: a host that boots again is the host that it was.

        Args:
            covers: folders to open for the user in every host.
        """
        for name in names:
            self._program(name).write_text(self._script(name, covers))

    def _program(self, name: str) -> Path:
        return self._state / "hosts" / f"{name}.sh"

    def _script(self, name: str, covers: Sequence[Cover]) -> str:
        """What the first process of a host does: arrange its world, then collect the dead."""
        state = shlex.quote(str(self._state))
        uncover = "".join(script(cover, self._state / "stage") for cover in covers)
        return (
            f"# First process of host {name}.\nset -eu\nhostname {name}\n{uncover}"
            f"mount -t tmpfs -o mode=1777,nosuid,nodev shm /dev/shm\n"
            f"mount -t tmpfs -o mode=755,nosuid,nodev run /run\n"
            f"mkdir -m 1777 {LOCAL} /run/lock\nmkdir -m 755 /run/munge /run/slurm\n"
            # Each host has a munged of its own at one path; the login host's is the one that the machine sees.
            f"{'' if name == LOGIN else f'mount --bind /run/munge {state}/munge'}\n"
            f"mount --bind {state}/etc-hosts /etc/hosts\n"
            # No name server answers here; without this every unknown name costs its timeout.
            f"[ ! -f /etc/resolv.conf ] || mount --bind {state}/empty /etc/resolv.conf\n"
            # Open MPI's session folder: hosts share /tmp.
            f"[ ! -f /etc/openmpi/openmpi-mca-params.conf ] || "
            f"mount --bind {state}/openmpi.conf /etc/openmpi/openmpi-mca-params.conf\n"
            f"for _ in $(seq 500); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.02; done\n"
            f"ip address add {self._addresses[name]}/{MASK} dev eth0\n"
            f"ip link set eth0 up\nip link set lo up\n"
            f": > {state}/hosts/{name}.ready\n"
            f"set +e\nwhile :; do sleep infinity & wait $!; done\n"
        )

    def enter(self, name: str, argv: Sequence[str], account: Account | None, cwd: Path | None) -> list[str]:
        first = self._first(name)
        if first is None:
            raise UsageError(f"host {name} is crashed; `boot` starts it again", host=name)
        entrance = ["nsenter", f"--target={first.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        become = as_user(account) if account else ["setpriv", "--pdeathsig=KILL", "--"]
        return [*entrance, *become, *here(cwd, argv)]

    def spawn(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        first = self._first(name)
        if first is None:
            raise LabError(f"host {name} ended while it started", host=name, log=processes.tail(self._log(name)))
        entrance = ["nsenter", f"--target={first.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]
        detach = [
            "setsid",
            "-f",
            "/bin/sh",
            "-c",
            f'umask 022; exec "$@" >>{shlex.quote(str(log))} 2>&1 </dev/null',
            "sh",
            *argv,
        ]
        call([*entrance, *detach], env={"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", MARK: str(self._state), **env})

    def is_alive(self) -> bool:
        return self._outer(SWITCH) is not None and any(self._first(name) for name in self._addresses)

    def state(self, name: str) -> str:
        first = self._first(name)
        if first is None:
            return "crashed"
        facts = processes.look(first.pid)
        if facts is not None and facts.state == "T":
            return "frozen"
        switch = self._switch()
        if not switch.cables().get(name):
            return "cut"
        return "slow" if name in switch.slowed() else "up"

    def crash(self, name: str) -> None:
        first, outer = self._first(name), self._outer(name)
        # The cable first: a host without power says no goodbye, and closing its sockets would say it.
        self._switch().cut(name)
        ended = [process for process in (first, outer) if process]
        processes.send(ended, signal.SIGKILL)
        wait_until(lambda: not any(map(processes.is_alive, ended)), f"host {name} is not gone", 10)

    def freeze(self, name: str) -> None:
        first = self._first(name)
        if first is not None and not processes.stop_all(lambda: processes.same_pid_namespace(first.pid)):
            raise LabError(f"not all processes of host {name} stand still", host=name)

    def thaw(self, name: str) -> None:
        first = self._first(name)
        if first is not None:
            processes.send(processes.same_pid_namespace(first.pid), signal.SIGCONT)

    def cut(self, name: str) -> None:
        self._switch().cut(name)

    def slow(self, name: str, kbit_s: int) -> None:
        first = self._first(name)
        if first is not None:
            self._switch().slow(name, first.pid, kbit_s)

    def mend(self, name: str) -> None:
        self._switch().mend(name)
        if name in self._switch().slowed():
            self.slow(name, 0)

    def end(self) -> None:
        def all_gone() -> bool:
            mine = processes.marked(MARK, str(self._state))
            processes.send(mine, signal.SIGKILL)
            return not mine

        wait_until(all_gone, "processes of the lab are not gone", 20)
        remove_uplink(self.uplink)

    def _log(self, name: str) -> Path:
        return self._state / "logs" / f"host-{name}.log"

    def _switch(self) -> Switch:
        outer = self._outer(SWITCH)
        if outer is None:
            raise LabError("the lab's switch is gone; `transom lab down` clears the rest")
        return Switch(outer.pid, self.uplink)

    def _outer(self, name: str) -> Process | None:
        """The process that was started for a host, seen from the machine; None once it is gone."""
        try:
            pid, start = (self._state / "hosts" / f"{name}.pid").read_text().split()
        except (OSError, ValueError):
            return None
        process = Process(int(pid), int(start))
        return process if processes.is_alive(process) else None

    def _first(self, name: str) -> Process | None:
        """Process 1 of a host, seen from the machine. (A switch has no process tree of its own.)"""
        outer = self._outer(name)
        if outer is None or name == SWITCH:
            return outer
        return next(iter(processes.children(outer.pid)), None)
