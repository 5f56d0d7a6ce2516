"""Other ways of saving and loading, each at its default and at its best settings.

`save` returns when file and folder are on disk: those that don't see to it themselves are fsynced here. `load` brings a
state to where it was, from whatever `save` wrote; a state as of a program that has just begun is what it gets.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from checkpointing.state import State

NAME = "state"

Save = Callable[[State, Path], None]
Load = Callable[[Path, State], None]


@dataclass(frozen=True, slots=True)
class Contender:
    """One way of saving, and of loading what it saved.

    Args:
        name: for people; short.
        save: into an empty folder.
        load: from there, by name of the way; empty where another contender's loads the same.
    """

    name: str
    save: Save
    load: dict[str, Load] = field(default_factory=dict)


def found() -> tuple[list[Contender], list[str]]:
    """All that can be had here, and what is missing."""
    contenders = [
        Contender(
            "torch.save", torch_save(), {"torch.load": torch_load(), "torch.load, mmap": torch_load(mapped=True)}
        ),
        Contender("torch.save, no CRC32", torch_save(crc=False)),
        Contender("torch.save, legacy", torch_save(legacy=True)),
        Contender("DCP, 1 thread", dcp_save(1), {"DCP": dcp_load}),
        Contender("DCP, 4 threads", dcp_save(4)),
    ]
    missing = []
    for module, contender in (
        ("safetensors", Contender("safetensors", safetensors_save, {"safetensors": safetensors_load})),
        ("tensorstore", Contender("tensorstore zarr3", tensorstore_save, {"tensorstore": tensorstore_load})),
        ("h5py", Contender("h5py", h5py_save, {"h5py": h5py_load})),
    ):
        try:
            __import__(module)
            contenders.append(contender)
        except ImportError:
            missing.append(module)
    return contenders, missing


# -- torch


def torch_save(crc: bool = True, legacy: bool = False) -> Save:
    """torch.save, to a path: faster than to an open file."""

    def save(state: State, path: Path) -> None:
        torch.serialization.set_crc32_options(crc)
        try:
            torch.save(state.plain(), path / NAME, _use_new_zipfile_serialization=not legacy)
        finally:
            torch.serialization.set_crc32_options(True)
        seal(path)

    return save


def torch_load(mapped: bool = False) -> Load:
    """torch.load, then load_state_dict.

    Args:
        mapped: with mmap=True, so that only load_state_dict copies.
    """

    def load(path: Path, state: State) -> None:
        held = torch.load(path / NAME, weights_only=True, mmap=mapped)
        if mapped:  # the optimizer keeps what it is given: memory of its own, as after the other loads
            for values in held["optimizer"]["state"].values():
                values.update({key: value.clone() for key, value in values.items()})
        state.fill(held)

    return load


def dcp_save(threads: int) -> Save:
    """DCP; its writer syncs its files."""

    def save(state: State, path: Path) -> None:
        with quietly():
            dcp.save(state.plain(), storage_writer=FileSystemWriter(path, thread_count=threads), no_dist=True)
        sync(path)

    return save


def dcp_load(path: Path, state: State) -> None:
    """DCP, into the state's own tensors."""
    held = state.room()
    with quietly():
        dcp.load(held, storage_reader=FileSystemReader(path), no_dist=True)
    state.fill(held)


class quietly(warnings.catch_warnings):
    """Without DCP's warning that nothing is distributed."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")


# -- others


def safetensors_save(state: State, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state.flat(), path / NAME)
    seal(path)


def safetensors_load(path: Path, state: State) -> None:
    from safetensors.torch import load_file

    state.fill_flat(load_file(path / NAME))


def h5py_save(state: State, path: Path) -> None:
    import h5py

    with h5py.File(path / NAME, "w") as file:
        for name, tensor in state.flat().items():
            file.create_dataset(name, data=tensor.numpy())
    seal(path)


def h5py_load(path: Path, state: State) -> None:
    import h5py
    import numpy as np

    held = {}
    with h5py.File(path / NAME, "r") as file:
        for name, dataset in file.items():
            room = np.empty(dataset.shape, dataset.dtype)
            dataset.read_direct(room)
            held[name] = torch.from_numpy(room)
    state.fill_flat(held)


def _open(path: Path, name: str, **more: Any) -> Any:
    import tensorstore

    store = {"driver": "file", "path": f"{path / name}/"}
    return tensorstore.open({"driver": "zarr3", "kvstore": store}, context=_context(), **more)


def _context() -> Any:
    import tensorstore

    # Eight in flight were fastest here; one chunk an array, since smaller ones are more files to sync. It syncs itself.
    return tensorstore.Context({"file_io_concurrency": {"limit": 8}, "data_copy_concurrency": {"limit": 2}})


def tensorstore_save(state: State, path: Path) -> None:
    import tensorstore

    arrays = {name: tensor.numpy() for name, tensor in state.flat().items()}
    opened = {}
    for name, array in arrays.items():
        chunks = tensorstore.ChunkLayout(chunk_shape=array.shape)
        opened[name] = _open(path, name, create=True, dtype=array.dtype.name, shape=array.shape, chunk_layout=chunks)
    writes = [
        opened[name].result().write(array, can_reference_source_data_indefinitely=True)
        for name, array in arrays.items()
    ]
    for write in writes:
        write.result()
    sync(path)


def tensorstore_load(path: Path, state: State) -> None:
    opened = {name.name: _open(path, name.name) for name in path.iterdir()}
    reads = {name: found.result().read() for name, found in opened.items()}
    state.fill_flat({name: torch.from_numpy(read.result()) for name, read in reads.items()})


# -- durability


def seal(path: Path) -> None:
    """Sync a folder's files, then it."""
    for file in path.iterdir():
        _fsync(file)
    sync(path)


def sync(path: Path) -> None:
    """Sync a folder and those in it, and the one that it is in: all names are on disk."""
    for folder in [path, *(found for found in path.rglob("*") if found.is_dir()), path.parent]:
        _fsync(folder)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
