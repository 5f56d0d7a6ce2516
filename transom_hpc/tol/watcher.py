"""The launcher's hold on the sidecar: starts its step, reads its lines, starts it again when it ends too early.

A sidecar that can't be kept alive is given up for the launch, and said; the program goes on without it.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence

from transom_hpc.base.clock import Clock
from transom_hpc.monitors.verdict import Message, parse_line
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.guard import supervisor
from transom_hpc.tol.job import Job
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.sidecar import EXIT_NO_MPI
from transom_hpc.tol.steps import Step, Steps

_TRIES, _MUTE_TRIES = 5, 3
MUTE_S = 10.0
"""After so many seconds without a word of the sidecar a host may be the reason."""


class Watcher:
    """One sidecar step at a time.

    Args:
        steps: starts it.
        job: the Slurm job.
        site: periods.
        run: the run directory, for the readings and the log.
        report: is told what is wrong with the monitoring.
        clock: time.
    """

    def __init__(
        self, steps: Steps, job: Job, site: SiteConfig, run: RunDir, report: Callable[[str], None], clock: Clock
    ) -> None:
        self._steps = steps
        self._job = job
        self._site = site
        self._run = run
        self._report = report
        self._clock = clock
        self._lines: queue.Queue[tuple[Step, str]] = queue.Queue()
        self._step: Step | None = None
        self._attempt = Attempt(0, 0)
        self._hosts: tuple[str, ...] = ()
        self._ended = 0
        self._resting = False
        self._spoke = False  # whether it has said anything in this launch
        self._retry_at: float | None = None
        self._mute_since: float | None = None  # None: it has spoken, or that was asked about already

    def start(self, attempt: Attempt, hosts: Sequence[str]) -> None:
        """Watch these hosts for this launch."""
        self._attempt, self._hosts, self._ended, self._spoke = attempt, tuple(hosts), 0, False
        self._resting = False
        self._start()

    def unheard(self) -> bool:
        """Whether the present sidecar does not begin to watch; said once for each start."""
        if self._mute_since is None or self._resting:
            return False
        ended = self._step is None
        if not ended and self._clock.now() - self._mute_since < MUTE_S:
            return False
        self._mute_since = None
        return True

    def drop(self, host: str) -> None:
        """Leave a host out when the sidecar is started again in this launch."""
        self._hosts = tuple(name for name in self._hosts if name != host)

    def rest(self) -> None:
        """Don't start the sidecar again in this launch, and don't wonder at its end."""
        self._resting = True

    def end(self) -> None:
        """End the step by force."""
        self._retry_at = None
        step, self._step = self._step, None
        if step is not None:
            step.end()

    def messages(self, timeout_s: float) -> list[Message]:
        """What the present sidecar has said since the last call; waits so long for a first line."""
        self._keep_alive()
        found: list[Message] = []
        try:
            step, text = self._lines.get(timeout=timeout_s)
            while True:
                message = parse_line(text) if step is self._step else None
                if message is not None:
                    self._spoke, self._mute_since = True, None
                    found.append(message)
                step, text = self._lines.get_nowait()
        except queue.Empty:
            return found

    def _start(self) -> None:
        self._retry_at, self._mute_since = None, self._clock.now()
        argv = [
            sys.executable,
            "-P",  # a file of the user's that is called like a standard module must not replace it
            "-m",
            "transom_hpc.tol.sidecar",
            f"--run-dir={self._run.path}",
            f"--attempt={self._attempt}",
            f"--hosts={','.join(sorted(self._hosts, key=self._job.hosts.index))}",
            f"--home={self._job.home}",
            f"--supervisor={supervisor()}",
            f"--period={self._site.sample_period_s}",
            f"--silent-periods={self._site.silent_periods}",
        ]
        log = self._run.logs / f"{self._attempt}-sidecar.log"
        try:
            self._step = self._steps.sidecar(argv, self._hosts, {"TRANSOM_SHM": str(self._job.shm)}, log)
        except OSError as error:  # no room for its log, no process to be had
            self._ended += 1
            if self._ended >= _TRIES:
                self._report(f"hosts are not watched in this launch: the sidecar can't be started ({error})")
                return
            self._report(f"the sidecar can't be started ({error}) and is tried again")
            self._retry_at = self._clock.now() + 2.0**self._ended
            return
        threading.Thread(target=self._read, args=(self._step,), daemon=True).start()

    def _read(self, step: Step) -> None:
        assert step.output is not None
        try:
            for line in step.output:
                self._lines.put((step, line))
        except ValueError:
            pass  # closed under us when the step was ended

    def _keep_alive(self) -> None:
        code = None if self._step is None else self._step.poll()
        if self._step is not None and code is not None:
            self._step.end()
            self._step = None
            if self._resting:
                return
            self._ended += 1
            if code == EXIT_NO_MPI:
                self._mute_since = None
                self._report(
                    f"hosts are not watched: MPI ranks don't see each other under `srun --mpi={self._site.mpi}`; set "
                    "`mpi` in the site config to a type that `srun --mpi=list` shows and that your MPI was built for"
                )
                return
            if self._ended >= (_TRIES if self._spoke else _MUTE_TRIES):
                log = self._run.logs / f"{self._attempt}-sidecar.log"
                self._report(f"hosts are not watched in this launch: the sidecar ended {self._ended} times, see {log}")
                return
            self._report("the sidecar ended and is started again")
            self._retry_at = self._clock.now() + 2.0**self._ended
        if self._retry_at is not None and self._clock.now() >= self._retry_at:
            self._start()
