"""What a rank says of its end, in real programs that really end so, in the wrapper that the launcher puts round it."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from transom_hpc.base.errors import SaveError, UsageError
from transom_hpc.tol import steps
from transom_hpc.tol.causes import Cause
from transom_hpc.tol.exits import FirstExit, classify
from transom_hpc.tol.last_words import kind_of, text_of

ATTEMPT = "A0001-L01"
Run = Callable[..., FirstExit]


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path("/dev/shm") / f"transom-test-{uuid.uuid4().hex[:12]}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def run(tmp_path: Path, shm: Path) -> Run:
    """Run a Python program under the task's wrapper, as rank 2 on n3."""

    def run(
        program: str,
        *,
        wrapper: str = steps._TASK,
        argv: list[str] | None = None,
        environment: Mapping[str, str] = {},
        prefix: Path | None = None,
    ) -> FirstExit:
        (tmp_path / "run" / "journal").mkdir(parents=True, exist_ok=True)
        prefix = prefix or tmp_path / ATTEMPT
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(program))
        variables = {
            "TRANSOM_RUN_DIR": str(tmp_path / "run"),
            "TRANSOM_SHM": str(shm),
            "TRANSOM_ATTEMPT": ATTEMPT,
            "SLURM_PROCID": "2",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_LOCALID": "0",
            "SLURMD_NODENAME": "n3",
            "LOCAL_WORLD_SIZE": "1",
            **{f"TRANSOM_{name.upper()}_FILE": f"{prefix}.{name}" for name in ("begun", "done", "exit")},
        }
        answer = subprocess.run(
            ["bash", "-c", wrapper, "transom-task", *(argv or [sys.executable, str(script)])],
            env={**os.environ, **variables, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        found = steps.first_exit(prefix)
        assert found is not None, answer.stderr
        assert answer.returncode == found.code
        if "raise" in program and "SystemExit" not in program:
            assert "Traceback" in answer.stderr  # the hook before ours has run
        return found

    return run


JOIN = """\
from transom_hpc.tol import last_words
last_words.listen(2, 4)
"""


def test_an_error_of_the_program(run: Run) -> None:
    found = run(JOIN + 'def f():\n    raise ValueError("shapes do not match\\nat all")\nf()\n')
    assert found == FirstExit(2, "n3", 1, kind="error", text="ValueError: shapes do not match (train.py:4)")
    assert classify(found, 1) == (
        Cause.PROGRAM_ERROR,
        "rank 2 on n3: ValueError: shapes do not match (train.py:4)",
    )


def test_the_checkpointer_listens(run: Run) -> None:
    program = """
        import numpy
        import transom_hpc as transom
        checkpointer = transom.Checkpointer.from_env(world_size=1, rank=0)
        checkpointer.restore({"x": numpy.zeros(3)})
        numpy.zeros(3) + numpy.zeros(4)
        raise AssertionError
    """
    found = run(program)
    assert (found.rank, found.kind) == (0, "error")  # the rank that the program goes by
    assert found.text == "ValueError: operands could not be broadcast together with shapes (3,) (4,) (train.py:6)"


def test_a_library_is_not_the_program(run: Run) -> None:
    found = run(JOIN + 'import json\n\njson.loads("{")\nraise\n')
    assert found.text.startswith("JSONDecodeError: ")
    assert found.text.endswith("(train.py:5)")


def test_a_hook_of_the_users_that_calls_no_other(run: Run) -> None:
    program = JOIN + 'import sys\nsys.excepthook = lambda *_: print("mine")\nx = 1 / 0\n'
    assert run(program).text == "ZeroDivisionError: division by zero (train.py:5)"


def test_a_status_is_no_error_in_words(run: Run) -> None:
    found = run(JOIN + "import sys\nsys.exit(3)\n")
    assert classify(found, 3) == (Cause.PROGRAM_ERROR, "rank 2 on n3: exit status 3")


def test_a_thread_that_ends_ends_no_program(run: Run) -> None:
    program = """
        import threading
        def f():
            raise ValueError("of a thread")
        thread = threading.Thread(target=f)
        thread.start()
        thread.join()
        raise KeyError("of the program")
    """
    assert run(JOIN + textwrap.dedent(program)).text == "KeyError: 'of the program' (train.py:10)"


def test_the_end_of_a_child_is_not_that_of_the_rank(run: Run) -> None:
    program = """
        import os
        if not os.fork():
            raise ValueError("of a child")
        os.wait()
        raise KeyError("of the rank")
    """
    assert run(JOIN + textwrap.dedent(program)).text == "KeyError: 'of the rank' (train.py:8)"


def test_a_failed_rank_that_does_not_end(run: Run) -> None:
    """As in MPI_Finalize, which waits for the others after the interpreter has gone."""
    program = """
        import ctypes
        last_words.END_S = 0.5
        at_the_very_end = ctypes.CFUNCTYPE(None)(("pause", ctypes.CDLL(None)))
        ctypes.pythonapi.Py_AtExit(at_the_very_end)
        raise ValueError("x")
    """
    found = run(JOIN + textwrap.dedent(program))
    assert found.code == 128 + signal.SIGALRM
    assert classify(found, 142) == (
        Cause.PROGRAM_ERROR,
        "rank 2 on n3: ValueError: x (train.py:8), and it did not end by itself",
    )


def test_memory_that_is_not_to_be_had(run: Run) -> None:
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        try:
            x = bytearray(1 << 31)
        except MemoryError as error:
            raise RuntimeError("no batch") from error
    """
    found = run(JOIN + textwrap.dedent(program))
    assert found.kind == "memory"
    assert classify(found, 1) == (Cause.OUT_OF_MEMORY, "rank 2 on n3: RuntimeError: no batch (train.py:9)")


def test_torch_without_memory(run: Run) -> None:
    found = run(JOIN + "import torch\nraise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')\n")
    assert classify(found, 1)[0] is Cause.OUT_OF_MEMORY


def test_torch_without_memory_on_the_host(run: Run) -> None:
    found = run(JOIN + "import torch\nx = torch.empty(1 << 50, dtype=torch.uint8)\nraise\n")
    assert "allocate" in found.text
    assert classify(found, 1)[0] is Cause.OUT_OF_MEMORY


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root only")
    try:
        with pytest.raises(OSError, match="No space"):
            (folder / "ballast").write_bytes(bytes(1 << 20))
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(run: Run, full: Path) -> None:
    program = f"open({str(full / 'x')!r}, 'wb').write(bytes(9999))\nraise\n"
    found = run(JOIN + program)
    assert classify(found, 1) == (
        Cause.STORAGE,
        "rank 2 on n3: OSError: [Errno 28] No space left on device (train.py:3)",
    )


def test_a_full_disk_that_the_last_words_were_to_go_to(run: Run, full: Path) -> None:
    program = f"open({str(full / 'x')!r}, 'wb').write(bytes(9999))\nraise\n"
    found = run(JOIN + program, prefix=full / ATTEMPT)
    assert (full / f"{ATTEMPT}.exit").read_text() == ""
    assert found == FirstExit(2, "n3", 1, kind="storage")
    assert classify(found, 1) == (Cause.STORAGE, "rank 2 on n3: it met a storage fault")


def test_no_room_in_memory_for_last_words(run: Run, full: Path) -> None:
    found = run(JOIN + "raise ValueError('x')\n", environment={"TRANSOM_SHM": str(full)})
    assert (found.code, found.kind) == (1, "")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with 96 MB of memory, of whichever version this machine has."""
    for root, limit, more in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", {}),
        (Path("/sys/fs/cgroup"), "memory.max", {"memory.swap.max": "0"}),
    ):
        group = root / f"transom-test-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(96 << 20))
            for name, text in more.items():
                (group / name).write_text(text)
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no control group for memory can be made here")


def test_a_rank_that_the_kernel_kills_for_memory(run: Run, small_group: Path) -> None:
    wrapper = f"echo $$ > {small_group / 'cgroup.procs'} || exit 99\n{steps._TASK}"
    found = run("x = [bytes([1]) * (1 << 20) for _ in range(300)]\n", wrapper=wrapper)
    assert (found.code, found.oom) == (128 + signal.SIGKILL, "group")
    assert classify(found, 137) == (
        Cause.OUT_OF_MEMORY,
        "rank 2 on n3 was killed while its control group ran out of memory",
    )


def test_a_group_below_the_one_that_counts(run: Run, small_group: Path, tmp_path: Path) -> None:
    """As where memory is counted for a whole step, or where a container sees its own group as the root."""
    version_1 = small_group.parent.name == "memory"
    line = f"{'4:memory' if version_1 else '0:'}:/{small_group.name}/user/task_0\n"
    (tmp_path / "cgroup").write_text(f"1:cpu,cpuacct:/x\n{line}")
    wrapper = f"echo $$ > {small_group / 'cgroup.procs'} || exit 99\n{steps._TASK}"
    wrapper = wrapper.replace("/proc/self/cgroup", str(tmp_path / "cgroup"))
    found = run("x = [bytes([1]) * (1 << 20) for _ in range(300)]\n", wrapper=wrapper)
    assert (found.code, found.oom) == (128 + signal.SIGKILL, "group")


def test_a_kill_while_the_host_kills_for_memory(run: Run, tmp_path: Path) -> None:
    """The host's counter is a copy here: nobody wants this machine to run out of memory."""
    copy = tmp_path / "vmstat"
    copy.write_text("nr_free_pages 55\noom_kill 4\n")
    wrapper = steps._TASK.replace("/proc/vmstat", str(copy))
    assert wrapper != steps._TASK
    program = f"import os\nopen({str(copy)!r}, 'w').write('oom_kill 5\\n')\nos.kill(os.getpid(), 9)\n"
    found = run(program, wrapper=wrapper)
    assert classify(found, 137) == (Cause.OUT_OF_MEMORY, "rank 2 on n3 was killed while its host ran out of memory")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGBUS"])
def test_a_rank_that_a_signal_kills(run: Run, name: str) -> None:
    found = run(f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    assert found.oom == ""
    assert classify(found, found.code) == (Cause.PROGRAM_KILLED, f"rank 2 on n3 died of {name}")


def test_a_program_that_is_not_python(run: Run) -> None:
    found = run("", argv=["sh", "-c", "exit 7"])
    assert classify(found, 7) == (Cause.PROGRAM_ERROR, "rank 2 on n3: exit status 7")


def test_the_first_one_has_the_word(run: Run, tmp_path: Path) -> None:
    (tmp_path / f"{ATTEMPT}.exit").write_text("1 n2 1 -\n\n")
    assert run("raise SystemExit(1)\n") == FirstExit(1, "n2", 1)


def caused(error: BaseException, by: BaseException) -> BaseException:
    error.__cause__ = by
    return error


FULL = OSError(errno.ENOSPC, "No space left on device", "/scratch/x")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), "error"),
        (OSError(errno.ENOENT, "no such file", "/x"), "error"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "memory"),
        (FULL, "storage"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/x"), "storage"),
        (OSError(errno.EIO, "Input/output error"), "storage"),
        (OSError(errno.ESTALE, "Stale file handle"), "storage"),
        (OSError(errno.EROFS, "Read-only file system"), "storage"),
        (OSError(errno.ENOTCONN, "not connected"), "error"),  # a socket
        (OSError(errno.ENOTCONN, "not connected", "/beegfs/x"), "storage"),
        (OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"), "memory"),
        (OSError("Can't write data (file write failed: error message = 'No space left on device')"), "storage"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "memory"),
        (RuntimeError("CUDA error: out of memory"), "memory"),
        (RuntimeError("unable to write to file </torch_12_34_0>: No space left on device (28)"), "memory"),
        (ValueError("CUDA error: out of memory"), "error"),  # said by the program itself
        (caused(SaveError("step 5 was not saved: x"), FULL), "storage"),
        (SaveError("step 5 was not saved: rank 3 failed: [Errno 122] Disk quota exceeded"), "storage"),
        (SaveError("/x has 0.10 GB left and the checkpoint takes 0.20 GB; make room, or keep fewer"), "storage"),
        (UsageError("wrong"), "error"),
        (caused(RuntimeError("x"), MemoryError()), "memory"),
        (ExceptionGroup("several", [ValueError(), FULL]), "storage"),
    ],
)
def test_kinds(error: BaseException, kind: str) -> None:
    assert kind_of(error) == kind


def test_what_is_hidden_does_not_count() -> None:
    def fail() -> None:
        try:
            raise FULL
        except OSError:
            raise ValueError("x") from None

    with pytest.raises(ValueError, match="x") as found:
        fail()
    assert kind_of(found.value) == "error"


def test_an_error_that_is_its_own_cause() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert kind_of(one) == "error"


def test_text_is_one_line_of_a_bounded_length() -> None:
    class Strange(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert text_of(ValueError()) == "ValueError"
    assert text_of(ValueError("\n  a\tb\x1b[31m\nc")) == "ValueError: a b [31m"
    assert text_of(Strange()) == "Strange"
    assert len(text_of(ValueError("x" * 5000))) == 240
