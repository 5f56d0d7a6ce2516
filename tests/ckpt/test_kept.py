"""Saves that are not written: they stay in memory, and are what a program that dies goes on from."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transom_hpc.ckpt import Checkpointer, interval, list_checkpoints, orders
from transom_hpc.ckpt.checkpointer import SaveWarning
from transom_hpc.ckpt.interval import Intervals
from transom_hpc.ckpt.pace import Wish

pytestmark = pytest.mark.timeout(60)


def until(ready: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """A file that keeps copies from arriving as long as it is there."""
    return tmp_path / "far"


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A file that keeps the server from writing as long as it is there."""
    return tmp_path / "gate"


@pytest.fixture
def serve(
    server: Any, staging: Path, directory: Path, tmp_path: Path, far: Path, gate: Path
) -> Iterator[Callable[[], int]]:
    started: list[int] = []

    def start() -> int:
        pid: int = server.start(
            scenario="serve_saves",
            facts={"shm": str(staging), "directory": str(directory), "far": str(far), "gate": str(gate)},
            environment={"RANK": "0", "WORLD_SIZE": "1"},
            out=str(tmp_path / "server.out"),
            err=str(tmp_path / "server.err"),
        )
        started.append(pid)
        until(lambda: (staging / orders.SERVER).exists() and orders.is_held(staging / orders.SERVER))
        return pid

    yield start
    for path in (far, gate):
        path.unlink(missing_ok=True)
    for pid in started:
        if pid in server._alive:
            server.kill(pid)
            server.wait(pid)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves that are not written come as often as can be, others by hand."""
    monkeypatch.setattr(interval, "LEAST_S", 0.0)
    monkeypatch.setattr(interval, "MOST_OVERHEAD", 1e9)
    monkeypatch.setattr(interval, "intervals", lambda *_: Intervals(0.0, 1000.0))


@pytest.fixture
def ckpt(directory: Path, staging: Path, often: None) -> Iterator[Checkpointer]:  # noqa: ARG001
    """With step 1 committed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SaveWarning)
        with Checkpointer(directory, every="auto", attempt="A1", shm=staging) as made:
            made.step(1, state(1))
            assert made.wait()
            made._learn()
            until(lambda: made._pace is not None and made._pace.interval_s == 1000)
            yield made


def state(step: int) -> dict[str, Any]:
    return {"x": np.arange(50_000.0) + step, "n": step}


def steps_until(ckpt: Checkpointer, begin: int, ready: Callable[[], Any]) -> int:
    """Steps, until something is so; returns the last one."""
    step = begin

    def one() -> Any:
        nonlocal step
        step += 1
        ckpt.step(step, state(step))
        return ready()

    until(one)
    return step


def in_memory(ckpt: Checkpointer) -> list[int]:
    """The whole steps, as the next start would find them."""
    other = ckpt._slots
    later = type(other)(other._folder, ckpt.directory, 0, 1, "A9", other._files, None, 1)
    return sorted(left.step for left in later.left())


@pytest.mark.parametrize("served", [True, False])
def test_a_program_that_is_killed_goes_on_from_a_step_that_was_never_written(
    ranks: Any, serve: Callable[[], int], directory: Path, served: bool
) -> None:
    if served:
        serve()
    died = ranks("keeps", 1, "A1", directory=directory, die=True)
    assert died.codes == [-9], died.errors
    kept = died.said[0]["kept"]
    assert list_checkpoints(directory)[-1].step == died.said[0]["last"]
    assert kept > died.said[0]["last"] > 0
    died = ranks("keeps", 1, "A2", directory=directory, die=True)
    assert died.said[0]["start"] == kept, died.errors
    assert died.said[0]["last"] == kept + 1, "what was in memory only is followed by one on disk at once"
    kept = died.said[0]["kept"]
    ended = ranks("keeps", 1, "A3", directory=directory, until=kept + 20)
    assert ended.said[0]["start"] == kept, ended.errors
    assert ended.said[0]["source"] == "memory:A2"
    unhurt = ranks("keeps", 1, "A0", directory=directory.parent / "unhurt", until=kept + 20)
    assert ended.said[0]["digest"] == unhurt.said[0]["digest"]


