"""All that knows Slurm. It never decides what a run does next.

Here are the names that need no Slurm at all; what asks or tells Slurm something stands in `commands` and `requeue`,
the readers of Slurm's output in `text`, site configs in `site`.
"""

from transom_hpc.slurm.hosts import expand_hosts, fold_hosts
from transom_hpc.slurm.jobid import JobId, parse_job_id
from transom_hpc.slurm.states import JobState, NodeFacts, job_state, node_state

__all__ = [
    "JobId",
    "JobState",
    "NodeFacts",
    "expand_hosts",
    "fold_hosts",
    "job_state",
    "node_state",
    "parse_job_id",
]
