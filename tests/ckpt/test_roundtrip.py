"""Whatever a state can hold comes back bit for bit."""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transom_hpc.base.errors import StateError
from transom_hpc.ckpt import Checkpointer, list_checkpoints, rng_state, verify

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.complex32,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip
Pair = namedtuple("Pair", "left right")


def there_and_back(directory: Path, state: Any, empty: Any) -> Any:
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.save(1, state, block=True)
    assert verify(list_checkpoints(directory)[-1].path) == []
    with Checkpointer(directory) as ckpt:
        assert ckpt.restore(empty) == 1
    return empty


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 256, (max(count, 1),), dtype=torch.uint8)[:count]
    if dtype is torch.bool:
        raw = raw % 2
    return raw.clone().view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def same(a: Any, b: Any) -> bool:
    """Equal in type, shape and bits; NaN is equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return [(type(k), k) for k in a] == [(type(k), k) for k in b] and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.element_size() == 1:
        tensor = tensor.view(torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(directory: Path, dtype: torch.dtype) -> None:
    shapes = [(), (1,), (0,), (3, 0, 2), (5, 7), (2, 3, 4)]
    state = {str(shape): noise(shape, dtype) for shape in shapes}
    state["strided"] = noise((6, 10), dtype).t()[::2]
    empty = {
        name: torch.zeros_like(t.view(torch.uint8) if t.element_size() == 1 else t).view(dtype)
        for name, t in state.items()
    }
    kept = dict(empty)
    there_and_back(directory, state, empty)
    assert all(same(state[name], empty[name]) for name in state)
    assert all(kept[name] is empty[name] for name in state), "tensors are filled, not replaced"


def test_dtypes_read_with_h5py(directory: Path) -> None:
    half = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
    state = {"half": half, "flag": torch.tensor([True, False]), "z": torch.tensor([1 + 2j])}
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, state, block=True)
    with h5py.File(list_checkpoints(directory)[-1].path / "data-00000.h5") as file:
        stored = file["tensors/half"]
        assert stored.dtype == "u2"
        assert stored.attrs["torch_dtype"] == "bfloat16"
        assert torch.equal(torch.from_numpy(stored[()]).view(torch.bfloat16), half)
        assert file["tensors/flag"].dtype == bool
        assert file["tensors/z"][0] == 1 + 2j


def test_layouts(directory: Path) -> None:
    big = torch.randn(1000, 100)
    state = {
        "rows": big[10:20],
        "columns": big[:, 3:5],
        "channels_last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "expanded": torch.randn(1, 4).expand(3, 4),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "neg": torch.randn(4, dtype=torch.complex64).conj().imag,
        "flipped": torch.randn(3, 4).flip(0),
        "transposed": torch.randn(30, 40).t(),
    }
    empty = {
        "rows": torch.zeros(10, 100),
        "columns": torch.zeros(1000, 9)[:, 2:4],
        "channels_last": torch.zeros(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "expanded": torch.zeros(1, 4).expand(3, 4),
        "conj": torch.zeros(4, dtype=torch.complex64).conj(),
        "neg": torch.zeros(4, dtype=torch.complex64).conj().imag,
        "flipped": torch.zeros(3, 4),
        "transposed": torch.zeros(40, 30),
    }
    strides = {name: t.stride() for name, t in empty.items()}
    there_and_back(directory, state, empty)
    for name in state:
        assert raw(state[name]) == raw(empty[name]), name
        assert empty[name].stride() == strides[name]
    found = list_checkpoints(directory)[-1].manifest
    assert {i.entry.name: i.entry.nbytes for i in found.stored}["tensors/rows"] == 10 * 100 * 4, "only the view"


def test_expanded_target_refuses_rows_that_differ(directory: Path) -> None:
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"x": torch.randn(3, 4)}, block=True)
    with Checkpointer(directory) as ckpt, pytest.raises(StateError, match="expanded"):
        ckpt.restore({"x": torch.zeros(1, 4).expand(3, 4)})


def test_tied_weights_once_and_still_tied(directory: Path) -> None:
    def build() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})
        model["b"].weight = model["a"].weight
        return model

    model, again = build(), build()
    there_and_back(directory, {"model": model}, {"model": again})
    assert again["a"].weight is again["b"].weight
    assert torch.equal(again["a"].weight, model["a"].weight)
    names = [i.entry.name for i in list_checkpoints(directory)[-1].manifest.stored]
    assert [n for n in names if "weight" in n] == ["tensors/model/a.weight"]
    untied = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8), "b": torch.nn.Linear(8, 8)})
    with Checkpointer(directory) as ckpt:
        ckpt.restore({"model": untied})
    assert torch.equal(untied["b"].weight, model["a"].weight), "also into a model that does not tie them"


def test_tied_tensors_of_an_object_are_tied_again(directory: Path) -> None:
    class Holder:
        def __init__(self, value: Any) -> None:
            self.value = value

        def state_dict(self) -> Any:
            return self.value

        def load_state_dict(self, value: Any) -> None:
            self.value = value

    tensor = torch.randn(5)
    empty = Holder(None)
    there_and_back(directory, {"h": Holder({"x": tensor, "y": [tensor]})}, {"h": empty})
    assert empty.value["x"] is empty.value["y"][0]
    assert torch.equal(empty.value["x"], tensor)


def test_optimizer_before_its_first_step(directory: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    state = {"m": model, "o": optimizer}
    other = torch.nn.Linear(4, 4)
    stepped = torch.optim.Adam(other.parameters())
    other(torch.randn(2, 4)).sum().backward()
    stepped.step()
    there_and_back(directory, state, {"m": other, "o": stepped})
    assert stepped.state_dict()["state"] == {}
    assert stepped.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop])
def test_optimizers_go_on_bitwise(directory: Path, make: Any) -> None:
    def build() -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 6)
        return model, make(model.parameters(), lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))

    def train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(3, 6)).square().sum().backward()
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, range(3))
    with Checkpointer(directory) as ckpt:
        ckpt.save(3, {"m": model, "o": optimizer}, block=True)
    train(model, optimizer, range(3, 6))
    again, fresh = build()
    with Checkpointer(directory) as ckpt:
        assert ckpt.restore({"m": again, "o": fresh}) == 3
    train(again, fresh, range(3, 6))
    assert torch.equal(again.weight, model.weight)


def test_optimizer_state_of_another_type_than_the_weights(directory: Path) -> None:
    weights = torch.nn.Parameter(torch.randn(4).bfloat16())
    optimizer = torch.optim.SGD([weights], lr=0.1)
    optimizer.state[weights]["master"] = torch.randn(4, dtype=torch.float32)
    other = torch.nn.Parameter(torch.zeros(4).bfloat16())
    fresh = torch.optim.SGD([other], lr=0.2)
    there_and_back(directory, {"o": optimizer}, {"o": fresh})
    assert same(fresh.state[other]["master"], optimizer.state[weights]["master"])


def test_random_generators(directory: Path) -> None:
    import random

    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"rng": rng_state()}, block=True)
    first = (torch.rand(3), np.random.rand(3).tolist(), random.random())
    with Checkpointer(directory) as ckpt:
        ckpt.restore({"rng": rng_state()})
    second = (torch.rand(3), np.random.rand(3).tolist(), random.random())
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]


def test_numpy_arrays(directory: Path) -> None:
    fields = np.dtype([("a", "<i4"), ("b", "<f8", (2,))])
    state = {
        "big_endian": np.arange(5, dtype=">f8"),
        "fortran": np.asfortranarray(np.random.rand(4, 5)),
        "zero_dim": np.array(3.5),
        "empty": np.zeros((0, 3)),
        "dates": np.array(["2024-01-01", "NaT"], dtype="M8[s]"),
        "text": np.array(["a", "bc"]),
        "bytes": np.array([b"a", b"bc\0d"]),
        "fields": np.zeros(3, dtype=fields),
        "long": np.array([1.5], dtype=np.longdouble),
        "half": np.array([1.5], dtype=np.float16),
        "flags": np.array([True, False]),
        "reversed": np.arange(6)[::-1],
    }
    empty = {name: np.zeros_like(a) for name, a in state.items()}
    kept = dict(empty)
    there_and_back(directory, state, empty)
    assert all(np.array_equal(state[n], empty[n]) or state[n].tobytes() == empty[n].tobytes() for n in state)
    assert all(kept[n] is empty[n] for n in state)


def test_read_only_array_is_replaced(directory: Path) -> None:
    target = np.zeros(3)
    target.flags.writeable = False
    empty = there_and_back(directory, {"x": np.ones(3)}, {"x": target})
    assert empty["x"].tolist() == [1, 1, 1]


def test_values(directory: Path) -> None:
    state = {
        "none": None, "nan": float("nan"), "inf": -float("inf"), "minus": -0.0, "huge": 10**40, "complex": 1e-300 - 2j,
        "text": "ä\ud800\0", "bytes": b"\0\xff", "long": bytes(range(256)) * 9, "array": bytearray(b"x"),
        "set": {1, "1", None}, "frozen": frozenset({2.5}), "tuple": (1, [2, (3,)]), "pair": Pair(1, torch.ones(2)),
        "scalar": np.float32(0.1), "date": np.datetime64("2024-01-01"), "range": range(3), "path": Path("/x"),
        "ordered": OrderedDict(b=1, a=2), "dtype": torch.bfloat16, "size": torch.Size([1, 2]),
        "keys": {1: "int", "1": "text", 1.5: 0, None: 0, (1, "a"): 0, "": 0, ".": 0, "a/b": 0, "%2F": 0},
    }  # fmt: skip
    empty = {name: type(v)() if isinstance(v, dict) else 0 for name, v in state.items()}
    empty |= {"keys": dict.fromkeys(state["keys"]), "ordered": OrderedDict(b=0, a=0), "tuple": (0, [0, (0,)])}
    empty |= {"pair": Pair(0, torch.zeros(2))}
    there_and_back(directory, state, empty)
    for name in state:
        assert same(state[name], empty[name]), name


class Wrapped(torch.Tensor):
    """A tensor that is none: it has no storage."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


