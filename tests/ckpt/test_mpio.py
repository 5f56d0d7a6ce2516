"""Parallel HDF5 on real MPI ranks makes the files that the direct writer makes, never hangs, never commits a half."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import Checkpointer, list_checkpoints, verify

WORKER = Path(__file__).with_name("mpi_worker.py")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine (scripts/setup)"),
    pytest.mark.skipif(not h5py.get_config().mpi, reason="h5py was built without MPI (scripts/setup)"),
]


def mpirun(scenario: str, folder: Path, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    start = ["mpirun", "--oversubscribe", "--allow-run-as-root", *options, "-n", str(ranks), sys.executable]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*start, str(WORKER), scenario, str(folder)], capture_output=True, text=True, timeout=100, env=environment
    )


def data(step: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(step.glob("data-*.h5"))}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_both_writers_make_the_same_files(tmp_path: Path, ranks: int) -> None:
    done = mpirun("both", tmp_path, ranks)
    assert done.returncode == 0, done.stderr
    found = {name: list_checkpoints(tmp_path / name)[0] for name in ("direct", "mpio", "auto")}
    assert {name: verify(c.path) for name, c in found.items()} == {"direct": [], "mpio": [], "auto": []}
    assert [found[name].manifest.writer for name in ("direct", "mpio")] == ["direct", "mpio"]
    assert len(found["direct"].manifest.files) == ranks
    for name in ("mpio", "auto"):
        assert data(found[name].path) == data(found["direct"].path)
        assert found[name].manifest.stored == found["direct"].manifest.stored
    first = found["mpio"].path / "data-00000.h5"
    with h5py.File(first, driver="sec2") as file:
        assert np.array_equal(file["tensors/large"][:], np.random.default_rng(5).random((37, 41, 900)))
        for item in found["mpio"].manifest.stored:  # whichever file it is in
            assert file[item.path].nbytes == item.entry.nbytes, item
        assert file["objects/object"].attrs["holds"] == "pickle"
    for command in (["h5dump", "-H"], ["h5ls", "-r"], ["h5dump", "-d", "/tensors/one"]):
        tool = subprocess.run([*command, str(first)], capture_output=True, text=True, timeout=30)
        assert tool.returncode == 0, tool.stderr
    record = json.loads((tmp_path / "auto" / ".writer-choice.json").read_text())
    assert (record["choice"], record["ranks"], record["why"]) == (found["auto"].manifest.writer, ranks, "")
    assert min(record["bytes_per_s"].values()) > 0
    assert not (tmp_path / "direct" / ".writer-choice.json").exists()
    if ranks == 2:
        later_starts_take_what_is_recorded(tmp_path, record)


def later_starts_take_what_is_recorded(folder: Path, record: dict[str, Any]) -> None:
    path = folder / "auto" / ".writer-choice.json"
    path.write_text(json.dumps({**record, "choice": "mpio"}))
    before = path.read_text()
    done = mpirun("again", folder, 2)
    assert done.returncode == 0, done.stderr
    assert list_checkpoints(folder / "auto")[-1].manifest.writer == "mpio"
    assert path.read_text() == before


def test_a_death_inside_ends_by_the_deadline_and_commits_nothing(tmp_path: Path) -> None:
    done = mpirun("dies", tmp_path / "c", 2, "--enable-recovery")
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"told"')))
    assert "a collective write did not go on: has a rank died in it?" in told["told"][0], told
    assert "step 3" in told["told"][1]
    assert told["took"] < 30
    assert [c.step for c in list_checkpoints(tmp_path / "c")] == [1]
    assert verify(tmp_path / "c" / "step-000000001") == []


def test_the_interpreter_goes_on_while_others_are_late(tmp_path: Path) -> None:
    done = mpirun("late", tmp_path / "c", 2)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) > 40


def test_what_comes_back_other_than_it_was_written_is_noticed(tmp_path: Path) -> None:
    done = mpirun("lies", tmp_path, 1)
    assert done.returncode == 0, done.stderr
    assert "was read back other than MPI-IO was given it" in json.loads(done.stdout)
    assert list_checkpoints(tmp_path / "mpio") == []
    record = json.loads((tmp_path / "auto" / ".writer-choice.json").read_text())
    assert record["choice"] == "direct"
    assert "was read back other" in record["why"]
    (found,) = list_checkpoints(tmp_path / "auto")
    assert (found.manifest.writer, verify(found.path)) == ("direct", [])


def test_a_rank_that_fails_inside_leaves_nobody_hanging(tmp_path: Path) -> None:
    done = mpirun("tears", tmp_path / "c", 2)
    assert done.returncode == 0, done.stderr
    first, second, *later = done.stdout.splitlines()
    assert "rank 1 gave up: SaveError: it was torn" in first
    assert second == "it was torn"
    assert later == ["committed", "committed"]
    assert [(c.step, c.manifest.writer) for c in list_checkpoints(tmp_path / "c")] == [(2, "mpio")]
    assert verify(tmp_path / "c" / "step-000000002") == []


def test_one_process_writes_for_several_ranks_and_another_for_none(tmp_path: Path) -> None:
    done = mpirun("server", tmp_path, 3)
    assert done.returncode == 0, done.stderr
    direct, together = (list_checkpoints(tmp_path / name)[0] for name in ("direct", "mpio"))
    assert together.manifest.writer == "mpio"
    assert data(together.path) == data(direct.path)
    assert verify(together.path) == []


def test_mpio_is_refused_where_it_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"writer='mpio' can't be used: .*MPI is not started in this program"):
        Checkpointer(tmp_path / "c", writer="mpio")
    program = (
        "import mpi4py, sys\nmpi4py.rc.thread_level = sys.argv[1]\nfrom mpi4py import MPI\n"
        "from transom_hpc.ckpt import Checkpointer\n"
        f"c = Checkpointer({str(tmp_path / 'd')!r}, int(sys.argv[2]), int(sys.argv[3]), attempt='A1', writer='mpio')\n"
    )
    for level, rank, size, why in (
        ("serialized", 0, 1, "MPI was not started with THREAD_MULTIPLE"),
        ("multiple", 1, 2, "MPI sees 1 ranks and the program has 2"),
    ):
        command = [sys.executable, "-c", program, level, str(rank), str(size)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert f"writer='mpio' can't be used: {why}" in done.stderr
        assert "UsageError" in done.stderr
