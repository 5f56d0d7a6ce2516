"""A state that is changed right after `save` returned: its old values are on disk, or the save is refused."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Shard

from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import Checkpointer, list_checkpoints, staging
from transom_hpc.ckpt.samples import SPOT_BYTES, SPOTS, Samples
from transom_hpc.ckpt.state import Leaf

sys.path.insert(0, str(Path(__file__).parent))
from meshes import split

SIDE = 700  # a weight of 2 MB


def flat(w: torch.Tensor) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = w.detach().numpy()
    return array


def replace_storage(w: torch.Tensor) -> None:
    w.data.set_(torch.full_like(w, 7.0).untyped_storage(), 0, w.shape)  # type: ignore[call-overload]


def unfused(w: torch.Tensor) -> None:
    w.grad = torch.ones_like(w)
    with torch.no_grad():
        w.data -= 0.1 * w.grad


COUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
    "fill_": lambda w: w.fill_(3),
    "zero_": lambda w: w.zero_(),
    "row": lambda w: w[0].zero_(),
    "index": lambda w: w.__setitem__(0, 5.0),
    "mask": lambda w: w.__setitem__(w > 0, 5.0),
    "view": lambda w: w.view(-1)[-1:].mul_(2),
    "narrow": lambda w: w.narrow(0, 1, 2).sigmoid_(),
    "transposed": lambda w: w.t().add_(1),
    "detached": lambda w: w.detach().add_(1),
    "split": lambda w: w.split(100)[1].add_(1),
    "out=": lambda w: torch.add(w, 1, out=w),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "foreach mul": lambda w: torch._foreach_mul_([w.view(-1)[:9]], 2.0),
    "index_add_": lambda w: w.index_add_(0, torch.tensor([3]), torch.ones(1, SIDE)),
    "scatter_": lambda w: w.scatter_(0, torch.zeros(1, SIDE, dtype=torch.int64), 5.0),
    "init": lambda w: torch.nn.init.normal_(w),
    "swap": lambda w: w.copy_(w.flip(0)),
}
"""What moves the tensor's version counter."""

UNCOUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    ".data add_": lambda w: w.data.add_(1),
    ".data copy_": lambda w: w.data.copy_(torch.ones_like(w)),
    ".data clamp_": lambda w: w.data.clamp_(-1e-4, 1e-4),
    ".data step": unfused,
    "numpy view": lambda w: np.add(flat(w), 1, out=flat(w)),
    "numpy fill": lambda w: flat(w).fill(4),
    "storage copy_": lambda w: w.untyped_storage().copy_(torch.ones_like(w).untyped_storage()),
    "storage fill_": lambda w: w.untyped_storage().fill_(1),
    "share_memory_": lambda w: (w.data.share_memory_(), w.data.add_(1)),
    "set_": replace_storage,
    "storage resize_": lambda w: w.untyped_storage().resize_(2 * w.untyped_storage().nbytes()),
    "data =": lambda w: setattr(w, "data", torch.full_like(w, 9.0)),
    "fused": lambda w: torch._fused_sgd_(
        [w], [torch.ones_like(w)], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    ),
}  # fmt: skip
"""What does not."""
KEPT = ("set_", "data =")
"""Of these: what gives the parameter other memory and leaves the old one, which the save holds, as it was."""


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Linear(SIDE, SIDE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies of what is put off wait for it."""
    opened = threading.Event()
    copy = staging.copy

    def waiting(leaf: Leaf, *args: Any) -> None:
        if leaf.lazy:
            opened.wait(20)
        copy(leaf, *args)

    monkeypatch.setattr(staging, "copy", waiting)
    yield opened
    opened.set()


def outcome(ckpt: Checkpointer, directory: Path, step: int, before: torch.Tensor) -> str:
    """What became of a save of a model: "old" values are on disk, or it was "refused"."""
    try:
        ckpt.wait()
    except SaveError as error:
        named = "weight was changed while it was being copied" in str(error)
        return "refused" if named and step not in [c.step for c in list_checkpoints(directory)] else str(error)
    other, fresh = model_and_optimizer()
    shutil.copytree(directory, directory.with_name("copy"))
    with Checkpointer(directory.with_name("copy"), shm_bytes=0) as reader:
        assert reader.restore({"m": other, "o": fresh}) == step
    assert torch.equal(other.weight, before), "a mixture, or new values"
    return "old"


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
@pytest.mark.parametrize("name", [*COUNTED, *UNCOUNTED])
def test_every_way_that_torch_has(directory: Path, gate: threading.Event, name: str, when: str) -> None:
    change = {**COUNTED, **UNCOUNTED}[name]
    model, optimizer = model_and_optimizer()
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        before = model.weight.detach().clone()
        if when == "after the copy":
            gate.set()
        ckpt.save(1, {"m": model, "o": optimizer})
        if when == "after the copy":
            assert ckpt._saver._copying is not None
            ckpt._saver._copying.source.copied()
        with torch.no_grad():
            change(model.weight)
        gate.set()
        found = outcome(ckpt, directory, 1, before)
    allowed = {"old"} if name in KEPT else {"refused"} if when == "before the copy" else {"old", "refused"}
    assert found in allowed


OF_PARTS: dict[str, Callable[[Any], object]] = {
    "the whole": lambda w: w.mul_(2),
    "the part": lambda w: w.to_local()[3].zero_(),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
    ".data": lambda w: w.data.mul_(2),
    "fused": lambda w: torch.optim.AdamW([w], fused=True).step(),
}
"""Ways to change a DTensor; the last three move no counter of it."""


@pytest.mark.parametrize("name", OF_PARTS)
def test_parts_of_tensors(directory: Path, gate: threading.Event, name: str) -> None:
    model, optimizer = model_and_optimizer()
    with torch.no_grad():
        for key, parameter in list(model.named_parameters()):
            setattr(model, key, torch.nn.Parameter(split(parameter.detach(), (1,), 0, [Shard(0)])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        before = model.weight.to_local().clone()
        ckpt.save(1, {"m": model, "o": optimizer})
        with torch.no_grad():
            OF_PARTS[name](model.weight)
        gate.set()
        assert outcome(ckpt, directory, 1, before) == "refused"
        gate.clear()
        threading.Timer(0.3, gate.set).start()
        before = model.weight.to_local().clone()
        optimizer.zero_grad()
        ckpt.save(2, {"m": model, "o": optimizer})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert outcome(ckpt, directory, 2, before) == "old", "the optimizer's step waits"


@pytest.mark.parametrize("name", [name for name in UNCOUNTED if name not in KEPT])
def test_after_a_refusal_it_is_copied_at_once(directory: Path, gate: threading.Event, name: str) -> None:
    model, optimizer = model_and_optimizer()
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.save(1, {"m": model, "o": optimizer})
        with torch.no_grad():
            UNCOUNTED[name](model.weight)
        gate.set()
        with contextlib.suppress(SaveError):
            ckpt.wait()
        gate.clear()
        threading.Timer(0.3, gate.set).start()
        before = model.weight.detach().clone()
        ckpt.save(2, {"m": model, "o": optimizer})
        model.weight.data.mul_(3)
        assert outcome(ckpt, directory, 2, before) == "old"


OPTIMIZERS = {
    "plain": lambda p: torch.optim.AdamW(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizer_waits(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever the optimizer, its step does not begin before all is copied, and never fails a save."""
    torch.manual_seed(1)
    model = torch.nn.Linear(200, 200)
    optimizer = OPTIMIZERS[name](model.parameters())  # type: ignore[no-untyped-call]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 200)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    copy = staging.copy

    def slowly(leaf: Leaf, *args: Any) -> None:
        if leaf.lazy:
            time.sleep(0.01)
        copy(leaf, *args)

    monkeypatch.setattr(staging, "copy", slowly)
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        wanted = {}
        for step in (1, 2, 3):
            wanted[step] = model.weight.detach().clone()
            ckpt.save(step, {"m": model, "o": optimizer})
            optimizer.step(closure)
            ckpt.wait()
    other = torch.nn.Linear(200, 200)
    for step in (3, 2, 1):
        with Checkpointer(directory, shm_bytes=0) as ckpt:
            found = ckpt.restore({"m": other, "o": OPTIMIZERS[name](other.parameters())})  # type: ignore[no-untyped-call]
        assert found == step
        assert torch.equal(other.weight, wanted[step])
        shutil.rmtree(list_checkpoints(directory)[-1].path)


def test_an_optimizer_that_steps_in_another_thread(directory: Path) -> None:
    """As those that step in the backward pass, which runs in threads of its own on a GPU."""
    model, optimizer = model_and_optimizer()
    model(torch.ones(1, SIDE)).sum().backward()
    optimizer.step()
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.save(1, {"m": model, "o": optimizer}, block=True)
        before = model.weight.detach().clone()
        ckpt.save(2, {"m": model, "o": optimizer})
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
        assert outcome(ckpt, directory, 2, before) == "old"


@pytest.mark.usefixtures("gate")
def test_inference_tensors_and_views_are_copied_at_once(directory: Path) -> None:
    with torch.inference_mode():
        made = torch.ones(SIDE, SIDE)
    base = torch.zeros(SIDE, SIDE)
    state = {"inference": made, "view": base[1:], "expanded": base[0].expand(9, SIDE)}
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.save(1, state)
        with torch.inference_mode():
            made.add_(1)
        base += 5
        assert ckpt.wait()
    like = {"inference": torch.ones(SIDE, SIDE) * 9, "view": base[1:], "expanded": torch.zeros(1, SIDE).expand(9, SIDE)}
    with Checkpointer(directory, shm_bytes=0) as ckpt:
        ckpt.restore(like)
    assert [float(t.max()) for t in like.values()] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_numpy_program_that_breaks_its_promise(directory: Path, gate: threading.Event, contiguous: bool) -> None:
    array = np.zeros((3000, 800)) if contiguous else np.zeros((3000, 1600))[:, ::2]
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.before_update()
        ckpt.save(1, {"field": array})
        array += 1  # without before_update
        gate.set()
        with pytest.raises(SaveError, match=r"field was changed while it was being copied; call before_update\(\)"):
            ckpt.wait()
    assert list_checkpoints(directory) == []


@pytest.mark.parametrize("told", [True, False])
def test_a_long_step(directory: Path, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """Nobody is heard of for as long as no operation takes: what was put off is summed once more."""
    monkeypatch.setattr(staging, "GRACE_S", 0.3)
    array, other = np.zeros((3000, 800)), np.zeros(9)
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.before_update()
        ckpt.save(1, {"field": array, "other": other})
        newest = ckpt._saver.newest
        assert newest is not None
        newest.source.entries()
        if told:
            ckpt.before_update()
        array[1234, 5] = 1  # between all samples
        assert newest.done.wait(20)
        assert (newest.error is None) is told
        if not told:
            assert "field was changed while it was being copied" in str(newest.error)
        ckpt._saver.failed.clear()
    assert [c.step for c in list_checkpoints(directory)] == ([1] if told else [])


def leaf(source: Any) -> Leaf:
    return Leaf("tensors/x", source, "float32", tuple(source.shape), source.nbytes)


def test_samples_are_spread_over_every_block() -> None:
    array = np.zeros(10_000_000, dtype=np.float32)  # two blocks and a part
    samples = Samples(leaf(array))
    assert len(samples._taken) == 3 * SPOTS
    for at, was in samples._taken:
        assert 0 <= at <= array.nbytes - SPOT_BYTES
        assert len(was) == SPOT_BYTES
        array.view(np.uint8)[at] = 1
        assert samples.changed(at, at + 1)
        assert not samples.changed(at + 1, at + 2)
        array.view(np.uint8)[at] = 0
    array[-1] = 1
    assert samples.changed(array.nbytes - 4096, array.nbytes)


def test_small_arrays_are_compared_whole() -> None:
    for count in (1, 3, 1024):
        tensor = torch.zeros(count)
        for at in (0, count // 2, count - 1):
            samples = Samples(leaf(tensor))
            flat(tensor)[at] += 1
            assert samples.changed(0, tensor.nbytes)


def test_only_elements_count_where_they_do_not_lie_together() -> None:
    base = torch.zeros(64, 64)
    samples = Samples(leaf(base[:, ::2]))
    flat(base)[:, 1::2] += 1
    assert not samples.changed(0, 1), "someone else's"
    flat(base)[0, 0] += 1
    assert samples.changed(0, 1)
    channels = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
    samples = Samples(leaf(channels))
    channels.data += 1
    assert samples.changed(0, 1)


def test_memory_that_was_given_back_is_not_read() -> None:
    tensor = torch.zeros(100_000)
    samples = Samples(leaf(tensor))
    assert not samples.moved()
    tensor.untyped_storage().resize_(0)
    assert samples.moved()
    assert samples.changed(0, 1)
