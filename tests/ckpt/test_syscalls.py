"""The kernel answers wrongly, at every call of a save, a commit, a delete, a start and an end, in turn.

Below everything that Python can see, so the libraries' own calls are among them. After each: what was committed is
there bit for bit, what was not is invisible and cleaned up, all ranks agree, and the next save works.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc), for the shim between the program and the kernel")
    shim = tmp_path_factory.mktemp("shim") / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl", "-lpthread"], check=True, timeout=60
    )
    found = Server(shim)
    yield found
    found.close()


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    path = Path("/dev/shm") / f"transom-test-{os.getpid()}-{tmp_path.name}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


class Bench:
    """Runs points one after the other, each in a copy of the same directory, in which step 2 is committed."""

    def __init__(self, server: Server, folder: Path, shm: Path) -> None:
        self._server = server
        self._folder = folder
        self._shm = shm
        self._number = 0
        self._template = folder / "template"
        self.points: list[tuple[str, Point]] = []
        self._told: Counter[str] = Counter()
        made = server.ask(scenario="seed", directory=self._template, shm=shm / "seed")
        assert made["code"] == 0, made["said"]

    def ask(self, scenario: str, point: Point | None = None, allowed: tuple[int, ...] = ()) -> Any:
        """One program, with one fault; where that killed it, the one after it as well."""
        self._number += 1
        directory, shm = self._folder / str(self._number), self._shm / str(self._number)
        order: dict[str, Any] = {"scenario": scenario, "directory": directory, "shm": shm, "template": self._template}
        if point is not None:
            self.points.append((scenario, point))
            order |= {"at": point.at, "fault": point.fault, "errno": point.errno}
        answer = self._server.ask(**order)
        ended = point is not None and point.fault in (KILL_BEFORE, KILL_AFTER)
        assert answer["code"] == (-9 if ended else 0), f"{scenario}: {point}: {answer['said']}"
        if allowed and point is not None and point.fault in (KILL_BEFORE, KILL_AFTER, HANG):
            after = self._server.ask(scenario="after", directory=directory, shm=shm, allowed=allowed)
            assert after["code"] == 0, f"after {scenario}: {point}: {after['said']}"
        shutil.rmtree(directory)
        shutil.rmtree(shm)
        return answer["said"]

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

    def ranks(self, scenario: str, count: int, **order: Any) -> list[dict[str, Any]]:
        """One program of several ranks in the same directory as the one before; what each answered."""
        facts: dict[str, Any] = {"directory": self._folder / "ranks", "shm": self._shm / "ranks", **order}
        pids = [
            self._server.ask(scenario=scenario, later=True, my_rank=rank, world_size=count, **facts)["pid"]
            for rank in range(count)
        ]
        return [self._server.say(f"wait {pid}") for pid in pids]

    def forget_ranks(self) -> None:
        for path in (self._folder / "ranks", self._shm / "ranks"):
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def bench(server: Server, shm: Path) -> Bench:
    """In memory, where a save costs little. The kernel's answers are the shim's."""
    return Bench(server, shm / "disk", shm)


@pytest.fixture
def disk_bench(server: Server, tmp_path: Path, shm: Path) -> Bench:
    return Bench(server, tmp_path / "disk", shm)


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
    failed = []
    for point in faults(calls, every_error):
        try:
            before = time.monotonic()
            bench.ask(scenario, point, SINGLE[scenario])
            if time.monotonic() - before > 3:
                failed.append(f"{point} took {time.monotonic() - before:.0f} s")
        except AssertionError as error:
            failed.append(str(error))
    assert not failed, f"{len(failed)} failed: " + "\n".join(failed[:20])
    print(f"\n{bench.table()}")
    assert len(bench.points) > {"first": 180, "again": 180, "start": 160, "end": 25}[scenario]
    kinds = {line.split()[2] for line in calls}
    wanted = {
        "first": {"pwrite", "fallocate", "ftruncate", "fsync", "rename", "unlink", "rmdir", "create", "close"},
        "again": {"pwrite", "fallocate", "ftruncate", "fsync", "rename", "unlink", "rmdir", "create", "write"},
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
    clean = bench.ranks("together", RANKS)
    assert [said["code"] for said in clean] == [0] * RANKS, clean
    assert [said["said"]["told"] for said in clean] == [""] * RANKS
    bench.forget_ranks()
    seen: Counter[str] = Counter()
    failed = []
    for at, line in enumerate(clean[victim]["said"]["calls"]):
        where = site(line)
        seen[where] += 1
        if seen[where] > each:
            continue
        fault = KILL_BEFORE if len(bench.points) % 3 == 2 else ERROR
        point = Point(where, at, fault, ERRORS[at % 4] if fault == ERROR else 0)
        bench.points.append((f"rank {victim}", point))
        try:
            one_of_four(bench, victim, point)
        except AssertionError as error:
            failed.append(f"{point}: {error}")
        bench.forget_ranks()
    assert not failed, f"{len(failed)} failed: " + "\n".join(failed[:20])
    print(f"\n{bench.table()}")
    assert len(seen) > (20 if victim == 0 else 12)


def one_of_four(bench: Bench, victim: int, point: Point) -> None:
    killed = point.fault == KILL_BEFORE
    order = {"victim": victim, "at": point.at, "fault": point.fault, "errno": point.errno}
    before = time.monotonic()
    done = bench.ranks("together", RANKS, deadline_s=0.5 if killed else 60.0, **order)
    assert time.monotonic() - before < 20, "what fails is told to the others, which do not wait for a deadline"
    for rank, said in enumerate(done):
        assert said["code"] == (-9 if killed and rank == victim else 0), said["said"]
    again = bench.ranks("resumes", RANKS)
    assert [said["code"] for said in again] == [0] * RANKS, [said["said"] for said in again]
    assert [said["said"]["told"] for said in again] == [""] * RANKS
    starts = {said["said"]["start"] for said in again}
    assert starts in (({4}, {6}) if killed else ({8},)), starts


def test_a_call_that_hangs_holds_no_program_up(bench: Bench) -> None:
    """Every call in the background of a save: the program goes on, and the one after it finds what was committed."""
    calls = bench.ask("hangs")["calls"]
    sites: dict[str, int] = {}
    for at, line in enumerate(calls):
        if line.startswith("disk background") and "list" not in line:
            sites.setdefault(site(line), at)
    for where, at in sites.items():
        said = bench.ask("hangs", Point(where, at, HANG), (2, 4, 6, 8))
        assert said["longest"] < 1, where
    print(f"\n{bench.table()}")
    assert len(sites) > 15
