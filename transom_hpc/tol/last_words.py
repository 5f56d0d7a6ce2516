"""What a rank says of its own end: one line in shared memory, left by a Python program that an exception ends.

Owns the line's making; `exits.parse_exit` reads it. The program's own hook still runs, and no fault in here ever ends
the program or hides its error. An exception that ends a thread does not end the program, so it is none of these.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_VARIABLE = "TRANSOM_LAST_WORDS"
_MOST_CHARS = 240

END_S = 30
"""Seconds that a failed rank has to end by itself, while the others may wait for it in vain."""

_pid = 0
_rank = 0
_others = False
_written: BaseException | None = None


def listen(rank: int, world_size: int) -> None:
    """From now on leave a line where the launcher's wrapper of this task looks for it, when an exception ends this.

    Args:
        rank: this process's rank.
        world_size: how many ranks there are.
    """
    global _pid, _rank, _others
    first = not _pid
    _pid, _rank, _others = os.getpid(), rank, world_size > 1
    if first:
        _chain()
        # Who sets a hook of their own later may not call ours; Python notes the exception before it calls any.
        atexit.register(lambda: _leave(getattr(sys, "last_value", None)))


def _chain() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _leave(error)
        before(kind, error, trace)

    sys.excepthook = hook


def _leave(error: BaseException | None) -> None:
    """Write the line, once; the first process of a task has the word."""
    global _written
    path = os.environ.get(_VARIABLE)
    if error is None or error is _written or not path or os.getpid() != _pid:  # a fork's end is its own matter
        return
    _written = error
    with contextlib.suppress(Exception):  # the edge to the user's program, whose own error is what counts
        line = f"{kind_of(error)} {_rank} {text_of(error)}\n".encode(errors="replace")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    if _others:
        # MPI_Finalize waits for ranks that wait for this one. Nothing of Python's outlives the interpreter; this does.
        with contextlib.suppress(Exception):  # not the main thread
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, END_S)


def kind_of(error: BaseException) -> str:
    """What an exception comes from: "memory", "storage" or "error".

    Those that it was raised from, or while they were handled, count too.
    """
    kinds = {_kind_of_one(one) for one in _origins(error)}
    return next((kind for kind in ("memory", "storage") if kind in kinds), "error")


def text_of(error: BaseException) -> str:
    """An exception in one line: "ValueError: shapes do not match (train.py:40)"."""
    try:
        message = str(error)
    except Exception:  # a faulty __str__ of the user's
        message = ""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    line = re.sub(r"[\x00-\x1f\x7f]", " ", lines[0] if lines else "")
    text = f"{type(error).__name__}{': ' if line else ''}{line}"
    if len(text) > _MOST_CHARS:
        text = text[: _MOST_CHARS - 1] + "…"
    place = _place(error.__traceback__)
    return f"{text} ({place})" if place else text


def is_foreign(path: str) -> bool:
    """Whether a source file is not the user's program: the standard library, an installed package, or ours."""
    return (
        path.startswith(("<frozen", "<string", *_INSTALLED)) or "/site-packages/" in path or "/dist-packages/" in path
    )


def _place(trace: TracebackType | None) -> str:
    """Where the error came from: the deepest line of the program itself, or the deepest of all."""
    places = []
    while trace is not None:
        places.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    path, line = next((place for place in reversed(places) if not is_foreign(place[0])), (places or [("", 0)])[-1])
    return f"{os.path.basename(path)}:{line}" if path else ""  # noqa: PTH119  (may be no path at all)


def _origins(error: BaseException) -> Iterator[BaseException]:
    """The exception and what it came from, in any order, each once."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < 64:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        behind = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        waiting += [*([behind] if behind is not None else []), *getattr(one, "exceptions", ())]


def _kind_of_one(error: BaseException) -> str:
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return "memory"
    if isinstance(error, OSError):
        if error.errno == errno.ENOMEM:
            return "memory"
        if error.errno in _STORAGE or (error.errno in _STORAGE_OF_A_FILE and error.filename is not None):
            return "memory" if str(error.filename).startswith("/dev/shm/") else "storage"
        if error.errno is not None:
            return "error"
    # Libraries that keep no number: torch, h5py, mpi4py, jax; and what another rank has told.
    if isinstance(error, OSError | RuntimeError) or type(error).__module__.startswith("transom_hpc."):
        text = str(error)
        if _MEMORY_WORDS.search(text):
            return "memory"
        if _STORAGE_WORDS.search(text):
            return "storage"
    return "error"


_INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (Path(os.__file__).parent, Path(__file__).parents[1], Path(__file__).resolve().parents[1])
)
_STORAGE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EFBIG, errno.EREMOTEIO, errno.ENOLCK}
)
# Of network file systems that are gone; of sockets they mean something else.
_STORAGE_OF_A_FILE = frozenset({errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.ENXIO})
_MEMORY_WORDS = re.compile(
    r"out of memory|(can't|cannot|can not|unable to) allocate|RESOURCE_EXHAUSTED|CUBLAS_STATUS_ALLOC_FAILED"
    r"|/torch_\d+_\d+\S*: No space left on device",  # a data loader's tensors in /dev/shm
    re.IGNORECASE,
)
_STORAGE_WORDS = re.compile(
    r"no space left on device|disk quota exceeded|input/output error|stale (nfs )?file handle|read-only file system"
    r"|MPI_ERR_(NO_SPACE|QUOTA|IO|READ_ONLY)\b|GB left and the checkpoint takes|more files \(inodes\)",
    re.IGNORECASE,
)
