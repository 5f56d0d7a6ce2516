"""Where ranks stand that hang: real processes, stopped, asleep, in C with the interpreter's lock, and not Python."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transom_hpc.monitors.heartbeat import read_heartbeats
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol import traces
from transom_hpc.tol.behind import Stand, parse_stand
from transom_hpc.tol.job import Job
from transom_hpc.tol.stacks import keep, look
from transom_hpc.tol.steps import Steps

ATTEMPT = f"A{os.getpid():04d}-L01"  # no other test's processes
Start = Callable[..., subprocess.Popen[bytes]]

# A rank that has finished its steps and goes on as the test says.
RANK = """\
import os, sys, time
from pathlib import Path
from transom_hpc.monitors.heartbeat import HeartbeatWriter
from transom_hpc.tol import last_words, traces
rank, shm = int(os.environ["RANK"]), Path(os.environ["TRANSOM_SHM"])
beat = HeartbeatWriter(shm / f"beat-{rank:06d}", rank, os.environ["TRANSOM_ATTEMPT"])
last_words.listen(rank, 4)
traces.offer(shm, rank)
"""
# srun as a script: it runs the tasks on this host, and where there is a file `dead` one host gives no answer.
SRUN = """#!/bin/bash
kind=
while [[ $1 == --* ]]; do
    case $1 in --job-name=*) kind=${1#*=};; esac
    shift
done
[ $kind = stacks ] || exit 1
echo "an mpi says a word" >&1
SLURMD_NODENAME=n1 "$@"
[ ! -e "$(dirname "$0")/dead" ] || exec sleep 60
"""


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job(800_000_000 + int(uuid.uuid4().hex[:6], 16), 0, ("n1", "n2"), "n1")
    job.shm.mkdir(mode=0o700)
    yield job
    shutil.rmtree(job.shm, ignore_errors=True)


@pytest.fixture
def shm(job: Job) -> Path:
    return job.shm


@pytest.fixture
def start(shm: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a rank of the program, and wait until it stands where it is to."""
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, program: str | list[str], ready: Callable[[], bool] | None = None) -> subprocess.Popen[bytes]:
        environment = {"TRANSOM_ATTEMPT": ATTEMPT, "RANK": str(rank), "TRANSOM_SHM": str(shm)}
        environment["TRANSOM_LAST_WORDS"] = f"{shm}/died-{ATTEMPT}-{rank}"
        if isinstance(program, str):
            script = tmp_path / f"train{rank}.py"
            script.write_text(RANK + textwrap.dedent(program))
            program = [sys.executable, str(script)]
        process = subprocess.Popen(
            program, env={**os.environ, **environment}, stderr=subprocess.DEVNULL, process_group=0
        )
        started.append(process)
        deadline = time.monotonic() + 20
        while not (ready or (lambda: any(beat.rank == rank and beat.step for beat in read_heartbeats(shm, ATTEMPT))))():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.1)  # from its word to its place
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def seen(shm: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[int, tuple[Stand, str]]]:
    """Look at the ranks: what is said of each, and what its file would hold."""

    def seen(patience_s: float = 4.0) -> dict[int, tuple[Stand, str]]:
        texts = look(ATTEMPT, shm, "n1", time.monotonic() + patience_s)
        stands = [stand for line in capsys.readouterr().out.splitlines() if (stand := parse_stand(line))]
        assert {f"n1-rank{stand.rank}.txt" for stand in stands} == set(texts)
        return {stand.rank: (stand, texts[f"n1-rank{stand.rank}.txt"]) for stand in stands}

    return seen


Seen = Callable[..., dict[int, tuple[Stand, str]]]


def test_a_rank_that_sleeps(start: Start, seen: Seen) -> None:
    process = start(3, "def rest():\n    beat.beat(41)\n    time.sleep(60)\nrest()\n")
    stand, text = seen()[3]
    assert (stand.step, stand.state, stand.place, stand.phase) == (41, "", "train3.py:11 in rest", "training")
    assert stand.age_s is not None
    assert 0 < stand.age_s < 10
    assert text.startswith(f"rank 3 on n1, process {process.pid}\nlast finished step: 41; training; last heartbeat ")
    assert 'train3.py", line 11 in rest' in text
    assert process.poll() is None  # and it goes on as before


