"""The Slurm job that this process runs in, as its environment tells it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transom_hpc.base.errors import LaunchError
from transom_hpc.slurm.hosts import expand_hosts


@dataclass(frozen=True, slots=True)
class Job:
    """The Slurm job that this process runs in.

    Args:
        job_id: Slurm's id.
        restarts: how often Slurm has requeued it (SLURM_RESTART_COUNT).
        hosts: all hosts of the allocation, in Slurm's order.
        home: this host, as Slurm names it.
    """

    job_id: int
    restarts: int
    hosts: tuple[str, ...]
    home: str

    @property
    def shm(self) -> Path:
        """The job's folder in each host's shared memory."""
        return Path(f"/dev/shm/transom-{os.getuid()}-{self.job_id}")


def job_of(environment: Mapping[str, str]) -> Job:
    """The job that this process runs in.

    Raises:
        LaunchError: it runs in none, or in one that can't be supervised.
    """
    if environment.get("SLURM_HET_SIZE"):
        raise LaunchError("heterogeneous jobs can't be supervised: ask for nodes of one kind")
    copies = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if copies != "1":
        raise LaunchError(f"srun has started transom launch {copies} times: call it in the batch script, without srun")
    try:
        job_id, text = environment["SLURM_JOB_ID"], environment["SLURM_JOB_NODELIST"]
    except KeyError:
        raise LaunchError(
            "transom launch runs inside a Slurm job: use transom submit, or sbatch with one of sbatch_templates/"
        ) from None
    hosts = tuple(expand_hosts(text))
    home = environment.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
    if home not in hosts:
        raise LaunchError(f"this host, {home}, is not one of the job's ({text}): call it on one of them", job=job_id)
    return Job(int(job_id), int(environment.get("SLURM_RESTART_COUNT", "0")), hosts, home)


_OF_A_STEP = re.compile(r"(SLURMD?|SRUN|PMIX|PMI2?|OMPI|PRTE|TRANSOM)_.*")
_OF_THE_JOB = re.compile(
    r"SLURM_(CONF|CONF_SERVER|JWT|CLUSTERS|SACK_.*|CLUSTER_NAME|WORKING_CLUSTER|JOB_(?!.*_PACK_GROUP_).*|JOBID|NODELIST"
    r"|SUBMIT_.*|ARRAY_.*|RESTART_COUNT|CPUS_PER_.*|GPUS.*|EXPORT_ENV|OPEN_MODE)|SLURMD_NODENAME|(OMPI|PMIX)_MCA_.*"
)


def batch_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of the job's batch script, as far as it can be told from that of a step's task.

    What srun and MPI have added for the task would be taken for arguments of the steps that are started from here.
    """
    return {
        name: value
        for name, value in environment.items()
        if _OF_THE_JOB.fullmatch(name) or not _OF_A_STEP.fullmatch(name)
    }
