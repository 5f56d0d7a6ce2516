"""The checkpointer: what a program calls. Saves in the background, restores, and keeps the directory in order."""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from transom_hpc.base.clock import Clock, SystemClock
from transom_hpc.base.errors import SaveError, StateError, UsageError
from transom_hpc.ckpt import arguments, catalog, commit, fence, h5file, interval, shm, start
from transom_hpc.ckpt import state as states
from transom_hpc.ckpt.agree import MEMORY, Outcome
from transom_hpc.ckpt.blank import Blanks
from transom_hpc.ckpt.commit import Job
from transom_hpc.ckpt.distrust import Distrust
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.handover import GATHERING, Handover
from transom_hpc.ckpt.meeting import Abandoned, Alone, FileMeeting, LeftOut, Meeting
from transom_hpc.ckpt.orders import Rank
from transom_hpc.ckpt.pace import Pace, Wish
from transom_hpc.ckpt.recovery import Recovery
from transom_hpc.ckpt.retention import Keep
from transom_hpc.ckpt.saver import Save, Saver
from transom_hpc.ckpt.slots import Slots
from transom_hpc.ckpt.writers import Asked, for_program

if TYPE_CHECKING:
    import torch

log = logging.getLogger("transom_hpc.ckpt")

DEADLINE_S = 300.0
"""Longest wait for another rank without any sign of it."""

AT_EXIT_S = 30.0
"""Longest wait for the save under way when the program ends without closing."""

_serials: dict[tuple[str, str, int], int] = {}


class SaveWarning(UserWarning):
    """A save failed or was left out; the program goes on."""


