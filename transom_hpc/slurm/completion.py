"""Ending a job in order, from inside, where its batch script is gone: as COMPLETED or FAILED, not as CANCELLED.

None of Slurm's programs can do that. Its library can (`slurm_complete_job` of slurm.h, by which salloc gives its
allocation back), and lets the job's own user do it (tried). It runs in a process of its own, with a deadline, since the
library ends its process when it can't read its configuration.
"""

from __future__ import annotations

import ctypes.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from transom_hpc.base.errors import SlurmError, SlurmMissing, SlurmUnreachable
from transom_hpc.slurm.environment import clean_environment

# RTLD_GLOBAL: Slurm's plugins look for its functions among those of the process.
_PROGRAM = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
if hasattr(library, "slurm_init"):
    library.slurm_init(None)
if library.slurm_complete_job(ctypes.c_uint32(int(sys.argv[2])), ctypes.c_uint32(int(sys.argv[3]))):
    library.slurm_strerror.restype = ctypes.c_char_p
    sys.exit(library.slurm_strerror(library.slurm_get_errno()).decode())
"""


def complete_job(job_id: int, code: int, timeout_s: float = 20.0) -> None:
    """End the job that this process is in: COMPLETED with exit status 0, else FAILED. All its steps are ended.

    Args:
        job_id: the job.
        code: exit status, 0 to 255.
        timeout_s: for Slurm's answer.

    Raises:
        SlurmMissing: there is no library of Slurm here.
        SlurmUnreachable: it did not answer in time.
        SlurmError: it refused.
    """
    library = _library()
    # Slurm answers by SIGTERM to every process of the job. What is blocked stays so in the child.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, library, str(job_id), str((code & 0xFF) << 8)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=clean_environment(os.environ),
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SlurmUnreachable(f"Slurm did not end job {job_id} within {timeout_s:g} s", job=job_id) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise SlurmError(f"Slurm did not end job {job_id}: {words[-1] if words else done.returncode}", job=job_id)


def _library() -> str:
    """Slurm's library: the public one, or the one that its own programs use, which lies among its plugins."""
    public = ctypes.util.find_library("slurm")
    if public is not None:
        return public
    try:
        answer = subprocess.run(
            ["scontrol", "show", "config"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=clean_environment(os.environ),
            text=True,
            errors="replace",
            timeout=10.0,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    found = re.search(r"^PluginDir\s*=\s*(\S+)", answer, re.MULTILINE)
    for folder in found[1].split(":") if found else ():
        library = Path(folder) / "libslurmfull.so"
        if library.exists():
            return str(library)
    raise SlurmMissing("Slurm's library is not on this host: the job can't be ended but by scancel")
