"""What the benchmarks of checkpoints have in common: each part in a process of its own, then one table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from checkpointing.figures import Figure, from_json, table
from checkpointing.ground import die_with_parent, ground, leave_on_term, warm_machine
from checkpointing.scale import FULL, QUICK, Scale, say

PATIENCE_S = 900.0
"""Longest time that a part may take."""

_WARM_BYTES = 12 << 30


def main(script: str, about: str, parts: Sequence[str]) -> None:
    """Measure all parts and print them.

    Args:
        script: the benchmark's own file, which is run again for each part.
        about: its docstring.
        parts: modules of this package, each with `measure(scale, ground)`.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer rounds, for a first look")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--directory", type=Path, help="on the file system to measure (default: the temporary folder)")
    parser.add_argument("--part", choices=parts, help=argparse.SUPPRESS)
    given = parser.parse_args()
    scale = QUICK if given.quick else FULL
    if given.part:
        part(given.part, scale, given.directory, given.json)
        return
    leave_on_term()
    figures, missing = everything(script, parts, scale, given)
    print(f"\n{table(figures)}")
    if given.json:
        given.json.write_text(json.dumps([figure.to_json() for figure in figures], indent=1) + "\n")
    if missing:
        sys.exit("not measured: " + ", ".join(missing))


def everything(
    script: str, parts: Sequence[str], scale: Scale, given: argparse.Namespace
) -> tuple[list[Figure], list[str]]:
    """All parts, one after the other.

    Returns:
        The figures, and the parts that failed or can't be had here.
    """
    nbytes = 3 * 50 * scale.elements * 4
    say(f"state of {nbytes / 1e9:.2f} GB in 150 tensors, {scale.rounds} rounds, {os.cpu_count()} cores")
    load = os.getloadavg()[0]
    if load > 0.5 * (os.cpu_count() or 1):
        say(f"this machine is in use (load {load:.1f}): ratios suffer less than times, but a quiet one tells more")
    say("touching the machine's memory once")
    warm_machine(_WARM_BYTES if not given.quick else _WARM_BYTES // 6)
    figures: list[Figure] = []
    missing = []
    with tempfile.TemporaryDirectory(prefix="transom-bench-") as folder:
        for name in parts:
            answer = Path(folder) / f"{name}.json"
            argv = [sys.executable, script, "--part", name, "--json", str(answer)]
            argv += ["--quick"] if given.quick else []
            argv += ["--directory", str(given.directory)] if given.directory else []
            run_part(argv)
            if answer.exists():
                figures += [from_json(held) for held in json.loads(answer.read_text())]
            else:
                missing.append(name)
    return figures, missing


def run_part(argv: list[str]) -> None:
    """Run a part; where it takes too long or we are stopped, it is stopped, and cleans up first."""
    process = subprocess.Popen(argv)
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        say(f"no end after {PATIENCE_S:.0f} s; it is left out")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def part(name: str, scale: Scale, directory: Path | None, answer: Path) -> None:
    """One part, in this process."""
    import importlib
    import warnings

    import torch

    die_with_parent()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with ground(directory) as where:
        figures = importlib.import_module(f"checkpointing.{name}").measure(scale, where)
    answer.write_text(json.dumps([figure.to_json() for figure in figures]))
