"""The kernel answers wrongly, at every call of a save, a commit, a delete, a start and an end, in turn.

Below everything that Python can see, so the libraries' own calls are among them. After each: what was committed is
there bit for bit, what was not is invisible and cleaned up, all ranks agree, and the next save works.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from injected import ERROR, ERROR_AFTER, HANG, KILL_AFTER, KILL_BEFORE, SHORT

pytestmark = pytest.mark.timeout(600)

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES)
CHANGES = ("rename", "mkdir", "unlink", "rmdir", "create", "fsync", "close")
"""What may be done although an error is reported, as when a server's answer is lost."""


@dataclass(frozen=True, slots=True)
class Point:
    """One call and what it answers."""

    site: str
    at: int
    fault: int
    errno: int = 0

    @property
    def what(self) -> str:
        name = {ERROR: "", SHORT: "short", KILL_BEFORE: "killed before", KILL_AFTER: "killed after", HANG: "hangs"}
        return name.get(self.fault) or errno.errorcode[self.errno] + (", but done" * (self.fault == ERROR_AFTER))


class Server:
    """Forks programs with the shim; see injected.py."""

    def __init__(self, shim: Path) -> None:
        here = Path(__file__).with_name("injected.py")
        self._process = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LD_PRELOAD": str(shim)},
        )

    def say(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, **order: Any) -> dict[str, Any]:
        return self.say(json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in order.items()}))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(20)


