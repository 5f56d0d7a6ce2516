"""The engine: one sidecar rank, from its first sample to its leaving.

Every rank samples its node and sends the sample to rank 0; pings say who lives (`succession`). Rank 0 prints messages
(`verdict`) on its standard output. Nothing here waits for another rank, for a file system or for a reader.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.monitors.exchange import Exchange, MpiExchange
from transom_hpc.monitors.heartbeat import read_heartbeats, start_ticks, summarise
from transom_hpc.monitors.outlet import Outlet
from transom_hpc.monitors.probe_system import SystemProbe
from transom_hpc.monitors.processes import end_program, is_running
from transom_hpc.monitors.reading import Reading, decode_reading, encode_reading
from transom_hpc.monitors.recorder import Recorder
from transom_hpc.monitors.store import new_store_path
from transom_hpc.monitors.succession import Member, Ping, Rules, Standing, Word, decode_ping, encode_ping
from transom_hpc.monitors.verdict import Bye, Message, format_line
from transom_hpc.monitors.watch import Watch

EXIT_LEFT = 0
"""Left in order: asked to, or dismissed by rank 0."""
EXIT_ISOLATED = 3
"""Left since its host is cut off."""

_PING, _READING = 1, 2  # kinds of messages


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """What a sidecar must know; the same on all ranks.

    Attributes:
        attempt: the attempt that it watches, as "A0002-L03".
        shm: the job's folder in shared memory, where the heartbeats are.
        run_dir: the run directory, for the readings; None keeps none.
        hosts: names of the hosts in the order of the ranks, for those that never speak; may be empty.
        supervisor_pid: the launcher's process, on the host of rank 0; None if there is none to watch. One that is not
            found at the start is not watched.
        period_s: between two samples.
        ping_s: between two pings.
        silent_after_s: a host not heard for longer is silent; None is three periods.
        isolated_after_s: a host without a majority for longer is cut off; None is twice silent_after_s.
        start_deadline_s: for the first sign of each rank.
        store_every_s: between two writes of the readings.
        hook_deadline_s: when leaving, how long a hook that runs may go on.
    """

    attempt: str
    shm: Path
    run_dir: Path | None = None
    hosts: tuple[str, ...] = ()
    supervisor_pid: int | None = None
    period_s: float = 2.0
    ping_s: float = 0.5
    silent_after_s: float | None = None
    isolated_after_s: float | None = None
    start_deadline_s: float = 15.0
    store_every_s: float = 10.0
    hook_deadline_s: float = 25.0

    def rules(self) -> Rules:
        """The times of the watch over each other.

        Raises:
            ValueError: they do not fit together.
        """
        silent = 3 * self.period_s if self.silent_after_s is None else self.silent_after_s
        isolated = 2 * silent if self.isolated_after_s is None else self.isolated_after_s
        if self.ping_s <= 0 or self.period_s <= 0:
            raise ValueError("ping_s and period_s must be above zero")
        if silent < 4 * self.ping_s:
            raise ValueError(f"silent_after_s is {silent:g}: at least four pings ({4 * self.ping_s:g}) are needed")
        if isolated < silent + 4 * self.ping_s:
            raise ValueError(f"isolated_after_s is {isolated:g}: silent_after_s and four pings are needed")
        return Rules(self.ping_s, silent, isolated, max(silent, self.start_deadline_s))


@dataclass(frozen=True, slots=True)
class SidecarHooks:
    """What happens when the sidecar can't go on watching.

    Attributes:
        isolated: this host is cut off: its program must not go on. Called once, in the sidecar's thread; the sidecar
            leaves afterwards. With two hosts it is also called when rank 0's host is lost: nobody is there to ask,
            and the hook may ask Slurm.
        orphaned: the launcher is gone and this rank speaks for the job. Called once for each loss with the lost hosts
            (none when only the launcher's process ended) and a sentence of evidence, in a thread of its own.
    """

    isolated: Callable[[], None]
    orphaned: Callable[[tuple[str, ...], str], None]


def default_hooks(attempt: str) -> SidecarHooks:
    """End the program on a host that is cut off; only say so when the launcher is lost."""

    def isolated() -> None:
        killed = end_program(attempt)
        _say(f"this host is cut off; ended {len(killed)} processes of {attempt}")

    def orphaned(dead: tuple[str, ...], evidence: str) -> None:
        _say(f"the launcher is lost ({', '.join(dead) or 'no host with it'}): {evidence}")

    return SidecarHooks(isolated, orphaned)


class Sidecar:
    """One sidecar rank.

    Args:
        config: the same on all ranks.
        hooks: what to do when cut off, or left without a launcher.
        exchange: the network; None is MPI.
        clock: time; a monotonic clock.
        stdout: file descriptor that rank 0 writes to.
    """

    def __init__(
        self,
        config: SidecarConfig,
        hooks: SidecarHooks,
        exchange: Exchange | None = None,
        clock: Clock | None = None,
        stdout: int = 1,
    ) -> None:
        self._config = config
        self._rules = config.rules()
        self._hooks = hooks
        self._given = exchange
        self._clock: Clock = SystemClock() if clock is None else clock
        self._stdout = stdout
        self._host = os.environ.get("SLURMD_NODENAME") or os.uname().nodename.split(".")[0]
        self._stop: str | None = None
        self._number = 0
        self._pings = 0
        self._hook: threading.Thread | None = None

    def run(self) -> int:
        """Watch until asked to stop (SIGTERM, SIGINT), dismissed, or cut off.

        All ranks must call it. Afterwards leave the process with `exchange.leave`.

        Returns:
            EXIT_LEFT or EXIT_ISOLATED.
        """
        self._catch_signals()
        exchange = MpiExchange() if self._given is None else self._given
        self._exchange = exchange
        now = self._clock.now()
        self._member = Member(exchange.rank, exchange.size, self._rules, now)
        self._probe = SystemProbe(self._config.shm)
        self._outlet = Outlet(self._stdout)
        self._watch = Watch(self._host, exchange.size, self._config.hosts, self._rules, self._member, now)
        self._recorder = self._new_recorder() if exchange.rank == 0 else None
        self._supervisor = self._supervisor_start() if exchange.rank == 0 else None
        self._supervisor_gone_since: float | None = None
        code, reason = self._loop()
        self._goodbye(code, reason)
        return code

    def _loop(self) -> tuple[int, str]:
        poll_s = min(0.1, self._rules.ping_s / 5)
        next_sample = self._clock.now()
        begun = next_sample
        while True:
            now = self._clock.now()
            for parcel in self._exchange.receive():
                self._take(parcel.source, parcel.kind, parcel.body, now)
            standing = self._member.tick(now)
            if standing.gap_s:
                next_sample = now
            ended = self._act(standing, now)
            if ended is not None:
                return ended
            follows = standing.leader
            for target, words in self._member.targets(now):
                self._ping(target, follows, words)
            if now >= next_sample:
                self._sample(now)
                next_sample = max(next_sample + self._config.period_s, now + self._config.period_s / 2)
            self._outlet.flush()
            # connections between ranks take a few rounds to come up: look more often at first
            self._clock.sleep(min(0.02, poll_s) if now - begun < 2.0 else poll_s)

    def _take(self, source: int, kind: int, body: bytes, now: float) -> None:
        if kind == _PING:
            ping = decode_ping(body)
            if ping is not None:
                self._member.heard(source, now, ping)
        elif kind == _READING:
            reading = decode_reading(body)
            if reading is not None:
                self._member.heard(source, now)
                self._keep(source, reading, now)

    def _act(self, standing: Standing, now: float) -> tuple[int, str] | None:
        """Do what the standing asks for; an exit code and a reason when it is time to leave."""
        if self._stop is not None:
            return EXIT_LEFT, self._stop
        if self._exchange.rank == 0:
            for message in self._watch.messages(standing, now):
                self._print(message)
            self._check_supervisor(now)
            if standing.isolated and self._watch.cut_off_for(now) >= self._cut_off_patience():
                return EXIT_ISOLATED, "this host is cut off"
            return None
        if standing.dismissed:
            return EXIT_LEFT, "rank 0 leaves"
        if standing.isolated:
            return EXIT_ISOLATED, "this host is cut off"
        if standing.speaks:
            dead, evidence = self._watch.loss(standing, self._exchange.rank, now)
            self._call_orphaned(dead, evidence)
        return None

    def _cut_off_patience(self) -> float:
        return self._rules.isolated_after_s - self._rules.silent_after_s

    def _sample(self, now: float) -> None:
        config = self._config
        self._number += 1
        beats = read_heartbeats(config.shm, config.attempt)
        figures = self._probe.sample(now) | summarise(beats, is_running, time.monotonic_ns())
        reading = Reading(self._host, config.attempt, self._number, time.time(), **figures)
        if self._exchange.rank == 0:
            self._keep(0, reading, now)
            self._print(self._watch.progress(now))
        else:
            self._exchange.send(0, _READING, encode_reading(reading))

    def _keep(self, source: int, reading: Reading, now: float) -> None:
        self._watch.take(source, reading, now)
        if self._recorder is not None:
            self._recorder.add(reading)

    def _ping(self, target: int, follows: int, words: Word) -> None:
        self._pings += 1
        self._exchange.send(target, _PING, encode_ping(Ping(self._host, follows, self._pings, words)))

    def _print(self, message: Message) -> None:
        self._outlet.write(format_line(message))

    def _check_supervisor(self, now: float) -> None:
        """Rank 0: the launcher's process is on this host; when it has ended, this rank speaks for the job."""
        pid = self._config.supervisor_pid
        if pid is None or self._supervisor is None or self._hook is not None:
            return
        if is_running(pid, self._supervisor):
            self._supervisor_gone_since = None
        elif self._supervisor_gone_since is None:
            self._supervisor_gone_since = now
        elif now - self._supervisor_gone_since >= self._config.period_s:
            self._call_orphaned((), f"the launcher's process {pid} on {self._host} has ended; the host lives")

    def _supervisor_start(self) -> int | None:
        pid = self._config.supervisor_pid
        if pid is None:
            return None
        started = start_ticks(pid)
        if not started or not is_running(pid, started):  # in another container, perhaps: never take that for its end
            _say(f"{self._host}: there is no process {pid}; the launcher's end will not be noticed, only its host's")
            return None
        return started

    def _call_orphaned(self, dead: tuple[str, ...], evidence: str) -> None:
        def call() -> None:
            try:
                self._hooks.orphaned(dead, evidence)
            except Exception as error:  # the edge to foreign code: recorded, and the watch goes on
                _say(f"{self._host}: the hook for a lost launcher failed: {error!r}")

        self._hook = threading.Thread(target=call, name="orphaned", daemon=True)
        self._hook.start()

    def _new_recorder(self) -> Recorder | None:
        if self._config.run_dir is None:
            return None
        try:
            path = new_store_path(self._config.run_dir / "health", self._config.attempt)
            return Recorder(path, self._config.store_every_s)
        except OSError as error:
            _say(f"readings are not kept: {error}")
            return None

    def _goodbye(self, code: int, reason: str) -> None:
        exchange = self._exchange
        now = self._clock.now()
        if code == EXIT_ISOLATED:
            word = Word.ISOLATED
            try:
                self._hooks.isolated()
            except Exception as error:  # the edge to foreign code: recorded, and the sidecar still leaves
                _say(f"{self._host}: the hook for a host that is cut off failed: {error!r}")
        else:
            word = Word.LEAVING
        if self._hook is not None:
            self._hook.join(self._config.hook_deadline_s)
        if code == EXIT_LEFT or exchange.rank != 0:  # rank 0, cut off, must not take the others with it
            follows = self._member.follows(now)
            for target in self._member.everybody():
                self._ping(target, follows, word)
        if exchange.rank == 0:
            self._print(Bye(reason))
        until = self._clock.now() + 0.3  # the last words need a few rounds to get out
        while self._clock.now() < until:
            exchange.receive()
            self._outlet.flush()
            self._clock.sleep(0.02)
        if self._recorder is not None:
            self._recorder.close(5.0)

    def _catch_signals(self) -> None:
        def stop(number: int, _frame: object) -> None:
            self._stop = f"asked to stop ({signal.Signals(number).name})"

        def ignore(_number: int, _frame: object) -> None:
            """Slurm signals every step; a handler is not inherited by children, as SIG_IGN would be."""

        if threading.current_thread() is not threading.main_thread():
            return
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, stop)
        for name in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            signal.signal(name, ignore)


def _say(text: str) -> None:
    try:
        print(f"transom: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody reads any more
        pass
