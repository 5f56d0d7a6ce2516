"""What a checkpoint costs: ratios to other ways of saving, measured by turns in one run, with the limits beside.

    python benchmarks/checkpoint.py [--quick] [--json FILE] [--directory DIR]

docs/benchmarks.md says what is measured, against what, and how. Each part runs in a process of its own. The storage
with a capped rate and the four hosts need root; without it they are left out, and it says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkpointing.driver import main

if __name__ == "__main__":
    main(__file__, __doc__ or "", ("one_rank", "restoring", "growth", "slow_storage", "lab_ranks"))