LANES = 3
"""Points tried at the same time: most of the time of those of several ranks is waiting for each other."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc), for the shim between the program and the kernel")
    shim = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl", "-lpthread"]
    subprocess.run(command, check=True, timeout=60)
    found = [Server(shim) for _ in range(LANES)]
    yield found
    for server in found:
        server.close()


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    path = Path("/dev/shm") / f"transom-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


class Bench:
    """Runs points, a few at a time, each in a copy of the same directory, in which step 2 is committed."""

    def __init__(self, servers: list[Server], folder: Path, shm: Path) -> None:
        self._free: queue.SimpleQueue[Server] = queue.SimpleQueue()
        for server in servers:
            self._free.put(server)
        self._folder = folder
        self._shm = shm
        self._numbers = itertools.count()
        self._template = folder / "template"
        self.points: list[tuple[str, Point]] = []
        made = servers[0].ask(scenario="seed", directory=self._template, shm=shm / "seed")
        assert made["code"] == 0, made["said"]

    def all(self, points: list[Point], run: Callable[[Point], object]) -> None:
        """Run all points; what fails is told together."""

        def one(point: Point) -> str:
            try:
                run(point)
            except AssertionError as error:
                return f"{point}: {error}"
            return ""

        with ThreadPoolExecutor(LANES) as pool:
            failed = [why for why in pool.map(one, points) if why]
        assert not failed, f"{len(failed)} failed: " + "\n".join(failed[:20])
        print(f"\n{self.table()}")

    @contextlib.contextmanager
    def _place(self) -> Iterator[tuple[Server, dict[str, Any]]]:
        """A server, and folders that go when the point is done with."""
        server, number = self._free.get(), str(next(self._numbers))
        facts = {"directory": self._folder / number, "shm": self._shm / number}
        try:
            yield server, facts
        finally:
            self._free.put(server)
            for path in facts.values():
                shutil.rmtree(path, ignore_errors=True)

    def ask(self, scenario: str, point: Point | None = None, allowed: tuple[int, ...] = ()) -> Any:
        """One program, with one fault; where that killed it, the one after it as well."""
        with self._place() as (server, facts):
            order: dict[str, Any] = {"scenario": scenario, "template": self._template, **facts}
            if point is not None:
                self.points.append((scenario, point))
                order |= {"at": point.at, "fault": point.fault, "errno": point.errno}
            before = time.monotonic()
            answer = server.ask(**order)
            ended = point is not None and point.fault in (KILL_BEFORE, KILL_AFTER)
            assert answer["code"] == (-9 if ended else 0), f"{scenario}: {answer['said']}"
            if allowed and point is not None and point.fault in (KILL_BEFORE, KILL_AFTER, HANG):
                after = server.ask(scenario="after", allowed=allowed, **facts)
                assert after["code"] == 0, f"after {scenario}: {after['said']}"
            assert time.monotonic() - before < 10, "something was waited for"
            return answer["said"]

    def ranks(self, order: dict[str, Any], *scenarios: str) -> list[list[dict[str, Any]]]:
        """Programs of several ranks, one after the other; what each rank answered."""
        with self._place() as (server, facts):
            found = []
            for scenario in scenarios:
                asked = {**facts, "scenario": scenario, "later": True, "world_size": RANKS}
                asked |= order if scenario == "together" else {}
                pids = [server.ask(my_rank=rank, **asked)["pid"] for rank in range(RANKS)]
                found.append([server.say(f"wait {pid}") for pid in pids])
            return found

    def table(self) -> str:
        """What was tried where, and how often."""
        rows: dict[tuple[str, str], Counter[str]] = {}
        for scenario, point in self.points:
            rows.setdefault((scenario, point.site), Counter())[point.what] += 1
        lines = [
            f"{scenario:6} {where:64} {', '.join(f'{what} x{n}' if n > 1 else what for what, n in tried.items())}"
            for (scenario, where), tried in rows.items()
        ]
        return "\n".join([*lines, f"{len(self.points)} points at {len(rows)} sites"])


@pytest.fixture
def bench(servers: list[Server], shm: Path) -> Bench:
    """In memory, where a save costs little. The kernel's answers are the shim's."""
    return Bench(servers, shm / "disk", shm)


@pytest.fixture
def disk_bench(servers: list[Server], tmp_path: Path, shm: Path) -> Bench:
    return Bench(servers, tmp_path / "disk", shm)


def site(line: str) -> str:
    """A call without what differs from run to run."""
    return re.sub(r"\.T\d+T[\d.]+|\d+", "#", line)


def faults(calls: list[str], every_error: bool) -> list[Point]:
    """All points of a program that makes these calls."""
    points = []
    for at, line in enumerate(calls):
        call = line.split()[2]
        rotated = [ERRORS[(at + i) % 4] for i in range(4 if every_error else 1)]
        points += [Point(site(line), at, ERROR, number) for number in rotated]
        points.append(Point(site(line), at, KILL_BEFORE))
        if call in CHANGES:
            points.append(Point(site(line), at, ERROR_AFTER, errno.EIO))
        if call in ("pwrite", "write", "pread", "read"):
            points.append(Point(site(line), at, SHORT))
    return [*points, Point(site(calls[-1]), len(calls) - 1, KILL_AFTER)]


SINGLE = {"first": (2, 4), "again": (6, 8), "start": (2,), "end": (4,)}
"""What a program does, and the steps of which one must be there when it was killed in it."""


@pytest.mark.parametrize("scenario", ["first", "start", "end"])
def test_every_call_of_one_rank(bench: Bench, scenario: str) -> None:
    one_rank(bench, scenario, False)


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SINGLE)
def test_every_call_of_one_rank_with_every_error(disk_bench: Bench, scenario: str) -> None:
    one_rank(disk_bench, scenario, True)


def one_rank(bench: Bench, scenario: str, every_error: bool) -> None:
    calls = bench.ask(scenario)["calls"]
    bench.all(faults(calls, every_error), lambda point: bench.ask(scenario, point, SINGLE[scenario]))
    assert len(bench.points) > {"first": 170, "again": 170, "start": 150, "end": 25}[scenario]
    kinds = {line.split()[2] for line in calls}
    wanted = {
        "first": {"pwrite", "fallocate", "ftruncate", "fsync", "rename", "create", "statvfs", "close"},
        "again": {"pwrite", "fsync", "rename", "create", "statvfs", "close"},
        "start": {"open", "create", "rename", "pread", "unlink", "rmdir", "mkdir", "stat"},
        "end": {"unlink", "close"},
    }[scenario]
    assert kinds >= wanted, wanted - kinds


RANKS = 4


@pytest.mark.parametrize("victim", [0, 2])
def test_a_call_at_each_site_of_one_rank_of_four(bench: Bench, victim: int) -> None:
    four_ranks(bench, victim, 1)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_every_call_of_one_rank_of_four(disk_bench: Bench, victim: int) -> None:
    four_ranks(disk_bench, victim, 1 << 30)


def four_ranks(bench: Bench, victim: int, each: int) -> None:
    """At most so many calls of each site, with an error or a kill in turn."""
    (clean,) = bench.ranks({}, "together")
    assert [said["code"] for said in clean] == [0] * RANKS, clean
    assert [said["said"]["told"] for said in clean] == [""] * RANKS
    seen: Counter[str] = Counter()
    points = []
    for at, line in enumerate(clean[victim]["said"]["calls"]):
        where = site(line)
        seen[where] += 1
        if seen[where] <= each:
            fault = KILL_BEFORE if len(points) % 3 == 2 else ERROR
            points.append(Point(where, at, fault, ERRORS[at % 4] if fault == ERROR else 0))
    bench.points += [(f"rank {victim}", point) for point in points]
    bench.all(points, lambda point: one_of_four(bench, victim, point))
    assert len(seen) > (20 if victim == 0 else 12)


def one_of_four(bench: Bench, victim: int, point: Point) -> None:
    killed = point.fault == KILL_BEFORE
    order = {"victim": victim, "at": point.at, "fault": point.fault, "errno": point.errno}
    before = time.monotonic()
    done, again = bench.ranks({**order, "deadline_s": 0.5 if killed else 60.0}, "together", "resumes")
    assert time.monotonic() - before < 25, "what fails is told to the others, which do not wait for a deadline"
    for rank, said in enumerate(done):
        assert said["code"] == (-9 if killed and rank == victim else 0), said["said"]
    assert [said["code"] for said in again] == [0] * RANKS, [said["said"] for said in again]
    assert [said["said"]["told"] for said in again] == [""] * RANKS
    starts = {said["said"]["start"] for said in again}
    assert starts in (({4}, {6}) if killed else ({8},)), starts


def test_a_call_that_hangs_holds_no_program_up(bench: Bench) -> None:
    """Every call in the background of a save: the program goes on, and the one after it finds what was committed."""
    sites: dict[str, int] = {}
    for at, line in enumerate(bench.ask("hangs")["calls"]):
        if line.startswith("disk background") and "list" not in line:
            sites.setdefault(site(line), at)
    assert len(sites) > 15

    def hang(point: Point) -> None:
        assert bench.ask("hangs", point, (2, 4, 6, 8))["longest"] < 1

    bench.all([Point(where, at, HANG) for where, at in sites.items()], hang)
