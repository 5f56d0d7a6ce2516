"""What a lab stands on before it runs and after it ended: its folder, addresses and account, laid out and taken away.

Decides which kind of lab this process can have. Starts no daemon.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import account, config, network, reach, record
from transom_hpc.lab.controller import Programs
from transom_hpc.lab.hosts import LOCAL, Hosts, NamespaceHosts
from transom_hpc.lab.plain import PlainHosts, free_ports
from transom_hpc.lab.processes import SYSTEM_PATH, call
from transom_hpc.lab.record import LOGIN, Record

NAMESPACES = "namespaces"
PROCESSES = "processes"
LOCK_S = 60.0
FOLDERS = ("logs", "run", "hosts", "spool", "slurmctld", "munge", "stage", "database")


def take_down(name: str) -> bool:
    """End a lab and remove all that is left of it, whole or not.

    Returns:
        Whether there was anything.

    Raises:
        UsageError: it was started by root, and we are not root.
        LabError: something could not be ended or removed.
    """
    state = record.locate(name)
    if state is None:
        return False
    if state.stat().st_uid != os.geteuid():
        raise UsageError(f"lab {name!r} was started by root; use sudo", lab=name)
    with record.lock(state, LOCK_S):
        end_and_erase(state)
    return True


def end_and_erase(state: Path) -> None:
    """End a lab and remove what is left; its own lock is held."""
    hosts_of(state, record.load(state)).end()
    with record.lock(state.parent, LOCK_S):
        _erase(state)


def _erase(state: Path) -> None:
    """Remove a lab's folder, and after the last one the account; the lock of all labs is held."""
    record.remove(state)
    if os.geteuid() == 0 and not record.others(state):
        account.remove_made()
    record.remove_root()


def clear_dead(state: Path, say: Callable[[str], None]) -> None:
    """Clear what a dead lab of this name left; the lock of all labs is held.

    Raises:
        UsageError: it is alive.
    """
    if not state.exists():
        return
    with record.lock(state, 0):
        facts = record.load(state)
        hosts = hosts_of(state, facts)
        if facts is not None and facts.ready and facts.boot == record.boot_id() and hosts.is_alive():
            size = len(facts.nodes)
            raise UsageError(f"lab {state.name!r} is up already, with {size} nodes; `transom lab down` ends it")
        say(f"clearing what a dead lab {state.name!r} left")
        hosts.end()
        record.remove(state)


def claim(state: Path, nodes: int, slurmd_timeout: int, user: str | None, programs: Programs) -> Record:
    """Make a lab's folder, with all its facts decided and written; the lock of all labs is held."""
    isolate = _can_isolate()
    names = tuple(f"n{number}" for number in range(1, nodes + 1))
    accounting = programs.can_account
    notices = []
    ports: dict[str, int] = {}
    if isolate:
        used = (facts.addresses[LOGIN] + "/24" for other in record.others(state) if (facts := record.load(other)))
        subnet = network.choose_subnet([*network.machine_networks(), *used])
        addresses = network.addresses(subnet, names, LOGIN)
    else:
        why = "root has no right to make namespaces here" if os.geteuid() == 0 else "without root"
        notices.append(f"{why}: hosts share this machine's network, processes and /dev/shm; cut and mend can't be had")
        listeners = ("slurmctld", "slurmdbd", *names)
        ports = dict(zip(listeners, free_ports(len(listeners)), strict=True))
        addresses = dict.fromkeys((LOGIN, *names), "127.0.0.1")
    if not accounting:
        notices.append("no slurmdbd and mariadbd on this machine: sacct has nothing to say")
    if programs.munged is None:
        notices.append("no munged on this machine: Slurm believes everybody to be who they say they are")
    try:
        who = _account(user)
        state.mkdir()
        facts = Record(
            name=state.name,
            kind=NAMESPACES if isolate else PROCESSES,
            ready=False,
            boot=record.boot_id(),
            user=who.name,
            nodes=names,
            addresses=addresses,
            slurmd_timeout_s=slurmd_timeout,
            version=programs.version,
            ports=ports,
            accounting=accounting,
            notices=tuple(notices),
        )
        record.save(state, facts)
        _lay_out(state, facts, who)
    except BaseException:
        _erase(state)
        raise
    return facts


def _account(user: str | None) -> account.Account:
    if os.geteuid() == 0:
        return account.ensure(user)
    who = account.current()
    if user not in (None, who.name):
        raise UsageError(f"without root a lab runs jobs of its own user only: {who.name}, not {user}")
    return who


def _lay_out(state: Path, facts: Record, who: account.Account) -> None:
    """Make the folders and small files that hosts and daemons find in a lab."""
    for folder in (state, *(state / name for name in FOLDERS), state / "work"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    mpi = Path("/etc/openmpi/openmpi-mca-params.conf")
    own = f"orte_tmpdir_base = {LOCAL}\n"
    texts = {
        "etc-hosts": config.hosts_file(facts.addresses),
        "empty": "",
        "openmpi.conf": (mpi.read_text(errors="replace") if mpi.is_file() else "") + own,
    }
    for name, text in texts.items():
        (state / name).write_text(text)
        (state / name).chmod(0o644)
    if os.geteuid() == 0:
        os.chown(state / "work", who.uid, who.gid)
    if facts.kind == NAMESPACES:
        must, wish = reach.needed_paths()
        closed = reach.closed_folders(who, [*must, *wish, state])
        covers = reach.covers(must, wish, closed)
        _namespace_hosts(state, facts).write_scripts((LOGIN, *facts.nodes), covers)


def _namespace_hosts(state: Path, facts: Record) -> NamespaceHosts:
    subnet = facts.addresses[LOGIN].rpartition(".")[0]
    return NamespaceHosts(state, subnet, facts.addresses)


def hosts_of(state: Path, facts: Record | None) -> Hosts:
    """The hosts of a lab. Of one that did not get as far as its record nothing runs but what is marked."""
    if facts is not None and facts.kind == NAMESPACES:
        return _namespace_hosts(state, facts)
    return PlainHosts(state, state.name)


def plan_of(state: Path, facts: Record, programs: Programs) -> config.Plan:
    isolated = facts.kind == NAMESPACES
    machine = socket.gethostname().split(".")[0]
    return config.Plan(
        cluster=facts.name,
        version=config.parse_version(facts.version),
        state=state,
        user=account.current().name,
        controller=LOGIN if isolated else machine,
        controller_address=facts.addresses[LOGIN],
        nodes=tuple(
            config.Node(name, facts.addresses[name], name if isolated else machine, facts.ports.get(name))
            for name in facts.nodes
        ),
        slurmd_timeout_s=facts.slurmd_timeout_s,
        accounting=facts.accounting,
        pmix=programs.pmix and isolated,  # the steps of one job collide where hosts share a /tmp
        munge_socket=state / "munge" / "socket" if programs.munged else None,
        local=LOCAL if isolated else None,
        controller_port=facts.ports.get("slurmctld"),
        database_port=facts.ports.get("slurmdbd"),
    )


def _can_isolate() -> bool:
    """Whether this process may make namespaces: root can, except in most containers."""
    if os.geteuid() != 0 or shutil.which("ip", path=SYSTEM_PATH) is None:
        return False
    try:
        call(["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "true"])
    except LabError:
        return False
    return True
