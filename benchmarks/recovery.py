"""Time from the crash of a host to the next new step: transom with a spare, against plain `sbatch --requeue`.

Both run the same program in the same lab under the same SlurmdTimeout, by turns. A run is back when it prints the first
step after the crash. Needs root (hosts with networks of their own).

    python benchmarks/recovery.py [--quick] [--pairs 5] [--slurmd-timeout 30] [--json FILE]

The limit beside the figures is the start of the program alone: the time that the same program takes from its launch to
its first step when nothing happened.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from transom_hpc.lab import Lab, take_down

HEAT = Path(__file__).resolve().parents[1] / "examples" / "heat_mpi.py"
PROGRAM = [sys.executable, str(HEAT), "--steps", "100000", "--size", "128", "--sleep", "0.05", "--print-every", "1"]
VICTIM = "n3"
PATIENCE_S = 400.0


def wait_for(what: str, ready: Callable[[], bool], seconds: float) -> float:
    """Wait until something is so; the moment, on the monotonic clock."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            sys.exit(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.05)
    return time.monotonic()


def steps_of_start(log: Path, start: int) -> int:
    """How many steps the program's start number `start` (from 0) has printed."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return 0
    parts = text.split("from step ")[1:]
    return parts[start].count("  residual ") if len(parts) > start else 0


def submit_transom(lab: Lab, folder: Path) -> tuple[str, Path]:
    """Submit with a spare; job id and log."""
    options = ["--nodes", "4", "--spares", "1", "--site", "lab", "--save-every", "20", "--run-dir", str(folder / "run")]
    argv = [sys.executable, "-P", "-m", "transom_hpc", "submit", "--json", *options, "--", *PROGRAM]
    job = str(json.loads(lab.run("login", argv, cwd=folder).stdout)["job_id"])
    return job, folder / "run" / "logs" / f"{job}_0_log.out"


def submit_plain(lab: Lab, folder: Path) -> tuple[str, Path]:
    """Submit as a careful user does without transom: requeueable, resuming from the same checkpoints."""
    script = folder / "plain.sh"
    command = " ".join([*PROGRAM, "--checkpoints", str(folder / "checkpoints"), "--save-every", "20"])
    script.write_text(f"#!/bin/bash\nsrun --mpi=pmix --kill-on-bad-exit=1 {command}\n")
    log = folder / "plain.log"
    options = ["--parsable", "--requeue", "--open-mode=append", "-N", "4", f"--output={log}"]
    return lab.run("login", ["sbatch", *options, str(script)], cwd=folder).stdout.strip(), log


def measure(lab: Lab, submit: Callable[[Lab, Path], tuple[str, Path]]) -> tuple[float, float]:
    """One run: seconds from the crash to the next new step, and from the submission to the first step."""
    folder = lab.shared / "benchmark"
    shutil.rmtree(folder, ignore_errors=True)
    lab.run("login", ["mkdir", str(folder)])
    begun = time.monotonic()
    job, log = submit(lab, folder)
    started = wait_for("the first step", lambda: steps_of_start(log, 0) > 0, 120) - begun
    wait_for("a checkpoint", lambda: steps_of_start(log, 0) > 60, 120)
    crashed = time.monotonic()
    lab.crash(VICTIM)
    back = wait_for("the next new step", lambda: steps_of_start(log, 1) > 0, PATIENCE_S) - crashed
    lab.run("login", ["scancel", job])
    lab.boot(VICTIM)

    def healthy() -> bool:
        hosts = [host for host in lab.status().hosts if host.name != "login"]
        return all(host.slurm == "idle" for host in hosts)

    wait_for("an idle lab", healthy, 120)
    return back, started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one pair")
    parser.add_argument("--slurmd-timeout", type=int, default=30, help="SlurmdTimeout of the lab, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    given = parser.parse_args()
    pairs = 1 if given.quick else given.pairs
    take_down("recovery")
    lab = Lab.up("recovery", nodes=5, slurmd_timeout=given.slurmd_timeout)
    ours: list[float] = []
    plain: list[float] = []
    starts: list[float] = []
    try:
        for pair in range(pairs):
            back, start = measure(lab, submit_transom)
            ours.append(back)
            starts.append(start)
            print(f"pair {pair + 1} of {pairs}: transom {back:6.1f} s", flush=True)
            back, _ = measure(lab, submit_plain)
            plain.append(back)
            print(f"pair {pair + 1} of {pairs}: plain   {back:6.1f} s", flush=True)
    finally:
        take_down("recovery")
    ratios = [theirs / mine for mine, theirs in zip(ours, plain, strict=True)]
    limit = f"start of the program alone: {statistics.median(starts):.1f} s"
    figures = [
        figure("host crash to next step, transom with a spare", ours, "s", 10.0, False, limit),
        figure(
            "host crash to next step, plain sbatch --requeue",
            plain,
            "s",
            None,
            False,
            f"SlurmdTimeout {given.slurmd_timeout} s",
        ),
        figure("plain over transom", ratios, "x", 15.0, True, ""),
    ]
    print(f"\n{'':50}{'median':>9}  {'spread':>15}  bar")
    for item in figures:
        low, high = item["spread"]  # type: ignore[misc]
        verdict = "" if item["bar"] is None else f"{item['bar']:g}: {'met' if item['met'] else 'MISSED'}"
        print(f"{item['name']:50}{item['value']:7.1f} {item['unit']}  {low:6.1f} to {high:5.1f}  {verdict}")
    print(f"limit: {limit}")
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


def figure(
    name: str, values: list[float], unit: str, bar: float | None, at_least: bool, limit: str
) -> dict[str, object]:
    """One figure in the form that all benchmarks write."""
    value = statistics.median(values)
    met = bar is None or (value >= bar if at_least else value <= bar)
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "bar": bar,
        "at_least": at_least,
        "met": met,
        "limit": limit,
        "pairs": len(values),
        "spread": [min(values), max(values)],
    }


if __name__ == "__main__":
    main()
