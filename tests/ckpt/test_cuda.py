"""Copies from GPUs: their order is tested with a device that is none; the rest needs a GPU."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transom_hpc.base.errors import SaveError
from transom_hpc.ckpt import Checkpointer, devices, staging, tensors
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.shm import Segment
from transom_hpc.ckpt.state import walk


class LateGpu:
    """Not a GPU: a stand-in for the order of things. What is started is copied only when it is waited for."""

    def __init__(self) -> None:
        self.started: list[tuple[torch.Tensor, np.ndarray[Any, Any]]] = []
        self.arrived = threading.Event()
        self.log: list[str] = []

    def copy(self, tensor: torch.Tensor, room: np.ndarray[Any, Any]) -> None:
        self.log.append("copy")
        self.started.append((tensor, room))

    def hold_program(self) -> None:
        self.log.append("hold")

    def wait(self) -> None:
        assert self.arrived.wait(20)
        self.log.append("wait")
        for tensor, room in self.started:
            tensors.copy_out(tensor, room)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    """Tensors with two dimensions count as being on it."""
    gpu = LateGpu()
    monkeypatch.setattr(devices, "on_gpu", lambda leaf: len(leaf.shape) == 2)
    monkeypatch.setattr(devices, "open_gpu", lambda *_: gpu)
    return gpu


def test_nothing_is_read_before_it_has_arrived(staging_path: Path, late: LateGpu) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 300))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    walked = walk({"o": optimizer, "w": weight, "buffer": torch.ones(20, 20), "here": torch.ones(9)})
    segment = Segment(staging_path / "a", Files())
    segment.reserve(staging.size(walked.leaves))
    staged = staging.Staged(walked.leaves, segment, 1, lambda *_: None)
    staged.begin()
    names = [entry.name for entry in staged.outline]
    assert late.log == ["copy", "hold"], "what is not an optimizer's is ordered before begin returns"
    assert bytes(staged.data(names.index("tensors/here"), 0, 4)) == np.float32(1).tobytes()
    background = threading.Thread(target=staged.background)
    background.start()
    staged.copied()
    assert late.log == ["copy", "hold", "copy", "hold"], "the optimizer's stream waits, its thread does not"
    staged.check()
    got: list[bytes] = []
    for name in ("tensors/w", "tensors/buffer"):
        reader = threading.Thread(target=lambda n=name: got.append(bytes(staged.data(names.index(n), 0, 400))))  # type: ignore[misc]
        reader.start()
    time.sleep(0.1)
    assert got == []
    late.arrived.set()
    staged.confirm()
    background.join()
    time.sleep(0.1)
    assert sorted(got) == sorted([weight.detach().numpy().tobytes()[:400], np.ones(100, np.float32).tobytes()])
    assert late.log[-1] == "wait"
    (staging_path / "a").unlink()


def test_a_gpu_that_fails_fails_the_save(directory: Path, late: LateGpu, monkeypatch: Any) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(late, "wait", lost)
    with Checkpointer(directory) as ckpt, pytest.raises(SaveError, match="step 1 was not saved: .*illegal memory"):
        ckpt.save(1, {"x": torch.ones(30, 30)}, block=True)
    assert list(directory.glob("step-*")) == []


@pytest.fixture
def staging_path(staging: Path) -> Path:
    """The fixture `staging`, whose name the module has here."""
    return staging


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def build(size: int = 2000) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size)).cuda()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(64, 2000, device="cuda")).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.cpu().clone() for k, v in model.state_dict().items()}


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("stream", ["default", "own"])
def test_on_a_gpu_old_values_are_saved(directory: Path, stream: str) -> None:
    """The kernels of the next steps are launched while the copies are still on their way."""
    model, optimizer = build()
    own = torch.cuda.Stream() if stream == "own" else torch.cuda.current_stream()
    own.wait_stream(torch.cuda.current_stream())
    wanted = {}
    with Checkpointer(directory, every=1, keep=9, on_save_error="raise") as ckpt, torch.cuda.stream(own):
        for step in range(1, 6):
            train(model, optimizer)
            wanted[step] = held(model)
            torch.cuda._sleep(50_000_000)
            ckpt.step(step, {"m": model, "o": optimizer})
            train(model, optimizer)
            ckpt.wait()
    for step in (5, 3, 1):
        other, fresh = build()
        with Checkpointer(directory, keep=9) as ckpt:
            while ckpt.restore({"m": other, "o": fresh}) > step:
                shutil.rmtree(max(directory.glob("step-*")))
        assert all(torch.equal(v, wanted[step][k]) for k, v in held(other).items())


@pytest.mark.gpu
@gpu
def test_a_save_does_not_wait_for_the_gpu(directory: Path) -> None:
    model, optimizer = build()
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        train(model, optimizer)
        ckpt.step(1, {"m": model, "o": optimizer})  # makes the slots ready
        ckpt.save(2, {"m": model, "o": optimizer}, block=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        before = time.monotonic()
        ckpt.save(3, {"m": model, "o": optimizer})
        assert time.monotonic() - before < 0.3
        assert ckpt.wait()


@pytest.mark.gpu
@gpu
def test_every_kind_of_tensor_on_a_gpu(directory: Path) -> None:
    base = torch.randn(200, 300, device="cuda")
    state = {
        "t": base.t(),
        "half": base.bfloat16(),
        "fp8": base.to(torch.float8_e4m3fn),
        "conj": torch.randn(50, dtype=torch.complex64, device="cuda").conj(),
        "expanded": base[0].expand(5, 300),
        "channels": torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last),
        "zero": torch.tensor(3.0, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
    }
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, state, block=True)
    like = {
        k: torch.zeros_like(v.view(torch.uint8) if v.element_size() == 1 else v).view(v.dtype) for k, v in state.items()
    }
    with Checkpointer(directory) as ckpt:
        assert ckpt.restore(like) == 1
    for name, tensor in state.items():
        assert torch.equal(
            tensor.float() if name == "fp8" else tensor, like[name].float() if name == "fp8" else like[name]
        )


@pytest.mark.gpu
@gpu
def test_memory_is_locked_once_and_given_back(directory: Path) -> None:
    model, optimizer = build()
    train(model, optimizer)
    with Checkpointer(directory, every=1) as ckpt:
        for step in (1, 2, 3):
            ckpt.step(step, {"m": model, "o": optimizer})
            ckpt.wait()
        segments = list(ckpt._slots._free)
        assert all(s.undo is not None for s in segments if s.capacity)
        assert torch.from_numpy(segments[0].array(0, 4096)).is_pinned()
    assert all(s.undo is None for s in segments)


@pytest.mark.gpu
@gpu
def test_without_locked_memory_it_is_as_right(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transom_hpc.ckpt import cuda

    monkeypatch.setattr(cuda, "_refused", True)
    test_on_a_gpu_old_values_are_saved(directory, "default")
