"""Takes a state apart: which arrays it holds, and a structure of plain JSON that says how they hang together.

Owns the walk over dicts, lists, torch modules, optimizers and the rest when saving. It copies no array and never
changes the state. `fill` is its counterpart when restoring.

The structure has one document for each key of the outermost dict, so that ranks share what is equal (see nodes).
"""

from __future__ import annotations

import base64
import json
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import dtypes, fqn, kinds, names
from transom_hpc.ckpt.block import Block, block_of
from transom_hpc.ckpt.nodes import Node, is_scalar, keyed, scalar

if TYPE_CHECKING:
    import torch

_AS_THEY_ARE = frozenset((type(None), bool, int, str))

_DEPTH = 8
"""Keys on the way to an optimizer or a module, at most."""

INLINE_BYTES = 256
"""`bytes` up to this long are written into the structure, longer ones get a dataset."""


@runtime_checkable
class Stateful(Protocol):
    """What keeps its state by itself: modules, optimizers, schedulers, samplers."""

    def state_dict(self) -> Any:
        """Its state, as something that can be saved."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state back."""


@dataclass(slots=True)
class Leaf:
    """An array, or the bytes of an object, that has to be copied.

    Args:
        name: in the file (see layout.Entry).
        source: the live tensor or array, or bytes that nobody else holds.
        dtype: element type (see dtypes).
        shape: of what is here.
        lazy: whether it stays as it is until `before_update` is called, as by the optimizer's next step.
        version: of the tensor when the state was walked; None where it has no counter.
        counted: the DTensor of which source is the part that is here. It has a counter of its own, which is added: what
            is done to the whole moves that one, what is done to the part moves the part's.
        global_shape, start: of the array of which this is a part, and where it begins there; None where it is whole.
            A part may be empty: a leaf of 0 bytes.
    """

    name: str
    source: torch.Tensor | np.ndarray[Any, Any] | bytes
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    lazy: bool = False
    version: int | None = None
    global_shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    counted: torch.Tensor | None = None


@dataclass(slots=True)
class Walked:
    """A state taken apart.

    Args:
        leaves: what has to be copied, each thing once.
        structure: for each outermost key (escaped), its document.
        optimizers: all that were found; what they own is `lazy` among the leaves.
        called: for each optimizer by its id, names of its parameters by their numbers (see fqn).
    """

    leaves: list[Leaf] = field(default_factory=list)
    structure: dict[str, Node] = field(default_factory=dict)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    called: dict[int, dict[int, str]] = field(default_factory=dict)


def walk(state: Any, arrays_later: bool = False) -> Walked:
    """Take a state apart.

    Args:
        state: nested dicts, lists and tuples of what can be saved.
        arrays_later: whether numpy arrays may be copied later, as what optimizers own; not those that objects keep.

    Raises:
        StateError: something in it can't be saved. It is named; nothing was done.
    """
    walker = _Walker(Walked(), arrays_later)
    walker.find_owners(state, ())
    if type(state) in (dict, OrderedDict) and state:
        for key, name, value in keyed(state, ()):
            walker.walked.structure[names.escape(name)] = ["key", scalar(key), walker.node(value, (name,))]
    else:
        walker.walked.structure[names.join(())] = ["root", walker.node(state, ())]
    return walker.walked


