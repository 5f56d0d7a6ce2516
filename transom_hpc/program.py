"""What a training program imports: the checkpointer, with the heartbeat and the answer to a stop request."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

from transom_hpc import ckpt
from transom_hpc.agreement import Agreement, find_agreement, say_to_all
from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import SaveError, UsageError
from transom_hpc.ckpt import interval
from transom_hpc.ckpt.pace import Wish
from transom_hpc.monitors.heartbeat import HeartbeatWriter
from transom_hpc.tol import last_words, traces
from transom_hpc.tol.events import EXIT_STOPPED

_STOP = max(Wish) + 1
"""What a rank may want of all, beside saves (see Wish). The largest one is what they do."""

_EVERY_IF_APART = 100
"""Steps between saves where ranks can't agree on what rank 0 decides."""


class Checkpointer(ckpt.Checkpointer):
    """Saves and restores a program's state, tells the run that the program is alive, and leaves when it is asked to.

    All ranks construct one, with the same arguments but the rank, and make the same calls in the same order.

    Args:
        directory: folder of the checkpoints, on a file system that all ranks share.
        rank: this process's rank, from 0.
        world_size: how many ranks there are.
        keep: how many committed checkpoints are kept.
        every: steps between two saves; or "auto": as often as loses least time, to saving and to failures together.
            Rank 0 decides, and all ranks save at the same step; that takes ranks that talk to each other, through
            torch.distributed or mpi4py, by the first `step`.
        options: as for transom_hpc.ckpt.Checkpointer.

    Raises:
        UsageError: an argument, or what the environment says of the rank, is wrong.
    """

    _ranks_agree = True

    def __init__(
        self,
        directory: str | Path,
        rank: int = 0,
        world_size: int = 1,
        keep: int | ckpt.Keep = 3,
        every: int | Literal["auto"] = 100,
        **options: Any,
    ) -> None:
        super().__init__(directory, rank, world_size, keep, every, **options)
        self._heartbeat: HeartbeatWriter | None = None
        self._stop_file: Path | None = None
        self._handlers: dict[int, Any] = {}  # what handled our signals before us
        self._stop_asked = False
        self._agreement: Agreement | None = None
        self._agreement_sought = False
        self._agreed = Wish.NOTHING  # for this step
        self._leave_s: float | None = None  # that the program has, once it is asked to stop

    @classmethod
    def from_env(cls, **options: Any) -> Checkpointer:
        """A checkpointer for the job that this process runs in; without a job, one for `options`.

        The launcher's environment says where the run directory is, which attempt this is, how often to save, how much
        shared memory of the node all its ranks may use together, the file system's stripe, how many data files a
        checkpoint has and who writes them; RANK and WORLD_SIZE (or Slurm's, or Open MPI's, names for them) say which
        rank. An argument beats the environment.
        Several ranks without a job must be able to talk to each other by now (torch.distributed is initialised, or
        mpi4py imported), and all must call it.

        Args:
            options: as for Checkpointer; None counts as not given. `directory` is needed only without a job.

        Raises:
            UsageError: there is neither a job nor a directory.
        """
        environment = os.environ
        rank, world_size = rank_of(environment)
        values: dict[str, Any] = {"rank": rank, "world_size": world_size}
        run = environment.get("TRANSOM_RUN_DIR")
        if run:
            values |= {
                "directory": Path(run) / "checkpoints",
                "attempt": environment.get("TRANSOM_ATTEMPT"),
                "every": _every(environment.get("TRANSOM_SAVE_EVERY", "100")),
                "mtbf_s": mtbf_of(environment, world_size),
                "distrust": environment.get("TRANSOM_DISTRUST"),
                "keep": int(environment.get("TRANSOM_KEEP", "3")),
            }
        shm = environment.get("TRANSOM_SHM")
        if shm:
            values["shm"] = Path(shm)
        staging_bytes, align_bytes = (_whole(environment, f"TRANSOM_{name}_BYTES") for name in ("STAGING", "STRIPE"))
        if staging_bytes is not None:
            values["shm_bytes"] = staging_bytes // (_whole(environment, "LOCAL_WORLD_SIZE") or world_size)
        if align_bytes is not None:
            values["align_bytes"] = align_bytes
        data_files = _whole(environment, "TRANSOM_DATA_FILES")
        if data_files is not None:
            values["data_files"] = data_files
        writer = environment.get("TRANSOM_WRITER")
        if writer and (writer != "mpio" or "mpi4py.MPI" in sys.modules):  # else it is the checkpoint server that can
            values["writer"] = writer
        values |= {name: value for name, value in options.items() if value is not None}
        if "directory" not in values:
            raise UsageError(
                "not inside a run: start the program with transom submit, or give Checkpointer.from_env(directory=...)"
            )
        if values["world_size"] > 1 and values.get("attempt") is None and "SLURM_JOB_ID" not in environment:
            # torchrun's name of a start is random or always the same, mpirun has none: neither says what came later
            values["attempt"] = say_to_all(f"T{SystemClock().wall():%Y%m%dT%H%M%S.%f}", values["world_size"])
        checkpointer = cls(**values)
        if shm and run:
            checkpointer._join_run(Path(shm), environment)
            checkpointer._leave_s = float(environment.get("TRANSOM_LEAVE_S", "inf"))
        return checkpointer

    def _join_run(self, shm: Path, environment: Mapping[str, str]) -> None:
        attempt = environment.get("TRANSOM_ATTEMPT", "")
        shm.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._heartbeat = HeartbeatWriter(shm / f"beat-{self.rank:06d}", self.rank, attempt)
        last_words.listen(self.rank, self.world_size)
        traces.offer(shm, self.rank)
        self._stop_file = shm / "stop"
        try:
            for number in (getattr(signal, f"SIG{environment.get('TRANSOM_SIGNAL', 'USR1')}"), signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._on_signal)
        except ValueError:  # not the main thread: the stop file still works
            pass

    def _hand_signals_back(self) -> None:
        """Let the signals do again what they did before: nobody is going to act on a stop request any more."""
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            if signal.getsignal(number) == self._on_signal and threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_asked = True  # nothing else: a signal may come in the middle of an update

    def restore(self, state: Any, strict: bool = True) -> int:
        """Fill the state from the newest checkpoint that every rank can have. All ranks must call it.

        See transom_hpc.ckpt.Checkpointer.restore.
        """
        self._say("restoring")
        step = super().restore(state, strict)
        self._say("training")
        return step

    def step(self, step: int, state: Any, **metrics: float) -> None:
        """Tell the run that a step is done; save when a save is due; leave when the run is asked to stop.

        All ranks must call it, after each step.

        Args:
            step: how many steps are done.
            state: what restore was given.
            metrics: figures of this step; `loss` is shown in the status.

        Raises:
            SystemExit: with status 75, when the run was asked to stop, after a checkpoint of this step was committed
                or it was said why it could not be.
            SaveError: an earlier save failed, by the policy of `on_save_error`.
        """
        if not self._agreement_sought:
            self._agreement_sought = True
            self._agreement = find_agreement(self.world_size)
            if self._agreement is None and self._stop_file is not None:
                self._warn_for_all(
                    "the ranks have no common torch.distributed or mpi4py: a request to stop can't be agreed on, "
                    "so the run goes on from its last checkpoint instead of saving first"
                )
                self._hand_signals_back()
            if self._agreement is None and self.every == "auto":
                self._warn_for_all(
                    "the ranks have no common torch.distributed or mpi4py, so every='auto' can't be: saves are "
                    f"{_EVERY_IF_APART} steps apart"
                )
        self._check_signals()
        self._check_lead()
        agreed = self._agree()
        before = time.monotonic()
        if agreed == _STOP:
            self._leave(step, state)
        self._agreed = Wish(agreed)
        super().step(step, state, **metrics)
        if self._heartbeat is not None:
            stall_s = time.monotonic() - before
            loss = metrics.get("loss")
            self._heartbeat.beat(
                step, loss=None if loss is None else float(loss), saved_step=self.last_committed, stall_s=stall_s
            )

    def _agree(self) -> int:
        """What all ranks do at this step, as they said at the one before: the most that any wanted."""
        if self._agreement is None:
            return 0
        self._asked_after = self._wished_after  # what is heard now was said a step ago
        if self._wanted():
            return self._agreement.exchange(_STOP)
        return self._agreement.exchange(self._wish() if self.every == "auto" else Wish.NOTHING)

    def _due(self, step: int) -> Wish:
        if self.every != "auto":
            return super()._due(step)
        if self._agreement is not None:
            return self._agreed
        return Wish.NOTHING if step % _EVERY_IF_APART else Wish.WRITE

    def _check_lead(self) -> None:
        """Warn, once, where a stop would come to its end before the save that it asks for."""
        if self._leave_s is None or self._durable_s <= self._leave_s:
            return
        self._warn_for_all(
            f"a save takes {self._durable_s:.0f} s until it is committed, and after a request to stop (time limit, "
            f"preemption) the program has {self._leave_s:.0f} s to save and leave: what is done since the checkpoint "
            f"before would be lost. Set signal_lead_s in the site config to {2 * math.ceil(1.5 * self._durable_s)} or "
            "more"
        )
        self._leave_s = None

    def _wanted(self) -> bool:
        return self._stop_asked or (self._stop_file is not None and self._stop_file.exists())

    def _check_signals(self) -> None:
        for number in self._handlers:
            if signal.getsignal(number) != self._on_signal:
                del self._handlers[number]
                self._warn_for_all(
                    f"{signal.Signals(number).name} is handled by somebody else now, so a signal from Slurm no longer "
                    "asks this program to save; choose another with `signal` in the site config"
                )
                return

    def _warn_for_all(self, message: str) -> None:
        """Warn of what is the same on all ranks: rank 0 says it."""
        if self.rank == 0:
            warnings.warn(message, stacklevel=4)

    def _leave(self, step: int, state: Any) -> None:
        self._say("stopping")
        try:
            self.wait()  # what failed before is told here, and does not keep this one from being saved
        except SaveError as error:
            warnings.warn(str(error), stacklevel=3)
        try:
            self.save(step, state, block=True)
            outcome = f"saved step {step} and left"
        except SaveError as error:  # still a stop that was asked for, not a failure of the program
            outcome = f"left, but step {step} is not saved: {error}"
        if self.rank == 0:
            print(f"transom: asked to stop: {outcome}", file=sys.stderr, flush=True)
        self.close()
        sys.exit(EXIT_STOPPED)

    def _say(self, phase: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.phase(phase)

    def close(self) -> None:
        """Wait for the save under way and let go of everything. All ranks must call it."""
        try:
            super().close()
        finally:
            self._hand_signals_back()
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the other ranks may be gone: nothing is agreed with them any more
            self._hand_signals_back()
            super().__exit__(kind, error, trace)


def rank_of(environment: Mapping[str, str]) -> tuple[int, int]:
    """This process's rank and the world size, by the names that the launcher, torchrun, Slurm and Open MPI use.

    Returns:
        (rank, world size); (0, 1) where nothing says otherwise.

    Raises:
        UsageError: the environment contradicts itself.
    """
    names = [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")]
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID", "").isdigit():
        names.append(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))
    for rank_name, size_name in names:
        if rank_name in environment and size_name in environment:
            try:
                rank, size = int(environment[rank_name]), int(environment[size_name])
            except ValueError:
                raise UsageError(f"{rank_name} and {size_name} must be whole numbers") from None
            if not 0 <= rank < size:
                raise UsageError(f"{rank_name}={rank} does not fit {size_name}={size}")
            return rank, size
    return 0, 1


def mtbf_of(environment: Mapping[str, str], world_size: int) -> float:
    """Mean time between failures of this program, in seconds, from its nodes and what the launcher saw of this run.

    Args:
        environment: TRANSOM_INTERRUPTIONS is "failures/node-seconds"; LOCAL_WORLD_SIZE says how many ranks a node has.
        world_size: how many ranks there are.
    """
    failures, _, node_seconds = environment.get("TRANSOM_INTERRUPTIONS", "").partition("/")
    local = environment.get("LOCAL_WORLD_SIZE", "")
    nodes = math.ceil(world_size / int(local)) if local.isdecimal() and int(local) else 1
    if not (failures.isdecimal() and node_seconds.isdecimal()):
        return interval.mtbf_s(nodes)
    return interval.mtbf_s(nodes, int(failures), float(node_seconds))


def _every(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not (text.isdecimal() and int(text)):
        raise UsageError(f"TRANSOM_SAVE_EVERY={text} must be a whole number, at least 1, or auto")
    return int(text)


def _whole(environment: Mapping[str, str], name: str) -> int | None:
    """A whole number from 1; None where the variable is not set."""
    text = environment.get(name, "")
    if text and not (text.isdecimal() and int(text)):
        raise UsageError(f"{name}={text} must be a whole number, at least 1")
    return int(text) if text else None
