"""The launcher's hold on the checkpoint server: starts its step, and starts it again when it ends too early.

It stays from one launch to the next as long as the hosts are the same. One that can't be kept alive is given up for the
launch, and said; saves are written by the program itself then. Spares have a server too, which keeps copies of other
hosts' memory. What servers and the program tell of memory is read here: lines of the server's log, and a small file.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from transom_hpc.base.clock import Clock
from transom_hpc.slurm.hosts import expand_hosts
from transom_hpc.slurm.site import SiteConfig
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.job import Job
from transom_hpc.tol.rundir import RunDir
from transom_hpc.tol.steps import Step, Steps

_TRIES = 5
MUTE_S = 20.0
"""Longest time from a start to the first sign of life: MPI's own start has no deadline, and sometimes hangs."""
LEAST_MUTE_S = 5.0
_TIMES_LONGEST = 3.0
"""Once one has begun, others are given so many times as long as that took, and never less than LEAST_MUTE_S: after a
loss the program waits for them."""

_PULSE = ".server"  # touched twice a second by the server that serves this host
_MARK = "@transom "
_RESTORED = ".restored"  # rank 0 leaves it on its host, which is the launcher's
_READ_BYTES = 1 << 20
DRAIN_S = 15.0
"""Longest wait of a new launch for the saves of the one before it."""


