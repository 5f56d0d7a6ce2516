"""Environments for what is started outside of the job that this process may be in. Pure: mappings in, mappings out."""

from __future__ import annotations

import re
from collections.abc import Mapping

# What a program of Slurm must still find: where its controller is, and its credentials.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS", "SLURM_SACK_KEY"}) | {
    "SLURM_SACK_JWKS",
}
# What a job leaves in its environment, and what changes what Slurm's programs do or print (SQUEUE_FORMAT…).
_SCRUBBED = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL|PMIX|PMI2?|OMPI|PRTE)_.*")
# What a job leaves in its children, and would be wrong in another one.
_FROM_A_JOB = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMIX_", "PMI_", "PMI2_", "OMPI_", "PRTE_", "TRANSOM_")


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program of Slurm: without what the job that we may be in has left there.

    Args:
        environment: as it is; `os.environ` as a rule.

    Returns:
        Without SLURM_*, SBATCH_*, PMIX_*, PMI_*, OMPI_* and the settings of squeue and its sisters, but with what
        says where Slurm is: SLURM_CONF, SLURM_CLUSTERS, the credentials.
    """
    return {name: value for name, value in environment.items() if name in _KEPT or not _SCRUBBED.fullmatch(name)}


def environment_of_a_new_job(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that a new job inherits, when it is submitted from inside of another.

    Args:
        environment: as it is; `os.environ` as a rule.

    Returns:
        The user's own, and SLURM_CONF. What is a setting of squeue or sinfo is the user's own too.
    """
    return {
        name: value for name, value in environment.items() if name == "SLURM_CONF" or not name.startswith(_FROM_A_JOB)
    }
