"""What a program imports: which rank it is, its heartbeat, and leaving when it is asked to."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
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
import transom_hpc.ckpt.interval
from transom_hpc.base.errors import UsageError
from transom_hpc.ckpt import interval
from transom_hpc.ckpt.files import Files
from transom_hpc.ckpt.pace import Wish
from transom_hpc.monitors.heartbeat import read_heartbeats
from transom_hpc.program import mtbf_of, rank_of

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


def test_what_is_not_to_be_restored_is_in_the_environment(
    shm: Path,  # noqa: ARG001
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with transom.Checkpointer.from_env(attempt="A0001-L01") as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, new_state(), block=True)
    monkeypatch.setenv("TRANSOM_DISTRUST", "10@A0001-L01")
    with transom.Checkpointer.from_env() as checkpointer:
        assert checkpointer.restore(new_state()) == 5
    (aside,) = (tmp_path / "run" / "checkpoints").glob(".distrusted-*")
    aside.rename(aside.with_name("step-000000010"))
    with transom.Checkpointer.from_env(attempt="A0002-L04", distrust="") as checkpointer:
        assert checkpointer.restore(new_state()) == 10, "the program knows better"


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
    """A file system that takes nothing while it does not work."""

    def __init__(self) -> None:
        self.working = threading.Event()
        self.working.set()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.working.wait(20)
        return super().pwrite(fd, data, offset)


def test_a_program_that_fails_does_not_wait_for_its_peers(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 (as above)
    """What is nearly written is worth a moment, once; the launcher restarts nothing before every rank has ended."""
    monkeypatch.setattr(transom_hpc.ckpt.checkpointer, "AT_EXIT_S", 2.0)
    disk = HungDisk()
    checkpointer = transom.Checkpointer.from_env(every=1, files=disk)
    disk.working.clear()
    checkpointer.step(1, new_state())
    before = time.monotonic()
    with pytest.raises(KeyError), checkpointer:
        raise KeyError
    took = time.monotonic() - before
    disk.working.set()
    assert checkpointer._saver.newest is not None
    assert checkpointer._saver.newest.done.wait(10)
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


RANKS = 3
SPEEDS = """
import sys, time
import numpy as np
from mpi4py import MPI
import transom_hpc as transom
from transom_hpc.ckpt import interval

