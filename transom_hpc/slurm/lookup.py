"""Looking for a job by the mark that it carries: for when sbatch was not answered, and yet the job may be there."""

from __future__ import annotations

from collections.abc import Sequence

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.base.errors import SlurmUnreachable
from transom_hpc.slurm.commands import Slurm

_PAUSES_S = (1.0, 3.0, 10.0)  # what sbatch said may still lie before the controller, unread


def find_job(slurm: Slurm, mark: str) -> int | None:
    """The id of my job in the queue whose comment is this mark, None when there is none.

    Raises:
        SlurmUnreachable: no answer.
    """
    return next((row.job_id for row in slurm.queue() if row.comment == mark), None)


def find_unheard(slurm: Slurm, mark: str, clock: Clock | None = None, pauses_s: Sequence[float] = ()) -> int | None:
    """As find_job, but again and again: for a job about which sbatch heard nothing.

    Raises:
        SlurmUnreachable: no answer at the last look: it is not known whether there is such a job.
    """
    clock = clock or SystemClock()
    silence: SlurmUnreachable | None = None
    for pause_s in pauses_s or _PAUSES_S:
        clock.sleep(pause_s)
        try:
            found = find_job(slurm, mark)
        except SlurmUnreachable as error:
            silence = error
            continue
        if found is not None:
            return found
        silence = None
    if silence is not None:
        raise silence
    return None