def documents(structure: dict[str, Node]) -> list[Leaf]:
    """The structure as bytes to store, one document for each outermost key."""
    leaves = []
    for key, node in structure.items():
        data = json.dumps(node, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
        # Blanks at the end, so that a counter that gets longer does not change the file's layout.
        data = data.ljust(-(-len(data) // 256) * 256)
        leaves.append(Leaf(f"structure/{key}", data, dtypes.JSON, (len(data),), len(data)))
    return leaves


class _Walker:
    def __init__(self, walked: Walked, arrays_later: bool) -> None:
        self.walked = walked
        self._arrays_later = arrays_later
        self.owned: set[tuple[Any, ...]] = set()
        self._wholes: dict[tuple[Any, ...], torch.Tensor] = {}  # DTensors among them, by the memory of what is here
        self._modules: list[tuple[tuple[str, ...], torch.nn.Module]] = []
        self._keys: dict[int, tuple[Any, ...]] = {}  # of the tensors that optimizers hold, by their id
        self._names: dict[tuple[Any, ...], str] = {}
        self._inside: set[int] = set()
        self._tensors: ModuleType | None = None

    def find_owners(self, value: Any, parts: tuple[str, ...]) -> None:
        """Optimizers, since what they own stays unchanged until their next step, and modules, whose parameters have
        names. Looked for before the walk, since either may come first."""
        if kinds.is_optimizer(value):
            self.walked.optimizers.append(value)
            for group in value.param_groups:
                self._own(group["params"])
            for held in value.state.values():
                if isinstance(held, dict):
                    self._own(tensor for tensor in held.values() if kinds.is_tensor(tensor))
        elif kinds.is_module(value):
            inner = kinds.unwrap(value)
            if all(inner is not module for _, module in self._modules):
                self._modules.append((parts, inner))
        elif len(parts) < _DEPTH and isinstance(value, dict):
            for key, item in value.items():
                self.find_owners(item, (*parts, str(key)))
        elif len(parts) < _DEPTH and isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                self.find_owners(item, (*parts, str(number)))

    def _own(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            local = _local(tensor)
            key = _key(local)
            self._keys[id(tensor)] = key
            self.owned.add(key)
            if local is not tensor:
                self._wholes[key] = tensor

    def node(self, value: Any, parts: tuple[str, ...]) -> Node:
        if type(value) in _AS_THEY_ARE:
            return value
        if kinds.is_tensor(value):
            return ["tensor", self._tensor(value, parts)]
        if is_scalar(value):
            return scalar(value)
        if isinstance(value, Block):
            return self._block(value, parts)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return ["array", self._array(value, parts)]
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            name = dtypes.of_numpy(value.dtype)
            return ["scalar", name, base64.b64encode(np.asarray(value).tobytes()).decode()]
        if type(value) in (bytes, bytearray):
            return self._bytes(value, parts)
        if id(value) in self._inside:
            raise StateError(f"{names.place(parts)}: it contains itself", name=names.place(parts))
        self._inside.add(id(value))
        try:
            return self._container(value, parts)
        finally:
            self._inside.discard(id(value))

    def _container(self, value: Any, parts: tuple[str, ...]) -> Node:
        if type(value) in (dict, OrderedDict):
            kind = "dict" if type(value) is dict else "odict"
            return [kind, [[scalar(k), n, self.node(v, (*parts, n))] for k, n, v in keyed(value, parts)]]
        if type(value) in (list, tuple):
            kind = "list" if type(value) is list else "tuple"
            return [kind, [self.node(v, (*parts, str(i))) for i, v in enumerate(value)]]
        if type(value) in (set, frozenset) and all(is_scalar(item) for item in value):
            items = sorted(value, key=lambda item: (type(item).__name__, repr(item)))
            return ["set" if type(value) is set else "frozenset", [scalar(item) for item in items]]
        if not isinstance(value, type) and isinstance(value, Stateful):
            return self._stateful(value, parts)
        if _has_tensors(value):
            if isinstance(value, dict):
                return ["dict", [[scalar(k), n, self.node(v, (*parts, n))] for k, n, v in keyed(value, parts)]]
            if isinstance(value, list):
                return ["list", [self.node(v, (*parts, str(i))) for i, v in enumerate(value)]]
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                where = f"{type(value).__module__}:{type(value).__qualname__}"
                return ["named", where, [self.node(v, (*parts, str(i))) for i, v in enumerate(value)]]
        return self._pickled(value, parts)

    def _stateful(self, value: Any, parts: tuple[str, ...]) -> Node:
        inner = kinds.unwrap(value)
        kind = "object"
        if kinds.is_module(inner):
            kind = "module"
        elif kinds.is_optimizer(inner):
            kind = "optimizer"
        try:
            held = inner.state_dict()
        except Exception as error:
            place = names.place(parts)
            raise StateError(
                f"{place}: its state_dict() failed: {type(error).__name__}: {error}", name=place
            ) from error
        # What an object keeps changes when the object likes, not when the program says so.
        arrays_later, self._arrays_later = self._arrays_later, False
        if kind == "optimizer":
            called = self.walked.called[id(inner)] = fqn.names_of(inner, self._modules)
            held = fqn.named(held, called)
        elif kind == "module":
            called_here = fqn.tidied(held)
            held = {called_here[key]: value for key, value in held.items()}
        node = self.node(dict(held) if isinstance(held, OrderedDict) else held, parts)
        self._arrays_later = arrays_later
        return [kind, node]

    def _tensor(self, tensor: torch.Tensor, parts: tuple[str, ...], block: Block | None = None) -> str:
        key = self._keys.get(id(tensor))
        dtype = self._tensor_dtype(tensor, parts)
        name = "tensors/" + names.join(parts)
        counted = None
        if kinds.is_dtensor(tensor):
            block = block_of(tensor)
            if block is None:  # others hold all of it
                return name
            counted, tensor = tensor, _local(tensor)
            dtype = self._tensor_dtype(tensor, parts)
        key = key or _key(tensor)
        if self._wholes and (owner := self._wholes.get(key)) is not None:
            # A detached one, such as a state_dict gives, has another counter than its optimizer's for what is here.
            counted, tensor = owner, _local(owner)
        nbytes = tensor.nbytes
        known = self._names.setdefault((key, *_place(block)), name) if nbytes else name
        if known == name:
            lazy, version = False, None
            if not tensor.is_inference():
                lazy = nbytes > 0 and key in self.owned
                version = tensor._version if counted is None else tensor._version + counted._version
            self.walked.leaves.append(
                Leaf(name, tensor.detach(), dtype, tuple(tensor.shape), nbytes, lazy, version, *_place(block), counted)
            )
        return known

    def _tensor_dtype(self, tensor: torch.Tensor, parts: tuple[str, ...]) -> str:
        if self._tensors is None:  # once a walk, since importing takes a microsecond each time
            from transom_hpc.ckpt import tensors

            self._tensors = tensors
        why = self._tensors.refusal(tensor)
        if why:
            raise StateError(f"{names.place(parts)}: {why}", name=names.place(parts))
        return self._tensors.dtype_of(tensor.dtype) or ""

    def _block(self, block: Block, parts: tuple[str, ...]) -> Node:
        if kinds.is_tensor(block.array):
            return ["tensor", self._tensor(block.array, parts, block)]
        if block.array.dtype.hasobject:
            raise StateError(f"{names.place(parts)}: a Block of objects can't be saved", name=names.place(parts))
        return ["array", self._array(block.array, parts, block)]

    def _array(self, array: np.ndarray[Any, Any], parts: tuple[str, ...], block: Block | None = None) -> str:
        facts = array.__array_interface__
        key = (facts["data"][0], array.shape, array.strides, array.dtype.str, *_place(block))
        name = "tensors/" + names.join(parts)
        known = self._names.setdefault(key, name) if array.size else name
        if known == name:
            dtype = dtypes.of_numpy(array.dtype) or ""
            lazy = self._arrays_later and array.nbytes > 0
            self.walked.leaves.append(Leaf(name, array, dtype, array.shape, array.nbytes, lazy, None, *_place(block)))
        return known

    def _bytes(self, value: bytes | bytearray, parts: tuple[str, ...]) -> Node:
        kind = "bytes" if type(value) is bytes else "bytearray"
        if len(value) <= INLINE_BYTES:
            return [kind, base64.b64encode(value).decode()]
        name = "tensors/" + names.join(parts)
        whole = np.frombuffer(bytes(value), dtype=np.uint8)
        self.walked.leaves.append(Leaf(name, whole, "numpy:|u1", whole.shape, len(value)))
        return [f"long{kind}", name]

    def _pickled(self, value: Any, parts: tuple[str, ...]) -> Node:
        place = names.place(parts)
        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:
            raise StateError(
                f"{place}: a {type(value).__name__} can't be saved ({type(error).__name__}: {error}); "
                "leave it out of the state, or give it state_dict and load_state_dict",
                name=place,
            ) from error
        name = "objects/" + names.join(parts)
        self.walked.leaves.append(Leaf(name, data, dtypes.PICKLE, (len(data),), len(data)))
        return ["pickle", name]


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for two tensors that are the same memory seen the same way: tied weights, detached aliases."""
    try:
        dtype = tensor.dtype
        flipped = tensor.is_neg(), dtype.is_complex and tensor.is_conj()
        return tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), dtype, flipped
    except (RuntimeError, ValueError):  # no storage, or no shape yet: refused later, by name
        return (id(tensor),)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor: a DTensor has none of its own."""
    return tensor._local_tensor if kinds.is_dtensor(tensor) else tensor


def _place(block: Block | None) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Global shape and start of a part; None where it is whole."""
    return (None, None) if block is None or block.is_whole else (block.global_shape, block.start)


def _has_tensors(value: Any, depth: int = 0) -> bool:
    """Whether a container holds arrays, so that it is taken apart and not pickled whole."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return depth < 20 and any(
        kinds.is_array(item) or isinstance(item, (Block, Stateful)) or _has_tensors(item, depth + 1) for item in items
    )
