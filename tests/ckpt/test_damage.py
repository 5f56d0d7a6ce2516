"""Shared memory and files damaged in turn, on several ranks: found before any tensor is touched, the same fall-back for
all."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transom_hpc.ckpt import Checkpointer, list_checkpoints
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.shm import HEADER_BYTES, Segment

RANKS = 3


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


class Left:
    """What a program left that died with step 2 committed, and step 4 in memory only. It can be put back."""

    def __init__(self, directory: Path, shm: Path, kept: Path) -> None:
        self.directory, self.shm, self._kept = directory, shm, kept
        for number, path in enumerate((directory, shm)):
            shutil.copytree(path, kept / str(number))

    def again(self) -> None:
        for number, path in enumerate((self.directory, self.shm)):
            for entry in path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            shutil.copytree(self._kept / str(number), path, dirs_exist_ok=True)

    def segment(self, rank: int, step: int = 4) -> Path:
        for path in sorted(p for p in self.shm.glob(f"*-rank-{rank:05d}.*") if p.name[0] != "."):
            found = Segment(path, Files())
            found.open()
            header = found.header()
            if header is not None and header.step == step:
                return path
        raise AssertionError(f"no segment of step {step} of rank {rank}")


@pytest.fixture
def left(ranks: Any, directory: Path, staging: Path, tmp_path: Path, request: Any) -> Left:
    count = getattr(request, "param", 1)
    died = ranks("dies", count, "A1", directory=directory)
    assert died.codes == [-9] * count, died.errors
    return Left(directory, staging, tmp_path / "kept")


def used(path: Path) -> int:
    """Where the table of a segment begins."""
    found: int = struct.unpack_from("<Q", path.read_bytes()[:HEADER_BYTES], struct.calcsize("<8sIIQQQ64s40s"))[0]
    return HEADER_BYTES + found


def in_memory(left: Left, rank: int = 0) -> dict[str, Callable[[], object]]:
    """Ways in which a segment of step 4 is damaged."""
    path = left.segment(rank)
    size, table = path.stat().st_size, used(path)
    damages: dict[str, Callable[[], object]] = {
        f"bit at {at}": lambda at=at: flip(path, at)
        for at in (0, 9, 13, 17, 30, 40, 60, 120, 145, 153, 161, HEADER_BYTES, table - 4096, table, table + 300)
    }
    for share in (0.0, 0.01, 0.5, 0.999):
        damages[f"cut at {share:.1%}"] = lambda share=share: os.truncate(path, int(size * share))
    damages["cut to its header"] = lambda: os.truncate(path, HEADER_BYTES)
    damages["zeros"] = lambda: path.write_bytes(bytes(size))
    damages["zeros behind the header"] = lambda: path.write_bytes(path.read_bytes()[:HEADER_BYTES].ljust(size, b"\0"))
    damages["gone"] = path.unlink
    damages["a folder"] = lambda: (path.unlink(), path.mkdir())
    damages["a link"] = lambda: (path.rename(left.shm / ".elsewhere"), path.symlink_to(left.shm / ".elsewhere"))
    damages["a pipe"] = lambda: (path.unlink(), os.mkfifo(path))
    return damages


def test_every_damage_of_memory(left: Left) -> None:
    names = list(in_memory(left))
    assert len(names) > 20
    for name in names:
        left.again()
        in_memory(left)[name]()
        target: dict[str, Any] = {"same": torch.zeros(500_000), "own": torch.zeros(1000, dtype=torch.int64), "n": 0}
        with Checkpointer(left.directory, attempt="A2", shm=left.shm, deadline_s=20.0) as ckpt:
            step = ckpt.restore(target)
        assert step == (4 if name == "cut at 99.9%" else 2), f"{name}: behind the table is room that nobody uses"
        assert torch.equal(target["same"], torch.arange(500_000.0) + step), name
        assert target["n"] == step, name
    for entry in left.shm.iterdir():
        if entry.is_dir():
            entry.rmdir()


@pytest.mark.parametrize("left", [RANKS], indirect=True)
def test_memory_of_one_rank_of_three(ranks: Any, left: Left) -> None:
    """What one rank has lost is lost to all, and all go back to the same step."""
    whole = {rank: left.segment(rank) for rank in range(RANKS)}
    damages: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "gone": whole[2].unlink,
        "a bit": lambda: flip(whole[1], HEADER_BYTES + 100),
        "cut": lambda: os.truncate(whole[2], whole[2].stat().st_size // 2),
        "another rank's": lambda: shutil.copy(whole[0], whole[1]),
        "an older one's": lambda: shutil.copy(left.segment(1, 2), whole[1]),
    }
    for number, (name, damage) in enumerate(damages.items()):
        left.again()
        damage()
        done = ranks("lives", RANKS, f"A{2 + number}", directory=left.directory)
        assert done.codes == [0] * RANKS, (name, done.errors)
        assert [said["start"] for said in done.said] == [4 if name == "nothing" else 2] * RANKS, name
        assert all(said["right"] for said in done.said), name


@pytest.mark.parametrize("left", [RANKS], indirect=True)
def test_ranks_that_have_their_memory_take_it_where_others_read_the_file(ranks: Any, left: Left) -> None:
    """Step 4 is nowhere whole; of step 2, which is in the file, one rank's memory has gone and another's is spoilt."""
    for rank in range(RANKS):
        left.segment(rank).unlink()
    left.segment(0, 2).unlink()
    flip(left.segment(1, 2), HEADER_BYTES + 100)
    done = ranks("lives", RANKS, "A2", directory=left.directory)
    assert done.codes == [0] * RANKS, done.errors
    assert all(said["start"] == 2 and said["right"] for said in done.said)
    assert [said["source"] for said in done.said] == ["step-000000002", "step-000000002", "memory:A1"]


def test_files_of_four_ranks(ranks: Any, directory: Path, tmp_path: Path) -> None:
    assert ranks("arrays", 4, "A1", directory=directory, total=4).codes == [0] * 4
    kept = tmp_path / "kept"
    shutil.copytree(directory, kept)
    newest, older = directory / "step-000000004", directory / "step-000000002"
    own = {i.rank: i for i in list_checkpoints(directory)[-1].manifest.stored if i.entry.name == "tensors/own"}

    data = newest / own[0].file

    def no_part(rank: int) -> None:
        """As a file system that lost what one rank wrote."""
        with data.open("r+b") as file:
            file.seek(own[rank].offset)
            file.write(bytes(own[rank].entry.nbytes))

    damages: dict[str, Callable[[], object]] = {
        "one rank's part": lambda: no_part(3),
        "a bit that one rank reads": lambda: flip(data, own[2].offset + 5),
        "cut at 50%": lambda: os.truncate(data, data.stat().st_size // 2),
        "cut at 99.9%, size kept": lambda: (
            size := data.stat().st_size,
            os.truncate(data, int(size * 0.5)),
            os.truncate(data, size),
        ),
        "manifest only": data.unlink,
        "an older one's data": lambda: shutil.copy(next(older.glob("*.h5")), data),
        "an older one": lambda: (shutil.rmtree(newest), shutil.copytree(older, newest)),
    }
    for number, (name, damage) in enumerate(damages.items()):
        shutil.rmtree(directory)
        shutil.copytree(kept, directory)
        damage()
        done = ranks("arrays", 4, f"A{2 + number}", directory=directory, total=4)
        assert done.codes == [0] * 4, (name, done.errors)
        assert [said["start"] for said in done.said] == [2] * 4, name
        assert [said["same"] for said in done.said] == [5.0 + 0 + 1 + 2 + 3] * 4, name
        assert [c.step for c in list_checkpoints(directory)] == [2, 4], name


@pytest.mark.parametrize("damaged", [False, True])
def test_moments_that_the_optimizer_does_not_have_yet(
    directory: Path, staging: Path, tmp_path: Path, caplog: Any, damaged: bool
) -> None:
    """They are copied while they are compared, into memory that is dropped where a bit is wrong."""

    def program(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(1000, 700)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = program(1)
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    with Checkpointer(directory, attempt="A1", shm=staging) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer}, block=True)
        kept = [path for path in staging.glob("*-rank-00000.A1.*") if path.stat().st_size]
        copies = [Path(shutil.copy2(path, tmp_path)) for path in kept]
    for path, copy in zip(kept, copies, strict=True):
        shutil.copy2(copy, path)
        at = path.read_bytes().find(optimizer.state[model.weight]["exp_avg_sq"].numpy().tobytes())
        if damaged and at >= 0:
            flip(path, at + 2_000_001)
    other, empty = program(2)
    with Checkpointer(directory, attempt="A2", shm=staging) as ckpt:
        caplog.set_level("INFO")
        assert ckpt.restore({"model": other, "optimizer": empty}) == 1
    assert f"restored step 1 from {'step-' if damaged else 'memory:A1'}" in caplog.text
    assert torch.equal(other.weight, model.weight)
    for before, after in zip(model.parameters(), other.parameters(), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[before][moment], empty.state[after][moment])
