"""A lab as a whole: bringing it up, finding it again, running things in it, hurting it, taking it down."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import account, ground, network, record
from transom_hpc.lab.controller import Daemons, Programs, find_programs
from transom_hpc.lab.daemon import Daemon, DaemonName
from transom_hpc.lab.hosts import Hosts
from transom_hpc.lab.processes import SYSTEM_PATH, call
from transom_hpc.lab.record import LOGIN, Record
from transom_hpc.lab.status import HostStatus, LabStatus


def _silent(_: str) -> None:
    pass


class Lab:
    """One lab that is up. Get it with `Lab.up` or `Lab.find`.

    Args:
        state: its folder.
        facts: what its record says.
    """

    def __init__(self, state: Path, facts: Record) -> None:
        self._state = state
        self._facts = facts

    @classmethod
    def up(
        cls,
        name: str = "lab",
        nodes: int = 5,
        slurmd_timeout: int = 30,
        user: str | None = None,
        say: Callable[[str], None] = _silent,
    ) -> Lab:
        """Start a lab, after clearing what a dead one of that name left.

        Args:
            name: of a-z, 0-9 and -; several labs can be up, each with its own.
            nodes: compute hosts, n1 to nN; `login` comes on top.
            slurmd_timeout: seconds of silence after which Slurm sets a host down.
            user: whose jobs it runs. By default who called sudo, or an account made for it; without root oneself.
            say: told in short lines what happens.

        Raises:
            UsageError: it is up already, or something that was asked for can't be.
            SlurmMissing: there is no Slurm on this machine.
            LabError: it did not come up; nothing is left of it. Its fact `log` has the words of the part that failed.
        """
        record.check_name(name)
        if not 1 <= nodes <= network.MOST_NODES:
            raise UsageError(f"a lab has 1 to {network.MOST_NODES} nodes; {nodes} is not")
        if not 5 <= slurmd_timeout <= 65533:
            raise UsageError(f"SlurmdTimeout is 5 to 65533 seconds; {slurmd_timeout} is not")
        programs = find_programs()
        with contextlib.ExitStack() as held:
            with record.lock_root(ground.LOCK_S) as root:
                state = root / name
                ground.clear_dead(state, say)
                facts = ground.claim(state, nodes, slurmd_timeout, user, programs)
                held.enter_context(record.lock(state, 0))
            for notice in facts.notices:
                say(notice)
            lab = cls(state, facts)
            try:
                lab._start(programs, say)
            except BaseException:
                try:
                    ground.end_and_erase(state)
                except LabError as error:
                    say(f"could not clear it all: {error}")
                raise
        return lab

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """Find a lab that is up.

        Raises:
            UsageError: there is none of that name, or only what a dead one left.
        """
        state = record.locate(name)
        if state is None:
            raise UsageError(f"no lab {name!r} is up; `transom lab up` starts one")
        facts = record.load(state)
        if facts is None or not facts.ready or facts.boot != record.boot_id():
            raise UsageError(f"lab {name!r} is not whole; `transom lab down` clears what is left of it")
        return cls(state, facts)

    @property
    def name(self) -> str:
        """Its name, which is also the name of the cluster."""
        return self._facts.name

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of its compute hosts. `login` is one more host, without slurmd."""
        return self._facts.nodes

    @property
    def user(self) -> str:
        """Whose jobs it runs."""
        return self._facts.user

    @property
    def is_isolated(self) -> bool:
        """Whether each host has network, process tree and memory of its own (it was started by root)."""
        return self._facts.kind == ground.NAMESPACES

    @property
    def shared(self) -> Path:
        """A folder that the user can write, at the same path on all hosts and outside."""
        return self._state / "work"

    @property
    def slurm_conf(self) -> Path:
        """The lab's slurm.conf, for Slurm's commands on this machine (SLURM_CONF)."""
        return self._state / "slurm.conf"

    def down(self) -> None:
        """End it and remove all that is left of it.

        Raises:
            LabError: something could not be ended or removed.
        """
        self._check_owner()
        ground.take_down(self.name)

    def argv(self, host: str, argv: Sequence[str], *, root: bool = False, cwd: Path | None = None) -> list[str]:
        """The command line that runs a command on a host.

        Raises:
            UsageError: no such host, or it can't answer.
        """
        self._check_owner()
        self._check_host(host)
        hosts = self._hosts()
        if hosts.state(host) == "frozen":
            raise UsageError(f"host {host} is frozen; `thaw` lets it go on", host=host)
        who = None if root else account.lookup(self.user)
        return hosts.enter(host, argv, who, cwd or (None if root else self.shared))

    def environment(self, *, root: bool = False) -> dict[str, str]:
        """The environment of a fresh login on a host of the lab."""
        who = account.current() if root else account.lookup(self.user)
        own = {name: os.environ[name] for name in ("TERM", "TZ", "COLORTERM") if name in os.environ}
        path = f"{Path(sys.prefix) / 'bin'}:{SYSTEM_PATH}" if sys.prefix != sys.base_prefix else SYSTEM_PATH
        return {**own, **who.environment(), "PATH": path, "LANG": "C.UTF-8", "SLURM_CONF": str(self.slurm_conf)}

    def popen(
        self,
        host: str,
        argv: Sequence[str],
        *,
        root: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host; the arguments are those of `run`. It ends when its Popen is killed."""
        return subprocess.Popen(
            self.argv(host, argv, root=root, cwd=cwd),
            env=self.environment(root=root) | dict(env or {}),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def run(
        self,
        host: str,
        argv: Sequence[str],
        *,
        root: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as at a fresh login there.

        Args:
            host: `login`, or one of `hosts`.
            argv: the command.
            root: as the daemons' user instead of the lab's user.
            env: variables to add.
            cwd: where; by default `shared`. The home folder where that can't be entered.
            timeout: seconds until it is killed.
            check: whether an exit code other than 0 is an error.

        Raises:
            UsageError: no such host, or it can't answer.
            LabError: it failed, or did not end in time. Facts: command, code.
        """
        words = " ".join(argv)
        process = self.popen(host, argv, root=root, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                message = f"`{words}` on {host} did not end within {timeout:g} s"
                raise LabError(message, lab=self.name, host=host, command=list(argv)) from error
            raise
        if check and process.returncode != 0:
            last = (err.strip() or out.strip() or "no output").splitlines()[-1]
            raise LabError(
                f"`{words}` on {host} failed ({process.returncode}): {last}",
                lab=self.name,
                host=host,
                command=list(argv),
                code=process.returncode,
                log=err.strip(),
            )
        return subprocess.CompletedProcess(list(argv), process.returncode, out, err)

    def crash(self, host: str) -> None:
        """Take a host's power away: nothing says goodbye, and what was in its memory is gone.

        Raises:
            UsageError: no such host, or it is crashed already.
        """
        with self._change(host) as hosts:
            if hosts.state(host) == "crashed":
                raise UsageError(f"host {host} is crashed already", host=host)
            hosts.crash(host)

    def freeze(self, host: str) -> None:
        """Stop everything on a host; its network card still answers.

        Raises:
            UsageError: no such host, or it is crashed or frozen.
        """
        with self._change(host) as hosts:
            if (state := hosts.state(host)) in ("crashed", "frozen"):
                raise UsageError(f"host {host} is {state} already", host=host)
            hosts.freeze(host)

    def thaw(self, host: str) -> None:
        """Undo `freeze`.

        Raises:
            UsageError: no such host, or it is not frozen.
        """
        with self._change(host) as hosts:
            if (state := hosts.state(host)) != "frozen":
                raise UsageError(f"host {host} is not frozen: it is {state}", host=host)
            hosts.thaw(host)

    def cut(self, host: str) -> None:
        """Cut a host off the network; what runs on it goes on.

        Raises:
            UsageError: no such host, it is crashed or cut, or the lab's hosts have no network of their own.
        """
        with self._change(host) as hosts:
            if (state := hosts.state(host)) in ("crashed", "cut"):
                raise UsageError(f"host {host} is {state} already", host=host)
            hosts.cut(host)

    def slow(self, host: str, kbit_s: int) -> None:
        """Let a host's cable carry no more than so much, each way.

        Args:
            host: which.
            kbit_s: 1000 bits a second.

        Raises:
            UsageError: no such host, it is crashed or cut, too little to speak of, or the lab's hosts have no network
                of their own.
        """
        if kbit_s < 1:
            raise UsageError(f"{kbit_s} kbit a second is no cable; `cut` takes it away", host=host)
        with self._change(host) as hosts:
            if (state := hosts.state(host)) in ("crashed", "cut"):
                raise UsageError(f"host {host} is {state}", host=host)
            hosts.slow(host, kbit_s)

    def mend(self, host: str) -> None:
        """Undo `cut` and `slow`.

        Raises:
            UsageError: no such host, it is crashed, or the lab's hosts have no network of their own.
        """
        with self._change(host) as hosts:
            if hosts.state(host) == "crashed":
                raise UsageError(f"host {host} is crashed; `boot` starts it again", host=host)
            hosts.mend(host)

    def boot(self, host: str) -> None:
        """Start a host again, whatever is wrong with it, and wait until Slurm counts on it.

        A healthy one is left alone.

        Raises:
            UsageError: no such host.
            LabError: it did not come up.
        """
        with self._change(host) as hosts:
            daemons = self._daemons(hosts, find_programs())
            state = hosts.state(host)
            if state == "up" and (
                host == LOGIN or self._slurm_states().get(host, "").startswith(("idle", "alloc", "mix"))
            ):
                return
            if state != "crashed":
                hosts.crash(host)
            hosts.start([host])
            if self.is_isolated or host == LOGIN:
                daemons.start_munged((host,))
            if host == LOGIN:
                daemons.start_database()
                daemons.start_controller()
            else:
                daemons.start_slurmd((host,))

    def daemon(self, name: DaemonName) -> Daemon:
        """slurmctld or slurmdbd, to do something to it.

        Raises:
            UsageError: this lab has no accounting, so no slurmdbd.
        """
        self._check_owner()
        if name == "slurmdbd" and not self._facts.accounting:
            raise UsageError(f"lab {self.name!r} has no accounting", lab=self.name)
        daemons = self._daemons(self._hosts(), find_programs())
        begin = daemons.start_controller if name == "slurmctld" else daemons.start_slurmdbd
        return Daemon(name, self._state, begin)

    def status(self) -> LabStatus:
        """How the lab and its hosts are; what Slurm believes is "unknown" where it does not answer."""
        facts = self._facts
        slurm = self._slurm_states()
        hosts = self._hosts() if self._owns() else None
        return LabStatus(
            name=facts.name,
            kind=facts.kind,
            user=facts.user,
            version=facts.version,
            slurmd_timeout_s=facts.slurmd_timeout_s,
            accounting=facts.accounting,
            state=self._state,
            shared=self.shared,
            notices=facts.notices,
            hosts=tuple(
                HostStatus(
                    name=name,
                    address=facts.addresses[name],
                    state=hosts.state(name) if hosts else "unknown",
                    slurm="controller" if name == LOGIN else slurm.get(name, "unknown"),
                )
                for name in (LOGIN, *facts.nodes)
            ),
        )

    def _slurm_states(self) -> dict[str, str]:
        """What sinfo says of each host, asked from this machine; empty where Slurm does not answer."""
        env = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", "SLURM_CONF": str(self.slurm_conf)}
        try:
            text = call(["sinfo", "-h", "-N", "-o", "%N %T"], timeout_s=5, env=env)
        except LabError:
            return {}
        return dict(line.split()[:2] for line in text.splitlines() if len(line.split()) == 2)

    def _start(self, programs: Programs, say: Callable[[str], None]) -> None:
        hosts = self._hosts()
        daemons = self._daemons(hosts, programs)
        daemons.write_configuration()
        everyone = (LOGIN, *self.hosts)
        hosts.start(everyone)
        if self.is_isolated:
            say(f"{len(self.hosts)} hosts and login are up, each with its own network and processes")
        daemons.start_munged(everyone if self.is_isolated else (LOGIN,))
        if self._facts.accounting:
            daemons.start_database()
            daemons.register(self.user)
            say("accounting is up")
        daemons.start_controller()
        say(f"{self._facts.version} answers")
        daemons.start_slurmd(self.hosts)
        say(f"{len(self.hosts)} nodes are ready for jobs of user {self.user}")
        self._facts = dataclasses.replace(self._facts, ready=True)
        record.save(self._state, self._facts)

    def _hosts(self) -> Hosts:
        return ground.hosts_of(self._state, self._facts)

    def _daemons(self, hosts: Hosts, programs: Programs) -> Daemons:
        def ask(argv: list[str], seconds: float) -> str:
            return self.run(LOGIN, argv, root=True, cwd=Path("/"), timeout=seconds).stdout

        return Daemons(self._state, hosts, programs, ground.plan_of(self._state, self._facts, programs), ask)

    def _owns(self) -> bool:
        return self._state.stat().st_uid == os.geteuid()

    def _check_owner(self) -> None:
        if not self._owns():
            raise UsageError(f"lab {self.name!r} was started by root; use sudo", lab=self.name)

    def _check_host(self, host: str) -> None:
        if host not in (LOGIN, *self.hosts):
            span = self.hosts[0] if len(self.hosts) == 1 else f"{self.hosts[0]} to {self.hosts[-1]}"
            raise UsageError(f"no host {host!r} in lab {self.name!r}: it has {LOGIN} and {span}", host=host)

    def _change(self, host: str) -> _Change:
        self._check_owner()
        self._check_host(host)
        return _Change(self._state, self._hosts())


class _Change:
    """Holds the lab's lock while one of its hosts is changed."""

    def __init__(self, state: Path, hosts: Hosts) -> None:
        self._lock = record.lock(state, ground.LOCK_S)
        self._hosts = hosts

    def __enter__(self) -> Hosts:
        self._lock.__enter__()
        return self._hosts

    def __exit__(self, *error: Any) -> None:
        self._lock.__exit__(*error)
