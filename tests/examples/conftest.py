"""Starts the examples as the launcher would, as real ranks, and watches them through their heartbeats."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from transom_hpc.monitors.heartbeat import Heartbeat, read_heartbeats

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_S = 150.0


class Launch:
    """One start of a program: its processes, and what they said.

    Args:
        processes: those that we started (mpirun, or the ranks themselves).
        log: where their output goes.
        attempt: of this start.
        world_size: how many ranks there are.
        shm: the folder of the heartbeats.
    """

    def __init__(
        self, processes: list[subprocess.Popen[bytes]], log: Path, attempt: str, world_size: int, shm: Path
    ) -> None:
        self._processes, self._log, self._attempt, self._world_size, self._shm = (
            processes,
            log,
            attempt,
            world_size,
            shm,
        )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def beats(self) -> list[Heartbeat]:
        return read_heartbeats(self._shm, self._attempt)

    def until_step(self, step: int) -> list[Heartbeat]:
        """Wait until every rank has done so many steps in this start."""
        return self._until(lambda beats: all(beat.step is not None and beat.step >= step for beat in beats))

    def until_saved(self, step: int) -> list[Heartbeat]:
        """Wait until a rank has seen that so many steps are committed."""
        return self._until(lambda beats: any((beat.saved_step or 0) >= step for beat in beats))

    def _until(self, ready: Callable[[list[Heartbeat]], bool]) -> list[Heartbeat]:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            beats = self.beats()
            if len(beats) == self._world_size and ready(beats):
                return beats
            assert all(process.poll() is None for process in self._processes), self.output
            time.sleep(0.01)
        raise AssertionError(f"the ranks did not get there: {self.beats()}\n{self.output}")

    def kill_ranks(self) -> None:
        """SIGKILL for every rank, at once."""
        for beat in self.beats():
            os.kill(beat.pid, signal.SIGKILL)

    def wait(self) -> set[int]:
        """Wait for the end.

        Returns:
            The different exit statuses.
        """
        try:
            return {process.wait(DEADLINE_S) for process in self._processes}
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end\n{self.output}") from None

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Job:
    """A run directory and a node's shared memory, in which an example is started as often as it takes."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self.run = folder / "run"
        self.run.mkdir(parents=True)
        self.shm = Path("/dev/shm") / f"transom-test-{uuid.uuid4().hex[:12]}"
        self._world_size = world_size
        self._launches: list[Launch] = []

    def mpi(self, script: str, *args: str, save_every: int = 5) -> Launch:
        """Start ranks of MPI."""
        mpirun = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", str(self._world_size), sys.executable]
        return self._launch([mpirun], [{}], script, args, save_every)

    def torch(self, script: str, *args: str, save_every: int = 5) -> Launch:
        """Start ranks of torch.distributed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        size = str(self._world_size)
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self._world_size)]
        common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        starts = [[sys.executable]] * self._world_size
        return self._launch(starts, [common | rank for rank in ranks], script, args, save_every)

    def _launch(
        self,
        starts: list[list[str]],
        environments: list[dict[str, str]],
        script: str,
        args: tuple[str, ...],
        save_every: int,
    ) -> Launch:
        number = len(self._launches) + 1
        (self.shm / "stop").unlink(missing_ok=True)  # as the launcher does
        attempt = f"A0001-L{number:02d}"
        job = {
            "TRANSOM_RUN_DIR": str(self.run),
            "TRANSOM_ATTEMPT": attempt,
            "TRANSOM_SHM": str(self.shm),
            "TRANSOM_SAVE_EVERY": str(save_every),
            "PYTHONUNBUFFERED": "1",
        }
        log = self.run / f"log-{number}"
        processes = []
        with log.open("wb") as out:
            for start, own in zip(starts, environments, strict=True):
                command = [*start, str(EXAMPLES / script), *args]
                processes.append(subprocess.Popen(command, env=os.environ | job | own, stdout=out, stderr=out))
        launch = Launch(processes, log, attempt, self._world_size, self.shm)
        self._launches.append(launch)
        return launch

    def ask_to_stop(self) -> None:
        (self.shm / "stop").write_text("a person asked")

    def end(self) -> None:
        for launch in self._launches:
            launch.end()
        shutil.rmtree(self.shm, ignore_errors=True)


@pytest.fixture
def new_job(tmp_path: Path) -> Iterator[Callable[[int], Job]]:
    """Makes jobs of so many ranks; none of their processes or memory outlives the test."""
    jobs: list[Job] = []

    def make(world_size: int) -> Job:
        jobs.append(Job(tmp_path / f"job-{len(jobs)}", world_size))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()
