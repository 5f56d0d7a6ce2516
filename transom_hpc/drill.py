"""A drill: train in the lab, take a host's power away in the middle, watch the run recover, compare the weights.

Everything in it is real: Slurm, the hosts' networks, the training, the crash. It runs what users run, through the
command line, as the lab's ordinary user.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from transom_hpc.base.errors import LabError, TransomError
from transom_hpc.lab import Lab
from transom_hpc.tol.history import History, fold
from transom_hpc.tol.rundir import RunDir

_NODES, _SPARES = 4, 1
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, and when the host is lost.

    Args:
        program: the training program.
        steps: of each run.
        save_every: steps between checkpoints.
        crash_after: the host is crashed when this step's checkpoint is committed.
        host: which.
        patience_s: longest time for each run.
    """

    program: Path
    steps: int = 60
    save_every: int = 10
    crash_after: int = 20
    host: str = "n3"
    patience_s: float = 240.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Where a run is, for whoever watches."""

    run: str
    step: int
    steps: int
    news: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the drill showed.

    Args:
        steps: of the run.
        restarts: of the hurt run.
        host: the host that was lost.
        excluded: hosts that the run stayed away from afterwards.
        back_s: seconds from the crash to the first new step.
        lost_steps: steps that were done twice.
        committed: the step of the last committed checkpoint.
        identical: whether both runs ended with bitwise the same weights.
        seconds: of the undisturbed and the hurt run.
    """

    steps: int
    restarts: int
    host: str
    excluded: tuple[str, ...]
    back_s: float | None
    lost_steps: int
    committed: int
    identical: bool
    seconds: tuple[float, float]


class Drill:
    """One drill in a lab.

    Args:
        lab: five hosts, healthy.
        plan: what to do.
        show: is told what happens.
    """

    def __init__(self, lab: Lab, plan: Plan, show: Callable[[Seen], None]) -> None:
        self._lab = lab
        self._plan = plan
        self._show = show
        self._folder = lab.shared / "drill"

    def run(self) -> Outcome:
        """Train undisturbed, train with a crash, compare.

        Raises:
            LabError: a run did not come to its end; the message has the last words of its log.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lab.run("login", ["mkdir", "-p", str(self._folder)])
        _, calm_s, _ = self._train("undisturbed", None)
        hurt, hurt_s, crashed = self._train("hurt", self._plan.host)
        history = fold(hurt.entries())
        return Outcome(
            steps=history.step,
            restarts=len(history.restarts),
            host=self._plan.host,
            excluded=tuple(incident.host for incident in history.incidents),
            back_s=None if crashed is None else _back_s(hurt, crashed),
            lost_steps=sum(max(0, facts.step - facts.restart.committed) for facts in history.restarts),
            committed=max(hurt.committed_steps(), default=0),
            identical=_same_weights(self._final("undisturbed"), self._final("hurt")),
            seconds=(calm_s, hurt_s),
        )

    def _final(self, name: str) -> Path:
        return self._folder / f"{name}.pt"

    def _train(self, name: str, victim: str | None) -> tuple[RunDir, float, float | None]:
        plan = self._plan
        transom = [sys.executable, "-P", "-m", "transom_hpc"]
        site = "lab" if self._lab.is_isolated else "lab-plain"
        options = ["--nodes", str(_NODES), "--spares", str(_SPARES), "--site", site, "--time", "10"]
        options += ["--name", name, "--run-dir", str(self._folder / name), "--save-every", str(plan.save_every)]
        program = [sys.executable, str(plan.program), "--steps", str(plan.steps), "--final", str(self._final(name))]
        submit = [*transom, "submit", "--json", *options, "--", *program]
        begun = time.monotonic()
        facts = json.loads(self._lab.run("login", submit, cwd=self._folder).stdout)
        self._show(Seen(name, 0, plan.steps, f"job {facts['job_id']} submitted by user {self._lab.user}"))
        run = RunDir(Path(facts["run_dir"]))
        crashed: float | None = None
        for history in self._follow(name, run, begun + plan.patience_s):
            saved = max(run.committed_steps(), default=0)
            if victim is not None and crashed is None and saved >= plan.crash_after and history.phase == "running":
                crashed = time.time()
                self._lab.crash(victim)
                self._show(
                    Seen(name, history.step, plan.steps, f"{victim} has lost its power (checkpoint {saved} is safe)")
                )
        return run, time.monotonic() - begun, crashed

    def _follow(self, name: str, run: RunDir, deadline: float) -> Iterator[History]:
        """The run's history, again and again, until its end; news are shown once."""
        shown = 0
        while True:
            entries = run.entries()
            history = fold(entries)
            for entry in entries[shown:]:
                self._show(Seen(name, history.step, self._plan.steps, _news(entry.kind, entry.facts)))
            shown = len(entries)
            if history.ending is not None and history.phase == "over":
                if history.ending[0] != "ended well":
                    raise LabError(f"the {name} run {history.ending[0]}: {history.ending[1]}\n{_last_words(run)}")
                return
            if time.monotonic() > deadline:
                raise LabError(f"the {name} run is not over after {self._plan.patience_s:.0f} s\n{_last_words(run)}")
            yield history
            time.sleep(_POLL_S)


def _news(kind: str, facts: dict[str, Any]) -> str:
    match kind:
        case "start":
            return f"started on {len(facts['hosts'])} hosts"
        case "launch":
            spares = f", {', '.join(facts['spares'])} stands by" if facts["spares"] else ""
            return f"program launched on {', '.join(facts['hosts'])}{spares}"
        case "running":
            return f"first step done: {facts['step']}"
        case "restart":
            return f"restart, {facts['cause']}: {facts['evidence']}"
        case "end":
            return f"{facts['ending']}: {facts['why']}"
        case "monitoring" if facts["problem"]:
            return f"monitoring: {facts['problem']}"
        case _:
            return ""


def _back_s(run: RunDir, crashed: float) -> float | None:
    """Seconds from the crash to the first step after it, as the launcher saw it; all clocks are this machine's."""
    for entry in run.entries():
        if entry.kind == "running":
            seconds = datetime.fromisoformat(entry.time).timestamp() - crashed
            if seconds > 0:
                return seconds
    return None


def _same_weights(one: Path, other: Path) -> bool:
    import torch

    states = [torch.load(path, weights_only=True) for path in (one, other)]
    if states[0].keys() != states[1].keys():
        return False
    pairs = [(states[0][name].contiguous(), states[1][name].contiguous()) for name in states[0]]
    return all(a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes() for a, b in pairs)


def _last_words(run: RunDir) -> str:
    logs = sorted(run.logs.glob("*_log.out"))
    try:
        return "\n".join(logs[-1].read_text(errors="replace").splitlines()[-15:]) if logs else "(no log)"
    except OSError as error:
        raise TransomError(f"{logs[-1]} can't be read: {error.strerror}", path=logs[-1]) from error
