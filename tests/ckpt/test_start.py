"""How ranks get a common name for their attempt, and how all of them hear that there is no way in."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from transom_hpc.base.clock import SystemClock
from transom_hpc.base.errors import CheckpointError, UsageError
from transom_hpc.ckpt import Checkpointer
from transom_hpc.ckpt.claim import this_process
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.meeting import Abandoned, Overdue
from transom_hpc.ckpt.start import Entry, enter, same_start

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "WORLD_SIZE": "3",
}


def start(directory: Path, rank: int, environment: dict[str, str], deadline_s: float = 20.0) -> Entry:
    return enter(directory, rank, 3, None, environment, Files(), SystemClock(), deadline_s)


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    found: list[Any] = [None] * len(calls)

    def call(index: int) -> None:
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def starts(directory: Path, environment: dict[str, str]) -> list[Any]:
    return together([lambda r=rank: start(directory, r, environment) for rank in range(3)])  # type: ignore[misc]


def test_one_name_for_all_and_another_one_each_time(tmp_path: Path) -> None:
    before = ""
    for environment in (
        TORCHRUN,
        TORCHRUN,  # the same run id and count, again
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "zz-5"},
        {**TORCHRUN, "TORCHELASTIC_RUN_ID": "aa-1", "TORCHELASTIC_RESTART_COUNT": "3"},  # sorts before
    ):
        entries = starts(tmp_path, environment)
        (name,) = {entry.attempt for entry in entries}
        assert name > before
        before = name
        entries[0].claim.release()
    assert [p.name for p in tmp_path.iterdir()] == [".attempt"]


def test_what_a_dead_start_left_answers_nobody(tmp_path: Path) -> None:
    for key in (same_start(TORCHRUN), "another"):
        folder = tmp_path / f".start-{key}"
        folder.mkdir()
        for rank in (1, 2):
            number = f"0000000000000{rank}"
            for name in (f"ask-0000{rank}-{number}", f"heard-0000{rank}-{number}", "ask-00001-77"):
                (folder / name).touch()
            (folder / f"answer-{number}").write_text(json.dumps({"attempt": "T1"}))
    entries = starts(tmp_path, TORCHRUN)
    (name,) = {entry.attempt for entry in entries}
    assert name != "T1"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".attempt", ".writer"]


def test_a_refusal_is_heard_by_all(tmp_path: Path) -> None:
    here = replace(this_process("A1", "now", {}), pid=os.getppid(), started="")
    (tmp_path / ".writer").write_text(json.dumps(asdict(here)) + "\n0\n")
    refused = starts(tmp_path, TORCHRUN)
    assert all(isinstance(error, CheckpointError) for error in refused)
    assert all("another program writes" in str(error) for error in refused)
    assert str(refused[1]).startswith("rank 0 was refused: ")
    assert [p.name for p in tmp_path.iterdir()] == [".writer"]


def test_a_refusal_is_heard_where_the_name_is_given(tmp_path: Path) -> None:
    here = replace(this_process("A1", "now", {}), pid=os.getppid(), started="")
    (tmp_path / ".writer").write_text(json.dumps(asdict(here)) + "\n0\n")
    other = Checkpointer(tmp_path, 1, 2, attempt="A2", deadline_s=60.0)
    with pytest.raises(CheckpointError, match="another program writes"):
        Checkpointer(tmp_path, 0, 2, attempt="A2")
    with pytest.raises(Abandoned, match="rank 0 gave up: another program writes"):
        other.restore({"x": 1})
    other.close()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(Overdue, match="no word from rank 1, 2 at the start"):
        start(tmp_path, 0, TORCHRUN, 0.1)
    assert not (tmp_path / ".writer").exists()
    with pytest.raises(Overdue, match="no word from rank 0 at the start"):
        start(tmp_path, 2, TORCHRUN, 0.1)


def test_without_anything_in_common(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass attempt="):
        start(tmp_path, 1, {})
    assert same_start({}) == ""
    assert same_start(TORCHRUN) != same_start({**TORCHRUN, "MASTER_PORT": "29501"})
