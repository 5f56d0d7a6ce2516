"""The configuration files of a lab's Slurm, as text. Pure: decides what is written, writes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

CPUS = 4  # every host claims these, whatever the machine has, so that examples for real clusters fit
MEMORY_MIB = 64000
GENTLE_S = 5  # seconds between SIGTERM and SIGKILL (KillWait)


@dataclass(frozen=True, slots=True)
class Node:
    """One compute host as slurm.conf names it. `port` is None for Slurm's own default."""

    name: str
    address: str
    hostname: str
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """All that the files depend on.

    Args:
        cluster: the cluster's name.
        version: Slurm's (year, month), as (22, 5).
        state: the lab's folder.
        user: who the daemons run as.
        controller: host name of the controller, and `controller_address` where it answers.
        controller_port: None for Slurm's own default; `database_port` likewise.
        nodes: the compute hosts.
        slurmd_timeout_s: seconds of silence after which a host is set down.
        accounting: whether there is a slurmdbd.
        pmix: whether this Slurm has its PMIx plugin.
        munge_socket: where munged listens; None to do without it.
        local: a folder of each host's own, for PMIx; None where hosts have none.
    """

    cluster: str
    version: tuple[int, int]
    state: Path
    user: str
    controller: str
    controller_address: str
    nodes: tuple[Node, ...]
    slurmd_timeout_s: int
    accounting: bool
    pmix: bool
    munge_socket: Path | None
    local: Path | None
    controller_port: int | None = None
    database_port: int | None = None


def parse_version(text: str) -> tuple[int, int]:
    """Year and month from what `slurmctld -V` prints ("slurm-wlm 22.05.8", "slurm 24.11.5").

    Raises:
        ValueError: there is no version in it.
    """
    match = re.search(r"\b(\d\d)\.(\d\d)\b", text)
    if match is None:
        raise ValueError(f"no version in {text!r}")
    return int(match[1]), int(match[2])


def _auth(plan: Plan) -> str:
    if plan.munge_socket is None:
        return "AuthType=auth/none\n"
    return f"AuthType=auth/munge\nAuthInfo=socket={plan.munge_socket}\n"


def slurm_conf(plan: Plan) -> str:
    """slurm.conf(5)."""
    ports = f"SlurmctldPort={plan.controller_port}\n" if plan.controller_port else ""
    accounting = ""
    if plan.accounting:
        accounting = (
            f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost={plan.controller_address}\n"
        )
        accounting += f"AccountingStoragePort={plan.database_port}\n" if plan.database_port else ""
        # Connections to slurmdbd don't look at AuthInfo: with munge this "password" is the path of its socket.
        accounting += f"AccountingStoragePass={plan.munge_socket}\n" if plan.munge_socket else ""
    nodes = "".join(
        f"NodeName={node.name} NodeAddr={node.address} NodeHostname={node.hostname}"
        + (f" Port={node.port}" if node.port else "")
        + f" CPUs={CPUS} RealMemory={MEMORY_MIB} State=UNKNOWN\n"
        for node in plan.nodes
    )
    names = ",".join(node.name for node in plan.nodes)
    return (
        f"# Written by `transom lab up`; gone with `transom lab down`.\n"
        f"ClusterName={plan.cluster}\n"
        f"SlurmctldHost={plan.controller}({plan.controller_address})\n"
        f"{ports}"
        f"SlurmUser={plan.user}\nSlurmdUser={plan.user}\n"
        f"{_auth(plan)}CredType=cred/{'munge' if plan.munge_socket else 'none'}\n"
        f"StateSaveLocation={plan.state}/slurmctld\n"
        f"SlurmdSpoolDir={plan.state}/spool/%n\n"
        f"SlurmctldPidFile={plan.state}/run/slurmctld.pid\n"
        f"SlurmdPidFile={plan.state}/run/slurmd-%n.pid\n"
        f"SlurmctldLogFile={plan.state}/logs/slurmctld.log\n"
        f"SlurmdLogFile={plan.state}/logs/slurmd-%n.log\n"
        f"MailProg=/bin/true\n"
        # Without cgroups: hosts are namespaces (or only processes), and the machine's cgroups are not ours to arrange.
        f"ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/linux\n"
        f"SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n"
        f"SlurmdParameters=config_overrides\n"
        f"MpiDefault={'pmix' if plan.pmix else 'none'}\n"
        f"{accounting}"
        f"JobCompType=jobcomp/none\n"
        f"JobRequeue=1\nReturnToService=1\nMinJobAge=300\nKillWait={GENTLE_S}\nUnkillableStepTimeout=60\n"
        f"SlurmctldTimeout=30\nSlurmdTimeout={plan.slurmd_timeout_s}\nInactiveLimit=0\n"
        # A person who tries something out waits for the scheduler, not for load: look often.
        f"SchedulerType=sched/backfill\nSchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0\n"
        f"PriorityType=priority/basic\n"
        f"PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
        f"{nodes}"
        f"PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE State=UP\n"
        f"PartitionName=urgent Nodes={names} Default=NO MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP\n"
    )


def cgroup_conf(plan: Plan) -> str:
    """cgroup.conf(5): keep Slurm away from the machine's cgroups, in the words of its version."""
    if plan.version >= (23, 2):
        return "CgroupPlugin=disabled\n"
    # Older ones start their plugin always. v1's start needs nothing; v2's asks systemd for a scope.
    return "CgroupAutomount=no\n" + ("CgroupPlugin=cgroup/v1\n" if plan.version >= (22, 5) else "")


def mpi_conf(plan: Plan) -> str:
    """mpi.conf(5), since 22.05: hosts that share /tmp collide in PMIx's default folder there."""
    return f"PMIxCliTmpDirBase={plan.local}\n" if plan.local and plan.pmix else ""


def slurmdbd_conf(plan: Plan) -> str:
    """slurmdbd.conf(5). The database is reached by the socket in MYSQL_UNIX_PORT."""
    port = f"DbdPort={plan.database_port}\n" if plan.database_port else ""
    return (
        f"{_auth(plan)}"
        f"DbdHost={plan.controller}\nDbdAddr={plan.controller_address}\n{port}"
        f"SlurmUser={plan.user}\n"
        f"StorageType=accounting_storage/mysql\nStorageHost=localhost\n"
        f"StorageUser=root\nStorageLoc=slurm\n"  # the private database's own root, reached by its socket alone
        f"LogFile={plan.state}/logs/slurmdbd.log\nPidFile={plan.state}/run/slurmdbd.pid\n"
    )


def hosts_file(addresses: dict[str, str]) -> str:
    """hosts(5) for all hosts of a lab: gloo and MPI look names up."""
    return "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n" + "".join(
        f"{address} {name}\n" for name, address in addresses.items()
    )
