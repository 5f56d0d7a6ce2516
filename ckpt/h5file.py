"""The hand on h5py: makes the HDF5 file with every dataset in place and no data in it.

Datasets are contiguous, allocated early, never filled and aligned, so that the offset of each is known before a byte is
written. A wider alignment than a page holds for those that are as large as it: small ones would leave holes of that
size. Who writes the bytes is elsewhere (direct). Restoring does not need this: the manifest has the offsets.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import dtypes
from transom_hpc.ckpt.layout import Shard, data_file
from transom_hpc.ckpt.sheet import Sheet

ALIGN = 4096
_META_BYTES = 1 << 16
"""HDF5 asks for space for names and types in runs of this many bytes, so that it does not scatter them."""


_loaded_here = False
_lost = ""


def library() -> Any:
    """h5py, without starting MPI.

    An h5py with MPI starts it when imported. Under srun without a matching MPI type that aborts the program, so MPI is
    left as the program has it.

    Raises:
        ImportError: it is not there.
        SaveError: a thread that will never come back may hold it.
    """
    global _loaded_here
    if _lost:
        raise SaveError(_lost)
    if "h5py" not in sys.modules:
        _loaded_here = True
    if "h5py" not in sys.modules and "mpi4py.MPI" not in sys.modules:
        try:
            import mpi4py
        except ImportError:
            pass
        else:
            before = mpi4py.rc.initialize
            mpi4py.rc.initialize = False
            try:
                import h5py
            finally:
                mpi4py.rc.initialize = before
    import h5py

    return h5py


def lose(why: str) -> None:
    """Say that a thread inside h5py was given up: whoever calls it from now on might wait for ever."""
    global _lost
    _lost = why


def is_the_programs() -> bool:
    """Whether the program has loaded h5py itself."""
    return "h5py" in sys.modules and not _loaded_here


def load() -> None:
    """Load h5py, if it is there, so that no thread does it while the interpreter ends: that is a segmentation fault."""
    with contextlib.suppress(ImportError):  # the save will say so
        library()


def lay_out(
    sheet: Sheet, number: int, shards: Sequence[Shard], attributes: Mapping[str, Any], alignment: int = ALIGN
) -> dict[str, int]:
    """Make one data file. The first one also shows what is in the others, so that it is enough to open it.

    Args:
        sheet: where, in memory; empty.
        number: of the file.
        shards: everything that the checkpoint will hold, in whichever file.
        attributes: of the file, for people who open it with other tools.
        alignment: each dataset of so many bytes or more begins at a multiple of them, each other one at a multiple of
            ALIGN.

    Returns:
        The byte offset of each dataset in this file by its path; those without bytes are left out.

    Raises:
        OSError: HDF5 can't express it.
    """
    h5py = library()
    offsets: dict[str, int] = {}
    here = [shard for shard in shards if shard.file == number]
    wide = [shard for shard in here if shard.entry.nbytes >= alignment > ALIGN]
    narrow = [shard for shard in here if not shard.entry.nbytes >= alignment > ALIGN]
    with _open(h5py, sheet, "w", 1, ALIGN) as file:
        for name, value in attributes.items():
            file.attrs[name] = value
        _add(h5py, file, narrow, offsets)
        if not wide and number == 0:
            _show(h5py, file, shards)
    if wide:  # a file has one alignment as long as it is open
        with _open(h5py, sheet, "r+", alignment, alignment) as file:
            _add(h5py, file, wide, offsets)
            if number == 0:
                _show(h5py, file, shards)
    return offsets


def _open(h5py: Any, sheet: Sheet, mode: str, threshold: int, interval: int) -> Any:
    return h5py.File(
        sheet,
        mode,
        libver=("earliest", "v110"),
        alignment_threshold=threshold,
        alignment_interval=interval,
        meta_block_size=_META_BYTES,
    )


def _add(h5py: Any, file: Any, shards: Sequence[Shard], offsets: dict[str, int]) -> None:
    links = _links(h5py)
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    how.set_obj_track_times(False)  # the same state gives the same bytes, whenever it is saved
    for shard in shards:
        dataset = _create(h5py, file, shard, how, links)
        if shard.entry.nbytes:
            offsets[shard.path] = int(dataset.get_offset())


def _links(h5py: Any) -> Any:
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    return links


def _create(h5py: Any, file: Any, shard: Shard, how: Any, links: Any) -> Any:
    entry = shard.entry
    attributes: tuple[tuple[str, str], ...] = ()
    if entry.dtype == dtypes.JSON:
        kind = h5py.h5t.py_create(h5py.string_dtype("ascii", max(1, entry.nbytes)))
        space = h5py.h5s.create(h5py.h5s.SCALAR)
        attributes = (("holds", entry.dtype),)
    elif dtypes.is_object(entry.dtype):  # bytes, not one element of that size, which could not be written in parts
        kind = h5py.h5t.py_create(np.dtype(np.uint8))
        space = h5py.h5s.create_simple((entry.nbytes,))
        attributes = (("holds", entry.dtype),)
    else:
        held = dtypes.storage(entry.dtype)
        kind = h5py.h5t.py_create(held.dtype, logical=True)
        shape = entry.shape if held.per_element == 1 else (*entry.shape, held.per_element)
        space = h5py.h5s.create(h5py.h5s.SCALAR) if shape == () else h5py.h5s.create_simple(shape)
        attributes = held.attributes
    dataset = h5py.h5d.create(file.id, shard.path.encode("utf-8"), kind, space, how, links)
    if attributes:
        wrapped = h5py.Dataset(dataset)
        for name, value in attributes:
            wrapped.attrs[name] = value
    return dataset


def _show(h5py: Any, file: Any, shards: Sequence[Shard]) -> None:
    """Let the first file show what is elsewhere: an array in parts as one dataset of the whole shape (virtual), an
    array in another file under its own name (an external link: where that file is missing, reading fails)."""
    parts: dict[str, list[Shard]] = {}
    for shard in shards:
        if shard.path.startswith("/shards/"):
            parts.setdefault(shard.entry.name, []).append(shard)
        elif shard.file:
            path = shard.path.encode("utf-8")
            file.id.links.create_external(path, data_file(shard.file).encode(), path, _links(h5py))
    for name, found in parts.items():
        entry = found[0].entry
        held = dtypes.storage(entry.dtype)
        of_one_array = len({(shard.entry.dtype, shard.entry.global_shape) for shard in found}) == 1
        if held.per_element != 1 or not of_one_array:
            continue
        found.reverse()  # where parts overlap, the last one shows: that of the lowest rank
        layout = h5py.VirtualLayout(shape=entry.global_shape, dtype=held.dtype)
        for shard in found:
            if not shard.entry.nbytes:
                continue
            where = tuple(
                slice(start, start + count) for start, count in zip(shard.entry.start, shard.entry.shape, strict=True)
            )
            source = data_file(shard.file) if shard.file else "."
            layout[where] = h5py.VirtualSource(source, shard.path, shape=shard.entry.shape)
        dataset = file.create_virtual_dataset(f"/{name}", layout)
        for key, value in held.attributes:
            dataset.attrs[key] = value
