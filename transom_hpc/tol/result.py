"""The result of a command, left where submitit's job looks for it."""

from __future__ import annotations

from transom_hpc.tol.events import Ending, Finish
from transom_hpc.tol.spec import Submitted


def write_result(submitted: Submitted, job_id: int, finish: Finish) -> None:
    """Write what `job.result()` returns or raises, once the run is over; nothing while it goes on.

    A Python function's result is written by submitit itself, in the task.
    """
    from submitit.core import utils

    if finish.ending is Ending.LEFT:
        return
    paths = utils.JobPaths(submitted.submitit, job_id=str(job_id), task_id=0)
    outcome = ("success", finish.code) if finish.ending is Ending.WELL else ("error", finish.why)
    with utils.temporary_save_path(paths.result_pickle) as temporary:
        utils.cloudpickle_dump(outcome, temporary)
