"""States from files of others: torch's, safetensors', and torch.distributed.checkpoint's folders.

Their own libraries read them. Tensors are mapped from the file, or fetched one by one when their turn comes, so that a
file larger than the memory can be read. Nothing in them is unpickled but what torch.load(weights_only=True) allows;
only the index of a torch.distributed.checkpoint folder is a pickle that its library opens as it is.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from transom_hpc.base.errors import UsageError

Fetch = Callable[[torch.Tensor], None]
"""Reads one tensor into memory that it is given."""


@dataclass(slots=True)
class Arrived:
    """A state.

    Args:
        state: nested dicts and lists.
        fetch: by the address of a tensor in the state that stands for one that is still in a file, how to get it.
        left_out: place, and why it is not in the state.
    """

    state: Any
    fetch: dict[int, Fetch] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def arrive(path: Path) -> Arrived:
    """Open what others wrote.

    Raises:
        UsageError: it can't be read, and why.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}", path=path)
    if path.is_dir():
        if not (path / ".metadata").is_file():
            raise UsageError(f"{path} is no folder of torch.distributed.checkpoint: it has no .metadata", path=path)
        return _from_dcp(path)
    return _from_safetensors(path) if path.suffix == ".safetensors" else _from_torch(path)


def _from_torch(path: Path) -> Arrived:
    try:
        with path.open("rb") as file:
            zipped = file.read(4) == b"PK\x03\x04"  # files of torch before 1.6 can't be mapped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it either reads it or says why not
            return Arrived(torch.load(path, map_location="cpu", weights_only=True, mmap=zipped))
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "nsupported" in line), "")
        raise UsageError(
            f"{path} holds more than tensors and plain values, or is no torch file, and is not unpickled, since that "
            f"would run code from it ({reason.strip() or str(error).splitlines()[0]}); where you trust it, load it "
            "with torch.load yourself and save its state_dict",
            path=path,
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise UsageError(f"{path} is no whole torch file: {str(error).splitlines()[0]}", path=path) from error


def _from_safetensors(path: Path) -> Arrived:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
            metadata = file.metadata() or {}
    except (SafetensorError, KeyError) as error:
        raise UsageError(
            f"{path} is no whole safetensors file that its library can read: {error}", path=path
        ) from error
    for name, same in metadata.items():  # as safetensors.torch.save_model writes down what is tied
        if name not in state and same in state:
            state[name] = state[same]
    return Arrived(state)


def _from_dcp(path: Path) -> Arrived:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
    except Exception as error:  # whatever a pickle that is none raises
        raise UsageError(f"{path}: its .metadata can't be read: {error}", path=path) from error
    places: Mapping[str, Any] = metadata.planner_data or {}
    arrived = Arrived({})
    for name, facts in metadata.state_dict_metadata.items():
        place = places.get(name, (name,))
        if isinstance(facts, TensorStorageMetadata):
            stand_in = torch.empty((), dtype=facts.properties.dtype).expand(facts.size)
            arrived.fetch[stand_in.data_ptr()] = lambda room, name=name: _fetch(reader, metadata, name, room)  # type: ignore[misc]
            _put(arrived.state, place, stand_in)
            continue
        try:
            _put(arrived.state, place, _fetch(reader, metadata, name, None))
        except pickle.UnpicklingError as error:
            arrived.left_out.append((name, f"a Python object ({str(error).splitlines()[0]})"))
    arrived.state = _in_order(arrived.state)
    return arrived


def _fetch(reader: Any, metadata: Any, name: str, room: torch.Tensor | None) -> Any:
    """One thing out of a folder of torch.distributed.checkpoint, by its own reader, without a process group."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class Planner(DefaultLoadPlanner):  # type: ignore[misc,unused-ignore]
        def load_bytes(self, read_item: Any, value: Any) -> None:
            self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)

    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted: dict[str, Any] = {name: room}
    planner.set_up_planner(wanted, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    reader.read_data(plan, planner).wait()
    return planner.state_dict[name]


def _put(state: dict[Any, Any], place: tuple[Any, ...], value: Any) -> None:
    """Put a value where it was; lists are dicts with numbers for keys until all is there."""
    for key in place[:-1]:
        state = state.setdefault(key, {})
    state[place[-1]] = value


def _in_order(value: Any) -> Any:
    """Lists as lists, and the numbers of an optimizer's parameters as numbers: the index has them as text."""
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_in_order(value[key]) for key in sorted(value)]
    held = {key: _in_order(item) for key, item in value.items()}
    if is_optimizer(held) and isinstance(held["state"], dict):
        held["state"] = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in held["state"].items()}
    return held


def is_optimizer(value: Any) -> bool:
    """Whether it looks like an optimizer's state_dict."""
    return isinstance(value, dict) and {"state", "param_groups"} <= set(value)


def is_module(value: Any) -> bool:
    """Whether it looks like a module's state_dict: tensors by name, and nothing else."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in value.items())
    )
