"""The variables that a program finds in its environment, beside those of its rank and of this start."""

from __future__ import annotations

from contextlib import suppress

from transom_hpc.base.errors import RunDirError
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.reliability import Interruptions, interruptions
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.spec import JobSpec


def program_variables(run: RunDir, spec: JobSpec, site: SiteConfig, leave_s: float) -> dict[str, str]:
    """What `Checkpointer.from_env` reads, and what the site sets.

    Args:
        run: the run directory.
        spec: what was submitted.
        site: the site config.
        leave_s: how long a program may take to save and leave.
    """
    seen = Interruptions()
    with suppress(RunDirError):  # a journal that can't be read now costs an estimate
        seen = interruptions(run.entries())
    staging = {"TRANSOM_STAGING_BYTES": str(site.staging_bytes)} if site.staging_bytes else {}
    return {
        **site.env,
        "TRANSOM_RUN_DIR": str(run.path),
        "TRANSOM_SAVE_EVERY": str(spec.save_every),
        "TRANSOM_KEEP": str(spec.keep),
        "TRANSOM_SIGNAL": site.signal,
        "TRANSOM_LEAVE_S": str(leave_s),
        "TRANSOM_INTERRUPTIONS": str(seen),
        "TRANSOM_STRIPE_BYTES": str(site.stripe_bytes),
        "TRANSOM_DATA_FILES": str(site.data_files),
        "TRANSOM_WRITER": site.writer,
        **staging,
    }
