"""The daemons of a lab: munged, mariadbd, slurmdbd and slurmctld on the login host, slurmd on the others.

Owns how each is started and how it is known to be ready; where they run is the business of the hosts.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transom_hpc.base.errors import LabError, SlurmMissing
from transom_hpc.lab import config
from transom_hpc.lab.hosts import Hosts
from transom_hpc.lab.processes import SYSTEM_PATH, call, wait_until
from transom_hpc.lab.record import LOGIN, MARK

PATIENCE_S = 60  # for a daemon to come up on a busy machine; usually a second or two
INSTALL_S = 60


@dataclass(frozen=True, slots=True)
class Node:
    """One host as Slurm sees it: its state in Slurm's words, in small letters, and when its slurmd started."""

    state: str
    slurmd_start: str

    @property
    def is_usable(self) -> bool:
        """Whether Slurm hears from the host and has not set it down."""
        base = re.split(r"[^a-z]", self.state)[0]
        return "*" not in self.state and "not_responding" not in self.state and base not in ("down", "unknown", "fail")


@dataclass(frozen=True, slots=True)
class Programs:
    """Where this machine has the programs of a lab; None for what is optional and missing."""

    slurmctld: str
    slurmd: str
    munged: str | None
    slurmdbd: str | None
    mariadbd: str | None
    install_db: str | None
    version: str
    pmix: bool

    @property
    def can_account(self) -> bool:
        """Whether sacct can work."""
        return bool(self.slurmdbd and self.mariadbd and self.install_db)


def find_programs() -> Programs:
    """Look for the programs of a lab.

    Raises:
        SlurmMissing: no slurmctld, slurmd or client commands. Facts: command.
    """

    def find(*names: str) -> str | None:
        paths = (shutil.which(name, path=os.environ.get("PATH", "") + ":" + SYSTEM_PATH) for name in names)
        return next((path for path in paths if path), None)

    def must(name: str) -> str:
        path = find(name)
        if path is None:
            raise SlurmMissing(
                f"no {name} on this machine; scripts/setup, or `apt-get install slurm-wlm`", command=name
            )
        return path

    for name in ("sinfo", "scontrol", "sbatch", "srun"):
        must(name)
    slurmctld = must("slurmctld")
    plugins = [p for p in Path("/usr").glob("lib*/**/slurm*/mpi_pmix.so") if p.is_file()]
    return Programs(
        slurmctld=slurmctld,
        slurmd=must("slurmd"),
        munged=find("munged"),
        slurmdbd=find("slurmdbd"),
        mariadbd=find("mariadbd"),
        install_db=find("mariadb-install-db", "mysql_install_db"),
        version=call([slurmctld, "-V"]).strip(),
        pmix=bool(plugins),
    )


