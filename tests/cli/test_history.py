"""transom history: one run's journal and checkpoints, in every form."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy
import pytest
from click.testing import CliRunner, Result

from transom_hpc.ckpt import Checkpointer
from transom_hpc.cli.history import history
from transom_hpc.run import ATTEMPTS, CHECKPOINTS, EVENTS, Run, load_run
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Journal
from transom_hpc.tol.rundir import RunDir, register
from transom_hpc.tol.spec import JobSpec, Submitted

BEGIN = datetime(2026, 11, 30, 12, tzinfo=timezone.utc)
EVIDENCE = "n2 has not been heard for 6.1 s, three periods; n1 and n3 are heard as ever"


class Watch:
    """A clock that is set."""

    at_s = 0.0

    def now(self) -> float:
        return self.at_s

    def wall(self) -> datetime:
        return BEGIN + timedelta(seconds=self.at_s)

    def sleep(self, seconds: float) -> None:
        self.at_s += seconds


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that lost a host and went on, with a checkpoint of step 40."""
    place = RunDir(tmp_path / "run")
    for folder in (place.journal, place.logs, place.checkpoints):
        folder.mkdir(parents=True)
    place.write(Submitted(JobSpec(nodes=2), ("true",), "/", job_id="7012"))
    os.utime(place.spec, (BEGIN.timestamp() - 20,) * 2)
    watch = Watch()
    journal = Journal(place.journal, 1, "n1", watch)

    def write(when: float, launch: int, kind: str, **facts: object) -> None:
        watch.at_s = when
        journal.append(Attempt(1, launch), kind, **facts)

    write(0, 0, "start", job_id=7012, hosts=["n1", "n2", "n3"])
    write(1, 1, "launch", hosts=["n1", "n2"], spares=["n3"])
    write(4, 1, "restored", step=0, source="")
    write(5, 1, "running", step=1)
    write(55, 1, "progress", step=51, step_s=1.0, loss=float("nan"), committed=40, stall_s=2.0)
    write(60, 1, "restart", cause="host silent", host_out="n2", evidence=EVIDENCE, committed=40, step=51, restored=0)
    write(60, 2, "launch", hosts=["n1", "n3"], spares=[])
    write(62, 2, "restored", step=40, source="memory: n1, n3")
    write(65, 2, "running", step=41)
    write(80, 2, "progress", step=56, step_s=1.0, loss=2.5, committed=40, stall_s=0.5)
    write(80, 2, "end", ending="ended well", why="all ranks ended well", code=0, committed=40)
    journal.close()
    with Checkpointer(place.checkpoints, every=10) as checkpointer:
        checkpointer.save(40, {"weights": numpy.arange(5000.0)}, block=True)
    return place.path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A run of which nothing is known yet."""
    place = RunDir(tmp_path / "empty")
    place.journal.mkdir(parents=True)
    place.write(Submitted(JobSpec(), ("true",), "/"))
    return place.path


def call(*arguments: str | Path, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(history, [str(argument) for argument in arguments])


def table(*arguments: str | Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(call(*arguments).stdout)))


def strict(text: str) -> object:
    """Read JSON as others do who know no NaN."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_screen(run: Path) -> None:
    answer = call(run)
    assert answer.exit_code == 0
    lines = answer.stdout.splitlines()
    assert lines[0] == f"run       {run}", "a path is not broken"
    assert max(map(len, lines[1:])) <= 80
    assert lines[1] == "goodput   52.5 % of 1.7 min"
    assert [line.split()[:5] for line in lines[2:10]] == [
        ["training", "52.5", "%", "52", "s"],
        ["saving", "2.5", "%", "2", "s"],
        ["redoing", "10.0", "%", "10", "s"],
        ["detecting", "5.0", "%", "5", "s"],
        ["restarting", "10.0", "%", "10", "s"],
        ["pausing", "0.0", "%", "0", "s"],
        ["waiting", "20.0", "%", "20", "s"],
        ["stopping", "0.0", "%", "0", "s"],
    ]
    assert [line.count("█") for line in lines[2:10]] == [16, 1, 3, 2, 3, 0, 6, 0]
    assert lines[11].split() == ["ATTEMPT", "STEPS", "LASTED", "HOST", "ENDED", "BY"]
    assert lines[12].startswith("A0001-L01  0 to 51   59 s    n2    host silent: n2 has not been heard")
    assert lines[-1].rstrip() == "A0001-L02  40 to 56  20 s    -     ended well: all ranks ended well"
    assert "\x1b" not in answer.stdout
    assert call(run, columns=20).stdout.splitlines()[0] == lines[0]