class Keeper:
    """One step of checkpoint servers at a time.

    Args:
        steps: starts it.
        job: the Slurm job.
        site: says who writes, and what is known of switches.
        run: the run directory, for the log, and for the saves under way.
        report: is told what is wrong, and whether it stays so for this launch.
        clock: time.
        per_host: ranks of the program on each host.
        copies: how many hosts keep a copy of each host's memory.
    """

    def __init__(
        self,
        steps: Steps,
        job: Job,
        site: SiteConfig,
        run: RunDir,
        report: Callable[[str, bool], None],
        clock: Clock,
        per_host: int = 1,
        copies: int = 1,
    ) -> None:
        self._per_host = per_host
        self._copies = copies
        self._spares: tuple[str, ...] = ()
        self._dropped = False
        self._mute_since: float | None = None  # None: it has begun
        self._took_s: float | None = None  # the longest that a server has taken to begin
        self._given_up = 0  # starts in a row that were given up since nothing was heard
        self._pulse_before = 0
        self._read_to: dict[Path, int] = {}
        self._steps = steps
        self._job = job
        self._site = site
        self._run = run
        self._report = report
        self._clock = clock
        self._step: Step | None = None
        self._attempt = self._begun = Attempt(0, 0)
        self._hosts: tuple[str, ...] = ()
        self._ended = 0
        self._resting = False
        self._retry_at: float | None = None
        self.distrust = ""
        """What is not to be restored, as TRANSOM_DISTRUST has it: told to the servers that are started from now on."""

    def start(self, attempt: Attempt, hosts: Sequence[str], spares: Sequence[str] = ()) -> None:
        """Have a server on each of these hosts, and on each spare, for this launch."""
        self.end_unless(hosts)
        self._attempt, self._hosts, self._ended, self._resting = attempt, tuple(hosts), 0, False
        if self._step is None:
            self._spares = tuple(spares)
            self._start()
        elif set(self._spares) - set(spares):
            self._spares, self._dropped = tuple(spares), True

    def stays(self, hosts: Collection[str]) -> bool:
        """Whether a launch on these hosts keeps the servers that there are, and so all memory where it is."""
        return set(hosts) == set(self._hosts)

    def drop(self, host: str) -> None:
        """A spare is lost: the others go on without it. One with ranks is a matter of the next launch."""
        if host in self._spares:
            self._spares = tuple(name for name in self._spares if name != host)
            self._dropped = True

    def look(self) -> None:
        """Start it again when it has ended, a little later each time; at once where it goes on without a spare."""
        if self._dropped and self._step is not None:  # Slurm would end it later, when it has noticed too
            self._step.end()
            self._start()
        code = None if self._step is None else self._step.poll()
        mute = self._step is not None and code is None and self._is_mute()
        if self._step is not None and (code is not None or mute):
            self._step.end()
            self._step = None
            if self._resting:
                return
            self._ended += 1
            if self._ended >= _TRIES:
                self._report(
                    f"the checkpoint server ended {self._ended} times and is given up in this launch, see "
                    f"{self._log()}; the program writes its checkpoints itself",
                    True,
                )
                return
            if mute:
                self._report(
                    f"the checkpoint server did not begin within {self._mute_s():.0f} s and is started again", False
                )
                self._given_up += 1
            if code:  # else its folder has gone, since the program has left, and we are about to hear of that
                self._report(f"the checkpoint server ended (exit status {code}) and is started again", False)
            self._retry_at = self._clock.now() + 2.0 ** (self._ended - 1)
        if self._retry_at is not None and self._clock.now() >= self._retry_at:
            self._start()

    def rest(self) -> None:
        """Don't start it again in this launch, and don't wonder at its end."""
        self._resting = True

    def end_unless(self, hosts: Collection[str]) -> None:
        """End the step by force where it is not for these hosts."""
        if self.stays(hosts):
            return
        self._retry_at, self._hosts = None, ()
        step, self._step = self._step, None
        if step is not None:
            step.end()

    def drain(self, attempt: Attempt, hosts: Collection[str], hurry: Callable[[], bool]) -> None:
        """Wait until the saves of a launch that is over are committed or given up: the next one fences them off.

        Where a host was lost nothing is waited for: its ranks never write their parts.

        Args:
            attempt: the launch that is over.
            hosts: of the next one.
            hurry: whether there is something else to do.
        """
        until = self._clock.now() + DRAIN_S
        while self.stays(hosts) and self._run.saves_under_way(str(attempt)):
            self.look()
            if self._step is None and self._retry_at is None:
                return
            if self._clock.now() >= until:
                self._report(f"a save of {attempt} was not over after {DRAIN_S:.0f} s and is given up", False)
                return
            if hurry():
                return
            self._clock.sleep(0.05)

    def _start(self) -> None:
        self._retry_at, self._begun, self._dropped = None, self._attempt, False
        self._mute_since, self._pulse_before = self._clock.now(), self._pulse()
        # A file of the user's that is called like a standard module must not replace it: -P.
        argv = [sys.executable, "-P", "-m", "transom_hpc.ckpt.server", f"--shm={self._job.shm}"]
        everywhere = (*self._hosts, *(self._spares if self._copies else ()))
        argv += [f"--ranks={len(everywhere)}", f"--writer={self._site.writer}", f"--roster={self._roster()}"]
        if self._site.staging_bytes is not None:
            argv.append(f"--limit={self._site.staging_bytes}")
        try:
            self._step = self._steps.server(argv, everywhere, {"TRANSOM_SERVER": str(self._job.shm)}, self._log())
        except OSError as error:  # no room for its log, no process to be had
            self._ended += 1
            if self._ended >= _TRIES:
                self._report(
                    f"the checkpoint server can't be started ({error}): the program writes its checkpoints", True
                )
                return
            self._report(f"the checkpoint server can't be started ({error}) and is tried again", False)
            self._retry_at = self._clock.now() + 2.0**self._ended

    def _is_mute(self) -> bool:
        """Whether the servers should have begun by now, and have not."""
        if self._mute_since is None:
            return False
        passed = self._clock.now() - self._mute_since
        if self._pulse() != self._pulse_before:
            self._mute_since, self._given_up = None, 0
            self._took_s = max(passed, self._took_s or 0.0)
            return False
        return passed >= self._mute_s()

    def _mute_s(self) -> float:
        """How long a start may take: learned, and longer after each that was given up, as hosts may be busy."""
        if self._took_s is None:
            return MUTE_S
        return min(MUTE_S, max(LEAST_MUTE_S, _TIMES_LONGEST * self._took_s) * 2.0**self._given_up)

    def _pulse(self) -> int:
        try:
            return (self._job.shm / _PULSE).stat().st_mtime_ns
        except OSError:
            return 0

    def _roster(self) -> str:
        """Who takes part, as the servers read it."""
        here = {*self._hosts, *self._spares}
        switches = {host: name for name, text in self._site.switches.items() for host in expand_hosts(text)}
        facts = {
            "attempt": str(self._attempt),
            "serving": self._hosts,
            "spares": self._spares if self._copies else (),
            "per_host": self._per_host,
            "switches": {host: name for host, name in switches.items() if host in here},
            "copies": self._copies,
            "distance": self._site.copy_distance,
            "directory": str(self._run.checkpoints),
            "distrust": self.distrust,
        }
        return json.dumps(facts, separators=(",", ":"))

    def news(self) -> Iterator[dict[str, Any]]:
        """What servers and the program have told of memory since the last call: `kind` and facts."""
        restored = self._job.shm / _RESTORED
        with contextlib.suppress(OSError, ValueError):
            text = restored.read_text()
            restored.unlink()
            yield {"kind": "restored", **json.loads(text)}
        with contextlib.suppress(OSError):
            for line in self._new_lines(self._log()):
                _, mark, text = line.partition(_MARK)
                with contextlib.suppress(ValueError):
                    found = json.loads(text) if mark else None
                    if isinstance(found, dict) and "kind" in found:
                        yield found

    def _new_lines(self, path: Path) -> list[str]:
        """Whole lines of a log that have come since the last call."""
        begin = self._read_to.setdefault(path, 0)
        if path.stat().st_size <= begin:
            return []
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(_READ_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        self._read_to[path] = begin + (len(whole) or len(data) * (len(data) == _READ_BYTES))
        return whole.decode("utf-8", "replace").splitlines()

    def _log(self) -> Path:
        return self._run.logs / f"{self._begun}-server.log"
