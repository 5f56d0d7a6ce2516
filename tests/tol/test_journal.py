from __future__ import annotations

import os
import resource
import signal
import stat
import threading
from pathlib import Path

import pytest

from transom_hpc.base.errors import RunDirError
from transom_hpc.tol.attempt import Attempt
from transom_hpc.tol.journal import Journal, begun_after, claim_exactly, claim_number, newer_than, read_journal


def test_round_trip(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1, "n1")
    journal.append(Attempt(1, 0), "start", job_id=7, hosts=["n1", "n2"])
    journal.append(Attempt(1, 1), "launch", text="with | = \n é")
    journal.close()
    first, second = read_journal(tmp_path)
    assert (first.kind, first.attempt, first.host, first.facts) == (
        "start",
        Attempt(1, 0),
        "n1",
        {"job_id": 7, "hosts": ["n1", "n2"]},
    )
    assert (second.order, second.facts["text"]) == (1, "with | = \n é")


@pytest.mark.parametrize("cut", range(1, 60))
def test_a_torn_last_line_is_left_out_and_harms_no_later_one(tmp_path: Path, cut: int) -> None:
    journal = Journal(tmp_path, 1, "n1")
    journal.append(Attempt(1, 1), "launch", hosts=["n1"])
    journal.append(Attempt(1, 1), "running", step=12)
    journal.close()
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-cut])
    assert [entry.kind for entry in read_journal(tmp_path)] == ["launch"]
    later = Journal(tmp_path, 1, "n1")
    later.append(Attempt(1, 1), "end")
    later.close()
    assert [entry.kind for entry in read_journal(tmp_path) if entry.kind != "running"] == ["launch", "end"]


@pytest.mark.parametrize("rooms", [(0, 0), (30, 30), (30, 150)])
def test_a_line_that_finds_no_room_is_written_with_the_next(tmp_path: Path, rooms: tuple[int, int]) -> None:
    journal = Journal(tmp_path, 1, "n1")
    journal.append(Attempt(1, 1), "launch", hosts=["n1"])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = journal.path.stat().st_size
    try:
        for step, room in zip((12, 13), rooms, strict=True):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, before[1]))
            with pytest.raises(OSError, match="File too large"):
                journal.append(Attempt(1, 1), "running", step=step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, previous)
    journal.append(Attempt(1, 1), "end")
    journal.close()
    assert [(entry.kind, entry.facts.get("step")) for entry in read_journal(tmp_path)] == [
        ("launch", None),
        ("running", 12),
        ("running", 13),
        ("end", None),
    ]


def test_two_writers_of_one_attempt(tmp_path: Path) -> None:
    for host, number in (("n2", 1), ("n1", 2), ("n1", 1)):
        journal = Journal(tmp_path, number, host)
        journal.append(Attempt(number, 1), host)
        journal.close()
    assert [(entry.attempt.number, entry.kind) for entry in read_journal(tmp_path)] == [(1, "n1"), (1, "n2"), (2, "n1")]


def test_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "A0001-n1.jsonl").write_bytes(
        b'[]\n{"kind": 1}\n\xff\xfe\nnull\n{"attempt": "x", "time": "", "host": ""}\n'
    )
    assert read_journal(tmp_path) == []


def test_a_number_is_given_once(tmp_path: Path) -> None:
    taken: list[int] = []

    def take() -> None:
        for _ in range(20):
            taken.append(claim_number(tmp_path / "journal"))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 81))


def test_exactly_one_of_many_gets_a_certain_number(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    won: list[bool] = []
    threads = [
        threading.Thread(target=lambda: won.append(claim_exactly(tmp_path / "journal", 2)), daemon=True)
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won.count(True) == 1
    assert claim_number(tmp_path / "journal") == 3


def test_who_has_claimed_a_number_may_claim_it_again(tmp_path: Path) -> None:
    assert claim_exactly(tmp_path, 2, "n1 100")
    assert claim_exactly(tmp_path, 2, "n1 100")
    assert not claim_exactly(tmp_path, 2, "n2 100")
    assert claim_exactly(tmp_path, 3)
    assert not claim_exactly(tmp_path, 3), "it has no name"


def test_a_number_that_can_not_be_claimed(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="can't write"):
        claim_exactly(tmp_path / "nowhere", 1)


def test_a_claim_is_not_yet_a_beginning(tmp_path: Path) -> None:
    Journal(tmp_path, 1, "n1").close()
    claim_exactly(tmp_path, 2)
    assert newer_than(tmp_path, 1)
    assert not begun_after(tmp_path, 1)
    Journal(tmp_path, 1, "n2").close()  # a survivor's words belong to the lost launcher's attempt
    assert not begun_after(tmp_path, 1)
    Journal(tmp_path, 2, "n2").close()
    assert begun_after(tmp_path, 1)
    assert not begun_after(tmp_path, 2)


def test_read_only_folder(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        target = tmp_path / "file"
        target.touch()
        with pytest.raises(RunDirError, match="can't write"):
            claim_number(target)
        return
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(RunDirError, match="can't write"):
        Journal(tmp_path, 1, "n1")