def test_all_threads_and_the_main_one_counts(start: Start, seen: Seen) -> None:
    program = """
        import threading
        def load():
            time.sleep(60)
        threading.Thread(target=load, daemon=True).start()
        beat.beat(1)
        threading.Event().wait()
    """
    stand, text = seen_one(start, seen, program)
    assert stand.place == "train0.py:15 in wait"  # a function of the standard library, called in the program's line
    assert "in load" in text


def seen_one(start: Start, seen: Seen, program: str) -> tuple[Stand, str]:
    start(0, program)
    return seen()[0]


def test_c_code_that_keeps_the_interpreter(start: Start, seen: Seen) -> None:
    program = """
        import ctypes
        def reduce():
            ends = os.pipe()
            beat.beat(7)
            ctypes.PyDLL(None).read(ends[0], ctypes.create_string_buffer(1), 1)
        reduce()
    """
    stand, text = seen_one(start, seen, program)
    assert (stand.step, stand.state, stand.place) == (7, "", "train0.py:14 in reduce")
    assert "pipe_read" in text  # the kernel's side


def test_a_loop_in_c_is_seen_as_well(start: Start, seen: Seen) -> None:
    stand, _ = seen_one(start, seen, "beat.beat(7)\nsum(x for x in iter(int, 1))\n")
    assert stand.place.startswith("train0.py:10 in ")


def test_a_rank_that_is_stopped(start: Start, seen: Seen) -> None:
    process = start(2, "beat.beat(41)\ntime.sleep(60)\n")
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    try:
        began = time.monotonic()
        stand, text = seen()[2]
        assert time.monotonic() - began < 2
        assert stand.state == "is stopped (SIGSTOP)"
        assert "it is stopped (SIGSTOP)\n" in text
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_rank_that_has_ended(start: Start, seen: Seen) -> None:
    process = start(2, "beat.beat(41)\n")
    process.wait()
    assert seen()[2][0].state == "has ended"


def test_a_rank_that_has_failed_and_does_not_end(start: Start, seen: Seen) -> None:
    program = """
        import atexit
        atexit.register(time.sleep, 60)
        beat.beat(5)
        raise ValueError("no such batch")
    """
    stand, text = seen_one(start, seen, program)
    assert stand.failed == "ValueError: no such batch (train0.py:13)"
    assert "it has failed and does not end: ValueError: no such batch (train0.py:13)" in text


def test_a_program_that_is_not_python(start: Start, seen: Seen) -> None:
    process = start(1, ["sh", "-c", "sleep 60; true"], lambda: True)
    stand, text = seen()[1]
    assert (stand.step, stand.age_s) == (None, None)
    assert stand.place.startswith("sleep ")  # what the shell has started
    assert "no Python stacks" in text
    assert process.poll() is None


def test_python_that_offers_nothing_is_not_hurt(start: Start, seen: Seen) -> None:
    """The signal would end it."""
    code = "import time; time.sleep(60)"
    process = start(1, [sys.executable, "-c", code], lambda: True)
    time.sleep(0.3)
    stand, text = seen()[1]
    time.sleep(0.2)
    assert process.poll() is None
    if shutil.which("py-spy") or Path(sys.executable).with_name("py-spy").exists():
        assert "<module> (<string>:1)" in text
    else:
        assert stand.place != ""


def test_a_file_that_an_earlier_process_left_asks_no_other(shm: Path, start: Start, seen: Seen) -> None:
    process = start(0, "beat.beat(1)\nimport signal\nsignal.signal(traces.SIGNAL, signal.SIG_DFL)\ntime.sleep(60)\n")
    time.sleep(0.2)
    seen()
    time.sleep(0.2)
    assert process.poll() is None
    assert traces.ask(shm, 0, os.getpid(), time.monotonic() + 1) == ""


def test_another_process_of_the_same_rank_is_not_asked(shm: Path, start: Start) -> None:
    """It catches the signal, for a use of its own; the file is of a rank that has gone."""
    program = """
        import signal
        signal.signal(traces.SIGNAL, lambda *_: beat.beat(99))
        path = traces.trace_path(shm, rank)
        path.write_text(path.read_text().replace(str(os.getpid()), "1"))
        beat.beat(1)
        time.sleep(60)
    """
    process = start(0, program)
    assert traces.ask(shm, 0, process.pid, time.monotonic() + 1) == ""
    time.sleep(0.2)
    assert [beat.step for beat in read_heartbeats(shm, ATTEMPT)] == [1]


