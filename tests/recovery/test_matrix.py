"""The fault matrix: what can happen, where, and at which moment of a run. On a real Slurm, as an ordinary user.

Whatever it is, the run ends with bitwise the field of one that was left alone, the journal names the cause, and nothing
is left behind. All but a few cells are for scripts/soak; `pytest -m soak --collect-only -q tests/recovery` lists them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest

from transom_hpc.base.errors import LabError

from . import moments
from .conftest import Runs, Submitted, same_bits
from .test_server import hold_a_save

# x: a test here, X: one that is run by default; a letter: why it is none, see WHY. Without a spare the job is requeued.
TABLE = """
                               with a spare          without a spare       the first host
                               start train save rest start train save rest start train save rest
host crashed                     x     x    x    x     x     d    x    x     x     d    x    x
host frozen                      x     x    x    e     e     x    e    e     e     x    x    e
host cut off, mended later       x     d    x    x     e     x    e    e     x     x    x    e
slow network                     x     x    x    x     a     a    a    a     a     x    a    a
rank killed                      x     d    x    x     a     a    a    a     a     x    a    x
rank stopped                     x     d    x    x     a     a    a    a     a     x    a    a
program error                    x     x    x    x     a     a    a    a     a     a    a    a
weights become NaN               n     x    x    n     a     a    a    a     a     a    a    a
scontrol requeue                 x     d    x    x     a     a    a    a     c     c    c    c
preempted                        x     x    x    x     a     a    a    a     c     c    c    c
time limit                       x     x    x    x     a     a    a    a     c     c    c    c
transom requeue                  x     x    x    x     a     a    a    a     c     c    c    c
transom stop, submitted again    x     x    x    x     a     a    a    a     c     c    c    c
scancel of the program's step    x     X    x    x     a     a    a    a     c     c    c    c
launcher killed                  b     b    b    b     b     b    b    b     x     d    x    x
sidecar killed                   x     d    x    x     a     a    a    a     x     x    x    a
checkpoint server killed         x     x    d    x     a     a    a    a     x     x    x    a
"""
WHY = {
    "a": "no host is replaced, and all ranks are alike: the same cell to the left",
    "b": "there is a launcher on the first host only",
    "c": "it happens to the job, on no host in particular",
    "d": "a test of its own, run by default: test_recovery, test_succession, test_server",
    "e": "nobody can tell it from a crash before the restart, and that is a cell",
    "n": "there are no weights yet that could be wrong",
}
PLACES = ("spare", "none", "first")
MOMENTS = ("start", "training", "saving", "restoring")
STEPS = 200
OPTIONS = ("--nodes", "3", "--save-every", "20", "--hang-after", "8")
PROGRAM = r"^[^ ]*python[^ ]* [^ ]*moments[.]py"  # the ranks; not srun, nor the launcher, which name it too
KEPT = {".attempt", ".writer-choice.json"}
SUBMITIT = ".submission_file"  # submitit keeps a copy of its script


@dataclass
class Scene:
    """A run, the host to which something happens, and when."""

    runs: Runs
    run: Submitted
    host: str
    moment: str
    restarts: int = 0  # before anything happened
    running: int = 0

    def on(self, host: str, *argv: str, check: bool = True) -> str:
        return self.runs.lab.run(host, argv, check=check).stdout

    def kill(self, pattern: str, signal: str = "KILL") -> None:
        """Send a signal to processes on the host, once they are there."""
        self.run.wait(pattern, lambda: self.on(self.host, "pgrep", "-f", pattern, check=False), 40)
        self.on(self.host, "pkill", f"-{signal}", "-f", pattern)

    def mark(self, name: str) -> None:
        (self.runs.folder / name).touch()

    def job(self, *argv: str) -> None:
        self.on("login", *argv, str(self.run.job_id))

    def cancel_step(self) -> None:
        steps = self.on("login", "squeue", "--steps", "-h", "-o", "%i %j", f"--jobs={self.run.job_id}")
        (step,) = (line.split()[0] for line in steps.splitlines() if line.split()[1:] == ["program"])
        self.on("login", "scancel", step)

    def preempt(self) -> None:
        options = ["-N5", "--exclusive", "--partition=urgent", "--output=/dev/null", "--wrap", "sleep 1"]
        self.on("login", "sbatch", *options)


@dataclass(frozen=True)
class Fault:
    """What happens, and what the journal is to say of it.

    Args:
        strike: does it.
        causes: one restart comes of it, for one of these; none: no restart.
        ended_by: what the next life of the job says that the one before ended by; "" where it is not asked.
        ending: how the first submission ends.
    """

    strike: Callable[[Scene], None]
    causes: tuple[str, ...] = ()
    ended_by: str = ""
    ending: str = "ended well"
    options: dict[str, tuple[str, ...]] = field(default_factory=dict)


GONE = ("host silent", "host lost")
EARLY = dict.fromkeys(("start", "restoring"), ("--start-deadline", "40"))
FAULTS = {
    "host crashed": Fault(lambda s: s.runs.lab.crash(s.host), GONE),
    "host frozen": Fault(lambda s: s.runs.lab.freeze(s.host), GONE),
    "host cut off, mended later": Fault(lambda s: s.runs.lab.cut(s.host), GONE),
    "slow network": Fault(lambda s: s.runs.lab.slow(s.host, 1000)),
    "rank killed": Fault(lambda s: s.kill(PROGRAM), ("program killed",)),
    "rank stopped": Fault(lambda s: s.kill(PROGRAM, "STOP"), ("program hung",), options=EARLY),
    "program error": Fault(lambda s: s.mark("fail"), ("program error",)),
    "weights become NaN": Fault(lambda s: s.mark("nan"), ("diverged",)),
    "scontrol requeue": Fault(lambda s: s.job("scontrol", "requeue"), ended_by="requeued by a person"),
    "preempted": Fault(Scene.preempt, ended_by="preempted"),
    "time limit": Fault(lambda s: s.job("scancel", "--batch", "--signal=USR1"), ("time limit",), "time limit"),
    "transom requeue": Fault(lambda s: ask(s, "requeue"), ("requeued by a person",), "requeued by a person"),
    "transom stop, submitted again": Fault(lambda s: ask(s, "stop"), ending="stopped"),
    "scancel of the program's step": Fault(Scene.cancel_step, ("program killed",)),
    "launcher killed": Fault(lambda s: s.kill("transom_hpc launch --guarded"), ("launcher lost",)),
    "sidecar killed": Fault(lambda s: s.kill("transom_hpc.tol.sidecar")),
    "checkpoint server killed": Fault(lambda s: s.kill("transom_hpc.ckpt.server ")),
}


def ask(scene: Scene, what: str) -> None:
    scene.runs.transom(what, "--no-wait", str(scene.run.path))


def cells() -> list[object]:
    """The table's tests."""
    found: list[object] = []
    for line in TABLE.splitlines()[3:]:
        name, marks = line[:30].strip(), line[30:].split()
        assert name in FAULTS
        assert len(marks) == len(PLACES) * len(MOMENTS)
        for index, mark in enumerate(marks):
            place, moment = PLACES[index // len(MOMENTS)], MOMENTS[index % len(MOMENTS)]
            if mark not in WHY:
                assert mark in ("x", "X")
                marker = [pytest.mark.soak] if mark == "x" else []
                found.append(pytest.param(name, place, moment, marks=marker, id=f"{name}-{place}-{moment}"))
    assert {line[:30].strip() for line in TABLE.splitlines()[3:]} == set(FAULTS)
    return found


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize(("name", "place", "moment"), cells())
def test_a_fault(runs: Runs, unhurt: Callable[..., numpy.ndarray], name: str, place: str, moment: str) -> None:
    fault = FAULTS[name]
    options = (*OPTIONS, *fault.options.get(moment, ()), *(() if place == "none" else ("--spares", "1")))
    run = runs.submit(*options, program=program(runs, moment))
    scene = Scene(runs, run, "n1" if place == "first" else "n2", moment)
    let_go = reach(scene)
    scene.restarts = len(run.entries("restart"))
    scene.running = len(run.entries("running"))
    fault.strike(scene)
    let_go()
    to_the_end(scene, 1)
    if fault.ending != "ended well":
        run.wait_end(fault.ending)
        submit_again(scene)
        to_the_end(scene, 2)
    run.wait_end()
    assert same_bits(run.field(), unhurt(STEPS, 3)), run.story()
    causes = [entry.facts["cause"] for entry in run.entries("restart")][scene.restarts :]
    assert len(causes) == bool(fault.causes), run.story()
    assert set(causes) <= set(fault.causes), run.story()
    if fault.ended_by:
        assert run.entries("start")[-1].facts["ended_by"] == fault.ended_by, run.story()
    nothing_left(scene)


def program(runs: Runs, moment: str) -> list[str]:
    """The heat equation, held at a moment."""
    interpreter, *heat = runs.heat_program(STEPS, 0.05)
    return [interpreter, str(Path(moments.__file__)), moment, str(runs.folder), *heat]


def reach(scene: Scene) -> Callable[[], None]:
    """Wait for the moment.

    Returns:
        What lets the run go on from there.
    """
    run, here = scene.run, scene.runs.folder / "here"
    if scene.moment != "start":
        run.wait_saved(40, 90)
    if scene.moment == "saving":
        pid = hold_a_save(scene.runs, run, "n3")
        return lambda: scene.runs.lab.run("n3", ["kill", "-CONT", str(pid)], check=False) and None
    if scene.moment == "restoring":
        scene.on("n3", "pkill", "-KILL", "-f", PROGRAM)
    if scene.moment != "training":
        run.wait(scene.moment, here.exists, 90)
    return lambda: scene.mark("struck")


def to_the_end(scene: Scene, number: int) -> None:
    """Wait for the run's end, its first or a later one. Slurm's hold is lifted, and a cut cable mended when it may."""
    run, lab = scene.run, scene.runs.lab
    waits_since = 0.0

    def ended() -> bool:
        nonlocal waits_since
        state = next(host.state for host in lab.status().hosts if host.name == scene.host)
        if state == "cut" and len(run.entries("running")) > scene.running:
            lab.mend(scene.host)
        try:
            waits = run.slurm()["JobState"] == "PENDING"
        except LabError:  # Slurm is slow just now
            waits = False
        if not waits:
            waits_since = time.monotonic()
        elif time.monotonic() - waits_since > 5:  # not at once: what ends the old life would meet the new one
            lab.run("login", ["scontrol", "update", f"jobid={run.job_id}", "StartTime=now"], check=False)
        time.sleep(0.5)
        return len([entry for entry in run.entries("end") if entry.facts["ending"] != "left"]) >= number

    run.wait("the end", ended, 240)


def submit_again(scene: Scene) -> None:
    """Go on in the same run directory."""
    run = scene.run
    run.wait("the job's end", lambda: run.slurm()["JobState"] not in ("RUNNING", "COMPLETING"), 60)
    again = ["submit", "--json", "--site", "lab", *OPTIONS, "--spares", "1", "--run-dir", str(run.path), "--"]
    words = json.loads((run.path / "spec.json").read_text())["program"]
    run.job_id = int(json.loads(scene.runs.transom(*again, *words).stdout)["job_id"])


def nothing_left(scene: Scene) -> None:
    """No process of the job, nothing in memory on any host, also on one that was away, and no temporary file."""
    run, lab = scene.run, scene.runs.lab
    run.wait("the job's end", lambda: run.slurm()["JobState"] not in ("RUNNING", "COMPLETING"), 90)
    assert run.slurm()["JobState"] == "COMPLETED", run.story()
    states = {host.name: host.state for host in lab.status().hosts if host.name in lab.hosts}
    for host, state in states.items():
        if state == "frozen":
            lab.thaw(host)
            reclaim(scene, host)
        elif state == "cut":
            lab.mend(host)
    for host in (host for host, state in states.items() if state != "crashed"):

        def left(host: str = host) -> list[str]:
            return processes(scene, host) + scene.on(host, "ls", "-A", "/dev/shm").split()

        run.wait(f"{host} is left clean, but for {left()}", lambda: not left(), 60)
    hidden = {path.name for folder in (run.path, *run.path.iterdir()) for path in folder.glob(".*")} - KEPT
    assert {name for name in hidden if not name.startswith(SUBMITIT)} == set(), run.story()
    assert not (run.path / "request.json").exists()


def processes(scene: Scene, host: str) -> list[str]:
    """The user's processes on a host."""
    lines = scene.on(host, "pgrep", "-u", scene.runs.lab.user, "-a", check=False).splitlines()
    return [line for line in lines if "pgrep" not in line]


def reclaim(scene: Scene, host: str) -> None:
    """Start a run on a host that has thawed.

    Slurm kills there, all at once, what is left of the job: nobody is there to give memory back, so the next run does.
    """
    run, lab = scene.run, scene.runs.lab
    run.wait(f"{host} is idle", lambda: f"{host}:idle" in scene.on("login", "sinfo", "-h", "-N", "-o", "%N:%T"), 90)
    run.wait("the end of processes", lambda: not processes(scene, host), 60)
    others = ",".join(other for other in lab.hosts if other != host)
    after = scene.runs.submit("--nodes", "1", "--exclude", others, program=["sleep", "8"])
    after.wait_end()
    after.wait("its end", lambda: after.slurm()["JobState"] == "COMPLETED", 60)


def test_the_table_names_every_reason() -> None:
    used = {mark for line in TABLE.splitlines()[3:] for mark in line[30:].split()} - {"x", "X"}
    assert used == set(WHY)