REFUSED: dict[str, Callable[[], Any]] = {
    "wrapped": lambda: torch.Tensor._make_wrapper_subclass(Wrapped, (3,)),  # type: ignore[attr-defined]
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "lazy": lambda: torch.nn.LazyLinear(3),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "mkldnn": lambda: torch.ones(3, 3).to_mkldnn(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "bits": lambda: torch.empty(4, dtype=torch.bits8),
    "four": lambda: torch.empty(4, dtype=torch.int4),
    "lambda": lambda: lambda: 0,
    "generator": lambda: (i for i in range(3)),
    "objects": lambda: np.array([lambda: 0]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_refused_by_name(directory: Path, name: str) -> None:
    state: dict[str, Any] = {"fine": torch.ones(3), name: {"deep": REFUSED[name]()}}
    if name == "lazy":
        state["optimizer"] = torch.optim.SGD(state[name]["deep"].parameters())
    with Checkpointer(directory) as ckpt:
        with pytest.raises(StateError, match=f"^{name}.*: ") as caught:
            ckpt.save(1, state)
        assert caught.value.name.startswith(name)
    assert [p.name for p in directory.iterdir()] == [".attempt"]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:staging takes")
@pytest.mark.parametrize("shm_bytes", [None, 0], ids=["staged", "straight"])
def test_more_than_two_gib_and_two_to_the_31_elements(directory: Path, shm_bytes: int | None) -> None:
    """Takes 6.5 GiB of memory, and 4.4 GiB on disk."""
    count = (1 << 31) + 4097
    large, columns = torch.empty(count, dtype=torch.uint8), np.zeros((3, 60_000_000), dtype=np.uint8)[:, ::2]
    large[:] = 7
    spots = [0, (1 << 31) - 1, 1 << 31, count - 1, 1 << 30]
    for i, at in enumerate(spots):
        large[at] = 100 + i
    columns[1, 5] = 9
    with Checkpointer(directory, shm_bytes=shm_bytes) as ckpt:
        ckpt.save(1, {"large": large, "columns": columns}, block=True)
    assert verify(list_checkpoints(directory)[-1].path) == []
    large.zero_()
    columns[:] = 0
    with Checkpointer(directory, shm_bytes=0) as ckpt:
        assert ckpt.restore({"large": large, "columns": columns}) == 1
    assert [int(large[at]) for at in spots] == [100, 101, 102, 103, 104]
    assert int(columns[1, 5]) == 9
    for at in spots:
        large[at] = 7
    assert bool((large == 7).all())


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary(max_size=300)
    | st.complex_numbers()
)
tensors = st.builds(
    lambda shape, dtype: noise(tuple(shape), dtype), st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES)
)
keys = (
    st.text(st.characters(), max_size=6) | st.integers(-3, 3) | st.sampled_from(["", ".", "..", "a/b", "%", "0", "1"])
)
trees = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=3)
    ),
    max_leaves=12,
)


class Box:
    """Holds anything; it is restored without anything that says what to expect."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def blank(value: Any) -> Any:
    """A state of the same form with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.view(torch.uint8)).view(value.dtype) if value.element_size() == 1 else value * 0
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(blank(v) for v in value)
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.dictionaries(keys, trees, max_size=4))
def test_any_state(tree: dict[Any, Any]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        state = {"tree": tree, "box": Box(tree)}
        empty: dict[str, Any] = {"tree": blank(tree), "box": Box(None)}
        there_and_back(folder, state, empty)
        assert same(tree, empty["tree"])
        assert same(tree, empty["box"].value)
    finally:
        shutil.rmtree(folder)
