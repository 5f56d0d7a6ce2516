"""What is saved: a model with Adam's moments, random data; and what trains it."""

from __future__ import annotations

import time
from typing import Any

import torch

TENSORS = 50
"""Parameters; each has two moments, so that there are three times as many large tensors."""


class Model(torch.nn.Module):
    """Parameters of one size: random, or ones where they are only to be filled."""

    def __init__(self, elements: int, seed: int | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed or 0)

        def values() -> torch.Tensor:
            return torch.ones(elements) if seed is None else torch.randn(elements, generator=generator)

        self.weights = torch.nn.ParameterList([torch.nn.Parameter(values()) for _ in range(TENSORS)])


def optimizer_of(model: Model) -> torch.optim.Optimizer:
    """One that has not taken a step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


class State:
    """A program's state.

    Args:
        elements: of each parameter.
        seed: of its random data.
        fresh: as of a program that has just begun: the optimizer has not taken a step. Otherwise it has, and its
            gradients are gone, so that its next steps change nothing.
    """

    def __init__(self, elements: int, seed: int = 1, fresh: bool = False) -> None:
        self.model = Model(elements, None if fresh else seed)
        self.optimizer = optimizer_of(self.model)
        self.elements = elements
        self.nbytes = self.bytes_of(elements)
        if not fresh:
            generator = torch.Generator().manual_seed(seed + 1)
            for weight in self.model.parameters():
                weight.grad = torch.randn(weight.shape, generator=generator)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    @staticmethod
    def bytes_of(elements: int) -> int:
        """Of all large tensors."""
        return 3 * TENSORS * elements * 4

    def whole(self) -> dict[str, Any]:
        """As our checkpointer takes it."""
        return {"model": self.model, "optimizer": self.optimizer}

    def plain(self) -> dict[str, Any]:
        """As torch.save and DCP take it."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def flat(self) -> dict[str, torch.Tensor]:
        """As those take it that know nothing but names and tensors. Adam's counters are one tensor."""
        found = {f"model.{i}": p.detach() for i, p in enumerate(self.model.parameters())}
        held = self.optimizer.state_dict()["state"]
        for i, values in held.items():
            found |= {f"{key}.{i}": values[key] for key in ("exp_avg", "exp_avg_sq")}
        return found | {"steps": torch.stack([values["step"] for values in held.values()])}

    def fill(self, held: dict[str, Any]) -> None:
        """Take over what `plain` gave."""
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])

    def fill_flat(self, held: dict[str, torch.Tensor]) -> None:
        """Take over what `flat` gave."""
        with torch.no_grad():
            for i, weight in enumerate(self.model.parameters()):
                weight.copy_(held[f"model.{i}"])
        moments = {
            i: {"step": step, **{key: held[f"{key}.{i}"] for key in ("exp_avg", "exp_avg_sq")}}
            for i, step in enumerate(held["steps"].unbind())
        }
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})

    def room(self) -> dict[str, Any]:
        """Plain, with memory for moments that are not there yet: DCP reads into what it is given."""
        held = self.plain()
        if not held["optimizer"]["state"]:
            weights = enumerate(self.model.parameters())
            held["optimizer"]["state"] = {
                i: {"step": torch.zeros(()), "exp_avg": torch.empty_like(w), "exp_avg_sq": torch.empty_like(w)}
                for i, w in weights
            }
        return held

    def same_as(self, other: State) -> bool:
        """Whether every element is equal."""
        mine, theirs = self.flat(), other.flat()
        return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


class Train:
    """Forward and backward of a given length on one thread, then the optimizer's step.

    Args:
        optimizer: not yet known to a checkpointer, whose hook must come after ours.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._a = torch.randn(256, 256)
        self._begun = self._free = 0.0
        self._last_hook: Any = None
        optimizer.register_step_pre_hook(self._begin)

    def compute(self, products: int) -> None:
        """So many products of matrices."""
        for _ in range(products):
            torch.mm(self._a, self._a)

    def products_in(self, seconds: float) -> int:
        """How many products take about so long."""
        self.compute(50)
        before = time.perf_counter()
        self.compute(300)
        return max(1, int(seconds * 300 / (time.perf_counter() - before)))

    def step(self) -> float:
        """The optimizer's step; the seconds that it was kept waiting before it began."""
        if self._last_hook is None:  # checkpointers have saved by now, so theirs lie between the two
            self._last_hook = self._optimizer.register_step_pre_hook(self._go)
        self._optimizer.step()
        return self._free - self._begun

    def _begin(self, *_: object) -> None:
        self._begun = time.perf_counter()

    def _go(self, *_: object) -> None:
        self._free = time.perf_counter()