def test_colours_on_a_terminal_only(run: Path) -> None:
    command = ["script", "-qec", f"{sys.executable} -P -m transom_hpc history {run}", "/dev/null"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    shown = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
    )
    assert "\x1b[32m█" in shown.stdout
    environment["PYTHONIOENCODING"] = "ascii"
    command = [sys.executable, "-P", "-m", "transom_hpc", "history", str(run)]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "################" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_nothing_yet(empty: Path) -> None:
    assert call(empty).stdout.splitlines()[1:] == ["nothing has happened yet: the journal is empty"]
    found = strict(call(empty, "--json").stdout)
    assert isinstance(found, dict)
    assert (found["goodput"]["goodput"], found["goodput"]["wall_s"]) == (None, 0.0)
    assert (found["attempts"], found["events"], found["checkpoints"]) == ([], [], [])
    assert call(empty, "--csv").stdout == ",".join(ATTEMPTS) + "\n"
    assert call(empty, "--what", "checkpoints").exit_code == 0


def test_no_steps(run: Path) -> None:
    journal = run / "journal" / "A0001-n1.jsonl"
    lines = [line for line in journal.read_text().splitlines() if '"running"' not in line and '"progress"' not in line]
    journal.write_text("\n".join(lines) + "\n")
    assert "no step was reported" in call(run).stdout


def test_json(run: Path) -> None:
    found = strict(call(run, "--json").stdout)
    assert isinstance(found, dict)
    assert list(found) == ["goodput", "attempts", "events", "checkpoints"]
    assert found["goodput"] == pytest.approx(
        {
            "goodput": 0.525,
            "wall_s": 100.0,
            "training_s": 52.5,
            "saving_s": 2.5,
            "redoing_s": 10.0,
            "detecting_s": 5.0,
            "restarting_s": 10.0,
            "pausing_s": 0.0,
            "waiting_s": 20.0,
            "stopping_s": 0.0,
            "over_s": 0.0,
        }
    )
    first, second = found["attempts"]
    assert tuple(first) == ATTEMPTS
    assert (first["attempt"], first["launch"], first["cause"], first["host_out"]) == (1, 1, "host silent", "n2")
    assert (second["from_step"], second["restored_from"], second["hosts"]) == (40, "memory: n1, n3", ["n1", "n3"])
    assert [row["kind"] for row in found["events"]][:3] == ["start", "launch", "restored"]
    assert next(row for row in found["events"] if row["kind"] == "progress")["loss"] is None
    (checkpoint,) = found["checkpoints"]
    assert tuple(checkpoint) == CHECKPOINTS
    assert (checkpoint["step"], checkpoint["ranks"], checkpoint["bytes"] >= 40_000) == (40, 1, True)
    for what in ("attempts", "events", "checkpoints"):
        assert strict(call(run, "--json", "--what", what).stdout) == found[what]


def test_csv(run: Path) -> None:
    first, second = table(run, "--csv")
    assert tuple(first) == ATTEMPTS
    assert (first["evidence"], first["hosts"], first["duration_s"]) == (EVIDENCE, "n1 n2", "59.0")
    assert second["ended"] == "2026-11-30T12:01:20.000+00:00"
    assert table(run, "--csv", "--what", "attempts") == [first, second]
    events = table(run, "--csv", "--what", "events")
    assert tuple(events[0])[:5] == EVENTS
    assert [row["host_out"] for row in events if row["kind"] == "restart"] == ["n2"]
    (checkpoint,) = table(run, "--csv", "--what", "checkpoints")
    assert (checkpoint["step"], Path(checkpoint["folder"]).name) == ("40", "step-000000040")


