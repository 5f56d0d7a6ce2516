"""The random number generators of a program as one thing to save and restore."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from transom_hpc.ckpt import kinds


class RngState:
    """Captures numpy's global generator, Python's `random` and, where the program has imported torch, torch's (CPU and
    every CUDA device in use).

    Put it into the state under a name of its own. Each rank keeps its own; where ranks agree it is stored once.
    """

    def state_dict(self) -> dict[str, Any]:
        """All generators as they are now."""
        torch = kinds.loaded_torch()
        held: dict[str, Any] = {} if torch is None else {"torch": torch.get_rng_state()}
        held |= {
            "numpy": np.random.get_state(legacy=True),
            "python": random.getstate(),
        }
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            held["cuda"] = torch.cuda.get_rng_state_all()
        return held

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put all generators back."""
        torch = kinds.loaded_torch()  # it is there where its generators are: their state is made of tensors
        if "torch" in state_dict:
            torch.set_rng_state(state_dict["torch"])
        np.random.set_state(state_dict["numpy"])
        random.setstate(state_dict["python"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state_dict["cuda"][: torch.cuda.device_count()])


def rng_state() -> RngState:
    """The program's random number generators, to be put into a state that is saved."""
    return RngState()
