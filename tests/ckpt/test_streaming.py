"""Export, import and diff of what is larger than they may hold: peaks of memory, and sizes above 2 GiB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MOST_MB = 80
"""What a tool may take on top of what is there before: some pieces of 8 MiB on their way, a block or two, and what the
heap keeps of them; less than the smallest file."""

PROGRAM = """
import json, shutil, sys, threading, time, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint
from transom_hpc.ckpt import compare, export, read_checkpoint
from transom_hpc.ckpt.arriving import arrive
from transom_hpc.ckpt.importing import import_state

folder, sizes = Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]

def anonymous():
    facts = dict(line.split(":") for line in open("/proc/self/status") if ":" in line)
    return sum(int(facts[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024

class Peak:
    def __enter__(self):
        self.before, self.most, self.over = anonymous(), 0.0, threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        while not self.over.wait(0.002):
            self.most = max(self.most, anonymous() - self.before)
    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

def sparse(path, size, last):
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    header = header.ljust(-(-len(header) // 8) * 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
        file.seek(-1, 2)
        file.write(bytes([last]))

peaks = {}
def measured(name, job):
    with Peak() as peak:
        result = job()
    peaks[name] = peak.most
    return result

for size in sizes:
    place = folder / str(size)
    place.mkdir()
    made = []
    for step, last in ((1, 7), (2, 9)):
        source = place / f"{step}.safetensors"
        sparse(source, size, last)
        made.append(measured("import", lambda: import_state(arrive(source), place / "checkpoints", step)).path)
    a, b = map(read_checkpoint, made)
    found = measured("diff", lambda: compare.compare(a, b))
    assert [(c.apart.differing, c.apart.max_abs) for c in found.changes] == [(1, 2)], found
    for name in ("x.safetensors", "x.pt"):
        measured(name, lambda: export.export(b, export.plan(b, place / name, "model"), place / name))
    assert (place / "x.safetensors").stat().st_size > size
    with (place / "x.safetensors").open("rb") as file:
        file.seek(-2, 2)
        assert file.read() == bytes([0, 9])
    held = torch.load(place / "x.pt", weights_only=True, mmap=True)["w"]
    assert (len(held), held[-1], held[-2], int(held[: size // 2].max())) == (size, 9, 0, 0)
    del held
    again = measured("import of torch", lambda: import_state(arrive(place / "x.pt"), place / "checkpoints", 3)).path
    assert compare.compare(b, read_checkpoint(again)).same
    shutil.rmtree(place)

def dcp_folder(path, count):
    warnings.simplefilter("ignore")  # it says that there is no process group
    torch.distributed.checkpoint.save(
        {str(i): torch.full((4 << 20,), i, dtype=torch.uint8) for i in range(count)}, checkpoint_id=path, no_dist=True
    )

for count in (1, 30):
    dcp_folder(folder / "dcp", count)
    made = measured("import of dcp", lambda: import_state(arrive(folder / "dcp"), folder / "of-dcp", count))
    assert made.arrays == count
    shutil.rmtree(folder / "dcp")
print(json.dumps(peaks))
"""


def peaks(folder: Path, *sizes: int, timeout: int) -> dict[str, float]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *map(str, sizes)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_memory_is_bounded(tmp_path: Path) -> None:
    found = peaks(tmp_path, 1000, 120 << 20, timeout=100)
    assert len(found) == 6
    assert {name: peak for name, peak in found.items() if peak > MOST_MB} == {}, found


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_above_two_gibibytes(tmp_path: Path) -> None:
    found = peaks(tmp_path, 1000, (2 << 30) + (200 << 20) + 5, timeout=850)
    assert {name: peak for name, peak in found.items() if peak > MOST_MB} == {}, found
