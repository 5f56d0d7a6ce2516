"""What the checkpoint tests share: programs of several ranks, as real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("worker.py")
SHARDED_WORKER = Path(__file__).with_name("sharded_worker.py")
Ranks = Callable[..., "Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the ranks of one start did.

    Args:
        codes: exit status of each rank.
        said: what each rank printed as its last line, from JSON; None where it printed nothing.
        errors: standard error of each rank.
    """

    codes: list[int]
    said: list[Any]
    errors: list[str]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_", "TRANSOM_", "PMIX_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint directory that does not exist yet."""
    return tmp_path / "checkpoints"


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Path]:
    """A private staging folder in shared memory, which must be empty of segments in the end."""
    path = Path("/dev/shm") / f"transom-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir(mode=0o700)
    yield path
    left = [p.name for p in path.iterdir() if not p.name.startswith(".")]
    for p in path.iterdir():
        p.unlink()
    path.rmdir()
    assert left == [], "segments were left"


class Server:
    """The process that forks ranks; see worker.py."""

    def __init__(self, worker: Path = WORKER) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._alive: set[int] = set()

    def ask(self, line: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def start(self, **order: Any) -> int:
        pid = self.ask(json.dumps(order))
        self._alive.add(pid)
        return pid

    def wait(self, pid: int) -> int:
        code = self.ask(f"wait {pid}")
        self._alive.discard(pid)
        return code

    def kill(self, pid: int) -> None:
        self.ask(f"kill {pid}")

    def kill_all(self) -> None:
        for pid in list(self._alive):
            self.kill(pid)
            self.wait(pid)

    def close(self) -> None:
        self.kill_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


@pytest.fixture(scope="session")
def sharded_server() -> Iterator[Server]:
    found = Server(SHARDED_WORKER)
    yield found
    found.close()


@pytest.fixture
def ranks(server: Server, staging: Path, tmp_path: Path) -> Iterator[Ranks]:
    """Starts the scenario of worker.py with this name on several ranks and waits for all of them."""
    yield from _starter(server, staging, tmp_path)


@pytest.fixture
def sharded(sharded_server: Server, staging: Path, tmp_path: Path) -> Iterator[Ranks]:
    """The same with those of sharded_worker.py."""
    yield from _starter(sharded_server, staging, tmp_path)


def _starter(server: Server, staging: Path, tmp_path: Path) -> Iterator[Ranks]:
    starts = 0

    def start(scenario: str, world_size: int, attempt: str, **facts: Any) -> Outcome:
        nonlocal starts
        starts += 1
        port = _free_port()
        given = {"attempt": attempt, "shm": str(staging), **{k: _plain(v) for k, v in facts.items()}}
        files = [(tmp_path / f"{starts}-{rank}.out", tmp_path / f"{starts}-{rank}.err") for rank in range(world_size)]
        pids = [
            server.start(
                scenario=scenario,
                facts=given,
                out=str(out),
                err=str(err),
                environment={
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "GLOO_SOCKET_IFNAME": "lo",
                },
            )
            for rank, (out, err) in enumerate(files)
        ]
        codes = [server.wait(pid) for pid in pids]
        said = [json.loads(out.read_text().splitlines()[-1]) if out.read_text().strip() else None for out, _ in files]
        return Outcome(codes, said, [err.read_text() for _, err in files])

    yield start
    server.kill_all()


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
