"""The checkpoint server: programs die after they have ordered a save, servers die in the middle of one, or stand still.

The server is a real process; the program is this one, or one that is killed.
"""

from __future__ import annotations

import errno
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from transom_hpc.base.errors import CheckpointError, SaveError
from transom_hpc.ckpt import Checkpointer, SaveWarning, handover, list_checkpoints, orders, verify
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.meeting import Abandoned, LeftOut

pytestmark = pytest.mark.timeout(60)

Serve = Callable[..., int]


def until(ready: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def ended(pid: int) -> bool:
    """Whether a process is over; it may not have been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def lives(staging: Path) -> bool:
    return (staging / orders.SERVER).exists() and orders.is_held(staging / orders.SERVER)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that keeps a server from writing data as long as it is there."""
    path = tmp_path / "gate"
    path.touch()
    return path


@pytest.fixture
def serve(server: Any, staging: Path, directory: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts a server, waits until it serves, and returns its process id."""
    started: list[int] = []

    def start(**facts: Any) -> int:
        given = {"shm": str(staging), "directory": str(directory), **facts}
        pid: int = server.start(
            scenario="serve_saves",
            facts=given,
            environment={"RANK": "0", "WORLD_SIZE": "1"},
            out=str(tmp_path / "server.out"),
            err=str(tmp_path / "server.err"),
        )
        started.append(pid)
        until(lambda: lives(staging))
        return pid

    yield start
    for pid in started:
        if pid in server._alive:
            server.kill(pid)
            server.wait(pid)


def state_at(step: int, rank: int = 0) -> dict[str, Any]:
    return {"same": np.arange(200_000.0) + step, "own": np.full(500 + rank, rank * 1000 + step), "n": step}


def check(directory: Path, step: int) -> None:
    """The step is committed, and every byte of it is right."""
    found = {c.step: c for c in list_checkpoints(directory)}
    assert step in found
    assert verify(found[step].path) == []
    rank_0 = [s for s in found[step].manifest.stored if s.entry.name == "tensors/same"]
    data = np.fromfile(found[step].path / rank_0[0].file, "<f8", 200_000, offset=rank_0[0].offset)
    assert np.array_equal(data, state_at(step)["same"])


def test_a_program_is_killed_when_it_has_ordered(
    ranks: Any, serve: Serve, gate: Path, directory: Path, staging: Path
) -> None:
    serve(gate=str(gate))
    done = ranks("orders", 2, "A1", directory=directory, step=2)
    assert done.codes == [-9, -9], done.errors
    assert list_checkpoints(directory) == []
    gate.unlink()
    until(lambda: list_checkpoints(directory))
    assert verify(list_checkpoints(directory)[0].path) == []
    again = ranks("lives", 2, "A2", directory=directory)
    assert [(said["start"], said["right"]) for said in again.said] == [(2, True)] * 2, again.errors
    until(lambda: not list(staging.glob(".[ora]*")), 5)  # orders, answers and ranks


@pytest.mark.parametrize(
    ("world_size", "stride"),
    [(1, 2), (2, 7), *(pytest.param(size, 1, marks=pytest.mark.soak) for size in (1, 2))],
)
def test_a_server_is_killed_at_any_moment(
    server: Any, serve: Serve, directory: Path, staging: Path, world_size: int, stride: int
) -> None:
    """The next one takes up what it had in hand; the program notices nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpts = [Checkpointer(directory, r, world_size, keep=1, attempt="A1", shm=staging) for r in range(world_size)]
        at, step = 0, 2
        while True:
            first = serve(at=at, fault="kill")
            for rank, ckpt in enumerate(ckpts):
                assert ckpt.save(step, state_at(step, rank))
            until(lambda pid=first: ended(pid) or all(ckpt._saver.idle(0.01) for ckpt in ckpts))
            if not ended(first):
                time.sleep(0.3)  # one that is killed over its last calls lets go of its locks before it counts as ended
            if not ended(first):
                break
            server.wait(first)
            second = serve()
            assert all(ckpt.wait(20) for ckpt in ckpts), at
            assert all(ckpt._saver.idle(20) for ckpt in ckpts)
            check(directory, step)
            for rank, ckpt in enumerate(ckpts):  # which removes what a killed server had not come to remove
                assert ckpt.save(step + 1, state_at(step + 1, rank))
            assert all(ckpt._saver.idle(20) for ckpt in ckpts)
            server.kill(second)
            server.wait(second)
            at, step = at + stride, step + 2
        for ckpt in ckpts:
            ckpt.close()
    assert at >= 12, at
    assert [c.step for c in list_checkpoints(directory)] == [step]
    assert not list(directory.glob(".step*"))


def test_both_are_killed(server: Any, ranks: Any, serve: Serve, gate: Path, directory: Path, staging: Path) -> None:
    """Nothing of the save is seen, nothing of it stays on disk; the memory of the node still has it."""
    pid = serve(gate=str(gate))
    assert ranks("orders", 2, "A1", directory=directory, step=2).codes == [-9, -9]
    until(lambda: list(directory.glob(".step*")))
    server.kill(pid)
    server.wait(pid)
    again = ranks("lives", 2, "A2", directory=directory)
    assert [(said["start"], said["right"]) for said in again.said] == [(2, True)] * 2, again.errors
    assert list_checkpoints(directory) == []
    assert not list(directory.glob(".step*"))
    assert not list(staging.glob(".[oa]*"))


def test_a_rank_that_died_before_it_ordered_is_not_waited_for(
    server: Any, serve: Serve, directory: Path, staging: Path, tmp_path: Path
) -> None:
    serve()
    with Checkpointer(directory, 0, 2, attempt="A1", shm=staging, on_save_error="raise") as ckpt:
        ckpt.save(2, state_at(2))
        assert not ckpt.wait(0.7)
        pid = server.start(
            scenario="leaves_nothing",
            facts={"directory": str(directory), "shm": str(staging), "attempt": "A1"},
            environment={"RANK": "1", "WORLD_SIZE": "2"},
            out=str(tmp_path / "1.out"),
            err=str(tmp_path / "1.err"),
        )
        assert server.wait(pid) == -9
        with pytest.raises(SaveError, match="rank 1 gave up: its program has died before the state was copied"):
            ckpt.wait(5)


def test_a_server_that_stands_still(
    serve: Serve, gate: Path, directory: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program goes on: the save in its hands fails, the next ones are made without it; and when it moves again it
    does no harm."""
    monkeypatch.setattr(handover, "SILENT_S", 0.7)
    pid = serve(gate=str(gate))
    with Checkpointer(directory, attempt="A1", shm=staging) as ckpt:
        ckpt.save(2, state_at(2))
        until(lambda: list(directory.glob(".step*/data*")))
        os.kill(pid, signal.SIGSTOP)
        with pytest.warns(SaveWarning, match="this host's checkpoint server has given no sign for 0.7 s"):
            assert not ckpt.wait(10)
        for step in (4, 6):  # into the slot of step 2 as well
            ckpt.save(step, state_at(step), block=True)
            check(directory, step)
        os.kill(pid, signal.SIGCONT)
        gate.unlink()
        until(lambda: len(list(Path(f"/proc/{pid}/task").iterdir())) == 1)
        for found in list_checkpoints(directory):
            check(directory, found.step)
        ckpt.save(10, state_at(10), block=True)
        check(directory, 10)


def test_a_program_that_waits_for_a_server_that_never_comes_back(
    server: Any, serve: Serve, gate: Path, directory: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "SILENT_S", 0.7)
    pid = serve(gate=str(gate))
    with Checkpointer(directory, attempt="A1", shm=staging) as ckpt:
        ckpt.save(2, state_at(2))
        until(lambda: list(directory.glob(".step*/data*")))
        server.kill(pid)
        server.wait(pid)
        assert ckpt.wait(10)
        check(directory, 2)
        ckpt.save(4, state_at(4), block=True)
        check(directory, 4)


def test_a_later_attempt_leaves_the_server_what_it_still_reads(
    ranks: Any, serve: Serve, gate: Path, directory: Path, staging: Path
) -> None:
    """It restores from that memory, takes other memory for its own saves, and the late save is fenced off."""
    pid = serve(gate=str(gate))
    assert ranks("orders", 1, "A1", directory=directory, step=2).codes == [-9]
    until(lambda: list(directory.glob(".step*/data*")))
    state = {"same": torch.zeros(500_000), "own": torch.zeros(1000, dtype=torch.int64), "n": 0}
    with Checkpointer(directory, attempt="A2", shm=staging) as ckpt:
        assert ckpt.restore(state) == 2
        assert torch.equal(state["same"], torch.arange(500_000.0) + 2)
        kept = [path for path in staging.iterdir() if ".A1." in path.name and not path.name.startswith(".")]
        assert kept == [], "the server has it mapped; nobody else writes into it"
        assert ".A1.0 (deleted)" in Path(f"/proc/{pid}/maps").read_text()
        ckpt.save(4, state_at(4))
        time.sleep(0.1)
        gate.unlink()
        assert ckpt.wait(20)
        until(lambda: not list(staging.glob(".[oa]*")))
    assert [c.step for c in list_checkpoints(directory)] == [4]
    check(directory, 4)


def test_what_the_server_says_is_reported_as_if_the_program_had_done_it(
    serve: Serve, directory: Path, staging: Path
) -> None:
    serve(at=4, fault=errno.ENOSPC)
    with Checkpointer(directory, attempt="A1", shm=staging, on_save_error="raise") as ckpt:
        ckpt.save(2, state_at(2))
        with pytest.raises(SaveError, match="step 2 was not saved: .*No space left on device"):
            ckpt.wait()
        ckpt.save(4, state_at(4), block=True)
        assert not list(directory.glob(".step*"))


@pytest.mark.parametrize(
    "error",
    [
        LeftOut("rank 1 gave up: both slots are in use", rank=1, reason="x"),
        Abandoned("rank 1 gave up: it is tired", rank=1, reason="y"),
        OSError(errno.EDQUOT, "Disk quota exceeded", "/x/y"),
        SaveError("no room"),
        CheckpointError("no 'held' from rank 3"),
        None,
    ],
)
def test_answers(directory: Path, error: BaseException | None) -> None:
    directory.mkdir()
    told = orders.Orders(directory, Files())
    told.answer("x", error)
    over, found = told.answered("x")
    assert over
    assert (type(found), str(found)) == (type(error), str(error))


def test_an_odd_error_is_told_in_words(directory: Path) -> None:
    directory.mkdir()
    told = orders.Orders(directory, Files())
    told.answer("x", ZeroDivisionError("odd"))
    assert str(told.answered("x")[1]) == "ZeroDivisionError: odd"


def test_it_leaves_when_its_folder_has_gone(server: Any, serve: Serve, staging: Path) -> None:
    pid = serve()
    for path in staging.iterdir():
        path.unlink()
    assert server.wait(pid) == 0


def test_it_leaves_when_asked_and_nobody_needs_it(server: Any, serve: Serve, directory: Path, staging: Path) -> None:
    pid = serve()
    with Checkpointer(directory, attempt="A1", shm=staging) as ckpt:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.7)
        ckpt.save(2, state_at(2), block=True)
        assert not ended(pid), "the program's last save needs it"
    assert server.wait(pid) == 0
