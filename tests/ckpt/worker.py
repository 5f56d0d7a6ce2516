"""Programs of several ranks for the tests.

Run as a server, it loads what is slow to load once and forks a process for each rank: a JSON object a line on standard
input ({"scenario", "facts", "environment", "out", "err"}), a process id a line on standard output. "wait PID" answers
with the exit status as Popen gives it, "kill PID" sends SIGKILL.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

import transom_hpc.ckpt.checkpointer  # noqa: F401  (loaded before the fork)
from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import SaveError, StateError
from transom_hpc.ckpt import Checkpointer, interval, rng_state
from transom_hpc.ckpt.server import Server

sys.path.insert(0, str(Path(__file__).parent))
import cuts
from faulty import Faulty

RANK = 0
WORLD_SIZE = 1


def make(facts: dict[str, Any], **options: Any) -> Checkpointer:
    return Checkpointer(
        facts["directory"],
        RANK,
        WORLD_SIZE,
        attempt=facts["attempt"],
        shm=facts["shm"],
        deadline_s=facts.get("deadline_s", 60.0),
        keep=facts.get("keep", 3),
        every=facts.get("every", 2),
        on_save_error=facts.get("on_save_error", "raise"),
        distrust=facts.get("distrust"),
        **options,
    )


def digest(*tensors: torch.Tensor) -> str:
    summed = xxhash.xxh3_64()
    for tensor in tensors:
        summed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return summed.hexdigest()


def ddp(facts: dict[str, Any]) -> Any:
    """Train a small model with DistributedDataParallel from where it was; tell the weights' digest after each step."""
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Dropout(0.2), torch.nn.Linear(128, 8))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    torch.manual_seed(100 + RANK)
    np.random.seed(RANK)
    state = {"model": wrapped, "optimizer": optimizer, "scheduler": scheduler, "rng": rng_state(), "mine": [RANK]}
    digests = {}
    with make(facts) as ckpt:
        start = ckpt.restore(state)
        for step in range(start, facts["total"]):
            data = torch.randn(16, 64) + float(np.random.rand())
            loss = wrapped(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            digests[step + 1] = digest(*model.parameters())
            ckpt.step(step + 1, state, loss=loss)
            if facts.get("patient"):  # no save is left out because the ones before it are still being written
                ckpt.wait()
        ckpt.wait()
        last = ckpt.last_committed
    dist.destroy_process_group()
    return {"start": start, "digests": digests, "last": last, "mine": state["mine"]}


def arrays(facts: dict[str, Any]) -> Any:
    """Save numpy arrays, the same on all ranks and private ones, without torch.distributed."""
    state = {"same": np.arange(300_000, dtype="<f8"), "own": np.full(1000 + RANK, RANK, dtype="<i4")}
    with make(facts) as ckpt:
        start = ckpt.restore(state)
        for step in range(start, facts["total"]):
            state["same"] += step
            ckpt.step(step + 1, state)
        ckpt.wait()
    return {"start": start, "same": float(state["same"][5]), "own": state["own"].tolist()[:1]}


def resized(facts: dict[str, Any]) -> Any:
    """Restore, and save step 2 where there is nothing; `own` says whether ranks have something of their own."""
    state = {"same": np.zeros(1000), "logger": {"lines": RANK}}
    if facts["own"]:
        state["own"] = np.full(100, float(RANK))
    if RANK:
        del state["logger"]
    with warnings.catch_warnings(record=True) as said, make(facts) as ckpt:
        warnings.simplefilter("always")
        try:
            start = ckpt.restore(state, strict=facts.get("strict", True))
        except StateError as error:
            return {"error": str(error)}
        if start == 0:
            state["same"] += 5
            if facts["own"]:
                state["own"] += 10
            ckpt.save(2, state, block=True)
    own = float(state["own"][99]) if facts["own"] else None
    return {"start": start, "same": float(state["same"][9]), "own": own, "said": [str(w.message) for w in said]}


def cut(facts: dict[str, Any]) -> Any:
    """See cuts."""
    return cuts.cut(facts, make)


def stages(facts: dict[str, Any]) -> Any:
    """See cuts."""
    return cuts.stages(facts, make)


def drift(facts: dict[str, Any]) -> Any:
    """See cuts."""
    return cuts.drift(facts, make)


def huge(facts: dict[str, Any]) -> Any:
    """See cuts."""
    return cuts.huge(facts, make)


def faulty(facts: dict[str, Any]) -> Any:
    """Save steps 2 and 4, the second with a fault at one file call of one rank, then 6; tell what happened."""
    hand = Faulty(where=Path(facts["directory"]))
    state = {"same": torch.arange(300_000.0), "own": torch.full((1000,), RANK)}
    told: dict[str, Any] = {"errors": []}
    with make(facts, files=hand) as ckpt:
        told["start"] = ckpt.restore(state)
        assert state["same"][0] == told["start"]
        for step in range(told["start"] + 2, facts["total"] + 1, 2):
            state["same"][0] = step
            ckpt.wait()
            if facts.get("rank") == RANK and step == 4:
                hand.aim(facts["at"], facts["fault"])
            before = len(hand.calls)
            try:
                ckpt.save(step, state, block=True)
            except SaveError as error:
                told["errors"].append(f"{step}: {error}")
            ckpt._saver.idle()
            told[f"calls{step}"] = hand.calls[before:]
        told["last"] = ckpt.last_committed
    return told


def numbers(step: int) -> dict[str, Any]:
    return {"same": torch.arange(500_000.0) + step, "own": torch.full((1000,), RANK * 1000 + step), "n": step}


class Deaf(Faulty):
    """Writes no data from a step on: the save hangs, as on a file system that does not answer."""

    deaf = False

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        while self.deaf:
            time.sleep(0.05)
        return super().pwrite(fd, data, offset)


class Full(Faulty):
    """Has no room for data."""

    def fsync(self, fd: int) -> None:  # noqa: ARG002
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def warned(facts: dict[str, Any]) -> Any:
    """Step 2 fails on one rank; tell the warnings that each gives. The log goes to standard error."""
    logging.basicConfig(level=logging.WARNING)
    hand = Full() if facts["rank"] == RANK else Faulty()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with make(facts, files=hand) as ckpt:
            ckpt.save(2, {"own": torch.full((1000,), RANK)}, metrics={"loss": "none"})  # type: ignore[dict-item]
            ckpt.wait()
    return [str(w.message) for w in said]


def dies(facts: dict[str, Any]) -> Any:
    """Commit step 2; have step 4 in memory only when SIGKILL comes."""
    hand = Deaf()
    ckpt = make(facts, files=hand)
    ckpt.restore(numbers(0))
    ckpt.save(2, numbers(2), block=True)
    hand.deaf = True
    ckpt.save(4, numbers(4))
    newest = ckpt._saver.newest
    assert newest is not None
    ckpt._saver.before_update()
    newest.source.confirm()
    os.kill(os.getpid(), signal.SIGKILL)


def keeps(facts: dict[str, Any]) -> Any:
    """Go on from what is there; with `die`, be killed when a step is in memory that is not written. Tell the end."""
    interval.LEAST_S, interval.MOST_OVERHEAD = 0.05, 1e9
    interval.intervals = lambda *_: interval.Intervals(0.05, 1000.0)
    logging.basicConfig(level=logging.DEBUG)
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer, "own": np.zeros(1000)}
    with make({**facts, "every": "auto"}) as ckpt:
        start = ckpt.restore(state)
        for step in range(start + 1, 100_000 if facts.get("die") else facts["until"] + 1):
            model(torch.full((4, 300), float(step))).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            state["own"] += step
            time.sleep(0.002)
            ckpt.step(step, state)
            kept = ckpt._saver.kept
            if facts.get("die") and kept is not None and kept.whole and kept.job.step > (ckpt.last_committed or 0):
                print(json.dumps({"start": start, "kept": kept.job.step, "last": ckpt.last_committed}), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
        source = ckpt.restored.source if ckpt.restored else ""
        found = {
            "start": start,
            "source": source,
            "digest": digest(*model.parameters(), torch.from_numpy(state["own"])),
        }
        ckpt.wait()
        return {**found, "last": ckpt.last_committed}


def lives(facts: dict[str, Any]) -> Any:
    """Restore what `dies` left, from wherever."""
    state = numbers(0)
    with make(facts) as ckpt:
        start = ckpt.restore(state)
        if facts.get("die"):
            os.kill(os.getpid(), signal.SIGKILL)
    wanted = numbers(start)
    right = all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(wanted[k])) for k in wanted)
    assert ckpt.restored is not None
    return {"start": start, "right": right, "source": ckpt.restored.source}


