"""The program's side of saving: what may change when, what is kept, who may write, what stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transom_hpc.base.errors import CheckpointError, SaveError, StateError, UsageError
from transom_hpc.ckpt import Checkpointer, Keep, SaveWarning, housekeeping, list_checkpoints, staging
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.manifest import decode, encode
from transom_hpc.ckpt.state import walk


class Slow(Files):
    """Waits before it writes data, so that a test can look at the time before."""

    def __init__(self) -> None:
        self.held = False

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        while self.held:
            time.sleep(0.005)
        return super().pwrite(fd, data, offset)


def stored(directory: Path, step: int, like: Any) -> Any:
    """What is on disk for a step."""
    for found in list_checkpoints(directory):
        if found.step > step:
            shutil.rmtree(found.path)
    with Checkpointer(directory, shm_bytes=0) as ckpt:
        assert ckpt.restore(like) == step
    return like


def build(size: int = 400) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, model[0].in_features)).square().sum().backward()  # type: ignore[index, union-attr]
    optimizer.step()
    optimizer.zero_grad()


def test_what_is_saved_is_the_state_at_the_call(directory: Path) -> None:
    model, optimizer = build()
    buffer, array, number = torch.zeros(1000), np.zeros(2_000_000), {"n": 1}
    state = {"model": model, "optimizer": optimizer, "buffer": buffer, "array": array, "number": number}
    hand = Slow()
    with Checkpointer(directory, files=hand) as ckpt:
        ckpt.save(1, state, block=True)  # from now on there is a hook
        train(model, optimizer)
        before = {k: v.clone() for k, v in model.state_dict().items()}
        moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
        hand.held = True
        ckpt.save(2, state)
        buffer += 1
        array += 1
        number["n"] = 2
        train(model, optimizer)
        hand.held = False
        assert ckpt.wait()
    other, fresh = build()
    like = {
        "model": other,
        "optimizer": fresh,
        "buffer": torch.ones(1000),
        "array": np.ones(2_000_000),
        "number": {"n": 0},
    }
    stored(directory, 2, like)
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())
    assert all(torch.equal(s["exp_avg"], m) for s, m in zip(fresh.state.values(), moments, strict=True))
    assert float(like["buffer"].max()) == 0  # type: ignore[union-attr]
    assert float(like["array"].max()) == 0  # type: ignore[union-attr]
    assert like["number"] == {"n": 1}


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = staging.copy

    def slowly(*args: Any) -> None:
        time.sleep(0.1)
        copy(*args)

    monkeypatch.setattr(staging, "copy", slowly)


def test_arrays_are_copied_in_the_background_until_the_update_is_told(directory: Path, monkeypatch: Any) -> None:
    array = np.zeros(12_000_000)  # six blocks
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"array": array}, block=True)
        ckpt.before_update()
        array += 1
        slow_copies(monkeypatch)
        before = time.monotonic()
        ckpt.save(2, {"array": array})
        assert time.monotonic() - before < 0.3, "nothing is waited for"
        ckpt.before_update()
        array += 1
        assert ckpt.wait()
    assert float(stored(directory, 2, {"array": np.full(12_000_000, 9.0)})["array"].max()) == 1


def test_arrays_that_objects_keep_are_copied_at_once() -> None:
    class Sampler:
        def state_dict(self) -> Any:
            return {"order": np.arange(9)}

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    leaves = walk({"sampler": Sampler(), "field": np.ones(9), "none": np.ones(0)}, arrays_later=True).leaves
    assert {leaf.name: leaf.lazy for leaf in leaves} == {
        "tensors/sampler/order": False,
        "tensors/field": True,
        "tensors/none": False,
    }


def test_arrays_that_change_although_the_update_was_not_told(directory: Path, monkeypatch: Any) -> None:
    array = np.zeros(12_000_000)
    with Checkpointer(directory, on_save_error="raise", every=2) as ckpt:
        ckpt.before_update()
        slow_copies(monkeypatch)
        ckpt.step(2, {"array": array})
        array += 1
        newest = ckpt._saver.newest
        with contextlib.suppress(SaveError):  # told by this call or by the next
            ckpt.step(3, {"array": array})
        assert newest is not None
        ckpt._saver.idle()
        assert str(newest.error).removeprefix("step 2 was not saved: ") in (
            "before_update() was called once, but not before the arrays were changed again",
            "array was changed while it was being copied; call before_update() before each change",
        )
        ckpt._saver.failed.clear()
        ckpt.step(6, {"array": array})  # copied at once again
        array += 1
        assert ckpt.wait()
    assert [c.step for c in list_checkpoints(directory)] == [6]
    assert float(stored(directory, 6, {"array": np.zeros(12_000_000)})["array"].max()) == 1


def test_the_first_save_is_protected_too(directory: Path) -> None:
    model, optimizer = build(1500)
    before = model[0].weight.detach().clone()  # type: ignore[index]
    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"m": model, "o": optimizer})
        train(model, optimizer)
        assert ckpt.wait()
    other, fresh = build(1500)
    stored(directory, 1, {"m": other, "o": fresh})
    assert torch.equal(other[0].weight, before)  # type: ignore[index]


CHANGES = {
    "add_": lambda w: w.add_(1),
    "copy_": lambda w: w.copy_(torch.ones_like(w)),
    "fill": lambda w: w.fill_(3),
    "row": lambda w: w[0].zero_(),
    "index": lambda w: w.__setitem__(0, 5.0),
    "view": lambda w: w.view(-1)[-1:].mul_(2),
    "transposed": lambda w: w.t().add_(1),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "out": lambda w: torch.add(w, 1, out=w),
    "set by init": lambda w: torch.nn.init.normal_(w),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_outside_the_optimizer_is_old_or_refused(directory: Path, change: str) -> None:
    model, optimizer = build(1500)
    weight = model[0].weight  # type: ignore[index]
    before = weight.detach().clone()
    refused = False
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.save(1, {"m": model, "o": optimizer})
        with torch.no_grad():
            CHANGES[change](weight)
        try:
            ckpt.wait()
        except SaveError as error:
            refused = "0.weight was changed while it was being copied" in str(error)
    if refused:
        assert list_checkpoints(directory) == []
        return
    other, fresh = build(1500)
    stored(directory, 1, {"m": other, "o": fresh})
    assert torch.equal(other[0].weight, before)  # type: ignore[index]


def test_a_torn_tensor_is_refused_by_name_and_the_next_save_works(directory: Path, monkeypatch: Any) -> None:
    model, optimizer = build()
    copy = staging.copy
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        slow_copies(monkeypatch)
        ckpt.save(1, {"m": model, "o": optimizer})
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        with pytest.raises(SaveError, match=r"step 1 was not saved: m/.*was changed while it was being copied"):
            ckpt.wait()
        monkeypatch.setattr(staging, "copy", copy)
        ckpt.save(2, {"m": model, "o": optimizer})
        assert ckpt.wait()
    assert [c.step for c in list_checkpoints(directory)] == [2]


def test_a_change_that_is_counted_after_the_copy_is_noticed(directory: Path) -> None:
    """torch counts a change when the operation ends: one that ran during the copy may be counted after it."""
    model, optimizer = build()
    with Checkpointer(directory, on_save_error="raise") as ckpt:
        ckpt.save(1, {"m": model, "o": optimizer})
        assert ckpt._saver.newest is not None
        ckpt._saver.newest.source.entries()  # everything is copied and summed
        with torch.no_grad():
            model[0].weight.add_(1)  # type: ignore[index]
        with pytest.raises(SaveError, match="m/0.weight was changed while it was being copied"):
            ckpt.wait()
        before = model[0].weight.detach().clone()  # type: ignore[index]
        ckpt.save(2, {"m": model, "o": optimizer})  # that tensor is not put off again
        with torch.no_grad():
            model[0].weight.add_(1)  # type: ignore[index]
        assert ckpt.wait()
    other, fresh = build()
    stored(directory, 2, {"m": other, "o": fresh})
    assert torch.equal(other[0].weight, before)  # type: ignore[index]


def test_keeps_the_last_k(directory: Path) -> None:
    with Checkpointer(directory, every=1, keep=2) as ckpt:
        for step in range(1, 6):
            ckpt.step(step, {"x": torch.ones(3)})
            ckpt.wait()
    assert [c.step for c in list_checkpoints(directory)] == [4, 5]
    assert sorted(p.name for p in directory.iterdir()) == [".attempt", "step-000000004", "step-000000005"]


def test_keeps_every_nth_and_the_best(directory: Path) -> None:
    losses = [5.0, 1.0, 4.0, 3.0, 2.0, 6.0]
    with Checkpointer(directory, every=1, keep=Keep(last=1, every=4, best=1, metric="loss")) as ckpt:
        for step, loss in enumerate(losses, start=1):
            ckpt.step(step, {"x": 1}, loss=loss)
            ckpt.wait()
    assert [c.step for c in list_checkpoints(directory)] == [2, 4, 6]
    assert list_checkpoints(directory)[0].manifest.metrics == {"loss": 1.0}


def test_a_committed_step_is_not_saved_again(directory: Path) -> None:
    with Checkpointer(directory) as ckpt:
        assert ckpt.save(1, {"x": 1}, block=True)
        assert not ckpt.save(1, {"x": 2}, block=True)
    with Checkpointer(directory) as ckpt:
        assert not ckpt.save(1, {"x": 2}, block=True)
    assert stored(directory, 1, {"x": 0}) == {"x": 1}


def test_a_late_writer_can_neither_commit_nor_delete(directory: Path, staging: Path) -> None:
    hand = Slow()
    old = Checkpointer(directory, attempt="A1", keep=1, files=hand, on_save_error="raise", shm=staging)
    old.save(1, {"x": 1}, block=True)
    hand.held = True
    old.save(2, {"x": 2})
    new = Checkpointer(directory, attempt="A2", keep=1)
    state = {"x": 0}
    assert new.restore(state) == 1
    hand.held = False
    with pytest.raises(SaveError, match="step 2 was not saved"):
        old.wait()
    with pytest.raises(SaveError, match="attempt A1 may not write .* any more: attempt A2"):
        old.save(3, {"x": 3}, block=True)
    old.close()
    assert [c.step for c in list_checkpoints(directory)] == [1]
    new.save(2, {"x": 22}, block=True)
    new.close()
    assert stored(directory, 2, {"x": 0}) == {"x": 22}


def test_a_late_delete_is_fenced(directory: Path) -> None:
    with Checkpointer(directory, attempt="A1", keep=1) as old:
        old.save(1, {"x": 1}, block=True)
        old._saver.idle()
        fence = old._fence
        Checkpointer(directory, attempt="A2").close()
        (directory / "step-000000001").rename(directory / "step-000000003")
        with pytest.raises(SaveError, match="may not write"):
            housekeeping.put_aside(directory, ["step-000000003"], housekeeping.DAMAGED, fence, Files())
        shutil.copytree(directory / "step-000000003", directory / "step-000000004")
        for name in ("step-000000003", "step-000000004"):
            found = decode((directory / name / "manifest.json").read_bytes())
            manifest = directory / name / "manifest.json"
            manifest.write_bytes(encode(replace(found, step=int(name[-1]))))
        with pytest.raises(SaveError, match="may not write"):
            housekeeping.retain(directory, Keep(last=1), fence, 9, Files())
    assert [c.step for c in list_checkpoints(directory)] == [3, 4]


def test_an_older_attempt_is_refused(directory: Path) -> None:
    Checkpointer(directory, attempt="A2").close()
    with pytest.raises(CheckpointError, match="in use by attempt A2 .*newer than A1"):
        Checkpointer(directory, attempt="A1")


def test_several_ranks_need_a_name(directory: Path) -> None:
    with pytest.raises(UsageError, match="pass attempt="):
        Checkpointer(directory, rank=1, world_size=2)


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 2},
        {"every": 0},
        {"keep": 0},
        {"world_size": 0},
        {"on_save_error": "ignore"},
        {"attempt": "a/b"},
        {"align_bytes": 2048},
        {"align_bytes": 12288},
    ],
    ids=str,
)
def test_bad_arguments(directory: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Checkpointer(directory, **bad)
    assert not directory.exists()


def test_what_cannot_be_saved_is_named_before_anything_is_written(directory: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    bad = {
        "a/f": {"a": {"f": lambda: 0}},
        "m": {"m": torch.ones(2, device="meta")},
        "s": {"s": torch.eye(3).to_sparse()},
        "loop": {"loop": loop},
        "keys": {"keys": {object(): 1}},
        "lock": {"lock": [__import__("threading").Lock()]},
    }
    with Checkpointer(directory) as ckpt:
        for name, state in bad.items():
            with pytest.raises(StateError, match=f"^{name}.*: ") as caught:
                ckpt.save(1, {"fine": torch.ones(3), **state})
            assert caught.value.name.startswith(name)
    assert [p.name for p in directory.iterdir()] == [".attempt"]


def test_both_slots_in_use_leaves_a_save_out(directory: Path) -> None:
    hand = Slow()
    with Checkpointer(directory, every=1, files=hand) as ckpt:
        hand.held = True
        ckpt.step(1, {"x": torch.ones(9)})
        ckpt.step(2, {"x": torch.ones(9)})
        with pytest.warns(SaveWarning, match="step 3 was left out"):
            ckpt.step(3, {"x": torch.ones(9)})
        hand.held = False
        assert ckpt.wait()
        ckpt.step(4, {"x": torch.ones(9)})
    assert [c.step for c in list_checkpoints(directory)] == [1, 2, 4]


def test_without_shared_memory_saves_go_straight_to_the_file(directory: Path) -> None:
    model, optimizer = build()
    scattered = torch.randn(500, 600).t()
    state = {"m": model, "o": optimizer, "t": scattered, "n": 5}
    with Checkpointer(directory, shm_bytes=100_000) as ckpt:
        with pytest.warns(SaveWarning, match="shared memory.*straight from the live tensors"):
            assert ckpt.save(1, state)
        assert ckpt.last_committed == 1, "it is on disk when save returns"
        ckpt.save(2, state)  # said once
    other, fresh = build()
    like = {"m": other, "o": fresh, "t": torch.zeros(600, 500), "n": 0}
    stored(directory, 2, like)
    assert torch.equal(like["t"], scattered)  # type: ignore[arg-type]
    assert torch.equal(other[0].weight, model[0].weight)  # type: ignore[index]


def test_close_leaves_no_memory_behind(directory: Path) -> None:
    from transom_hpc.ckpt.shm import default_path

    with Checkpointer(directory) as ckpt:
        ckpt.save(1, {"x": torch.ones(1000)})
        assert default_path(directory).is_dir()
        assert default_path(directory).stat().st_mode & 0o777 == 0o700
    assert not default_path(directory).exists()


PROGRAM = """
import os, sys, torch
from transom_hpc.ckpt import Checkpointer
ckpt = Checkpointer(sys.argv[1], every=1)
state = {"x": torch.arange(100000.)}
ckpt.restore(state)
state["x"] += 1
ckpt.step(int(sys.argv[2]), state)
exec(sys.argv[3])
"""


def run(directory: Path, step: int, end: str) -> int:
    return subprocess.run([sys.executable, "-c", PROGRAM, str(directory), str(step), end], timeout=60).returncode


def test_memory_of_the_killed_is_reclaimed(directory: Path, tmp_path: Path) -> None:
    from transom_hpc.ckpt.shm import default_path

    assert run(directory, 1, "ckpt.wait(); os.kill(os.getpid(), 9)") == -9
    assert default_path(directory).is_dir()
    Checkpointer(tmp_path / "another").close()
    assert not default_path(directory).exists()


def test_a_program_that_forgets_to_close_and_its_forked_children(directory: Path) -> None:
    from transom_hpc.ckpt.shm import default_path

    end = "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\nassert os.listdir(sys.argv[4])"
    code = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(directory), "1", end,
         str(default_path(directory))], timeout=60,
    ).returncode  # fmt: skip
    assert code == 0
    assert [c.step for c in list_checkpoints(directory)] == [1]
    assert not default_path(directory).exists()


def test_memory_does_not_grow(directory: Path) -> None:
    import psutil

    state = {"x": torch.zeros(2_000_000)}
    with Checkpointer(directory, every=1, keep=1) as ckpt:
        sizes = []
        for step in range(1, 31):
            state["x"] += 1
            ckpt.step(step, state)
            ckpt.wait()
            sizes.append(psutil.Process().memory_info().rss)
    assert sizes[-1] - sizes[8] < 8 << 20
    assert len(os.listdir("/proc/self/fd")) < 200  # noqa: PTH208


def test_a_replaced_directory_of_someone_else(directory: Path, tmp_path: Path) -> None:
    open_to_all = tmp_path / "shm"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(CheckpointError, match="not a private folder"):
        Checkpointer(directory, shm=open_to_all)


def test_enospc_on_a_small_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(small)], timeout=20)
    if mounted.returncode:
        pytest.skip("mount is not allowed here")
    try:
        state = {"x": torch.randn(2_000_000)}  # 8 MB
        with Checkpointer(small / "c", keep=5) as ckpt:
            for step in (1, 2):
                ckpt.save(step, state, block=True)
            for step in (3, 4):
                with pytest.raises(SaveError, match="GB left|No space"):
                    ckpt.save(step, state, block=True)
            assert [c.step for c in list_checkpoints(small / "c")] == [1, 2]
            assert not list((small / "c").glob(".step*"))
        with Checkpointer(small / "c", keep=5) as ckpt:
            assert ckpt.restore({"x": torch.zeros(2_000_000)}) == 2
    finally:
        subprocess.run(["umount", str(small)], timeout=20, check=True)
