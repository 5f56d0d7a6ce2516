"""What a checkpoint costs: ratios to other ways of saving, measured alternately in one run, with the limits beside.

    python benchmarks/checkpoint.py [--quick] [--json FILE] [--directory DIR]

The state is a model of fp32 parameters with Adam's moments, random data, 150 tensors: 1.5 GB, or 0.2 GB with --quick.
Every way of saving ends with fsync of file and folder where the figure says durable; loads begin with a cold page cache
where the machine allows to drop it. Training is one thread of matrix products; what is not used by it is to spare.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from transom_hpc.ckpt import Checkpointer

try:
    import safetensors.torch as safetensors
except ImportError:
    safetensors = None

PIECE = 8 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result. `limit` is a text: what bounds the figure, as measured in this run."""

    name: str
    value: float
    unit: str
    bar: float | None
    at_least: bool
    limit: str
    pairs: int
    spread: str


class Model(torch.nn.Module):
    """Parameters of one size."""

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(elements, generator=generator)) for _ in range(tensors)]
        )


def build(elements: int) -> tuple[Model, torch.optim.Optimizer]:
    """A model and an AdamW that has taken a step; gradients are gone, so that its next steps change nothing."""
    model = Model(50, elements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


class Train:
    """Forward and backward of a given length on one thread, then the optimizer's step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._a = torch.randn(256, 256)

    def compute(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._a, self._a)

    def products_in(self, seconds: float) -> int:
        """How many products take about so long."""
        before = time.perf_counter()
        self.compute(300)
        return max(1, int(seconds * 300 / (time.perf_counter() - before)))

    def step(self) -> float:
        """The optimizer's step, in seconds: it has no gradients, so what it takes is what it waited."""
        before = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - before


class Run:
    """One run of the benchmark."""

    def __init__(self, quick: bool, where: Path | None) -> None:
        self.pairs = 3 if quick else 5
        self.elements = 350_000 if quick else 2_500_000
        self.folder = Path(tempfile.mkdtemp(prefix="transom-bench-", dir=where))
        self.model, self.optimizer = build(self.elements)
        self.train = Train(self.optimizer)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.plain = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.bytes = 3 * 50 * self.elements * 4
        self.figures: list[Figure] = []
        self._step = 0

    # -- helpers

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def fresh(self) -> Path:
        self._step += 1
        path = self.folder / f"c{self._step}"
        path.mkdir()
        return path

    def gone(self, path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)

    def add(
        self, name: str, values: list[float], unit: str, bar: float | None, limit: str, at_least: bool = True
    ) -> None:
        middle = statistics.median(values)
        spread = f"{min(values):.3g} to {max(values):.3g}"
        self.figures.append(Figure(name, middle, unit, bar, at_least, limit, len(values), spread))
        self.say(f"  {name}: {middle:.3g} {unit} ({spread})")

    def gigabytes_per_second(self, seconds: float) -> float:
        return self.bytes / seconds / 1e9

    # -- limits

    def copy_seconds(self, threads: int = 2) -> float:
        """Copy the bytes of the state once, warm, with so many threads."""
        from transom_hpc.ckpt import lanes

        arrays = [t.detach().numpy() for t in self.model.parameters()]
        if not hasattr(self, "_copies"):
            self._copies = [np.zeros_like(a) for a in arrays]
        jobs = [(lambda a=a, b=b: np.copyto(b, a)) for _ in range(3) for a, b in zip(arrays, self._copies, strict=True)]
        before = time.perf_counter()
        lanes.run(jobs, threads)
        return time.perf_counter() - before

    def disk_write_seconds(self) -> float:
        """Write as many bytes with O_DIRECT from warm aligned memory, 4 writes of 8 MiB in flight, reserved blocks."""
        from transom_hpc.ckpt import lanes

        path = self.folder / "limit"
        room = self._aligned()
        before = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(fd, 0, self.bytes)
        whole = self.bytes // PIECE
        lanes.run([(lambda i=i: os.pwrite(fd, room[i % 8], i * PIECE)) for i in range(whole)])
        os.fsync(fd)
        os.close(fd)
        return (time.perf_counter() - before) * self.bytes / (whole * PIECE)

    def disk_read_seconds(self) -> float:
        """Read the same file with O_DIRECT, 4 reads in flight."""
        from transom_hpc.ckpt import lanes

        room = self._aligned()
        fd = os.open(self.folder / "limit", os.O_RDONLY | os.O_DIRECT)
        whole = self.bytes // PIECE
        before = time.perf_counter()
        lanes.run([(lambda i=i: os.preadv(fd, [room[i % 8]], i * PIECE)) for i in range(whole)])
        seconds = (time.perf_counter() - before) * self.bytes / (whole * PIECE)
        os.close(fd)
        return seconds

    def _aligned(self) -> list[memoryview]:
        if not hasattr(self, "_rooms"):
            self._rooms = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(8)]
            for room in self._rooms:
                room[:] = np.random.bytes(PIECE)
        return self._rooms

    # -- other ways of saving; each returns when the bytes are on disk

    def torch_save(self, path: Path, crc: bool) -> None:
        torch.serialization.set_crc32_options(crc)
        with (path / "state.pt").open("wb") as file:
            torch.save(self.plain, file)
            file.flush()
            os.fsync(file.fileno())
        torch.serialization.set_crc32_options(True)

    def dcp_save(self, path: Path, threads: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.plain, storage_writer=FileSystemWriter(path, thread_count=threads), no_dist=True)

    def safetensors_save(self, path: Path) -> None:
        flat = {f"m{i}": t for i, t in enumerate(self.plain["model"].values())}
        for i, held in self.plain["optimizer"]["state"].items():
            flat |= {f"o{i}.{k}": t for k, t in held.items()}
        safetensors.save_file(flat, path / "state.safetensors")
        fd = os.open(path / "state.safetensors", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def others(self) -> dict[str, Callable[[Path], None]]:
        found: dict[str, Callable[[Path], None]] = {
            "torch.save": lambda p: self.torch_save(p, True),
            "torch.save without CRC32": lambda p: self.torch_save(p, False),
            "DCP, 1 thread": lambda p: self.dcp_save(p, 1),
            "DCP, 4 threads": lambda p: self.dcp_save(p, 4),
        }
        if safetensors is not None:
            found["safetensors"] = self.safetensors_save
        return found

    def timed(self, save: Callable[[Path], None]) -> float:
        path = self.fresh()
        before = time.perf_counter()
        save(path)
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        seconds = time.perf_counter() - before
        self.gone(path)
        return seconds

    # -- figures

    def warm(self, ckpt: Checkpointer) -> None:
        """Both slots have been used once."""
        for _ in range(3):
            self._step += 1
            ckpt.save(self._step, self.state, block=True)

    def saving(self) -> None:
        """What training waits for, what it loses, and how long until the bytes are on disk."""
        others = self.others()
        times: dict[str, list[float]] = {name: [] for name in others}
        stall, short, added, added_async, async_stall, durable = [], [], [], [], [], []
        write, copy = [], []
        products = self.train.products_in(max(0.2, 2.5 * self.copy_seconds(1)))
        with Checkpointer(self.fresh(), every=1, keep=1) as ckpt:
            self.say("warming up")
            self.warm(ckpt)
            for save in others.values():
                self.timed(save)
            for number in range(self.pairs):
                self.say(f"saving, round {number + 1} of {self.pairs}")
                write.append(self.disk_write_seconds())
                copy.append(self.copy_seconds())
                stall.append(self.stall(ckpt, products))
                short.append(self.stall(ckpt, 0))
                alone = self.loop(products, None)
                added.append(self.loop(products, lambda: self.save_in_background(ckpt)) - alone)
                ckpt.wait()
                stalled, extra = self.async_save(products, alone)
                async_stall.append(stalled)
                added_async.append(extra)
                before = time.perf_counter()
                self._step += 1
                ckpt.save(self._step, self.state, block=True)
                durable.append(time.perf_counter() - before)
                for name, save in others.items():
                    times[name].append(self.timed(save))
        best_name = min(times, key=lambda name: statistics.median(times[name]))
        best, best_torch = times[best_name], times["torch.save without CRC32"]
        disk = f"disk {self.gigabytes_per_second(statistics.median(write)):.2f} GB/s"
        bandwidth = f"copy {self.gigabytes_per_second(statistics.median(copy)):.1f} GB/s"
        self.add("stall of a save", [s * 1e3 for s in stall], "ms", None, bandwidth, at_least=False)
        self.add("stall: DCP async_save to ours", _ratio(async_stall, stall), "x", 20, bandwidth)
        self.add("stall: torch.save at its best to ours", _ratio(best_torch, stall), "x", 100, bandwidth)
        self.add("stall without forward and backward, in memory copies", _ratio(short, copy), "x", 1, bandwidth, False)
        self.add("wall time added by a save", [s * 1e3 for s in added], "ms", None, bandwidth, at_least=False)
        self.add("wall time added: DCP async_save to ours", _ratio(added_async, added), "x", 5, bandwidth)
        self.add("durable save, share of the disk", _ratio(write, durable), "x", 0.85, disk)
        self.add(f"durable save: best other ({best_name}) to ours", _ratio(best, durable), "x", 1.5, disk)
        for name, values in times.items():
            self.add(f"durable save: {name} to ours", _ratio(values, durable), "x", None, disk)

    def save_in_background(self, ckpt: Checkpointer) -> float:
        self._step += 1
        before = time.perf_counter()
        if not ckpt.save(self._step, self.state):
            raise RuntimeError("the save was not begun")
        return time.perf_counter() - before

    def stall(self, ckpt: Checkpointer, products: int) -> float:
        """Seconds that training stands still: in the call, and in the optimizer's step after it."""
        ckpt.wait()
        time.sleep(0.1)  # the deletion of an old checkpoint that follows a save is over, as it is in a real run
        seconds = self.save_in_background(ckpt)
        self.train.compute(products)
        seconds += self.train.step()
        ckpt.wait()
        return seconds

    def loop(self, products: int, save: Callable[[], object] | None, rounds: int = 6) -> float:
        """Seconds of a few steps, with a save after the first."""
        before = time.perf_counter()
        for number in range(rounds):
            self.train.compute(products)
            self.train.step()
            if number == 0 and save is not None:
                save()
        return time.perf_counter() - before

    def async_save(self, products: int, alone: float) -> tuple[float, float]:
        """Stall and added wall time of DCP's async_save."""
        path = self.fresh()
        stalled: list[float] = []
        futures: list[Any] = []

        def begin() -> None:
            before = time.perf_counter()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                futures.append(dcp.async_save(self.plain, storage_writer=FileSystemWriter(path), no_dist=True))
            stalled.append(time.perf_counter() - before)

        seconds = self.loop(products, begin)
        futures[0].result()
        self.gone(path)
        return stalled[0], seconds - alone

    def loading(self) -> None:
        """From a cold file, and from the memory of a program that died."""
        cold = drop_caches()
        if not cold:
            self.say("the page cache can't be dropped here (no root): loads of other ways are warm")
        theirs = self.fresh()
        self.torch_save(theirs, False)
        directory = self.fresh()
        with Checkpointer(directory) as ckpt:
            ckpt.save(1, self.state, block=True)
        read, ours, torch_load, copy, memory = [], [], [], [], []
        self.disk_write_seconds()
        for number in range(self.pairs):
            self.say(f"loading, round {number + 1} of {self.pairs}")
            drop_caches()
            read.append(self.disk_read_seconds())
            copy.append(self.copy_seconds())
            drop_caches()
            with Checkpointer(directory, keep=10) as ckpt:
                self.pretouch(ckpt)
                fresh = self.as_started()
                before = time.perf_counter()
                if ckpt.restore(fresh) != 1:
                    raise RuntimeError("nothing was restored")
                ours.append(time.perf_counter() - before)
                del fresh
            fresh = self.as_started()
            drop_caches()
            before = time.perf_counter()
            loaded = torch.load(theirs / "state.pt", weights_only=True)
            fresh["model"].load_state_dict(loaded["model"])
            fresh["optimizer"].load_state_dict(loaded["optimizer"])
            torch_load.append(time.perf_counter() - before)
            del loaded, fresh
            memory.append(self.from_memory())
        disk = f"disk {self.gigabytes_per_second(statistics.median(read)):.2f} GB/s"
        bandwidth = f"copy {self.gigabytes_per_second(statistics.median(copy)):.1f} GB/s"
        self.add("cold restore, share of the disk", _ratio(read, ours), "x", 0.85, disk)
        self.add("cold restore: torch.load to ours", _ratio(torch_load, ours), "x", None, disk)
        self.add("restore from own memory, share of the copy bandwidth", _ratio(copy, memory), "x", 0.7, bandwidth)
        self.add("restore from own memory: cold torch.load to ours", _ratio(torch_load, memory), "x", None, bandwidth)

    def as_started(self) -> dict[str, Any]:
        """The state of a program that has just begun: a model, and an optimizer that has not taken a step."""
        model = Model(50, self.elements)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)}

    def pretouch(self, ckpt: Checkpointer) -> None:
        """Shared memory that was never touched costs what the machine's memory costs, whoever uses it: not counted."""
        ckpt._slots.prepare(self.bytes + (4 << 20))

    def from_memory(self) -> float:
        """A program saves and dies; seconds that the next one takes to restore."""
        directory = self.fresh()
        shared = Path(tempfile.mkdtemp(prefix=f"transom-{os.getuid()}-bench-", dir="/dev/shm"))
        shared.chmod(0o700)
        try:
            child = [sys.executable, __file__, "--die", str(directory), "--shm", str(shared), "--elements"]
            subprocess.run([*child, str(self.elements)], check=False)
            with Checkpointer(directory, shm=shared) as ckpt:
                before = time.perf_counter()
                if ckpt.restore(self.state) != 1:
                    raise RuntimeError("nothing was restored")
                return time.perf_counter() - before
        finally:
            self.gone(directory)
            self.gone(shared)

    def memory(self) -> None:
        """What the process takes beyond the two slots, and whether it grows."""
        saves = 12 if self.pairs == 3 else 50
        self.say(f"memory over {saves} saves")
        process = psutil.Process()
        with Checkpointer(self.fresh(), keep=1) as ckpt:
            self.warm(ckpt)
            own = [self._private(process)]
            for _ in range(saves):
                self.save_in_background(ckpt)
                ckpt.wait()
                own.append(self._private(process))
        half = len(own) // 2
        self.add("private memory of 50 saves", [max(own) / 1e6 - own[0] / 1e6], "MB", 64, "two slots", at_least=False)
        slope = statistics.median(own[half:]) - statistics.median(own[:half])
        self.add("growth over the second half of the saves", [slope / 1e6], "MB", 1, "zero", at_least=False)

    def _private(self, process: psutil.Process) -> int:
        facts = process.memory_info()
        return int(facts.rss - facts.shared)