class Distant:
    """Other hosts, to whom nothing comes as long as the file at `far` is there."""

    is_on_a_spare = False

    def __init__(self, far: Path) -> None:
        self._far = far

    def begin(self, folder: Path) -> None: ...

    def close(self) -> None: ...

    def save(self, order: Any, left: Any) -> None: ...

    def committed(self, order: Any) -> None: ...

    def copied(self, order: Any) -> int:  # noqa: ARG002
        while self._far.exists():
            time.sleep(0.01)
        return 1


class Gated(Faulty):
    """Writes no data as long as the file at `gate` is there."""

    gate = Path("/nonexistent")

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        while self.gate.exists():
            time.sleep(0.01)
        return super().pwrite(fd, data, offset)


def serve_saves(facts: dict[str, Any]) -> Any:
    """The checkpoint server of a node."""
    hand = Gated(facts.get("at"), facts.get("fault", 0), Path(facts["directory"]))
    hand.gate = Path(facts.get("gate", hand.gate))
    company: Any = Distant(Path(facts["far"])) if "far" in facts else None
    server = Server(Path(facts["shm"]), hand, SystemClock(), company=company)
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "leaving", True))
    return server.serve()


def orders(facts: dict[str, Any]) -> Any:
    """Have a save handed to the server, and be killed at once."""
    ckpt = make(facts)
    ckpt.save(facts["step"], numbers(facts["step"]))
    ckpt._saver.before_update()
    while not list(Path(facts["shm"]).glob(f".order.*-rank-{RANK:05d}*")):
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_nothing(facts: dict[str, Any]) -> Any:
    """Be killed before anything is saved."""
    make(facts)
    os.kill(os.getpid(), signal.SIGKILL)


def unlike(facts: dict[str, Any]) -> Any:
    """One rank's state can't be saved: nobody waits for it."""
    state: dict[str, Any] = {"x": torch.ones(10)}
    if facts["bad"] == RANK:
        state["f"] = lambda: 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with make(facts) as ckpt:
            try:
                ckpt.save(2, state, block=True)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return "saved"


def child(order: dict[str, Any]) -> None:
    """One rank, in a process of its own."""
    global RANK, WORLD_SIZE
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(order["environment"])
    RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        print(json.dumps(globals()[order["scenario"]](order["facts"])), flush=True)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    warm = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    del warm
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "wait":
            _, status = os.waitpid(int(rest), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif word == "kill":
            os.kill(int(rest), signal.SIGKILL)
            print(0, flush=True)
        else:
            pid = os.fork()
            if pid == 0:
                child(json.loads(line))
            print(pid, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
