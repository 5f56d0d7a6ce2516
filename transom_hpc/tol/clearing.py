"""Ends on this host what older steps of this job have left: run as a task of a step by a launcher that takes over."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from transom_hpc.monitors.processes import end_older_steps


def main() -> None:
    """End them, and say what was ended."""
    shm = Path(sys.argv[1])
    killed = end_older_steps(int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"]), shm)
    host = os.environ.get("SLURMD_NODENAME", "")
    if killed:
        print(f"transom: {host}: ended {len(killed)} processes that were left", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