written, in_memory = float(sys.argv[3]), float(sys.argv[4])
interval.LEAST_S, interval.MOST_OVERHEAD = min(written, in_memory), 1e9
interval.intervals = lambda *_: interval.Intervals(in_memory, written)
rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
for attempt in ("A0001-L01", "A0001-L02"):
    ckpt = transom.Checkpointer(
        sys.argv[1], rank, size, keep=99, every="auto", attempt=attempt, deadline_s=60, writer="direct"
    )
    saved, kept = [], []
    save, keep = ckpt.save, ckpt._saver.keep
    ckpt.save = lambda step, state, **more: (saved.append(step), save(step, state, **more))[1]
    ckpt._saver.keep = lambda job, leaves: (kept.append(job.step), keep(job, leaves))[1]
    state = {"x": np.zeros(50), "step": 0}
    start = ckpt.restore(state)
    for step in range(start, start + 100):
        time.sleep([0.001, 0.02, 0.004][(rank + step // 20) % 3])
        state["step"] = step + 1
        state["x"] += 1
        ckpt.step(step + 1, state)
    ckpt.close()
    open(f"{sys.argv[2]}/{attempt}-{rank}", "w").write(f"{start} {saved}")
    open(f"{sys.argv[2]}/{attempt}-{rank}-kept", "w").write(f"{kept}")
"""


@pytest.mark.mpi
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not there")
def test_ranks_of_very_different_speeds_save_at_the_same_steps(tmp_path: Path) -> None:
    """Nobody knows the intervals but rank 0, which is now the fastest and now the slowest; twice, the second time from
    what the first has saved and learned. Some are written, more are not."""
    (tmp_path / "said").mkdir()
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(RANKS), sys.executable]
    command += ["-W", "error::transom_hpc.ckpt.checkpointer.SaveWarning", "-c", SPEEDS]
    ran = subprocess.run(
        [*command, str(tmp_path / "checkpoints"), str(tmp_path / "said"), "0.3", "0.05"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert ran.returncode == 0, ran.stderr
    said = {path.name: path.read_text() for path in (tmp_path / "said").iterdir()}
    heard = [
        {said[f"A0001-L0{start}-{rank}{kind}"] for rank in range(RANKS)} for kind in ("", "-kept") for start in (1, 2)
    ]
    assert [len(words) for words in heard] == [1, 1, 1, 1], said
    first, second, *kept = ([int(word) for word in re.findall(r"\d+", *words)] for words in heard)
    assert first[0] == 0
    assert len(first) >= 3, "it saved more than once"
    assert second[0] == first[-1], "the second start went on from the last save of the first that is on disk"
    assert all(len(steps) >= 4 for steps in kept), said
    assert not {*first[1:], *second[1:]} & {*kept[0], *kept[1]}
    manifests = [transom_hpc.ckpt.read_checkpoint(path).manifest for path in (tmp_path / "checkpoints").glob("step-*")]
    assert {manifest.step for manifest in manifests} == {*first[1:], *second[1:]}
    assert {manifest.world_size for manifest in manifests} == {RANKS}


def test_auto_alone(shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment says auto; a save comes one step after it was wanted, and a stop beats a save."""
    monkeypatch.setenv("TRANSOM_SAVE_EVERY", "auto")
    monkeypatch.setattr(transom_hpc.ckpt.interval, "LEAST_S", 0.0)
    monkeypatch.setattr(transom_hpc.ckpt.interval, "MOST_S", 0.0)
    with transom.Checkpointer.from_env() as ckpt:
        assert ckpt.every == "auto"
        ckpt.step(1, new_state())
        assert ckpt.last_committed is None
        ckpt.step(2, new_state())
        ckpt.wait()
        assert committed(tmp_path / "run" / "checkpoints") == ["step-000000002"]
        (shm / "stop").touch()
        ckpt.step(3, new_state())
        with pytest.raises(SystemExit):
            ckpt.step(4, new_state())
    assert committed(tmp_path / "run" / "checkpoints")[-1] == "step-000000004"


class Listening:
    """An agreement that keeps what is posted, and to which nobody answers."""

    def __init__(self) -> None:
        self.posted: list[int] = []

    def exchange(self, flag: int) -> int:
        self.posted.append(flag)
        return 0

    def close(self) -> None:
        pass


def test_only_rank_0_wants_saves_and_each_once(
    directory_of_two: tuple[transom.Checkpointer, transom.Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    for one in directory_of_two:
        one._agreement_sought, one._agreement = True, (listening := Listening())
        now = [1e6]
        monkeypatch.setattr(one._pace._clock, "now", lambda now=now: now[0])  # type: ignore[union-attr]
        for step in range(1, 5):
            now[0] += 6.0  # of the ten seconds until the first save
            one.step(step, new_state())
        heard.append(listening.posted)
    assert heard == [[Wish.WRITE, 0, Wish.WRITE, 0], [0, 0, 0, 0]]


class Both:
    """The agreement of two ranks that are one after the other in this process."""

    def __init__(self, rank: int, posted: list[list[int]]) -> None:
        self._rank, self._posted = rank, posted

    def exchange(self, flag: int) -> int:
        self._posted[self._rank].append(flag)
        round_before = len(self._posted[self._rank]) - 2
        return max(heard[round_before] for heard in self._posted) if round_before >= 0 else 0

    def close(self) -> None:
        pass


def test_nothing_is_kept_in_memory_before_all_ranks_are_ready(
    directory_of_two: tuple[transom.Checkpointer, transom.Checkpointer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a rank could lose the only step that it has with the others."""
    monkeypatch.setattr(interval, "LEAST_S", 0.0)
    monkeypatch.setattr(interval, "MOST_OVERHEAD", 1e9)
    monkeypatch.setattr(interval, "intervals", lambda *_: interval.Intervals(0.0, 1000.0))
    posted: list[list[int]] = [[], []]
    for one in directory_of_two:
        one._agreement_sought, one._agreement = True, Both(one.rank, posted)
        one.save(1, new_state())
    zero, other = directory_of_two
    assert zero.wait()
    assert other.wait()
    zero._pace.ended(0.001, 0.01)  # type: ignore[union-attr]

    def until_kept(first: int, count: int, what: dict[str, object]) -> int:
        for step in range(first, first + count):
            for one in directory_of_two:
                one.step(step, new_state() | (what if one is other else {}))
            kept = zero._saver.kept
            if kept is not None and kept.job.step == step:
                return step
            time.sleep(0.01)
        return 0

    first = until_kept(2, 100, {"not yet": lambda: 0})
    assert first
    assert other._saver.kept is None
    assert zero._saver.kept is not None
    zero._saver.kept.done.wait(10)
    assert not until_kept(first + 1, 20, {}), "the other rank has only step 1, which rank 0 would overwrite"
    for one in directory_of_two:
        one.save(200, new_state())
    assert zero.wait()
    assert other.wait()
    assert until_kept(201, 100, {})
    assert other._saver.kept is not None


def test_auto_where_ranks_cannot_agree(directory_of_two: tuple[transom.Checkpointer, transom.Checkpointer]) -> None:
    zero, one = directory_of_two
    with pytest.warns(UserWarning, match="saves are 100 steps apart"):
        zero.step(1, new_state())
    one.step(1, new_state())
    assert [zero._due(99), zero._due(100), one._due(200)] == [Wish.NOTHING, Wish.WRITE, Wish.WRITE]


@pytest.fixture
def directory_of_two(tmp_path: Path) -> Iterator[tuple[transom.Checkpointer, transom.Checkpointer]]:
    two = [transom.Checkpointer(tmp_path / "c", rank, 2, every="auto", attempt="A0001-L01") for rank in range(2)]
    yield (two[0], two[1])
    for one in two:
        one.close()


@pytest.mark.parametrize(
    ("environment", "world_size", "expected"),
    [
        ({}, 1, (1, 0, 0.0)),
        ({"LOCAL_WORLD_SIZE": "8"}, 20, (3, 0, 0.0)),
        ({"LOCAL_WORLD_SIZE": "2", "TRANSOM_INTERRUPTIONS": "3/86400"}, 8, (4, 3, 86400.0)),
        ({"LOCAL_WORLD_SIZE": "x", "TRANSOM_INTERRUPTIONS": "3/"}, 8, (1, 0, 0.0)),
    ],
)
def test_mtbf_of(environment: dict[str, str], world_size: int, expected: tuple[int, int, float]) -> None:
    assert mtbf_of(environment, world_size) == transom_hpc.ckpt.interval.mtbf_s(*expected)


@pytest.mark.usefixtures("shm")
def test_an_interval_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("often", "0", "-1"):
        monkeypatch.setenv("TRANSOM_SAVE_EVERY", text)
        with pytest.raises(UsageError, match=f"TRANSOM_SAVE_EVERY={text} must be a whole number, at least 1, or auto"):
            transom.Checkpointer.from_env()


@pytest.mark.usefixtures("shm")
def test_too_little_time_to_leave_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_LEAVE_S", "0.1")
    slow = Files()
    monkeypatch.setattr(slow, "fsync", lambda fd: (time.sleep(0.15), os.fsync(fd)))
    with transom.Checkpointer.from_env(every=1, files=slow) as ckpt:
        ckpt.step(1, new_state())
        ckpt.wait()
        ckpt.step(2, new_state())  # hears of the first, and
        with pytest.warns(UserWarning, match="has 0 s to save and leave.*Set signal_lead_s in the site config to"):
            ckpt.step(3, new_state())
        ckpt.wait()
        ckpt.step(4, new_state())
        ckpt.step(5, new_state())
    monkeypatch.setenv("TRANSOM_LEAVE_S", "30")
    monkeypatch.setenv("TRANSOM_ATTEMPT", "A0001-L02")
    with transom.Checkpointer.from_env(every=1) as ckpt:
        for step in range(6, 9):
            ckpt.step(step, new_state())
            ckpt.wait()