def _ratio(above: list[float], below: list[float]) -> list[float]:
    """Pair by pair. What is lost in the noise counts as a millisecond, so that it never makes a ratio look good."""
    return [max(a, 1e-3) / max(b, 1e-3) for a, b in zip(above, below, strict=True)]


def drop_caches() -> bool:
    """Whether the page cache could be dropped."""
    ctypes.CDLL(None).sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


def die(directory: Path, shared: Path, elements: int) -> None:
    """A program that saves once and is killed."""
    torch.set_num_threads(1)
    model, optimizer = build(elements)
    ckpt = Checkpointer(directory, shm=shared)
    ckpt.save(1, {"model": model, "optimizer": optimizer}, block=True)
    os.kill(os.getpid(), 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer rounds, for a first look")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--directory", type=Path, help="on the file system to measure (default: the temporary folder)")
    parser.add_argument("--die", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shm", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--elements", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.die:
        die(given.die, given.shm, given.elements)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up when it is stopped, too
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    run = Run(given.quick, given.directory)
    try:
        run.say(f"state of {run.bytes / 1e9:.2f} GB in 150 tensors, {run.pairs} rounds, {os.cpu_count()} cores")
        run.saving()
        run.loading()
        run.memory()
    finally:
        shutil.rmtree(run.folder, ignore_errors=True)
    print(f"\n{'figure':58} {'value':>9} {'bar':>9}         limit; spread of {run.pairs} pairs")
    for f in run.figures:
        met = "" if f.bar is None else "met" if (f.value >= f.bar) == f.at_least or f.value == f.bar else "MISSED"
        bar = "" if f.bar is None else f"{'>=' if f.at_least else '<='} {f.bar:g}"
        print(f"{f.name:58} {f.value:7.3g} {f.unit:2} {bar:>8} {met:6} {f.limit}; {f.spread}")
    if given.json:
        given.json.write_text(json.dumps([asdict(f) for f in run.figures], indent=1))


if __name__ == "__main__":
    main()
