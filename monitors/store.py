"""The readings kept: RUN/health/<attempt>.h5, one table a node, opened by anything that reads HDF5.

Owns h5py. A table is at /nodes/<host>, one row a sample::

    pandas.DataFrame(h5py.File("A0001-L01.h5")["nodes/n1"][:])

Runs as a small process of its own (`python -m transom_hpc.monitors.store FILE`, records on standard input), so that a
file system that hangs holds up nobody. Rows are added in one go every few seconds with the file closed in between:
whoever is killed leaves a file that opens, but for the moment of writing itself.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transom_hpc.monitors.reading import METRICS, RECORD_BYTES, Reading, decode_reading

if TYPE_CHECKING:
    import pandas

_GROUP = "nodes"
_CHUNK_ROWS = 256


def new_store_path(folder: Path, attempt: str) -> Path:
    """Make a file in the health folder; one that is there, perhaps of a sidecar still alive, is left alone.

    Args:
        folder: RUN/health, made if missing.
        attempt: as "A0001-L01", which is the name unless it is taken.

    Raises:
        OSError: the folder can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / (f"{attempt}.h5" if number == 1 else f"{attempt}-{number}.h5")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            number += 1
            continue
        return path


def append_readings(path: Path, readings: Iterable[Reading]) -> None:
    """Add rows, and close the file.

    Args:
        path: the file; an empty one, or one of ours.
        readings: of any nodes, in the order of time.

    Raises:
        OSError: they could not be written.
    """
    h5py, numpy = _libraries()
    columns = numpy.dtype([("number", "u8"), ("time_s", "f8"), *((name, "f8") for name in METRICS)])
    rows: dict[str, list[Any]] = {}
    attempt = ""
    for reading in readings:
        attempt = reading.attempt
        figures = (getattr(reading, name) for name in METRICS)
        row = (reading.number, reading.time_s, *(numpy.nan if value is None else value for value in figures))
        rows.setdefault(reading.host.replace("/", "%2F") or "?", []).append(row)
    if not rows:
        return
    fresh = not path.exists() or path.stat().st_size == 0
    with h5py.File(path, "w" if fresh else "r+") as file:
        if fresh:
            file.attrs.update({"format": 1, "attempt": attempt, "written_by": "transom-hpc"})
        nodes = file.require_group(_GROUP)
        for host, new in rows.items():
            table = nodes.get(host)
            if table is None:
                # not compressed: what grows is then written in place, and a kill in the middle spoils no older row
                table = nodes.create_dataset(host, shape=(0,), maxshape=(None,), dtype=columns, chunks=(_CHUNK_ROWS,))
            start = len(table)
            table.resize(start + len(new), axis=0)
            table[start:] = numpy.array(new, dtype=columns)


def load_readings(path: Path) -> pandas.DataFrame:
    """Read all nodes' tables as one data frame, with the host as a column, in the order of time.

    A file that is just being written to is tried again a few times.

    Raises:
        OSError: the file is missing or can't be read.
    """
    for _ in range(4):
        try:
            return _load(path)
        except FileNotFoundError:
            raise
        except (OSError, KeyError, RuntimeError):  # what h5py says when it meets half a change
            time.sleep(0.1)
    try:
        return _load(path)
    except (KeyError, RuntimeError) as error:
        raise OSError(f"{path} can't be read: {error}") from error


def _load(path: Path) -> pandas.DataFrame:
    h5py, _ = _libraries()
    import pandas  # slow to import, and only people need it

    with h5py.File(path, "r") as file:
        frames = [
            pandas.DataFrame(table[:]).assign(host=host.replace("%2F", "/"))
            for host, table in file.get(_GROUP, {}).items()
        ]
    if not frames:
        return pandas.DataFrame(columns=["host", "number", "time_s", *METRICS])
    whole = pandas.concat(frames, ignore_index=True)
    ordered: pandas.DataFrame = whole[["host", "number", "time_s", *METRICS]].sort_values(["time_s", "host"])
    return ordered.reset_index(drop=True)


def _libraries() -> tuple[Any, Any]:
    """Import h5py without starting MPI: built for parallel use it loads mpi4py, and one file here has one writer."""
    os.environ.setdefault("HDF5_USE_FILE_LOCKING", "FALSE")  # fails on some file systems, and is not needed
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
    import h5py
    import numpy

    return h5py, numpy


def main(path: Path, fd: int, flush_s: float) -> None:
    """Store the records that arrive on a pipe until it ends; what can't be written is dropped, and said once.

    Args:
        path: the file.
        fd: where the records come from, each RECORD_BYTES long.
        flush_s: seconds between writes.
    """
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # it ends when the sidecar does, with everything written
    data = b""
    waiting: list[Reading] = []
    due = time.monotonic() + min(1.0, flush_s)  # the first rows early: short launches leave something, too
    said = False
    ended = False
    while not ended:
        if select.select([fd], [], [], max(0.0, due - time.monotonic()))[0]:
            piece = os.read(fd, 1 << 16)
            ended = not piece
            data += piece
            while len(data) >= RECORD_BYTES:
                reading = decode_reading(data[:RECORD_BYTES])
                data = data[RECORD_BYTES:]
                if reading is not None:
                    waiting.append(reading)
        if ended or time.monotonic() >= due:
            try:
                append_readings(path, waiting)
            except Exception as error:  # the edge of the process: readings are lost, nothing else
                if not said:
                    print(f"transom: readings not written to {path}: {error}", file=sys.stderr, flush=True)
                    said = True
            waiting = []
            due = time.monotonic() + flush_s


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.stdin.fileno(), float(sys.argv[2]))
