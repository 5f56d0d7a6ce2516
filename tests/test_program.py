"""What a program imports: which rank it is, its heartbeat, and leaving when it is asked to."""

from __future__ import annotations

import errno
import shutil
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import transom_hpc as transom
import transom_hpc.ckpt.checkpointer
from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt.files import Files
from transom_hpc.monitors.heartbeat import read_heartbeats
from transom_hpc.program import rank_of

ATTEMPT = "A0001-L01"


@pytest.fixture(autouse=True)
def _leave_as_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No rank from the environment of the tests, and the signal handlers as they were."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process is the only rank of a job."""
    path = Path("/dev/shm") / f"transom-test-{uuid.uuid4().hex[:12]}"
    monkeypatch.setenv("TRANSOM_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TRANSOM_ATTEMPT", ATTEMPT)
    monkeypatch.setenv("TRANSOM_SHM", str(path))
    monkeypatch.setenv("TRANSOM_SAVE_EVERY", "5")
    monkeypatch.setenv("TRANSOM_KEEP", "2")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def new_state() -> dict[str, np.ndarray]:
    return {"field": np.zeros(3)}


def committed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}, (3, 8)),
        # the batch script has a SLURM_PROCID too, and is no rank of anything
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "batch"}, (0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),
        # torchrun inside of a step of one task a node
        (
            {"RANK": "5", "WORLD_SIZE": "8", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0"},
            (5, 8),
        ),
        # half a pair is none
        ({"RANK": "5"}, (0, 1)),
        ({"WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_rank_of(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert rank_of(environment) == expected


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "4"), ("0", "0"), ("one", "4"), ("1", ""), ("0", "4.0")])
def test_rank_that_can_not_be(rank: str, size: str) -> None:
    with pytest.raises(UsageError, match="RANK"):
        rank_of({"RANK": rank, "WORLD_SIZE": size})


def test_without_a_job_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"transom submit.*from_env\(directory="):
        transom.Checkpointer.from_env()
    with pytest.raises(UsageError, match="not inside a run"):
        transom.Checkpointer.from_env(directory=None)


def test_without_a_job_it_saves_where_it_is_told(tmp_path: Path) -> None:
    state = new_state()
    with transom.Checkpointer.from_env(directory=tmp_path, every=2) as checkpointer:
        assert checkpointer.restore(state) == 0
        for step in (1, 2):
            state["field"] += step
            checkpointer.step(step, state)
    fresh = new_state()
    with transom.Checkpointer.from_env(directory=tmp_path) as checkpointer:
        assert checkpointer.restore(fresh) == 2
    np.testing.assert_array_equal(fresh["field"], [3.0, 3.0, 3.0])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_several_ranks_that_can_not_talk_need_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="attempt="):
        transom.Checkpointer.from_env(directory=tmp_path)


def test_in_a_job_the_environment_says_everything(shm: Path, tmp_path: Path) -> None:
    with transom.Checkpointer.from_env() as checkpointer:
        assert (checkpointer.rank, checkpointer.world_size, checkpointer.every) == (0, 1, 5)
        assert checkpointer.attempt == ATTEMPT
        assert checkpointer.directory == tmp_path / "run" / "checkpoints"
        assert shm.stat().st_mode & 0o777 == 0o700
        for step in range(1, 16):
            checkpointer.step(step, new_state())
            checkpointer.wait()
    assert committed(tmp_path / "run" / "checkpoints") == ["step-000000010", "step-000000015"]


def test_an_argument_beats_the_environment(shm: Path, tmp_path: Path) -> None:  # noqa: ARG001 (the job is wanted)
    with transom.Checkpointer.from_env(every=3, directory=tmp_path / "here", keep=None) as checkpointer:
        assert checkpointer.every == 3
        checkpointer.step(3, new_state())
    assert committed(tmp_path / "here") == ["step-000000003"]


