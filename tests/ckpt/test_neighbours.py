"""Hosts that keep copies of each other's memory over real MPI: what arrives, what is brought back, what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.ckpt.cargo import compare
from transom_hpc.ckpt.copies import Copies
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.roster import MARK
from transom_hpc.ckpt.shm import HEADER_BYTES, Segment
from transom_hpc.ckpt.slots import read_left

WORKER = Path(__file__).with_name("neighbours_worker.py")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun on this machine (scripts/setup)"),
]


class Hosts:
    """Some hosts, each with a staging folder, as processes of one mpirun."""

    def __init__(self, shm: Path, directory: Path) -> None:
        self.shm = shm
        self.directory = directory
        self.log = ""

    def run(self, scenario: str, serving: str, spares: str = "", **facts: Any) -> list[dict[str, Any]]:
        """Run a scenario; hosts are named by letters.

        Returns:
            What each host said.
        """
        hosts = sorted(serving + spares)
        for host in hosts:
            (self.shm / host).mkdir(mode=0o700, exist_ok=True)
        given = {"hosts": hosts, "serving": list(serving), "shm": str(self.shm), "directory": str(self.directory)}
        options = ["--oversubscribe", "--allow-run-as-root", "--enable-recovery", "-n", str(len(hosts))]
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            ["mpirun", *options, sys.executable, str(WORKER), scenario, json.dumps({**given, **facts})],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment,
        )
        self.log = done.stdout + done.stderr
        said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert not any("error" in facts for facts in said), self.log
        return said

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What the launcher would read in the log."""
        lines = [json.loads(line.partition(MARK)[2]) for line in self.log.splitlines() if MARK in line]
        return [line for line in lines if line["kind"] == kind]

    def copies(self, host: str) -> dict[int, set[int]]:
        """For each rank the steps of which a host has whole copies; every byte of them is compared."""
        found: dict[int, set[int]] = {}
        folder = Copies(self.shm / host, host, None, 0, Files())
        for item in folder.inventory():
            if item.copy:
                left = folder.find(item.name, item.step, item.attempt)
                assert left is not None
                compare(left)
                found.setdefault(item.rank, set()).add(item.step)
        return found

    def lose(self, host: str) -> None:
        shutil.rmtree(self.shm / host)

    def forget_files(self) -> None:
        """Nothing can be read from disk any more."""
        for path in self.directory.glob("step-*"):
            shutil.rmtree(path)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    shm = Path("/dev/shm") / f"transom-test-{os.getpid()}-{tmp_path.name}"
    shm.mkdir(mode=0o700)
    yield Hosts(shm, tmp_path / "checkpoints")
    shutil.rmtree(shm)


def whole(folder: Path, copies: bool = True) -> list[Any]:
    paths = [
        path for path in folder.glob("*-rank-*") if path.name.startswith("copy.") == copies and path.name[0] != "."
    ]
    found = [read_left(Segment(path, Files())) for path in paths]
    return [left for left in found if left is not None]


def test_copies_arrive_bit_for_bit_and_are_brought_back(hosts: Hosts) -> None:
    said = hosts.run("copied", "abc", "d", attempt="A1", steps=[1, 2, 3])
    assert [facts["sent"] for facts in sorted(said, key=lambda f: f["host"])] == [3, 3, 3, 0], hosts.log
    assert {host: hosts.copies(host) for host in "abcd"} == {
        "a": {},
        "b": {0: {2, 3}},
        "c": {1: {2, 3}},
        "d": {2: {2, 3}},
    }
    for keeper, rank, owner in (("b", 0, "a"), ("c", 1, "b"), ("d", 2, "c")):
        for copy in whole(hosts.shm / keeper):
            (own,) = [left for left in whole(hosts.shm / owner, copies=False) if left.step == copy.step]
            assert (copy.entries, copy.places, copy.world_size) == (own.entries, own.places, 3)
            for entry, at in zip(own.entries, own.places, strict=True):
                assert copy.segment.data(at, at + entry.nbytes) == own.segment.data(at, at + entry.nbytes), (
                    rank,
                    entry,
                )
    assert len(list(hosts.shm.glob("*/copy.*"))) == 6, "two of each rank"
    received = {facts["host"]: facts["received"] for facts in said}
    assert received["d"] - received["c"] == 3 * 1_600_000, "what c's own rank has saved alike is not sent to it"
    hosts.lose("b")
    hosts.forget_files()
    said = hosts.run("restored", "adc", "", attempt="A2")
    assert sorted((facts["host"], facts["step"], facts["same"]) for facts in said) == [
        ("a", 3, True),
        ("c", 3, True),
        ("d", 3, True),
    ], hosts.log
    (told,) = hosts.told("gathered")
    assert (told["steps"], told["moved"], told["lost"], told["spoilt"]) == ([3], 1, [], {})
    assert 9_000_000 < told["bytes"] < 9_100_000


def test_steps_that_are_not_written_are_copied_and_restored(hosts: Hosts) -> None:
    """The newest on disk is older."""
    said = hosts.run("kept", "ab", attempt="A1", steps=[1, 2, 3])
    assert {(f["step"], f["copies"], f["sent"], f["whole"]) for f in said} == {(2, 1, 1, True), (3, 1, 1, True)}, (
        hosts.log
    )
    assert len(said) == 4
    assert [path.name for path in hosts.directory.glob("*step-*")] == ["step-000000001"]
    assert {host: hosts.copies(host) for host in "ab"} == {"a": {1: {2, 3}}, "b": {0: {2, 3}}}
    hosts.lose("b")
    said = hosts.run("restored", "ac", attempt="A2")
    assert [(facts["step"], facts["same"]) for facts in said] == [(3, True)] * 2, hosts.log


