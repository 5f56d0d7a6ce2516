"""Programs in which the kernel answers one call wrongly (see shim.c). Run with the shim preloaded, as a server.

An order is a JSON object a line on standard input; a process is forked for it from this one, which has everything
loaded. The answer is a line on standard output: {"code", "said"}, or {"pid"} for one that is not waited for; "wait PID"
asks for its answer.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from transom_hpc.base.errors import CheckpointError, SaveError
from transom_hpc.ckpt import Checkpointer, claim, h5file, list_checkpoints, verify

NONE, ERROR, KILL_BEFORE, KILL_AFTER, SHORT, HANG, ERROR_AFTER = range(7)

_shim = ctypes.CDLL(None)
RANK = 0
WORLD_SIZE = 1


def watch(disk: Path, memory: Path) -> None:
    _shim.shim_watch(str(disk).encode(), str(memory).encode())


def arm(point: dict[str, Any]) -> None:
    """Count from now on; the call with this number meets its fault."""
    _shim.shim_arm.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
    _shim.shim_looks(int(WORLD_SIZE == 1))
    mine = point.get("victim", RANK) == RANK
    _shim.shim_arm(point.get("at", -1) if mine else -1, point.get("fault", NONE), point.get("errno", 0))


def disarm() -> list[str]:
    """What was called, a line each: "disk background pwrite data-00000.h5"."""
    _shim.shim_disarm()
    _shim.shim_log.restype = ctypes.c_char_p
    found: bytes = _shim.shim_log()
    return found.decode().splitlines()


def state_at(step: int) -> dict[str, Any]:
    return {"same": np.arange(30_000.0) + step, "own": np.full(500, float(RANK + step)), "n": step}


def right(state: dict[str, Any], step: int) -> bool:
    wanted = state_at(step)
    return state["n"] == step and all(np.array_equal(state[k], wanted[k]) for k in ("same", "own"))


def make(order: dict[str, Any], attempt: str, **options: Any) -> Checkpointer:
    return Checkpointer(
        order["directory"], RANK, WORLD_SIZE, keep=1, attempt=attempt, shm=order["shm"],
        deadline_s=order.get("deadline_s", 30.0), **options,
    )  # fmt: skip


def begin(order: dict[str, Any]) -> None:
    """A directory in which step 2 is committed."""
    directory = Path(order["directory"])
    if "template" in order:
        shutil.copytree(order["template"], directory)
    Path(order["shm"]).mkdir(mode=0o700, exist_ok=True)
    watch(directory, Path(order["shm"]))


def saved(ckpt: Checkpointer, step: int) -> str:
    """Save, and tell the error that came; only a SaveError may."""
    try:
        ckpt.save(step, state_at(step), block=True)
        return ""
    except SaveError as error:
        return str(error)
    finally:
        ckpt._saver.idle()


def committed(order: dict[str, Any], allowed: tuple[int, ...]) -> None:
    """What is visible is whole, and the newest is one of these."""
    found = list_checkpoints(order["directory"])
    assert found, "nothing is committed any more"
    assert found[-1].step in allowed, [c.step for c in found]
    for checkpoint in found:
        assert verify(checkpoint.path) == [], checkpoint.path
    with h5py.File(found[-1].path / "data-00000.h5") as file:  # what is around the arrays has no checksum
        wanted = state_at(found[-1].step)
        assert all(np.array_equal(file[f"tensors/{name}"], wanted[name]) for name in ("same", "own"))


def restored(order: dict[str, Any], allowed: tuple[int, ...], attempt: str) -> int:
    """A new start finds one of these steps, bit for bit, saves the next and leaves nothing else behind."""
    state = state_at(0)
    with make(order, attempt) as ckpt:
        step = ckpt.restore(state)
        assert step in allowed, step
        assert right(state, step)
        ckpt.save(step + 2, state_at(step + 2), block=True)
    again = state_at(0)
    with make(order, attempt + ".1") as ckpt:
        assert ckpt.restore(again) == step + 2
        assert right(again, step + 2)
    if RANK == 0:
        clean(order)
    return step


def clean(order: dict[str, Any]) -> None:
    names = {p.name for p in Path(order["directory"]).iterdir()}
    assert {name for name in names if not name.startswith("step-")} <= {".attempt"}, names
    assert sum(name.startswith("step-") for name in names) == 1, names
    left = [p.name for p in Path(order["shm"]).iterdir() if not p.name.startswith(".")]
    assert left == [] or WORLD_SIZE > 1, left


def seed(order: dict[str, Any]) -> None:
    begin(order)
    with make(order, "A0") as ckpt:
        assert saved(ckpt, 2) == ""


def first(order: dict[str, Any]) -> dict[str, Any]:
    """The first save of a program, laid out by HDF5, with the commit and the delete of what was before."""
    begin(order)
    with make(order, "A1") as ckpt:
        assert ckpt.restore(state_at(0)) == 2
        arm(order)
        told = saved(ckpt, 4)
        calls = disarm()
        committed(order, (4,) if not told else (2, 4))
        assert saved(ckpt, 6) == ""
    restored(order, (6,), "A2")
    return {"calls": calls, "told": told}


def again(order: dict[str, Any]) -> dict[str, Any]:
    """A later save, whose layout is known."""
    begin(order)
    with make(order, "A1") as ckpt:
        assert saved(ckpt, 4) == ""
        assert saved(ckpt, 6) == ""
        arm(order)
        told = saved(ckpt, 8)
        calls = disarm()
        committed(order, (8,) if not told else (6, 8))
        assert saved(ckpt, 10) == ""
    restored(order, (10,), "A2")
    return {"calls": calls, "told": told}


def start(order: dict[str, Any]) -> dict[str, Any]:
    """The start of a program and its restore, after one that was killed in a save."""
    begin(order)
    litter(order)
    arm(order)
    state, told = state_at(0), ""
    try:
        with make(order, "A2") as ckpt:
            step = ckpt.restore(state)
            calls = disarm()
        assert step == 2
        assert right(state, 2)
    except (OSError, CheckpointError) as error:
        calls = disarm()
        told = f"{type(error).__name__}: {error}"
        assert right(state, 0), "touched"
    committed(order, (2,))
    restored(order, (2,), "A3")
    return {"calls": calls, "told": told}


def litter(order: dict[str, Any]) -> None:
    """What a program that was killed leaves."""
    directory = Path(order["directory"])
    for name in (".step-000000004.A1.1", ".trash-step-000000001.A1.0", ".restore.A1.0"):
        (directory / name).mkdir()
        (directory / name / "data-00000.h5").write_bytes(b"x" * 10_000)


def end(order: dict[str, Any]) -> dict[str, Any]:
    """The end of a program."""
    begin(order)
    told = ""
    ckpt = make(order, "A1")
    assert saved(ckpt, 4) == ""
    arm(order)
    try:
        ckpt.close()
    except (OSError, CheckpointError) as error:
        told = f"{type(error).__name__}: {error}"
    calls = disarm()
    committed(order, (4,))
    restored(order, (4,), "A2")
    return {"calls": calls, "told": told}


def after(order: dict[str, Any]) -> int:
    """The start after one that was killed."""
    begin({k: v for k, v in order.items() if k != "template"})
    committed(order, tuple(order["allowed"]))
    return restored(order, tuple(order["allowed"]), "A5")


def hangs(order: dict[str, Any]) -> dict[str, Any]:
    """A call that does not return, in the background: the program goes on."""
    begin(order)
    ckpt = make(order, "A1", every=2)
    ckpt.restore(state_at(0))
    _shim.shim_background(1)  # which thread comes first is a matter of time
    arm(order)
    longest = 0.0
    for step in (4, 5, 6, 7, 8):
        before = time.monotonic()
        ckpt.step(step, state_at(step))
        longest = max(longest, time.monotonic() - before)
        time.sleep(0.02)
    before = time.monotonic()
    done = ckpt.wait(0.1)
    assert time.monotonic() - before < 2
    return {"calls": disarm(), "longest": longest, "done": done}


def together(order: dict[str, Any]) -> dict[str, Any]:
    """A save by several ranks, with a fault on one of them; then the next save."""
    Path(order["shm"]).mkdir(mode=0o700, exist_ok=True)
    watch(Path(order["directory"]), Path(order["shm"]))
    with make(order, "A1") as ckpt:
        ckpt.restore(state_at(0))
        assert saved(ckpt, 2) == ""
        assert saved(ckpt, 4) == ""
        arm(order)
        told = saved(ckpt, 6)
        calls = disarm()
        ended = order.get("fault") in (KILL_BEFORE, KILL_AFTER, HANG)
        assert ended or saved(ckpt, 8) == ""
    return {"told": told, "calls": calls}


def resumes(order: dict[str, Any]) -> dict[str, Any]:
    """The start of several ranks after all that."""
    watch(Path(order["directory"]), Path(order["shm"]))
    state = state_at(0)
    with make(order, "A2") as ckpt:
        step = ckpt.restore(state)
        assert right(state, step), step
        told = saved(ckpt, 20)
    if RANK == 0:
        clean(order)
    return {"start": step, "told": told}


def child(order: dict[str, Any], out: int) -> None:
    global RANK, WORLD_SIZE
    RANK, WORLD_SIZE = order.get("my_rank", 0), order.get("world_size", 1)
    code = 0
    try:
        warnings.simplefilter("ignore")
        logging.disable()
        claim._UNREADABLE_S = 0.2
        said: Any = globals()[order["scenario"]](order)
    except BaseException:
        said, code = traceback.format_exc(), 1
    os.write(out, json.dumps(said).encode())
    os._exit(code)


def collect(pid: int, read: int) -> dict[str, Any]:
    with os.fdopen(read, "rb") as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"code": code, "said": json.loads(said) if said else None}


def serve() -> None:
    h5file.load()
    open_ends: dict[int, int] = {}
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        answer: dict[str, Any]
        if word == "wait":
            answer = collect(int(rest), open_ends.pop(int(rest)))
        elif word == "kill":
            os.kill(int(rest), signal.SIGKILL)
            answer = {}
        else:
            order = json.loads(line)
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                child(order, write)
            os.close(write)
            open_ends[pid] = read
            answer = {"pid": pid} if order.get("later") else collect(pid, open_ends.pop(pid))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