def test_the_site_says_how_much_memory_which_stripe_and_how_many_files(
    shm: Path,  # noqa: ARG001 (as above)
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRANSOM_STAGING_BYTES", "400000")
    monkeypatch.setenv("TRANSOM_STRIPE_BYTES", str(1 << 16))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("TRANSOM_DATA_FILES", "2")
    monkeypatch.setenv("TRANSOM_WRITER", "mpio")  # which is not for a program without MPI
    state = {"large": np.ones(10_000), "small": np.ones(10)}
    with transom.Checkpointer.from_env() as checkpointer:
        with pytest.warns(UserWarning, match=r"staging takes .* and 0 MB may be used"):
            checkpointer.save(5, state)
        assert checkpointer.wait()
    (found,) = transom_hpc.ckpt.list_checkpoints(tmp_path / "run" / "checkpoints")
    offsets = {item.entry.name: item.offset for item in found.manifest.stored}
    assert offsets["tensors/large"] % (1 << 16) == 0
    assert offsets["tensors/small"] % 4096 == 0
    assert (len(found.manifest.files), found.manifest.writer) == (2, "direct")
    monkeypatch.setenv("TRANSOM_STAGING_BYTES", "4MB")
    with pytest.raises(UsageError, match="TRANSOM_STAGING_BYTES=4MB must be a whole number"):
        transom.Checkpointer.from_env()


def test_heartbeat(shm: Path) -> None:
    checkpointer = transom.Checkpointer.from_env()
    state = new_state()
    assert [beat.phase for beat in read_heartbeats(shm, ATTEMPT)] == ["starting"]
    checkpointer.restore(state)
    (beat,) = read_heartbeats(shm, ATTEMPT)
    assert (beat.rank, beat.phase, beat.step, beat.loss) == (0, "training", None, None)
    checkpointer.step(4, state)
    checkpointer.step(5, state, loss=2.5)
    checkpointer.wait()
    checkpointer.step(6, state, loss=np.float32(0.5))
    (beat,) = read_heartbeats(shm, ATTEMPT)
    assert (beat.step, beat.loss, beat.saved_step) == (6, 0.5, 5)
    checkpointer.close()


@pytest.mark.parametrize("ask", ["stop file", "USR1", "TERM"])
def test_leaves_when_asked(ask: str, shm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = transom.Checkpointer.from_env()
    state = new_state()
    checkpointer.restore(state)
    checkpointer.step(1, state)
    if ask == "stop file":
        (shm / "stop").touch()
    else:
        signal.raise_signal(getattr(signal, f"SIG{ask}"))
    state["field"] += 2
    checkpointer.step(2, state)  # agreed on while step 3 runs
    state["field"] += 3
    with pytest.raises(SystemExit) as left:
        checkpointer.step(3, state)
    assert left.value.code == 75
    assert committed(tmp_path / "run" / "checkpoints") == ["step-000000003"]
    assert "saved step 3 and left" in capsys.readouterr().err
    assert [beat.phase for beat in read_heartbeats(shm, ATTEMPT)] == ["stopping"]


class SlowDisk(Files):
    """A file system on which every fsync takes a while."""

    def fsync(self, fd: int) -> None:
        time.sleep(0.3)
        super().fsync(fd)


def test_leaving_waits_for_saves_under_way(shm: Path, tmp_path: Path) -> None:
    """Else the last save, the one that counts, would be left out while two are still being written."""
    checkpointer = transom.Checkpointer.from_env(every=1, files=SlowDisk())
    state = new_state()
    checkpointer.step(1, state)
    (shm / "stop").touch()
    checkpointer.step(2, state)
    with pytest.raises(SystemExit):
        checkpointer.step(3, state)
    assert "step-000000003" in committed(tmp_path / "run" / "checkpoints")


class HungDisk(Files):
    """A file system that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.working = threading.Event()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.working.wait(20)
        return super().pwrite(fd, data, offset)


def test_a_program_that_fails_does_not_wait_for_its_peers(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 (as above)
    """What is nearly written is worth a moment, once; the launcher restarts nothing before every rank has ended."""
    monkeypatch.setattr(transom_hpc.ckpt.checkpointer, "AT_EXIT_S", 2.0)
    disk = HungDisk()
    checkpointer = transom.Checkpointer.from_env(every=1, files=disk)
    checkpointer.step(1, new_state())
    before = time.monotonic()
    with pytest.raises(KeyError), checkpointer:
        raise KeyError
    took = time.monotonic() - before
    disk.working.set()
    checkpointer._saver.idle(10)
    assert 1.9 < took < 3.5


class FailingDisk(Files):
    """A file system whose next fsync fails."""

    failed = True

    def fsync(self, fd: int) -> None:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EIO, "Input/output error")
        super().fsync(fd)


def test_leaving_saves_although_the_save_before_failed(shm: Path, tmp_path: Path) -> None:
    disk = FailingDisk()
    checkpointer = transom.Checkpointer.from_env(every=2, files=disk, on_save_error="raise")
    disk.failed = False
    state = new_state()
    (shm / "stop").touch()
    checkpointer.step(2, state)
    with pytest.warns(UserWarning, match="step 2 was not saved"), pytest.raises(SystemExit) as left:
        checkpointer.step(3, state)
    assert left.value.code == 75
    assert committed(tmp_path / "run" / "checkpoints") == ["step-000000003"]


def test_leaves_also_when_it_can_not_save(shm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpointer = transom.Checkpointer.from_env()
    state = new_state()
    (shm / "stop").touch()
    checkpointer.step(1, state)
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("in the way")
    with pytest.raises(SystemExit) as left:
        checkpointer.step(2, state)
    assert left.value.code == 75
    assert "step 2 is not saved" in capsys.readouterr().err


def test_another_signal_can_be_chosen(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 (as above)
    monkeypatch.setenv("TRANSOM_SIGNAL", "USR2")
    with transom.Checkpointer.from_env() as checkpointer:
        signal.raise_signal(signal.SIGUSR2)
        checkpointer.step(1, new_state())
        with pytest.raises(SystemExit):
            checkpointer.step(2, new_state())


def test_a_replaced_handler_is_noticed_once(shm: Path) -> None:
    checkpointer = transom.Checkpointer.from_env()
    state = new_state()
    checkpointer.step(1, state)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with pytest.warns(UserWarning, match=r"SIGUSR1 is handled by somebody else.*`signal` in the site config"):
        checkpointer.step(2, state)
    checkpointer.step(3, state)  # warnings are errors
    (shm / "stop").touch()
    checkpointer.step(4, state)
    with pytest.raises(SystemExit):
        checkpointer.step(6, state)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_signals_are_handed_back(shm: Path) -> None:  # noqa: ARG001 (as above)
    """After the end of training nobody answers a request to stop, so SIGTERM must end the program again."""
    before = signal.getsignal(signal.SIGTERM)
    checkpointer = transom.Checkpointer.from_env()
    assert signal.getsignal(signal.SIGTERM) != before
    checkpointer.close()
    assert signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(KeyError), transom.Checkpointer.from_env():
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) == before


def test_ranks_that_can_not_agree(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 (as above)
    """They are told, and a signal does again what it does to any program."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    checkpointer = transom.Checkpointer.from_env()
    with pytest.warns(UserWarning, match="can't be agreed on"):
        checkpointer.step(1, new_state())
    checkpointer.step(2, new_state())
    assert signal.getsignal(signal.SIGTERM) == before
    checkpointer.close()
