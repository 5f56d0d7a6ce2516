"""The sidecar as a step of a real Slurm job, on hosts that freeze, are cut off and crash."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from transom_hpc.lab import Lab
from transom_hpc.monitors.verdict import Bye, Cleared, Message, Progress, Ready, Verdict, parse_line

pytestmark = [pytest.mark.slurm, pytest.mark.mpi, pytest.mark.slow]

PERIOD_S = 0.5
ATTEMPT = "A0001-L01"


class SidecarStep:
    """A sidecar on all hosts of a lab, started on the login host, which none of the faults reaches."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.said: list[tuple[float, Message]] = []
        self.lines: list[str] = []
        self.process = lab.popen(
            "login",
            [
                *("salloc", "--quiet", f"--nodes={len(lab.hosts)}", "--no-kill", "srun", "--overlap", "--no-kill"),
                *("--mpi=pmix", "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--label", "--unbuffered"),
                *(sys.executable, "-m", "transom_hpc.monitors", f"--attempt={ATTEMPT}", "--shm=/dev/shm/sidecar"),
                *(f"--period={PERIOD_S}", "--ping=0.1", f"--hosts={','.join(lab.hosts)}"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message = parse_line(line)
            if message is None:
                self.lines.append(line.rstrip())
            else:
                self.said.append((time.monotonic(), message))

    def wait(self, what: Callable[[Message], bool], seconds: float) -> tuple[float, Message]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for when, message in list(self.said):
                if what(message):
                    return when, message
            time.sleep(0.02)
        raise AssertionError(f"not said within {seconds} s: {self.news()} {self.lines}")

    def wait_line(self, text: str, seconds: float) -> str:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for line in list(self.lines):
                if text in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"not said within {seconds} s: {self.news()} {self.lines}")

    def news(self) -> list[Message]:
        return [message for _, message in self.said if not isinstance(message, Progress)]

    def close(self) -> None:
        self.lab.run("login", ["scancel", "--user", self.lab.user], check=False)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:  # srun may wait for a host that is lost
            self.process.kill()
            self.process.wait()
        self.reader.join(20)
        if self.process.stdout is not None and not self.reader.is_alive():
            self.process.stdout.close()


@pytest.fixture
def step(healthy_lab: Lab) -> Iterator[SidecarStep]:
    one = SidecarStep(healthy_lab)
    try:
        _, ready = one.wait(lambda message: isinstance(message, Ready), 60)
        assert ready == Ready(tuple(healthy_lab.hosts))
        time.sleep(1.0)
        yield one
    finally:
        one.close()


def verdict_on(host: str) -> Callable[[Message], bool]:
    return lambda message: isinstance(message, Verdict) and message.host == host


def test_frozen_cut_off_and_crashed_hosts(healthy_lab: Lab, step: SidecarStep) -> None:
    lab = healthy_lab
    program = lab.popen("n5", ["sleep", "120"], env={"TRANSOM_ATTEMPT": ATTEMPT})

    lab.freeze("n4")
    frozen = time.monotonic()
    when, verdict = step.wait(verdict_on("n4"), 20)
    assert isinstance(verdict, Verdict)
    assert verdict.cause == "silent"
    assert when - frozen < 3 * PERIOD_S + 0.8
    lab.thaw("n4")
    step.wait(lambda message: message == Cleared("n4", "silent", "n4 is heard again"), 20)

    assert program.poll() is None
    lab.cut("n5")
    cut = time.monotonic()
    when, verdict = step.wait(verdict_on("n5"), 20)
    assert when - cut < 3 * PERIOD_S + 0.8
    try:
        program.wait(6 * PERIOD_S + 10)  # the host that is cut off ends its program by itself
    finally:
        program.kill()
        program.wait()
    assert not [line for line in step.lines if "the launcher is lost" in line]

    lab.crash("n1")
    crashed = time.monotonic()
    line = step.wait_line("the launcher is lost", 20)
    assert time.monotonic() - crashed < 3 * PERIOD_S + 1.5
    assert line.startswith("1: ")
    assert "(n1" in line
    time.sleep(2.0)
    assert len([line for line in step.lines if "the launcher is lost" in line]) == 1
    verdicts = [message for message in step.news() if isinstance(message, Verdict)]
    assert [(message.host, message.cause) for message in verdicts] == [("n4", "silent"), ("n5", "silent")]


def test_it_leaves_in_order_when_the_job_ends(healthy_lab: Lab, step: SidecarStep) -> None:
    jobs = healthy_lab.run("login", ["squeue", "-h", "-o", "%A"]).stdout.split()
    healthy_lab.run("login", ["scancel", *jobs])
    step.wait(lambda message: isinstance(message, Bye), 20)
    assert not [message for message in step.news() if isinstance(message, Verdict)]
    assert not [line for line in step.lines if "the launcher is lost" in line or "cut off" in line]


def kill_sidecar(lab: Lab, host: str) -> None:
    (pid,) = lab.run(host, ["pgrep", "-f", "transom_hpc.monitors --attempt"]).stdout.split()
    lab.run(host, ["kill", "-KILL", pid])


def test_a_sidecar_that_is_killed_takes_no_other_with_it(healthy_lab: Lab, step: SidecarStep) -> None:
    kill_sidecar(healthy_lab, "n3")
    _, verdict = step.wait(lambda message: isinstance(message, Verdict), 20)
    assert isinstance(verdict, Verdict)
    assert verdict.host == "n3"
    time.sleep(3.0)
    verdicts = [message.host for message in step.news() if isinstance(message, Verdict)]
    assert verdicts == ["n3"]
    _, progress = step.said[-1]
    assert isinstance(progress, Progress)
    assert progress.hosts == 4
    kill_sidecar(healthy_lab, "n1")
    assert step.wait_line("the launcher is lost", 20).startswith("1: ")