def test_one_table_for_a_person(run: Path) -> None:
    events = call(run, "--what", "events", columns=200).stdout.splitlines()
    assert len(events) == 12
    assert events[6].startswith("2026-11-30T12:01:00  A0001-L01  restart   cause host silent, host_out n2, ")
    assert call(run, "--what", "attempts").stdout in call(run).stdout
    checkpoints = call(run, "--what", "checkpoints").stdout.splitlines()
    assert checkpoints[1].split()[:4] == ["40", "40.3", "kB", "1"]


def test_by_job_id(run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    register(RunDir(run))
    assert call("7012").stdout == call(run).stdout
    assert "no run with job id 7013" in str(call("7013").exception)


def test_what_can_not_be_done(run: Path, tmp_path: Path) -> None:
    assert call(run, "--json", "--csv").exit_code == 2
    assert call(run, "--what", "goodput").exit_code == 2
    command = [sys.executable, "-P", "-m", "transom_hpc", "history"]
    for target, why in ((tmp_path / "none", "neither a run directory nor a job id"), (run, "can't be read")):
        (run / "spec.json").write_text("{")
        shown = subprocess.run([*command, str(target)], capture_output=True, text=True, timeout=60, check=False)
        assert (shown.returncode, shown.stdout, len(shown.stderr.splitlines())) == (2, "", 1)
        assert shown.stderr.startswith("transom: ")
        assert why in shown.stderr


def test_foreign_entries(run: Path) -> None:
    line = {"time": 7, "attempt": "A0001-L02", "host": None, "kind": ["x"], "launch": "y", "deep": {"a": [1]}}
    with (run / "journal" / "A0001-n1.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n" + json.dumps({**line, "time": "soon", "kind": "restart"}) + "\n")
    for form in ((), ("--json",), ("--csv",), ("--what", "events"), ("--csv", "--what", "events")):
        assert call(run, *form).exit_code == 0, form
    assert table(run, "--csv", "--what", "events")[-1]["deep"] == '{"a": [1]}'
    frame = load(run).history()
    assert list(frame["launch"])[-2:] == [2, 2]
    assert frame["time"].isna().sum() == 2


def load(run: Path) -> Run:
    found = load_run(run)
    assert found.path == run
    return found


def test_frames(run: Path, empty: Path) -> None:
    found = load(run)
    attempts = found.attempts()
    assert tuple(attempts.columns) == ATTEMPTS
    assert list(attempts["began"] - BEGIN) == [timedelta(seconds=1), timedelta(seconds=60)]
    assert list(attempts["to_step"]) == [51, 56]
    checkpoints = found.checkpoints()
    assert tuple(checkpoints.columns) == CHECKPOINTS
    assert str(checkpoints["committed"].dt.tz) == "UTC"
    assert found.goodput().goodput == pytest.approx(0.525)
    assert tuple(found.history().columns)[:5] == EVENTS
    nothing = load(empty)
    assert (tuple(nothing.attempts().columns), len(nothing.attempts())) == (ATTEMPTS, 0)
    assert (tuple(nothing.checkpoints().columns), len(nothing.checkpoints())) == (CHECKPOINTS, 0)
    assert tuple(nothing.history().columns) == EVENTS
    assert nothing.goodput().goodput is None
    os.utime(run / "spec.json", None)  # submitted again: when it was first is not known any more
    assert found.goodput().wall_s == pytest.approx(80.0)
    (run / "spec.json").unlink()
    assert found.goodput().wall_s == pytest.approx(80.0)


def test_the_screen_and_json_need_no_pandas(run: Path) -> None:
    code = (
        "import sys, contextlib, io\nfrom transom_hpc.cli.history import history\n"
        "for form in ([], ['--json'], ['--csv']):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        f"        history([{str(run)!r}, *form])\n"
        "print(*sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert not {"pandas", "torch", "h5py", "mpi4py", "submitit"} & set(answer.stdout.split())
