"""Try the sidecar alone: ``mpirun -n 4 python -m transom_hpc.monitors --attempt A0001-L01 --shm /dev/shm/me``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transom_hpc.monitors.exchange import leave
from transom_hpc.monitors.sidecar import Sidecar, SidecarConfig, default_hooks


def main() -> None:
    """Read the arguments, watch, leave."""
    parser = argparse.ArgumentParser(prog="python -m transom_hpc.monitors", description=__doc__)
    parser.add_argument("--attempt", required=True, help='the attempt to watch, as "A0001-L01"')
    parser.add_argument("--shm", required=True, type=Path, help="folder with the heartbeats, in /dev/shm")
    parser.add_argument("--run-dir", type=Path, help="keep the readings in RUN_DIR/health")
    parser.add_argument("--hosts", default="", help="names of the hosts by rank, with commas")
    parser.add_argument("--supervisor-pid", type=int, help="the launcher's process on the host of rank 0")
    for name, text in (
        ("period", "between two samples"),
        ("ping", "between two pings"),
        ("silent-after", "a host not heard for longer is silent"),
        ("isolated-after", "a host without a majority for longer is cut off"),
        ("start-deadline", "for the first sign of each rank"),
    ):
        parser.add_argument(f"--{name}", dest=f"{name.replace('-', '_')}_s", type=float, metavar="S", help=text)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    given["hosts"] = tuple(name for name in given["hosts"].split(",") if name)
    config = SidecarConfig(**given)
    try:
        config.rules()
    except ValueError as error:
        print(f"transom: {error}", file=sys.stderr)
        sys.exit(2)
    leave(Sidecar(config, default_hooks(config.attempt)).run())


if __name__ == "__main__":
    main()
