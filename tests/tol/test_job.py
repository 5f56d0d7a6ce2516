"""What a step's task may pass on to the launcher that it starts."""

from __future__ import annotations

from transom_hpc.tol.job import batch_environment

# As seen in a task of a PMIx step (Slurm 22.05.8), with some of a user's own.
OF_THE_BATCH_SCRIPT = {
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_CLUSTER_NAME": "c",
    "SLURM_JOBID": "7",
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NODELIST": "n[1-4]",
    "SLURM_SUBMIT_DIR": "/home/me",
    "SLURM_RESTART_COUNT": "1",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURMD_NODENAME": "n2",
    "PATH": "/usr/bin",
    "OMPI_MCA_btl": "tcp,self",
    "SLURMFOO": "1",
}
OF_THE_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_JOB_CPUS_PER_NODE_PACK_GROUP_0": "1(x4)",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_NNODES": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_PMIXP_ABORT_AGENT_PORT": "37794",
    "SLURM_SRUN_COMM_PORT": "37794",
    "SLURM_CPU_BIND": "none",
    "SLURM_DISTRIBUTION": "arbitrary",
    "SLURM_HOSTFILE": "/dev/shm/x",
    "SRUN_DEBUG": "3",
    "PMIX_RANK": "1",
    "PMIX_SERVER_URI4": "x",
    "OMPI_COMM_WORLD_RANK": "1",
    "TRANSOM_SHM": "/dev/shm/transom-1-7",
}


def test_what_srun_added_is_left_out() -> None:
    assert batch_environment({**OF_THE_BATCH_SCRIPT, **OF_THE_STEP}) == OF_THE_BATCH_SCRIPT
