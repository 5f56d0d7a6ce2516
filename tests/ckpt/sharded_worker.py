"""Programs of several ranks that shard one model in every way, for the tests; see worker.py."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

sys.path.insert(0, str(Path(__file__).parent))
import worker

from transom_hpc.ckpt import Block

WORDS, WIDTH, HIDDEN = 23, 12, 30


class Layer(torch.nn.Module):
    """Attention over what came before, and two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.mix = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Net(torch.nn.Module):
    """A small language model; no size of it is a multiple of every number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate()),
    "layers.*.up": ColwiseParallel(),
    "layers.*.down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def build(kind: str, world_size: int) -> torch.nn.Module:
    """The model on all ranks: "ddp", "fsdp", "tp", "hybrid" (two replicas of shards), or "tp x fsdp"."""
    model: torch.nn.Module = Net()
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (world_size,))
    if kind == "tp":
        return parallelize_module(model, mesh, PLAN)
    if kind == "tp x fsdp":
        two = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, two["tp"], PLAN)
        mesh = two["dp"]
    if kind == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicas", "shards"))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_optimizer(model: torch.nn.Module, kind: str, backwards: bool) -> torch.optim.Optimizer:
    named = sorted(model.named_parameters(), reverse=backwards)
    decayed = [p for name, p in named if "norm" not in name and "bias" not in name]
    rest = [p for name, p in named if "norm" in name or "bias" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    # torch has no foreach for plain tensors, or several meshes, among DTensors.
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False if "tp" in kind else None)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (4, 7), generator=generator)
    out = model(words[:, :-1])
    loss = torch.nn.functional.cross_entropy(out.reshape(-1, WORDS), words[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> torch.Tensor:
    with torch.no_grad():
        found = value.full_tensor() if isinstance(value, DTensor) else value
    assert isinstance(found, torch.Tensor)
    return found


def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str]]:
    """Each array of the state, by a name that no sharding changes, and what is in the whole of it."""
    settings = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        yield name, worker.digest(whole(parameter))
        yield f"{name}: decay", str(settings[id(parameter)])
        for key, value in optimizer.state[parameter].items():
            if key != "step":
                assert type(value) is (DTensor if isinstance(parameter, DTensor) else torch.Tensor)
                assert value.shape == parameter.shape
            yield f"{name}: {key}", worker.digest(whole(value))
    for name, buffer in model.named_buffers():
        yield name.removeprefix("module."), worker.digest(whole(buffer))


def training(facts: dict[str, Any]) -> Any:
    """Restore, tell what the state is, train two steps, save, and tell it again. Rank 0 tells."""
    dist.init_process_group("gloo")
    torch.manual_seed(worker.RANK if facts["kind"] == "ddp" else 5)
    model = build(facts["kind"], worker.WORLD_SIZE)
    optimizer = make_optimizer(model, facts["kind"], facts.get("backwards", False))
    if facts.get("warm"):
        train(model, optimizer, 1000)
    state = {"optimizer": optimizer, "model": model, "count": 0}
    with worker.make(facts) as ckpt:
        start = ckpt.restore(state)
        assert state["count"] == start
        before = dict(contents(model, optimizer)) if start else {}
        for step in range(start, start + 2):
            train(model, optimizer, step)
            state["count"] = step + 1
        after = dict(contents(model, optimizer))
        if facts.get("unsharded"):
            model.eval()
            with torch.no_grad():
                model(torch.zeros(1, 3, dtype=torch.int64))  # FSDP2 leaves what is not in a layer whole after that
        ckpt.step(start + 2, state)
        train(model, optimizer, 2000)  # waits for the copy
        ckpt.wait()
        last = ckpt.last_committed
        if facts.get("die"):
            print(json.dumps({"start": start, "before": before, "after": after, "last": last}), flush=True)
            os._exit(9)
    dist.destroy_process_group()
    return {"start": start, "before": before, "after": after, "last": last}


def cut(size: int, parts: int, number: int) -> tuple[int, int]:
    return size * number // parts, size * (number + 1) // parts


def blocks(facts: dict[str, Any]) -> Any:
    """A field cut into blocks with ghost cells, a row of ranks by a column of ranks, in numpy."""
    rows, columns = facts["grid"]
    shape = (23, 17)
    top, bottom = cut(shape[0], rows, worker.RANK // columns)
    left, right = cut(shape[1], columns, worker.RANK % columns)
    u = np.full((bottom - top + 2, right - left + 2), -1.0)
    inner = u[1:-1, 1:-1]
    row = np.zeros(right - left, dtype=np.int32)
    wanted = np.add.outer(1000.0 * np.arange(top, bottom), np.arange(left, right))
    state = {"u": Block(inner, shape, (top, left)), "row": Block(row, shape[1:], (left,)), "step": 0}
    with worker.make(facts) as ckpt:
        start = ckpt.restore(state)
        assert state["step"] == start
        if start:
            assert np.array_equal(inner, wanted + start)
            assert np.array_equal(row, np.arange(left, right) + start)
        inner[:] = wanted + start + 2
        row[:] = np.arange(left, right) + start + 2
        state["step"] = start + 2
        ckpt.save(start + 2, state, block=True)
    assert (u[0] == -1).all()
    assert (u[:, -1] == -1).all()
    return {"start": start}


def stages(facts: dict[str, Any]) -> Any:
    """Each stage has some of seven layers and trains them by itself; tell what they are. A stage is a rank, or `shards`
    ranks that have a part of each of its layers."""
    shards = facts.get("shards", 1)
    stage, count = worker.RANK // shards, worker.WORLD_SIZE // shards
    layers = range(*cut(7, count, stage))
    torch.manual_seed(stage)
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(3 + i, 4 + i) for i in layers})
    if shards > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (count, shards), mesh_dim_names=("stage", "shard"))
        for layer in model.values():
            fully_shard(layer, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "common": torch.zeros(9)}
    with worker.make(facts) as ckpt:
        start = ckpt.restore(state)
        before = dict(contents(model, optimizer)) if start else {}
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.grad = gradient
        optimizer.step()
        scheduler.step()
        state["common"] += 1
        ckpt.save(start + 2, state, block=True)
    assert float(state["common"][0]) == start / 2 + 1
    rates = {group["lr"] for group in optimizer.param_groups}
    return {"start": start, "before": before, "after": dict(contents(model, optimizer)), "rates": sorted(rates)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker.__dict__.update({"training": training, "blocks": blocks, "stages": stages})
    worker.serve()