class Checkpointer:
    """Saves and restores the state of one rank of a program. Every rank makes one and calls the same methods.

    Args:
        directory: that holds the folders `step-*`; made if need be. On a file system that all ranks see.
        rank: this rank.
        world_size: how many there are.
        keep: how many of the newest committed checkpoints are kept; or a Keep for more than that.
        every: `step` saves each step that this divides; or "auto": as often as loses least time, to saving and to
            failures together (see interval), and between those that are written more that stay in memory. That takes
            one rank, or ranks that agree on each step (see transom_hpc.Checkpointer).
        attempt: name of this start of the program, the same on all ranks, one that sorts after those of earlier
            starts, and one that no earlier start had. Left out: from Slurm's environment; under torchrun, and where
            there is one rank, a fresh one.
        shm: private folder in shared memory for staging, left standing at the end. Left out: one of our own, removed
            by `close`.
        shm_bytes: limit for this rank's staging in bytes; None: what the node has.
        on_save_error: "warn" (the program goes on) or "raise" (at the next call after a save that failed).
        unpickle: whether `restore` unpickles objects also where the state has no object. Only for checkpoints that you
            trust.
        deadline_s: longest wait for another rank, in seconds.
        align_bytes: arrays of so many bytes or more begin at a multiple of them in the file, such as a stripe of the
            file system; a power of two, at least 4096.
        data_files: files over which the data of a checkpoint is spread, such as the number of storage targets.
        writer: "direct" (each rank by itself, past the page cache), "mpio" (parallel HDF5 over the program's MPI, all
            ranks together; not for a program that writes HDF5 with several ranks itself while it trains) or "auto":
            where both are possible the faster one, measured with the first save. Under MPI all ranks must construct a
            Checkpointer at the same place of the program then, unless it is "direct".
        mtbf_s: mean time between failures of the whole program, in seconds, for every="auto"; None: as is usual for one
            node.
        distrust: "STEP@ATTEMPT": what was saved at this step or later, by this attempt or an earlier one, is not to be
            restored, from whatever memory or file. The files are put aside.
        files, clock: the hands; tests give others.

    Raises:
        UsageError: an argument that can't be.
        CheckpointError: another program writes to the directory, or a newer attempt has it.
    """

    _ranks_agree = False
    """Whether several ranks decide together when to save."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        rank: int = 0,
        world_size: int = 1,
        keep: int | Keep = 3,
        every: int | Literal["auto"] = 100,
        *,
        attempt: str | None = None,
        shm: str | os.PathLike[str] | None = None,
        shm_bytes: int | None = None,
        on_save_error: Literal["raise", "warn"] = "warn",
        unpickle: bool = False,
        deadline_s: float = DEADLINE_S,
        align_bytes: int = h5file.ALIGN,
        data_files: int = 1,
        writer: Asked = "auto",
        mtbf_s: float | None = None,
        distrust: str | None = None,
        files: Files | None = None,
        clock: Clock | None = None,
    ) -> None:
        arguments.check(rank, world_size, keep, on_save_error, align_bytes)
        arguments.check_writing(data_files, writer)
        arguments.check_interval(every, mtbf_s, world_size == 1 or self._ranks_agree)
        if attempt is not None:
            fence.check_name(attempt)
        self.directory = Path(directory).absolute()
        self.rank, self.world_size = rank, world_size
        self.every: int | Literal["auto"] = every
        self._keep = keep if isinstance(keep, Keep) else Keep(last=keep)
        self._policy = on_save_error
        self._unpickle = unpickle
        self._distrust = Distrust.parse(distrust or "")
        self._deadline_s = deadline_s
        self._files = files or Files()
        self._clock = clock or SystemClock()
        self._files.make_dir(self.directory)
        environment = fence.environment()
        self._entry = start.enter(
            self.directory, rank, world_size, attempt, environment, self._files, self._clock, deadline_s
        )
        self.attempt, self._fence = self._entry.attempt, self._entry.fence
        self._slots, self._folder = self._open_slots(shm, shm_bytes, environment)
        here = Rank(self.directory, rank, world_size, self.attempt, self._slots.prefix)
        self._handover = Handover(self._folder, here, self._files, self._clock)
        self._saver = Saver(
            self._slots,
            for_program(writer, world_size, self._files, self._clock, deadline_s),
            Blanks(self._files, align_bytes, data_files),
            self._fence,
            self._files,
            self._clock,
            self._keep,
            self._handover,
            self._say_once,
        )
        self._pace: Pace | None = None
        if every == "auto":
            mtbf = interval.mtbf_s(1) if mtbf_s is None else mtbf_s
            self._pace = Pace(self.directory, mtbf, self._files, self._clock)
        self._learned_from: set[Save | None] = set()
        self._wished_after = 0  # saves that had been tried when this rank last said what it wants
        self._asked_after = 0  # the same when it said what the ranks act on now
        self._blocking: Save | None = None  # the last one that the program waited for of its own will
        self._durable_s = 0.0  # of the newest save that was committed
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
        self._listed = False
        self._prepared = False
        self._h5py_loaded = False
        self._update_told = False  # since the last save
        self._arrays_put_off = False  # by the last save, and not heard of since
        self._said: set[str] = set()
        self.restored: Outcome | None = None
        """What `restore` last did, with the bytes that this rank needed and read."""
        self._closed = False
        self._finalizer = weakref.finalize(
            self, _finish, self._saver, self._slots, self._handover, self._folder, os.getpid()
        )

    def _open_slots(
        self, given: str | os.PathLike[str] | None, limit: int | None, environment: Mapping[str, str]
    ) -> tuple[Slots, shm.Folder]:
        path = Path(given) if given is not None else shm.default_path(self.directory)
        if given is None:
            shm.reclaim(path, self._files)
        folder = shm.Folder(path, given is None, self._files)
        folder.open()
        local = environment.get("LOCAL_WORLD_SIZE", "")
        local_ranks = int(local) if local.isdigit() else self.world_size
        slots = Slots(folder, self.directory, self.rank, self.world_size, self.attempt, self._files, limit, local_ranks)
        return slots, folder

    # ------------------------------------------------------------------ saving

    def step(self, step: int, state: Any, **metrics: float) -> None:
        """Tell that a training step is done, and save when one is due. Never waits for the disk.

        Args:
            step: number of steps done.
            state: see `save`.
            metrics: figures to keep with the checkpoint.

        Raises:
            StateError, SaveError: see `save`.
        """
        if self._arrays_put_off and not self._update_told:
            self._saver.distrust("before_update() was called once, but not before the arrays were changed again")
        self._arrays_put_off = False
        self._saver.before_update()
        self._report()
        self._learn()
        due = self._due(step)
        if due is Wish.WRITE:
            self.save(step, state, metrics=metrics)
        elif due is Wish.KEEP:
            self._keep_in_memory(step, state)
        elif not self._prepared:
            self._prepare(state)

    def _due(self, step: int) -> Wish:
        """What is to be done at this step. The same on all ranks."""
        if self.every != "auto":
            return Wish.NOTHING if step % self.every else Wish.WRITE
        wish = self._wish()
        self._asked_after = self._wished_after
        return wish

    def _wish(self) -> Wish:
        """What this rank wants to be done: only rank 0 wants saves. The interval begins anew with that."""
        newest, self._wished_after = self._saver.newest, self._saver.tries
        pace = self._pace if self.rank == 0 else None
        if pace is not None and pace.due(newest is not None and not newest.done.is_set()):
            pace.begun()
            return Wish.WRITE
        if not self._saver.ready():
            return Wish.NOT_YET
        if pace is not None and pace.due_in_memory():
            pace.begun_in_memory()
            return Wish.KEEP
        return Wish.NOTHING

    def _learn(self) -> None:
        """What the newest saves took, once they are over."""
        for save in (self._saver.newest, self._saver.kept):
            if save is None or save in self._learned_from or not save.done.is_set():
                continue
            self._learned_from = {save, *(self._learned_from & {self._saver.newest, self._saver.kept})}
            if save.error is not None:
                continue
            took_s = save.ended_s - save.began_s
            tell = self._pace if self.rank == 0 and save is not self._blocking else None
            if save is self._saver.kept:
                if tell is not None:
                    self._saver.later(partial(tell.copied, save.cost_s, took_s, save.copies > 0))
                continue
            self._durable_s = took_s
            if tell is not None:
                self._saver.later(partial(tell.ended, save.cost_s, took_s))

    def before_update(self) -> None:
        """Say that numpy arrays of the state are about to be changed in place. Waits until what was put off is copied.

        Optional, and a promise: after a call of it, the next save copies numpy arrays in the background, as it does
        with what optimizers own, until this is called again. It must be called before each change then. A step that
        ends without makes that save fail, if it is heard of within 10 s, and the saves after it copy at once again.
        What objects with state_dict keep is always copied at once.
        """
        self._update_told = True
        self._saver.before_update()

    def _prepare(self, state: Any) -> None:
        """The first step has made the optimizer's state, so the size of a save is known, long before one is due."""
        self._prepared = True
        self._load_h5py()
        try:
            walked = states.walk(state)
        except StateError:
            return  # the save will say so
        self._saver.prepare(walked.leaves + states.documents(walked.structure))

    def _load_h5py(self) -> None:
        if self.rank == 0 and not self._h5py_loaded:
            self._h5py_loaded = True
            h5file.load()
            # h5py takes itself apart when the interpreter ends. The last save, of a program that does not close, comes
            # before: what is registered last is called first.
            atexit.register(self._finalizer)

    def save(self, step: int, state: Any, block: bool = False, metrics: Mapping[str, float] | None = None) -> bool:
        """Save a state in the background. All ranks must call it for the same steps.

        What optimizers in the state own is copied while the program goes on, until their next step; numpy arrays too
        where the program calls `before_update`; everything else before this returns.

        Args:
            step: number of steps done.
            state: nested dicts, lists and tuples of tensors, numpy arrays, numbers, text, and of what has state_dict
                and load_state_dict; other objects are pickled.
            block: return when it is committed, and raise when it is not.
            metrics: figures to keep with the checkpoint.

        Returns:
            Whether a save was begun; False where the step is committed already, or both slots are still in use.

        Raises:
            StateError: something in the state can't be saved. Nothing was written.
            SaveError: an earlier save failed and the policy is "raise"; or this one did and block is set.
        """
        began_s = self._clock.now()
        self._open()
        self._report()
        self._load_h5py()
        number = arguments.step_number(step)
        if block:
            self._saver.idle()
        newest = self._saver.newest
        if newest is not None and newest.job.step == number and newest.error is None:
            return False  # under way already
        figures = arguments.figures(metrics) if self.rank == 0 else {}  # rank 0 keeps them
        job = self._next_job(number, figures)
        try:
            if commit.is_committed(job, self._files):
                return False
            self._saver.tried()
            walked = states.walk(state, arrays_later=self._update_told)
            save = self._saver.begin(job, walked.leaves + states.documents(walked.structure))
        except BaseException as error:
            self._give_up(job, f"{type(error).__name__}: {error}", False)
            if isinstance(error, OSError):
                return self._failed_at_once(job, error, block)
            raise
        if save is None:
            why = f"step {number} was left out: the two saves before it are still being written; save less often"
            self._give_up(job, why, True)
            self._warn(why, by_all=True)  # rank 0 has no slot either, or hears that this one has none
            return False
        self._begun(walked)
        if self._pace is not None:
            self._pace.begun()
        save.cost_s += self._clock.now() - began_s
        if block:
            self._blocking = save
            self._saver.before_update()
            save.done.wait()
            if save.error is not None:
                self._saver.failed.clear()
                raise self._as_save_error(job, save.error) from save.error
        return True

    def _keep_in_memory(self, step: int, state: Any) -> None:
        """Have a state staged and copied to neighbours, and not written. All ranks must call it for the same steps.

        Never waits, and says nothing where it can't be: the next save that is written is what counts.
        """
        began_s = self._clock.now()
        self._open()
        job = self._next_job(arguments.step_number(step), {})
        if self._saver.tries != self._asked_after:
            return  # there was another save since the ranks said that they are ready
        self._saver.tried()
        try:
            walked = states.walk(state, arrays_later=self._update_told)
            save = self._saver.keep(job, walked.leaves + states.documents(walked.structure))
        except (StateError, OSError) as error:
            log.debug("step %d is not kept: %s", step, error)
            return
        if save is not None:
            self._begun(walked)
            save.cost_s += self._clock.now() - began_s

    def _next_job(self, step: int, figures: Mapping[str, float]) -> Job:
        serial = self._next_serial()
        return Job(self.directory, step, serial, self.rank, self.world_size, self.attempt, figures, self._deadline_s)

    def _begun(self, walked: states.Walked) -> None:
        """A state is being staged."""
        self._arrays_put_off, self._update_told = self._update_told, False
        for optimizer in walked.optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(_before_step(weakref.ref(self._saver)))

    def _failed_at_once(self, job: Job, error: OSError, block: bool) -> bool:
        failure = self._as_save_error(job, error)
        if block or self._policy == "raise":
            raise failure from error
        self._warn(str(failure))
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the newest save is committed, or has failed.

        Args:
            timeout: longest wait, in seconds; None: as long as it takes (each of its parts has a deadline).

        Returns:
            Whether everything that was begun is committed.

        Raises:
            SaveError: a save failed and the policy is "raise".
        """
        newest = self._saver.newest
        if newest is None:
            return True
        self._saver.before_update()
        if not newest.done.wait(timeout):
            return False
        self._report()
        return newest.error is None

    @property
    def last_committed(self) -> int | None:
        """The newest step that is committed, None where there is none."""
        if self._saver.last_step is None and not self._listed:
            self._listed = True
            found = catalog.list_checkpoints(self.directory)
            self._saver.last_step = found[-1].step if found else None
        return self._saver.last_step

    def close(self) -> None:
        """Wait for the save under way, then give the staging memory back. Closing again does nothing.

        Raises:
            SaveError: a save failed and the policy is "raise".
        """
        self._close(None)

    def _close(self, timeout_s: float | None) -> None:
        if self._closed:
            return
        self._closed = True
        for handle in self._hooks.values():
            handle.remove()
        self._saver.close(timeout_s)
        try:
            self._report()
        finally:
            self._finalizer()
            atexit.unregister(self._finalizer)
            if self._entry.claim is not None:
                self._entry.claim.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the other ranks may be gone: what is nearly written is worth a moment, not a deadline.
        self._close(None if kind is None else AT_EXIT_S)

    # ------------------------------------------------------------------ restoring

    def restore(self, state: Any, strict: bool = True) -> int:
        """Fill a state from the newest checkpoint that all ranks can have. All ranks must call it, before any save.

        Existing tensors, arrays, modules and optimizers are filled in place. Nothing is touched before every byte has
        been compared with its checksum and all ranks have agreed.

        Args:
            state: as given to `save`.
            strict: whether what is missing, extra or of another shape is an error; False takes what fits and says so.

        Returns:
            The step; 0 where there is nothing.

        Raises:
            StateError: the checkpoint does not fit; names every place that does not. Nothing was touched.
            CorruptCheckpoint: there are checkpoints, and none is whole, or trusted. Nothing was touched.
        """
        self._open()
        if launch := fence.environment().get(GATHERING):
            self._handover.until_gathered(launch)
        recovery = Recovery(
            self.directory,
            state,
            self.rank,
            self.world_size,
            strict,
            self._unpickle,
            self._slots,
            self._fence,
            self._files,
            self._distrust,
            0 if self.every == "auto" else self.every,
        )
        self.restored = outcome = recovery.run(self._meet_to_restore())
        if self._saver.newest is None:
            self._saver.last_step, self._listed = None, False  # what was the newest may have been put aside
        if self.rank == 0 and fence.environment().get("TRANSOM_ATTEMPT") == self.attempt:
            self._handover.restored(outcome.step, outcome.source)
        if outcome.left_out:
            self._warn(f"restored step {outcome.step} without what does not fit: {outcome.left_out}", by_all=True)
        if self._pace is not None:
            self._pace.rest(self._is_written(outcome))
        return outcome.step

    def _is_written(self, outcome: Outcome) -> bool:
        """Whether what was restored is on disk. Only rank 0 looks, whose pace counts."""
        if self.rank or not outcome.source.startswith(MEMORY):
            return True
        return any(step == outcome.step for step, _ in catalog.folders(self.directory, self._files))

    def _meet_to_restore(self) -> Meeting:
        serial = self._next_serial()
        if self.world_size == 1:
            return Alone()
        folder = self.directory / f".restore.{self.attempt}.{serial}"
        self._files.make_dir(folder)
        return FileMeeting(folder, self.rank, self.world_size, self._files, self._clock, self._deadline_s, "restore")

    # ------------------------------------------------------------------ reporting

    def _open(self) -> None:
        if self._closed:
            raise UsageError("this Checkpointer is closed")

    def _next_serial(self) -> int:
        """Number of this meeting. Ranks call the same methods in the same order, so they have the same numbers."""
        key = (str(self.directory), self.attempt, self.rank)
        _serials[key] = _serials.get(key, -1) + 1
        return _serials[key]

    def _give_up(self, job: Job, reason: str, left_out: bool) -> None:
        """Tell the other ranks that this one does not take part in a save."""
        try:
            commit.meet(job, self._files, self._clock).give_up(reason, left_out)
        except OSError as error:
            log.warning("other ranks could not be told that %s: %s", reason, error)

    def _as_save_error(self, job: Job, error: BaseException) -> SaveError:
        if isinstance(error, SaveError):
            return error
        return SaveError(f"step {job.step} was not saved: {error}", step=job.step, path=self.directory)

    def _report(self) -> None:
        """Report saves that failed since the last call."""
        while self._saver.failed:
            save = self._saver.failed.popleft()
            assert save.error is not None
            error = self._as_save_error(save.job, save.error)
            if self._policy == "raise" and not isinstance(save.error, LeftOut):
                raise error from save.error
            self._warn(str(error), by_all=isinstance(save.error, Abandoned))  # whose fault it is says so, and rank 0

    def _say_once(self, message: str) -> None:
        """Say something once."""
        if message not in self._said:
            self._said.add(message)
            self._warn(message)

    def _warn(self, message: str, by_all: bool = False) -> None:
        """Warn the program's user, once: not through the log as well, and not by every rank where all say the same."""
        if by_all and self.rank:
            log.info("%s", message)
        else:
            warnings.warn(message, SaveWarning, stacklevel=3)


def _before_step(owner: weakref.ref[Saver]) -> Callable[..., None]:
    """The hook that an optimizer calls before it changes anything."""

    def hook(*_: object) -> None:
        saver = owner()
        if saver is not None:
            saver.before_update()

    return hook


def _finish(saver: Saver, slots: Slots, handover: Handover, folder: shm.Folder, owner: int) -> None:
    """Also at the end of a program that did not close: what was begun is committed, and no memory stays behind."""
    if os.getpid() != owner:
        return  # a forked child, such as a data loader's worker: all this is its parent's
    try:
        saver.close(AT_EXIT_S)
        for save in saver.failed:  # there is no next call to tell it
            log.error("step %d was not saved: %s", save.job.step, save.error)
    finally:
        slots.close()
        handover.close()
        folder.close()
