"""Programs without torch never import it, and what a program with torch saved is theirs too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from transom_hpc.ckpt import Checkpointer, kinds, rng_state

PROGRAM = """
import sys
import numpy as np
import transom_hpc as transom

class Sampler:
    place = 0
    def state_dict(self):
        return {"place": self.place, "order": np.arange(9)}
    def load_state_dict(self, state):
        self.place = state["place"]

sampler = Sampler()
state = {
    "field": np.zeros((300, 40)), "columns": np.zeros((50, 60))[:, ::2], "n": np.float32(1),
    "sampler": sampler, "rng": transom.rng_state(), "list": [b"x" * 1000, {1, 2}],
}
with transom.Checkpointer.from_env(directory=sys.argv[1], every=2) as ckpt:
    start = ckpt.restore(state)
    print(start, state["field"][0, 0], state["columns"][3, 3], sampler.place, np.random.rand())
    for step in range(start, start + 2):
        state["field"] += 1
        state["columns"] += 2
        sampler.place += 3
        ckpt.step(step + 1, state, loss=np.float64(step))
    ckpt.wait()
print(np.random.rand())
if len(sys.argv) == 2:
    assert "torch" not in sys.modules
"""


def run(*arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_numpy_program_does_not_import_torch(directory: Path) -> None:
    first, second = run(str(directory)), run(str(directory))
    assert first[:4] == ["0", "0.0", "0.0", "0"]
    assert second[:4] == ["2", "2.0", "4.0", "6"]
    assert second[4] == first[5], "the generator went on"


def test_what_was_saved_with_torch_is_restored_without_it_being_imported_first(directory: Path) -> None:
    """The checkpoint has torch's generator, so its restoring imports torch, whether the program did or not."""
    torch.manual_seed(5)
    with Checkpointer(directory) as ckpt:
        ckpt.save(2, {"rng": rng_state()}, block=True)
    wanted = torch.rand(1).item()
    program = (
        "import sys\nfrom transom_hpc.ckpt import Checkpointer, rng_state\n"
        "ckpt = Checkpointer(sys.argv[1])\nckpt.restore({'rng': rng_state()})\nckpt.close()\n"
        "import torch\nprint(torch.rand(1).item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)], capture_output=True, text=True, timeout=60, check=True
    )
    assert float(done.stdout) == wanted


def test_generators_without_torch_leave_torch_alone(directory: Path) -> None:
    run(str(directory))
    torch.manual_seed(5)
    wanted = torch.rand(1).item()
    torch.manual_seed(5)
    with Checkpointer(directory) as ckpt:
        state = {
            "field": np.zeros((300, 40)),
            "columns": np.zeros((50, 60))[:, ::2],
            "n": np.float32(0),
            "sampler": Holder(),
            "rng": rng_state(),
            "list": [b"", set()],
        }
        assert ckpt.restore(state) == 2
    assert torch.rand(1).item() == wanted


class Holder:
    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        assert state["place"] == 6


def test_half_imported_torch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be importing it just now; something else may have the name."""
    tensor = torch.ones(1)
    assert kinds.is_tensor(tensor)
    assert kinds.is_array(tensor)
    monkeypatch.setattr(kinds, "_torch", None)  # not looked for before
    monkeypatch.setitem(sys.modules, "torch", type(sys)("torch"))
    assert not kinds.is_tensor(tensor)
    assert not kinds.is_module(tensor)
    assert kinds.is_array(np.ones(1))
    assert kinds.unwrap(tensor) is tensor
