"""Real runs in the lab: submit one as the ordinary user, hurt it, and compare what it leaves with an unhurt one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest

from transom_hpc.base.errors import LabError
from transom_hpc.lab import Lab
from transom_hpc.tol.journal import Entry
from transom_hpc.tol.rundir import RunDir

HEAT = Path(__file__).parents[2] / "examples" / "heat_mpi.py"
SIZE = 64
PYTHON = [sys.executable, "-P"]


@dataclass
class Submitted:
    """A run in the lab, as a test sees it."""

    lab: Lab
    path: Path
    job_id: int
    final: Path

    def entries(self, kind: str) -> list[Entry]:
        """Its journal's entries of one kind."""
        return [entry for entry in RunDir(self.path).entries() if entry.kind == kind]

    def wait(self, what: str, ready: Callable[[], Any], seconds: float) -> Any:
        """Wait until something is so; fail with all there is to see when it is not so in time."""
        deadline = time.monotonic() + seconds
        while True:
            value = ready()
            if value:
                return value
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not in {seconds} s\n{self.story()}")
            time.sleep(0.1)

    def wait_saved(self, step: int, seconds: float = 60) -> None:
        """Wait until a checkpoint of this step or a later one is committed."""
        self.wait(f"checkpoint {step}", lambda: max(RunDir(self.path).committed_steps(), default=0) >= step, seconds)

    def wait_entry(self, kind: str, count: int = 1, seconds: float = 60) -> Entry:
        """Wait for the journal's entry number `count` of a kind, and return it."""
        self.wait(f"{count}. {kind!r}", lambda: len(self.entries(kind)) >= count, seconds)
        return self.entries(kind)[count - 1]

    def wait_end(self, how: str = "ended well", seconds: float = 120) -> Entry:
        """Wait until the run is over."""
        self.wait("the end", lambda: any(e.facts["ending"] != "left" for e in self.entries("end")), seconds)
        entry = self.entries("end")[-1]
        assert entry.facts["ending"] == how, self.story()
        return entry

    def slurm(self) -> dict[str, str]:
        """What scontrol shows of the job, field by field."""
        text = self.lab.run("login", ["scontrol", "-o", "show", "job", str(self.job_id)]).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def release(self, seconds: float = 90) -> None:
        """Let the requeued job start at once, where Slurm holds it (it does for two minutes, mostly).

        Not in the same instant: what ends the old life on the hosts would meet the new one, which has the same id.
        """
        lives = len(self.entries("start"))
        told = time.monotonic()

        def started() -> bool:
            nonlocal told
            if len(self.entries("start")) > lives:
                return True
            if self.slurm()["JobState"] != "PENDING":
                told = time.monotonic()
            elif time.monotonic() - told > 5:
                told = time.monotonic() + 5
                self.lab.run("login", ["scontrol", "update", f"jobid={self.job_id}", "StartTime=now"], check=False)
            return False

        self.wait("the next start", started, seconds)

    def field(self) -> numpy.ndarray:
        """The field that the program left."""
        found: numpy.ndarray = numpy.load(self.final)
        return found

    def story(self) -> str:
        """Journal and logs, for a failure's message."""
        lines = [f"{e.time[11:23]} {e.attempt} {e.host} {e.kind} {e.facts}" for e in RunDir(self.path).entries()]
        logs = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted((self.path / "logs").glob("*log*"))]
        names = ("JobState", "Reason", "StartTime", "EligibleTime", "NodeList")
        try:
            facts = self.slurm()
            slurm = [str({name: facts.get(name) for name in names}), self.lab.run("login", ["sinfo", "-N"]).stdout]
        except LabError as error:  # Slurm does not answer
            slurm = [str(error)]
        return "\n".join([*slurm, *lines, *logs])


class Runs:
    """Submits runs in the lab, and ends what a failed test leaves."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.count = 0

    def transom(self, *arguments: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Call the command line on the login node, as the ordinary user."""
        argv = [*PYTHON, "-m", "transom_hpc", *arguments]
        return self.lab.run("login", argv, cwd=self.folder, timeout=timeout, check=check)

    def submit(self, *options: str, program: list[str]) -> Submitted:
        """Submit a program; its run directory is new."""
        self.count += 1
        path = self.folder / f"run{self.count}"
        answer = self.transom("submit", "--json", "--site", "lab", "--run-dir", str(path), *options, "--", *program)
        facts = json.loads(answer.stdout)
        return Submitted(self.lab, Path(facts["run_dir"]), int(facts["job_id"]), self.folder / f"final{self.count}.npy")

    def heat(self, *options: str, steps: int, sleep: float = 0.05) -> Submitted:
        """Submit the heat equation on four ranks."""
        return self.submit(*options, program=self.heat_program(steps, sleep))

    def heat_program(self, steps: int, sleep: float) -> list[str]:
        """The heat equation's command; it writes final<count>.npy."""
        final = self.folder / f"final{self.count + 1}.npy"
        sizes = ["--steps", str(steps), "--size", str(SIZE), "--sleep", str(sleep)]
        return [sys.executable, str(HEAT), *sizes, "--final", str(final)]


@pytest.fixture
def runs(healthy_lab: Lab, request: pytest.FixtureRequest) -> Iterator[Runs]:
    """Runs in a folder of their own on the lab's shared disk."""
    folder = healthy_lab.shared / re.sub(r"\W+", "-", request.node.name)
    shutil.rmtree(folder, ignore_errors=True)
    healthy_lab.run("login", ["mkdir", str(folder)])
    yield Runs(healthy_lab, folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., numpy.ndarray]:
    """The field after so many steps on so many ranks that nothing happened to, bit for bit."""
    known: dict[tuple[int, int], numpy.ndarray] = {}

    def field(steps: int, ranks: int = 4) -> numpy.ndarray:
        if (steps, ranks) not in known:
            folder = tmp_path_factory.mktemp("unhurt")
            final = folder / "final.npy"
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks)]
            sizes = ["--steps", str(steps), "--size", str(SIZE), "--checkpoints", str(folder / "ckpt")]
            command = [*mpirun, sys.executable, str(HEAT), *sizes, "--final", str(final)]
            subprocess.run(command, check=True, timeout=100, stdout=subprocess.DEVNULL)
            known[steps, ranks] = numpy.load(final)
        return known[steps, ranks]

    return field


def same_bits(one: numpy.ndarray, other: numpy.ndarray) -> bool:
    """Whether two arrays are the same, bit for bit."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@pytest.fixture
def identical() -> Callable[[numpy.ndarray, numpy.ndarray], bool]:
    """Bitwise comparison."""
    return same_bits
