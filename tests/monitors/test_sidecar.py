"""The sidecar with real MPI ranks on this machine. A stopped process stands for a host that is not heard."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from transom_hpc.monitors.heartbeat import HeartbeatWriter, beat_path
from transom_hpc.monitors.sidecar import SidecarConfig
from transom_hpc.monitors.store import load_readings
from transom_hpc.monitors.verdict import (
    Alone,
    Behind,
    Bye,
    Cleared,
    Message,
    Progress,
    Ready,
    Replaced,
    Verdict,
    parse_line,
)

pytestmark = pytest.mark.mpi

PERIOD_S = 0.4
SILENT_S = 3 * PERIOD_S
QUICK = ("--period", str(PERIOD_S), "--ping", "0.1", "--start-deadline", "10")


@dataclass
class Ranks:
    """A sidecar on n0, n1, ... and all that it says."""

    size: int
    folder: Path
    attempt: str
    arguments: tuple[str, ...] = QUICK
    wrap: str = "exec {command}"
    said: list[tuple[float, Message]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> Ranks:
        command = ["mpirun", "--oversubscribe", "--allow-run-as-root", "--tag-output", "--enable-recovery"]
        command += ["--mca", "orte_abort_on_non_zero_status", "0"]
        for rank in range(self.size):
            own = f"{sys.executable} -m transom_hpc.monitors --attempt {self.attempt} --shm {self.folder}/n{rank} "
            own += f"--run-dir {self.folder} " + " ".join(self.arguments)
            command += [":"] if rank else []
            command += ["-n", "1", "-x", f"SLURMD_NODENAME=n{rank}", "bash", "-c", self.wrap.format(command=own)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.readers = [
            threading.Thread(target=self.read, args=(self.process.stdout, self.take), daemon=True),
            threading.Thread(target=self.read, args=(self.process.stderr, self.errors.append), daemon=True),
        ]
        for reader in self.readers:
            reader.start()
        try:
            self.pids = self.find()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        processes = [psutil.Process(pid) for pid in getattr(self, "pids", []) if psutil.pid_exists(pid)]
        for process in processes:
            process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(15)
        finally:
            self.process.kill()
            self.process.wait()
            for process in processes:
                if process.is_running():
                    process.kill()
            for reader in self.readers:
                reader.join(5)
            for stream in (self.process.stdout, self.process.stderr):
                if stream is not None:
                    stream.close()

    def read(self, stream: Iterator[str], take: Callable[[str], None]) -> None:
        for line in stream:
            take(line)

    def take(self, line: str) -> None:
        message = parse_line(line)
        if message is not None:
            self.said.append((time.monotonic(), message))

    def find(self) -> list[int]:
        """Process of each rank, once all have started."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            found: dict[int, int] = {}
            for process in psutil.Process(self.process.pid).children():
                try:
                    if "transom_hpc.monitors" in process.cmdline():
                        found[int(process.environ()["OMPI_COMM_WORLD_RANK"])] = process.pid
                except psutil.Error:
                    continue
            if len(found) == self.size:
                return [found[rank] for rank in range(self.size)]
            time.sleep(0.05)
        raise AssertionError(f"only {len(found)} ranks started: {self.errors}")

    def wait(self, what: Callable[[Message], bool], seconds: float = 20.0) -> tuple[float, Message]:
        """The first message of a kind, and when it came."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for when, message in list(self.said):
                if what(message):
                    return when, message
            time.sleep(0.02)
        raise AssertionError(f"not said within {seconds} s: {self.all_but_progress()} {self.errors}")

    def wait_error(self, text: str, seconds: float = 20.0) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for line in list(self.errors):
                if text in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"not said within {seconds} s: {self.errors}")

    def ready(self) -> Ranks:
        self.wait(lambda message: isinstance(message, Ready))
        time.sleep(0.3)
        return self

    def all_but_progress(self) -> list[Message]:
        return [message for _, message in self.said if not isinstance(message, Progress)]

    def progress_count(self) -> int:
        return sum(isinstance(message, Progress) for _, message in self.said)

    def verdicts(self) -> list[tuple[str, str]]:
        return [(item.host, item.cause) for item in self.all_but_progress() if isinstance(item, Verdict)]

    def signal(self, number: int, *ranks: int) -> float:
        for rank in ranks:
            os.kill(self.pids[rank], number)
        return time.monotonic()

    def alive(self) -> list[int]:
        return [
            rank
            for rank, pid in enumerate(self.pids)
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]

    def lost_lines(self) -> list[str]:
        return [line for line in self.errors if "the launcher is lost" in line]


@pytest.fixture
def attempt() -> str:
    return f"A8{os.getpid()}-L01"


def test_the_program_is_seen_the_readings_are_kept_and_it_leaves_in_order(tmp_path: Path, attempt: str) -> None:
    writers = [HeartbeatWriter(beat_path(tmp_path / f"n{rank // 2}", rank), rank, attempt) for rank in range(8)]
    HeartbeatWriter(beat_path(tmp_path / "n0", 99), 99, "A0001-L01")  # of another attempt
    for rank, writer in enumerate(writers):
        writer.beat(10, loss=1.0)
        writer.beat(11 if rank == 5 else 12, loss=1.0 + rank, saved_step=10, stall_s=0.5)
    with Ranks(4, tmp_path, attempt) as ranks:
        _, ready = ranks.wait(lambda message: isinstance(message, Ready))
        assert ready == Ready(("n0", "n1", "n2", "n3"))
        _, progress = ranks.wait(lambda message: isinstance(message, Progress) and message.ranks == 8)
        assert isinstance(progress, Progress)
        assert (progress.step_min, progress.step_max, progress.saved_step, progress.stall_s) == (11, 12, 10, 0.5)
        assert progress.behind == Behind("n2", 5)
        assert progress.loss == 4.5
        assert progress.phase == "training"
        assert progress.hosts == 4
        assert progress.age_s is not None
        ranks.wait(lambda _: ranks.progress_count() >= 5)
        ranks.signal(signal.SIGUSR1, 0, 1, 2, 3)  # Slurm signals every step before the time limit
        time.sleep(0.3)
        assert ranks.alive() == [0, 1, 2, 3]
        ranks.signal(signal.SIGTERM, 0)  # when rank 0 leaves, everybody leaves
        ranks.wait(lambda message: isinstance(message, Bye))
        assert ranks.process.wait(15) is not None
        assert [type(message) for message in ranks.all_but_progress()] == [Ready, Bye]
    frame = load_readings(tmp_path / "health" / f"{attempt}.h5")
    assert set(frame["host"]) == {"n0", "n1", "n2", "n3"}
    assert frame.groupby("host").size().min() >= 4
    assert frame.loc[frame["host"] == "n2", "step_min"].iloc[-1] == 11


def test_a_silent_host_is_named_within_three_periods_and_cleared_when_it_is_back(tmp_path: Path, attempt: str) -> None:
    # the launcher's process can't be seen, as from another container: it is not taken for dead
    with Ranks(4, tmp_path, attempt, (*QUICK, "--supervisor-pid", "4194303")) as ranks:
        ranks.ready()
        ranks.wait_error("there is no process 4194303")
        stopped = ranks.signal(signal.SIGSTOP, 2)
        when, verdict = ranks.wait(lambda message: isinstance(message, Verdict))
        assert isinstance(verdict, Verdict)
        assert (verdict.host, verdict.cause, verdict.severity) == ("n2", "silent", "act")
        assert "n2 has not been heard for 1." in verdict.evidence
        assert verdict.readings["sidecar_rss_bytes"] is not None
        assert SILENT_S - 0.4 < when - stopped < SILENT_S + 0.6
        time.sleep(2.0)
        _, progress = ranks.said[-1]
        assert isinstance(progress, Progress)
        assert progress.hosts == 3
        ranks.signal(signal.SIGCONT, 2)
        _, cleared = ranks.wait(lambda message: isinstance(message, Cleared))
        assert cleared == Cleared("n2", "silent", "n2 is heard again")
        time.sleep(2.0)
        assert ranks.verdicts() == [("n2", "silent")]
        assert ranks.alive() == [0, 1, 2, 3]
        assert not ranks.lost_lines()


def test_when_rank_0_stops_the_next_speaks_once_and_nobody_is_blamed_later(tmp_path: Path, attempt: str) -> None:
    with Ranks(4, tmp_path, attempt) as ranks:
        ranks.ready()
        stopped = ranks.signal(signal.SIGSTOP, 0)
        line = ranks.wait_error("the launcher is lost")
        assert time.monotonic() - stopped < SILENT_S + 1.5
        assert "[1,1]" in line
        assert "(n0): n0 (rank 0) has not been heard for" in line
        assert "3 of 4 hosts hear each other" in line
        time.sleep(3.0)
        ranks.signal(signal.SIGCONT, 0)
        ranks.wait(lambda message: message == Replaced("n1"))
        time.sleep(2.5)
        assert ranks.verdicts() == []
        assert len(ranks.lost_lines()) == 1
        assert ranks.alive() == [0, 1, 2, 3]


def test_when_ranks_0_and_1_die_rank_2_speaks(tmp_path: Path, attempt: str) -> None:
    with Ranks(5, tmp_path, attempt) as ranks:
        ranks.ready()
        ranks.signal(signal.SIGKILL, 0, 1)
        line = ranks.wait_error("the launcher is lost")
        assert "[1,2]" in line
        assert "(n0, n1)" in line
        time.sleep(2.0)
        assert len(ranks.lost_lines()) == 1
        assert ranks.alive() == [2, 3, 4]


def test_rank_0_that_hears_nobody_is_the_one_that_is_cut_off(tmp_path: Path, attempt: str) -> None:
    with Ranks(4, tmp_path, attempt) as ranks:
        ranks.ready()
        ranks.signal(signal.SIGSTOP, 1, 2, 3)
        _, verdict = ranks.wait(lambda message: isinstance(message, Verdict))
        assert isinstance(verdict, Verdict)
        assert "it is the one that is cut off" in verdict.evidence
        ranks.wait_error("this host is cut off")
        ranks.wait(lambda message: isinstance(message, Bye))
        assert ranks.verdicts() == [("n0", "isolated")]
        assert any(isinstance(message, Alone) for message in ranks.all_but_progress())
        time.sleep(1.0)
        assert ranks.alive() == [1, 2, 3]


def test_with_two_hosts_the_one_without_the_launcher_ends_its_program(tmp_path: Path, attempt: str) -> None:
    environment = {**os.environ, "TRANSOM_ATTEMPT": attempt}
    with (
        subprocess.Popen(["sleep", "60"], env=environment) as program,
        Ranks(2, tmp_path, attempt) as ranks,
    ):
        try:
            ranks.ready()
            assert program.poll() is None
            ranks.signal(signal.SIGSTOP, 0)
            line = ranks.wait_error("this host is cut off; ended 1 processes")
            assert "[1,1]" in line
            assert program.wait(5) == -signal.SIGKILL
            time.sleep(1.0)
            assert ranks.alive() == [0]
        finally:
            program.kill()


def test_when_only_the_launchers_process_ends_rank_0_speaks(tmp_path: Path, attempt: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as launcher:
        arguments = (*QUICK, "--supervisor-pid", str(launcher.pid))
        with Ranks(3, tmp_path, attempt, arguments) as ranks:
            ranks.ready()
            time.sleep(1.0)
            assert not ranks.lost_lines()
            launcher.kill()
            launcher.wait()
            line = ranks.wait_error("the launcher is lost")
            assert "[1,0]" in line
            assert "(no host with it)" in line
            time.sleep(1.0)
            assert len(ranks.lost_lines()) == 1


def test_nobody_reads_and_the_sidecar_goes_on(tmp_path: Path, attempt: str) -> None:
    with Ranks(3, tmp_path, attempt, wrap="exec {command} > >(head -n 1)") as ranks:
        ranks.wait(lambda message: isinstance(message, (Ready, Progress)))
        time.sleep(2.5)
        assert ranks.alive() == [0, 1, 2]


def test_it_costs_little(tmp_path: Path, attempt: str) -> None:
    def seconds(pid: int) -> float:
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)

    with Ranks(4, tmp_path, attempt, ()) as ranks:
        ranks.ready()
        before, start = [seconds(pid) for pid in ranks.pids], time.monotonic()
        time.sleep(5.0)
        shares = [
            (seconds(pid) - old) / (time.monotonic() - start) for pid, old in zip(ranks.pids, before, strict=True)
        ]
        memory = [psutil.Process(pid).memory_info().rss for pid in ranks.pids]
    assert max(shares) < 0.01, shares
    assert max(memory) < 80e6, memory


@pytest.mark.parametrize(
    ("values", "word"),
    [({"ping_s": 0.0}, "above zero"), ({"silent_after_s": 1.0}, "four pings"), ({"isolated_after_s": 6.5}, "pings")],
)
def test_times_that_do_not_fit_are_refused(tmp_path: Path, values: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        SidecarConfig("A0001-L01", tmp_path, **values).rules()  # type: ignore[arg-type]
