"""Memory is looked at before it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from transom_hpc.ckpt.budget import MARGIN_BYTES, Memory, read, room

GB = 1 << 30


def test_the_least_counts_and_ranks_share_it() -> None:
    memory = Memory(10 * GB, 20 * GB, 4 * GB + MARGIN_BYTES)
    assert room(memory, 1, None, 0) == 4 * GB
    assert room(memory, 4, None, 0) == GB
    assert room(memory, 1, 3 * GB, 2 * GB) == GB
    assert room(memory, 1, 3 * GB, 5 * GB) == 0
    assert room(Memory(0, None, None), 1, None, 0) == 0


def groups(root: Path, version: int, limit: str) -> tuple[Path, Path]:
    proc, tree = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    8388608 kB\n")
    if version == 2:
        leaf = tree / "job/step"
        (proc / "self/cgroup").write_text("0::/job/step\n")
        names = ("memory.max", "memory.current", "inactive_file")
    else:
        leaf = tree / "memory/job/step"
        (proc / "self/cgroup").write_text("4:memory:/job/step\n0::/\n")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    leaf.mkdir(parents=True)
    for folder, bound in ((leaf, "max" if version == 2 else str(1 << 62)), (leaf.parent, limit)):
        (folder / names[0]).write_text(bound + "\n")
        (folder / names[1]).write_text(f"{2 * GB}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {GB}\n")
    return proc, tree


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_job_above_the_step(tmp_path: Path, version: int) -> None:
    proc, tree = groups(tmp_path, version, str(3 * GB))
    found = read(tmp_path, proc, tree)
    assert found.group_bytes == 2 * GB, "limit less usage, reclaimable cache not counted"
    assert found.machine_bytes == 8 * GB


def test_no_limit(tmp_path: Path) -> None:
    proc, tree = groups(tmp_path, 2, "max")
    assert read(tmp_path, proc, tree).group_bytes is None


def test_here() -> None:
    found = read(Path("/dev/shm"))
    assert found.shared_bytes > 0
    assert found.free_bytes <= found.shared_bytes