def test_the_step_before_stays_until_the_next_is_whole_everywhere(
    ckpt: Checkpointer, serve: Callable[[], int], far: Path
) -> None:
    far.touch()
    serve()
    first = steps_until(ckpt, 1, lambda: ckpt._saver.kept)
    until(lambda: in_memory(ckpt) == [1, first])
    for step in range(first + 1, first + 20):
        ckpt.step(step, state(step))
        assert ckpt._saver.kept is not None
        assert ckpt._saver.kept.job.step == first, "the other hosts do not have it yet"
    assert ckpt._wish() == Wish.NOT_YET
    far.unlink()
    second = steps_until(ckpt, step, lambda: ckpt._saver.kept.job.step != first)
    until(lambda: in_memory(ckpt) == [first, second])
    until(ckpt._saver.kept.done.is_set)
    assert ckpt._saver.kept.copies == 1
    assert ckpt.last_committed == 1
    assert [c.step for c in list_checkpoints(ckpt.directory)] == [1]


def test_one_that_is_written_waits_for_none_that_is_not(
    ckpt: Checkpointer, serve: Callable[[], int], far: Path
) -> None:
    far.touch()
    serve()
    first = steps_until(ckpt, 1, lambda: ckpt._saver.kept)
    assert ckpt._saver.kept is not None
    assert ckpt.save(first + 1, state(first + 1))
    assert ckpt.wait(20)
    assert not ckpt._saver.kept.done.is_set()
    assert ckpt.last_committed == first + 1
    far.unlink()
    until(ckpt._saver.kept.done.is_set)
    assert ckpt.save(first + 2, state(first + 2), block=True)
    assert in_memory(ckpt) == [first + 1, first + 2]


def test_none_is_kept_while_one_is_being_written(ckpt: Checkpointer, serve: Callable[[], int], gate: Path) -> None:
    serve()
    gate.touch()
    assert ckpt.save(2, state(2))
    for step in range(3, 23):
        ckpt.step(step, state(step))
        time.sleep(0.005)
    assert ckpt._saver.kept is None
    assert ckpt.save(23, state(23)), "there is a slot for it"
    gate.unlink()
    assert ckpt.wait(20)
    steps_until(ckpt, 23, lambda: ckpt._saver.kept)


def test_a_save_that_the_program_asks_for_meanwhile_comes_first(ckpt: Checkpointer) -> None:
    """The ranks had agreed before; all of them leave it out."""
    assert ckpt._wish() == Wish.KEEP
    ckpt._asked_after = ckpt._wished_after
    assert ckpt.save(2, state(2), block=True)
    ckpt._keep_in_memory(3, state(3))
    assert ckpt._saver.kept is None


def test_one_that_fails_is_no_failure(ckpt: Checkpointer, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be kept, or had changed, is no warning; and none is tried before the next is written."""
    ckpt.step(2, {**state(2), "f": lambda: 0})
    ckpt.step(3, state(3))
    assert ckpt._saver.kept is None
    assert ckpt._wish() == Wish.NOT_YET
    assert ckpt.save(4, state(4), block=True)
    ckpt.before_update()
    ckpt.step(5, state(5))
    assert ckpt._saver.kept is not None
    ckpt._saver.distrust("it has changed")
    ckpt.step(6, state(6))
    until(ckpt._saver.kept.done.is_set)
    assert in_memory(ckpt) == [4]
    assert ckpt._wish() == Wish.NOT_YET
    assert ckpt.wait()
    assert ckpt.save(7, state(7), block=True)
    steps_until(ckpt, 7, lambda: ckpt._saver.kept.job.step > 7)
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("often")
def test_without_memory_for_two_the_only_one_stays(
    directory: Path, staging: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with Checkpointer(directory, every="auto", attempt="A1", shm=staging, shm_bytes=600_000) as ckpt:
        ckpt.step(1, state(1))
        assert ckpt.wait()
        ckpt._learn()
        until(lambda: ckpt._pace is not None and ckpt._pace.interval_s == 1000)
        for step in range(2, 20):
            ckpt.step(step, state(step))
            assert in_memory(ckpt) == [1]
    assert not recwarn.list


def test_a_server_that_dies_takes_nothing_with_it(
    server: Any, ckpt: Checkpointer, serve: Callable[[], int], far: Path
) -> None:
    """The next one takes the order up, or the program goes on without."""
    far.touch()
    pid = serve()
    steps_until(ckpt, 1, lambda: ckpt._saver.kept)
    kept = ckpt._saver.kept
    assert kept is not None
    time.sleep(0.2)
    server.kill(pid)
    server.wait(pid)
    far.unlink()
    serve()
    until(kept.done.is_set)
    assert (kept.whole, kept.copies, kept.error) == (True, 1, None)
