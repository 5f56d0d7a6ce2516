"""What a person asks of a run that works: to stop, or to be requeued. One file in the run directory, no Slurm.

The launcher looks for it about once a second; who asks needs only the file system that both see.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

import msgspec

from transom_hpc.base.atomic import write_bytes
from transom_hpc.base.errors import RunDirError
from transom_hpc.tol.rundir import RunDir

What = Literal["stop", "requeue"]


@dataclass(frozen=True, slots=True)
class Request:
    """What a person asks.

    Args:
        what: to save and end, or to save and go back into the queue.
        by: who, as user@host.
        job_id: the job that it is for.
        when: ISO date and time, UTC. No two requests of one person have the same.
        restarts: how often Slurm had requeued that job then, as far as the journal knows.
    """

    what: What
    by: str
    job_id: str
    when: str
    restarts: int = 0


def ask(run: RunDir, what: What, job_id: str) -> Request:
    """Ask the launcher of a job; a request that it has not seen yet is replaced.

    Raises:
        RunDirError: the run directory can't be read or written.
    """
    restarts = 0
    for entry in run.entries():
        if entry.kind == "start" and str(entry.facts.get("job_id")) == job_id:
            restarts = _number(entry.facts.get("requeues"))
    when = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    request = Request(what, f"{_user()}@{socket.gethostname()}", job_id, when, restarts)
    try:
        write_bytes(run.request, msgspec.json.encode(request) + b"\n")
    except OSError as error:
        raise RunDirError(f"can't write in the run directory {run.path}: {error.strerror}", path=run.path) from error
    return request


def asked(run: RunDir, job_id: str, restarts: int) -> Request | None:
    """What is asked of this life of a job; cheap, and never raises.

    Args:
        run: the run directory.
        job_id: this job.
        restarts: how often Slurm has requeued it.

    Returns:
        The request; None where there is none, or none that can be read, or one for another job. A wish to be requeued
        that an earlier life of the job has not seen is fulfilled by this one; a wish to be stopped is not.
    """
    try:
        # Opening the folder makes an NFS client look anew: that there was no such file it would believe for a minute.
        os.close(os.open(run.path, os.O_RDONLY | os.O_DIRECTORY))
        request = msgspec.json.decode(run.request.read_bytes(), type=Request)
    except (OSError, msgspec.DecodeError):
        return None
    if request.job_id != job_id or (request.what == "requeue" and request.restarts < restarts):
        return None
    return request


def waits(run: RunDir, request: Request) -> bool:
    """Whether no launcher has taken this request up yet."""
    try:
        os.close(os.open(run.path, os.O_RDONLY | os.O_DIRECTORY))
        return msgspec.json.decode(run.request.read_bytes(), type=Request) == request
    except (OSError, msgspec.DecodeError):
        return False


def answered(run: RunDir) -> None:
    """Take the request away: it is being acted on."""
    with suppress(OSError):
        run.request.unlink(missing_ok=True)


def _number(value: object) -> int:
    return int(value) if isinstance(value, (int, str)) and re.fullmatch(r"[0-9]+", str(value)) else 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no such entry in passwd, as in some containers
        return str(os.getuid())
