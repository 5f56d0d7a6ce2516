"""What comes back how fast: from memory, from a neighbour's memory, from files, and on another number of ranks.

    python benchmarks/restore.py [--quick] [--json FILE] [--directory DIR]

docs/benchmarks.md says what is measured, against what, and how. Each part runs in a process of its own. The hosts of
the lab need root; without it that part is left out, and it says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from checkpointing.driver import main

if __name__ == "__main__":
    main(__file__, __doc__ or "", ("tiers", "resharding"))
