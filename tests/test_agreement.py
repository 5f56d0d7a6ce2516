"""How the ranks of a program agree: all learn of a flag in the same round, whatever they talk with."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from transom_hpc.agreement import Alone, find_agreement, say_to_all

RANKS = 3
ROUNDS = 6
TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
"""
MPI = """
from mpi4py import MPI
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
"""
# Rank 1 raises its flag in the third round; ranks are out of step by a little, as real ones are.
BODY = f"""
import sys, time
from transom_hpc.agreement import find_agreement, say_to_all
agreement = find_agreement(size)
seen = []
for turn in range({ROUNDS}):
    time.sleep(0.01 * ((rank + turn) % size))
    seen.append(agreement.exchange(int(rank == 1 and turn == 2)))
agreement.close()
open(sys.argv[1] + str(rank), "w").write(f"{{type(agreement).__name__}} {{seen}} {{say_to_all(f'by {{rank}}', size)}}")
"""


@pytest.fixture
def said(tmp_path: Path) -> Path:
    (tmp_path / "said").mkdir()
    return tmp_path / "said"


def check(said: Path, kind: str) -> None:
    """A flag raised in one round is seen by everybody in the next, and rank 0's words by all."""
    heard = {path.name: path.read_text() for path in said.iterdir()}
    assert heard == {str(rank): f"{kind} [0, 0, 0, 1, 0, 0] by 0" for rank in range(RANKS)}


def test_alone() -> None:
    agreement = find_agreement(1)
    assert isinstance(agreement, Alone)
    assert [agreement.exchange(flag) for flag in (0, 1, 0, 0)] == [0, 0, 1, 0]
    agreement.close()
    assert say_to_all("me", 1) == "me"


def test_ranks_that_do_not_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert find_agreement(2) is None
    assert say_to_all("me", 2) is None


def test_through_torch(said: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", TORCH + BODY, f"{said}/"]
    ranks = [subprocess.Popen(command, env=common | {"RANK": str(rank)}) for rank in range(RANKS)]
    try:
        assert {rank.wait(100) for rank in ranks} == {0}
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    check(said, "TorchAgreement")


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine (scripts/setup)")
def test_through_mpi(said: Path) -> None:
    start = ["mpirun", "--oversubscribe", "--allow-run-as-root", "-n", str(RANKS)]
    subprocess.run([*start, sys.executable, "-c", MPI + BODY, f"{said}/"], check=True, timeout=100)
    check(said, "MpiAgreement")


@pytest.mark.mpi
def test_mpi_that_does_not_see_the_others() -> None:
    """As under srun with the wrong --mpi: each process is rank 0 of 1."""
    done = subprocess.run(
        [sys.executable, "-c", MPI + BODY.replace("find_agreement(size)", "find_agreement(4)")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "UsageError: 4 processes were started, but MPI sees 1" in done.stderr
    assert "srun --mpi=list" in done.stderr