class Daemons:
    """Starts a lab's daemons and waits for them.

    Args:
        state: the lab's folder.
        hosts: where they run.
        programs: what this machine has.
        plan: what the configuration says.
        run: runs a client command on the login host as the daemons' user, with (argv, deadline in seconds).
    """

    def __init__(
        self, state: Path, hosts: Hosts, programs: Programs, plan: config.Plan, run: Callable[[list[str], float], str]
    ) -> None:
        self._state = state
        self._hosts = hosts
        self._programs = programs
        self._plan = plan
        self._run = run
        self._env = {"SLURM_CONF": str(state / "slurm.conf")}

    def write_configuration(self) -> None:
        """Write all configuration files, and the key that hosts share."""
        plan, state = self._plan, self._state
        for name, text, mode in (
            ("slurm.conf", config.slurm_conf(plan), 0o644),
            ("cgroup.conf", config.cgroup_conf(plan), 0o644),
            ("mpi.conf", config.mpi_conf(plan), 0o644),
            ("slurmdbd.conf", config.slurmdbd_conf(plan), 0o600),
        ):
            if text:
                (state / name).write_text(text)
                (state / name).chmod(mode)
        key = os.open(state / "munge.key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(key, "wb") as file:
            file.write(secrets.token_bytes(128))

    def start_munged(self, names: tuple[str, ...]) -> None:
        """Start munged on hosts: whoever talks to Slurm there proves with it who they are."""
        if self._programs.munged is None or self._plan.munge_socket is None:
            return
        socket = self._plan.munge_socket
        for name in names:
            own = self._state / "hosts" / name
            own.mkdir(exist_ok=True)
            argv = [self._programs.munged, "--foreground", "--force", f"--socket={socket}", "--num-threads=2"]
            argv += [f"--key-file={self._state / 'munge.key'}", f"--pid-file={own / 'munged.pid'}"]
            argv += [f"--seed-file={own / 'munged.seed'}", f"--log-file={own / 'munged.log'}"]
            self._hosts.spawn(name, argv, self._state / "logs" / f"munged-{name}.log", {})

    def start_database(self) -> None:
        """Start the private database and slurmdbd, and enter the cluster there."""
        programs, state = self._programs, self._state
        if not self._plan.accounting:
            return
        if programs.mariadbd is None or programs.install_db is None or programs.slurmdbd is None:
            raise LabError("accounting needs slurmdbd and mariadbd")
        data, socket = state / "database", state / "run" / "mariadb.socket"
        # A lab's accounts need not outlive a power failure: no waiting for the disk.
        options = ["--innodb-log-file-size=8M", "--innodb-flush-method=nosync", "--innodb-flush-log-at-trx-commit=0"]
        if not (data / "mysql").exists():
            install = [programs.install_db, "--no-defaults", f"--datadir={data}", "--skip-test-db", *options[:2]]
            install += ["--auth-root-authentication-method=normal", "--skip-name-resolve"]
            own = {"PATH": SYSTEM_PATH, "LC_ALL": "C.UTF-8", MARK: str(state)}  # so that `down` finds it too
            call([*install, "--user=root"] if os.geteuid() == 0 else install, timeout_s=INSTALL_S, env=own)
        serve = [programs.mariadbd, "--no-defaults", f"--datadir={data}", f"--socket={socket}", *options]
        serve += ["--skip-networking", "--innodb-buffer-pool-size=16M", "--innodb-lock-wait-timeout=900"]
        serve += [f"--pid-file={state / 'run' / 'mariadb.pid'}"] + (["--user=root"] if os.geteuid() == 0 else [])
        # The client library of Debian 13 fails after slurmdbd had to find out that its database does not exist yet.
        (state / "database.sql").write_text("CREATE DATABASE IF NOT EXISTS slurm;\n")
        serve += [f"--init-file={state / 'database.sql'}"]
        socket.unlink(missing_ok=True)
        log = state / "logs" / "mariadbd.log"
        self._hosts.spawn(LOGIN, serve, log, {})
        wait_until(socket.exists, "mariadbd is not ready", PATIENCE_S, log)
        self.start_slurmdbd()

    def start_slurmdbd(self) -> None:
        """Start slurmdbd, whose database is up, and wait until it answers."""
        programs, state = self._programs, self._state
        if programs.slurmdbd is None:
            raise LabError("accounting needs slurmdbd and mariadbd")
        dbd_log = state / "logs" / "slurmdbd.log"
        env = self._env | {"MYSQL_UNIX_PORT": str(state / "run" / "mariadb.socket")}
        self._hosts.spawn(LOGIN, [programs.slurmdbd, "-D"], state / "logs" / "slurmdbd.out", env)
        self._await_answer(["sacctmgr", "-n", "list", "cluster"], "slurmdbd does not answer", dbd_log)

    def register(self, user: str) -> None:
        """Enter the cluster, one account and the user into the accounts."""
        if not self._plan.accounting:
            return
        cluster = self._plan.cluster
        self._run(["sacctmgr", "-i", "add", "cluster", cluster], PATIENCE_S)
        self._run(["sacctmgr", "-i", "add", "account", "lab", f"cluster={cluster}", "Description=lab"], PATIENCE_S)
        self._run(["sacctmgr", "-i", "add", "user", user, "account=lab", f"cluster={cluster}"], PATIENCE_S)

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        state = self._state
        self._hosts.spawn(LOGIN, [self._programs.slurmctld, "-D"], state / "logs" / "slurmctld.out", self._env)
        self._await_answer(["sinfo", "-h"], "slurmctld does not answer", state / "logs" / "slurmctld.log")

    def start_slurmd(self, names: tuple[str, ...]) -> None:
        """Start slurmd on hosts and wait until Slurm counts on them."""
        before = self.nodes()
        for name in names:
            out = self._state / "logs" / f"slurmd-{name}.out"
            self._hosts.spawn(name, [self._programs.slurmd, "-D", "-N", name], out, self._env)

        def registered() -> bool:
            now = self.nodes()
            return all(
                name in now
                and now[name].is_usable
                and (name not in before or now[name].slurmd_start != before[name].slurmd_start)
                for name in names
            )

        logs = [self._state / "logs" / f"slurmd-{name}.log" for name in names]
        wait_until(registered, f"slurmd on {','.join(names)} has not registered", PATIENCE_S, *logs)

    def nodes(self) -> dict[str, Node]:
        """What Slurm says of all hosts."""
        return parse_nodes(self._run(["scontrol", "-o", "show", "nodes"], 10))

    def _await_answer(self, argv: list[str], what: str, log: Path) -> None:
        refusals: list[LabError] = []

        def answers() -> bool:
            try:
                self._run(argv, 5)
            except LabError as error:
                refusals.append(error)
                return False
            return True

        try:
            wait_until(answers, what, PATIENCE_S, log)
        except LabError as error:
            reason = f"; {refusals[-1]}" if refusals else ""
            raise LabError(f"{error}{reason}", log=error.log) from error


def parse_nodes(text: str) -> dict[str, Node]:
    """Read `scontrol -o show nodes`: one line a host, of KEY=VALUE and free text."""
    found = {}
    for line in text.splitlines():
        facts = dict(re.findall(r"(?:^|\s)(NodeName|State|SlurmdStartTime)=(\S+)", line))
        if "NodeName" in facts and "State" in facts:
            found[facts["NodeName"]] = Node(facts["State"].lower(), facts.get("SlurmdStartTime", "None"))
    return found