def test_who_starts_ranks_is_none(shm: Path, start: Start, seen: Seen, tmp_path: Path) -> None:
    """torchrun has the rank of its task, and its workers have theirs."""
    rank = tmp_path / "rank.py"
    rank.write_text(RANK + "beat.beat(1)\ntime.sleep(60)\n")
    code = "import os, subprocess, sys; subprocess.run([sys.executable, sys.argv[1]], env={**os.environ, 'RANK': '4'})"
    above = [sys.executable, "-c", code, str(rank)]
    start(1, above, lambda: any(beat.step for beat in read_heartbeats(shm, ATTEMPT)))
    assert set(seen()) == {4}


def test_a_program_that_uses_the_signal_keeps_it(shm: Path) -> None:
    program = """
        import os, signal
        from pathlib import Path
        from transom_hpc.tol import traces
        signal.signal(traces.SIGNAL, lambda *_: print("mine"))
        traces.offer(Path(os.environ["TRANSOM_SHM"]), 0)
        os.kill(os.getpid(), traces.SIGNAL)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env={"TRANSOM_SHM": str(shm)})
    assert answer.stdout == "mine\n"
    assert not traces.trace_path(shm, 0).exists()


def test_a_rank_that_can_not_be_woken(start: Start, seen: Seen, tmp_path: Path) -> None:
    """A parent waits so for the child of vfork, as others do for a file system that is gone."""
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")
    library = tmp_path / "wait.so"
    source = "#include <unistd.h>\nvoid wait_for_child(void) { if (!vfork()) { sleep(60); _exit(0); } }\n"
    subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(library)], input=source.encode(), check=True)
    start(0, f"import ctypes\nwait = ctypes.PyDLL({str(library)!r}).wait_for_child\nbeat.beat(1)\nwait()\n")
    began = time.monotonic()
    stand, text = seen(2.0)[0]
    assert time.monotonic() - began < 2.5
    assert stand.state == "waits in the kernel and can't be woken (disk or file system)"
    assert "it waits in the kernel" in text


def test_a_disk_that_hangs_holds_nobody_up(shm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stacks"
    folder.mkdir()
    os.mkfifo(folder / "n1-rank0.txt")  # it can't be opened until somebody reads it
    began = time.monotonic()
    keep({"n1-rank0.txt": "here\n"}, shm / "stacks", folder, began + 0.5)
    assert time.monotonic() - began < 1
    assert (shm / "stacks" / "n1-rank0.txt").read_text() == "here\n"
    assert os.read(os.open(folder / "n1-rank0.txt", os.O_RDONLY), 9)  # lets the thread go


@pytest.fixture
def steps(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steps:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(SRUN)
    (programs / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return Steps(job, SiteConfig(), os.environ)


def test_the_step(start: Start, steps: Steps, tmp_path: Path) -> None:
    for rank, last in enumerate((42, 41)):
        start(rank, f"def train():\n    beat.beat({last})\n    time.sleep(60)\ntrain()\n")
    began = time.monotonic()
    said = steps.stacks(["n1"], ATTEMPT, tmp_path / "logs" / "stacks")
    assert time.monotonic() - began < 5
    assert said == "rank 1 on n1 is behind, at step 41: train1.py:11 in train"
    assert sorted(path.name for path in (tmp_path / "logs" / "stacks").iterdir()) == ["n1-rank0.txt", "n1-rank1.txt"]


def test_a_dead_host_is_not_waited_for(start: Start, steps: Steps, tmp_path: Path) -> None:
    (tmp_path / "bin" / "dead").touch()
    start(0, "beat.beat(3)\ntime.sleep(60)\n")
    began = time.monotonic()
    said = steps.stacks(["n1", "n2"], ATTEMPT, tmp_path / "stacks", patience_s=4.0)
    assert time.monotonic() - began < 4.5
    assert said == "rank 0 on n1 is at step 3: train0.py:10 in <module>; no answer from n2"


def test_a_program_that_the_launcher_has_started(start: Start, seen: Seen) -> None:
    """With a Checkpointer, as programs have."""
    program = """
        import numpy
        import transom_hpc as transom
        os.environ["TRANSOM_RUN_DIR"] = str(Path(__file__).parent / "run")
        checkpointer = transom.Checkpointer.from_env(rank=0, world_size=1)
        state = {"x": numpy.zeros(3)}
        checkpointer.restore(state)
        checkpointer.step(1, state)
        time.sleep(60)
    """
    stand, _ = seen_one(start, seen, program)
    assert (stand.step, stand.place) == (1, "train0.py:17 in <module>")