def test_copies_that_are_not_trusted_are_given_up_and_those_before_are_brought_back(hosts: Hosts) -> None:
    hosts.run("copied", "abc", attempt="A1", steps=[1, 2, 3])
    hosts.lose("b")
    said = hosts.run("restored", "adc", attempt="A2", distrust="3@A1")
    assert [(facts["step"], facts["same"]) for facts in said] == [(2, True)] * 3, hosts.log
    (told,) = hosts.told("gathered")
    assert (told["steps"], told["moved"], told["lost"]) == ([2], 1, []), "a file of step 3 makes it no worse"
    left = [one.step for host in "adc" for copies in (True, False) for one in whole(hosts.shm / host, copies)]
    assert set(left) == {2}
    assert [path.name for path in hosts.directory.glob(".distrusted-*")] == [".distrusted-step-000000003.A2"]


@pytest.mark.soak
def test_steps_that_are_not_written_where_there_is_no_room_for_copies(hosts: Hosts) -> None:
    said = hosts.run("kept", "ab", attempt="A1", steps=[1, 2, 3], limit=1)
    assert {(f["step"], f["copies"], f["sent"], f["whole"]) for f in said} == {(2, 0, 0, True), (3, 0, 0, True)}, (
        hosts.log
    )


@pytest.mark.soak
def test_a_spare_restores_from_the_copy_that_it_kept(hosts: Hosts) -> None:
    hosts.run("copied", "ab", "c", attempt="A1", steps=[1])
    hosts.lose("b")
    hosts.forget_files()
    said = hosts.run("restored", "ac", attempt="A2")
    assert [(facts["step"], facts["same"]) for facts in said] == [(1, True)] * 2, hosts.log
    (told,) = hosts.told("gathered")
    assert (told["moved"], told["bytes"]) == (1, 0), "it only got another name"


@pytest.mark.parametrize("where", ["bytes", pytest.param("table", marks=pytest.mark.soak)])
def test_a_spoilt_copy_is_dropped_and_the_next_best_taken(hosts: Hosts, where: str) -> None:
    hosts.run("copied", "abc", "d", attempt="A1", steps=[1, 2])
    (newest,) = [left for left in whole(hosts.shm / "c") if left.step == 2]
    header = newest.segment.header()
    at = HEADER_BYTES + (newest.places[0] + 5 if where == "bytes" else header.used + 5)
    data = bytearray(newest.segment.path.read_bytes())
    data[at] ^= 1
    newest.segment.path.write_bytes(data)
    hosts.lose("b")
    hosts.forget_files()
    said = hosts.run("restored", "adc", attempt="A2")
    assert [(facts["step"], facts["same"]) for facts in said] == [(1, True)] * 3, hosts.log
    (told,) = hosts.told("gathered")
    if where == "bytes":
        assert "is not what its sum says" in "".join(told["spoilt"].values())
        assert not [left for left in whole(hosts.shm / "c") if left.step == 2], "it is dropped"
    else:
        assert told["lost"] == ["no memory has step 2 of rank 1"]


@pytest.mark.soak
def test_two_neighbours_lost(hosts: Hosts) -> None:
    """The file is read, and that is said."""
    hosts.run("copied", "abc", "de", attempt="A1", steps=[1, 2])
    hosts.lose("b")
    hosts.lose("c")
    said = hosts.run("restored", "ade", attempt="A2")
    assert [(facts["step"], facts["same"]) for facts in said] == [(2, True)] * 3, hosts.log
    assert "from step-000000002" in hosts.log
    (told,) = hosts.told("gathered")
    assert told["lost"] == ["no memory has step 2 of rank 1"]


@pytest.mark.soak
def test_two_copies_survive_two_neighbours(hosts: Hosts) -> None:
    hosts.run("copied", "abc", "de", attempt="A1", steps=[1, 2], copies=2)
    hosts.lose("b")
    hosts.lose("c")
    hosts.forget_files()
    said = hosts.run("restored", "ade", attempt="A2", copies=2)
    assert [(facts["step"], facts["same"]) for facts in said] == [(2, True)] * 3, hosts.log


def test_no_room_for_copies_is_said_once_and_saves_go_on(hosts: Hosts) -> None:
    said = hosts.run("refused", "ab", attempt="A1", steps=[1, 2, 3], limit=25_000_000)
    assert [facts["sent"] for facts in said] == [0, 0]
    told = hosts.told("copies")
    assert sorted(facts["host"] for facts in told) == ["a", "b"], "once each"
    assert "MB of memory and" in told[0]["problem"]
    assert not list(hosts.shm.glob("*/copy.*"))
    assert (hosts.directory / "step-000000003").exists()


@pytest.mark.soak
def test_the_host_that_keeps_copies_dies_in_the_middle(hosts: Hosts) -> None:
    said = hosts.run("killed", "a", "b", attempt="A1", steps=[1, 2, 3], elements=3_000_000)
    assert [facts["sent"] for facts in said] == [0], hosts.log
    assert len(hosts.told("copies")) == 1
    assert (hosts.directory / "step-000000003").exists()
    assert not whole(hosts.shm / "b"), "half a copy is none"


@pytest.mark.soak
def test_more_than_two_gigabytes(hosts: Hosts) -> None:
    hosts.run("copied", "ab", "", attempt="A1", steps=[1], huge=2_300_000_003)
    hosts.lose("b")
    hosts.forget_files()
    said = hosts.run("restored", "ac", attempt="A2", huge=2_300_000_003)
    assert [(facts["step"], facts["same"]) for facts in said] == [(1, True)] * 2, hosts.log
    (told,) = hosts.told("gathered")
    assert told["bytes"] > 2_300_000_003
