"""Why a program's step ended, from what its first task and Slurm have left."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.tol.causes import Cause
from transom_hpc.tol.exits import FirstExit, classify, how_ended, parse_exit, parse_said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 n3 1 -\n\n", FirstExit(2, "n3", 1)),
        ("2 n3 137 group\n\n", FirstExit(2, "n3", 137, oom="group")),
        ("2 n3 137 host\n\n", FirstExit(2, "n3", 137, oom="host")),
        ("2 n3 1\n", FirstExit(2, "n3", 1)),  # an older version's
        ("2 n3 1 new words\nerror 2 x\n", FirstExit(2, "n3", 1, kind="error", text="x")),
        ("0 n3 1 -\nerror 7 ValueError: x (a.py:1)\n", FirstExit(7, "n3", 1, "", "error", "ValueError: x (a.py:1)")),
        ("2 n3 1 -\nstorage -", FirstExit(2, "n3", 1, kind="storage")),  # in short
        ("2 n3 1 -\n -", FirstExit(2, "n3", 1)),
        ("2 n3 1 -\nstrange 2 x\n", FirstExit(2, "n3", 1)),
        ("", None),
        ("2 n3", None),
        ("two n3 1 -\n", None),
        ("\n2 n3 1", None),
    ],
)
def test_parse_exit(text: str, expected: FirstExit | None) -> None:
    assert parse_exit(text) == expected


@given(st.text())
def test_anything_can_be_read(text: str) -> None:
    parse_exit(text)
    parse_said(text)


OOM_LINES = (
    "n3: task 2: Out Of Memory",
    "Detected 1 oom-kill event(s) in StepId=12.0. Some of your processes may have been killed by the cgroup "
    "out-of-memory handler.",
)


@pytest.mark.parametrize(
    ("first", "code", "started", "words", "cause", "evidence"),
    [
        (
            FirstExit(2, "n3", 1, kind="error", text="ValueError: x (train.py:40)"),
            1,
            True,
            (),
            Cause.PROGRAM_ERROR,
            "rank 2 on n3: ValueError: x (train.py:40)",
        ),
        (FirstExit(2, "n3", 255), 255, True, (), Cause.PROGRAM_ERROR, "rank 2 on n3: exit status 255"),
        (FirstExit(2, "n3", 139), 137, True, (), Cause.PROGRAM_KILLED, "rank 2 on n3 died of SIGSEGV"),
        (FirstExit(2, "n3", 137), 137, True, (), Cause.PROGRAM_KILLED, "rank 2 on n3 died of SIGKILL"),
        (
            FirstExit(2, "n3", 134, kind="error", text="ValueError: x (a.py:1)"),
            134,
            True,
            (),
            Cause.PROGRAM_ERROR,
            "rank 2 on n3: ValueError: x (a.py:1), then it died of SIGABRT",
        ),
        (
            FirstExit(2, "n3", 142, kind="error", text="ValueError: x (a.py:1)"),
            142,
            True,
            (),
            Cause.PROGRAM_ERROR,
            "rank 2 on n3: ValueError: x (a.py:1), and it did not end by itself",
        ),
        (FirstExit(2, "n3", 142), 142, True, (), Cause.PROGRAM_KILLED, "rank 2 on n3 died of SIGALRM"),
        (
            FirstExit(2, "n3", 137, oom="group"),
            137,
            True,
            (),
            Cause.OUT_OF_MEMORY,
            "rank 2 on n3 was killed while its control group ran out of memory",
        ),
        (
            FirstExit(2, "n3", 1, "group", "error", "RuntimeError: DataLoader worker (pid 7) died"),
            1,
            True,
            (),
            Cause.OUT_OF_MEMORY,
            "rank 2 on n3 ended (RuntimeError: DataLoader worker (pid 7) died) while its control group ran out of "
            "memory",
        ),
        (
            FirstExit(
                2, "n3", 1, "host", "error", "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."
            ),
            1,
            True,
            (),
            Cause.OUT_OF_MEMORY,
            "rank 2 on n3 ended (RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.) while its host "
            "ran out of memory",
        ),
        # another user's process was killed on a host that is shared
        (
            FirstExit(2, "n3", 1, "host", "error", "ValueError: x"),
            1,
            True,
            (),
            Cause.PROGRAM_ERROR,
            "rank 2 on n3: ValueError: x",
        ),
        (FirstExit(2, "n3", 139, "host"), 139, True, (), Cause.PROGRAM_KILLED, "rank 2 on n3 died of SIGSEGV"),
        (
            FirstExit(2, "n3", 137),
            137,
            True,
            OOM_LINES,
            Cause.OUT_OF_MEMORY,
            f"rank 2 on n3 was killed, and Slurm says: {OOM_LINES[1]}",
        ),
        # words of Slurm about tasks that it killed because of this one
        (FirstExit(2, "n3", 3), 3, True, OOM_LINES, Cause.PROGRAM_ERROR, "rank 2 on n3: exit status 3"),
        (
            FirstExit(2, "n3", 1, kind="storage", text="OSError: full (a.py:1)"),
            1,
            True,
            (),
            Cause.STORAGE,
            "rank 2 on n3: OSError: full (a.py:1)",
        ),
        (FirstExit(2, "n3", 1, kind="memory"), 1, True, (), Cause.OUT_OF_MEMORY, "rank 2 on n3: it ran out of memory"),
        (None, 137, True, OOM_LINES, Cause.OUT_OF_MEMORY, f"Slurm says: {OOM_LINES[1]}"),
        (
            None,
            1,
            False,
            ("Unable to create step for job 12: Invalid node name specified",),
            Cause.SLURM,
            "srun did not start the program: Unable to create step for job 12: Invalid node name specified",
        ),
        (None, 0, False, (), Cause.SLURM, "srun did not start the program (its words are in the log)"),
        (
            None,
            0,
            True,
            (),
            Cause.SLURM,
            "srun has ended, and rank 0 of the program has not ended well (its words are in the log)",
        ),
        (
            None,
            137,
            True,
            ("n3: task 2: Killed",),
            Cause.PROGRAM_KILLED,
            "the program's step died of SIGKILL: n3: task 2: Killed",
        ),
        (
            None,
            1,
            True,
            (),
            Cause.PROGRAM_ERROR,
            "the program's step ended with exit status 1 (its words are in the log)",
        ),
    ],
)
def test_classify(
    first: FirstExit | None, code: int, started: bool, words: Sequence[str], cause: Cause, evidence: str
) -> None:
    assert classify(first, code, started, words) == (cause, evidence)


def test_signals_are_named_as_here() -> None:
    for number in range(1, 32):
        name = how_ended(128 + number).removeprefix("died of ")
        if not name.startswith("signal "):
            assert name == signal.Signals(number).name
    assert how_ended(128 + 40) == "died of signal 40"
    assert how_ended(128 + 65) == "exit status 193"


@given(
    st.builds(
        FirstExit,
        st.integers(0, 9),
        st.just("n1"),
        st.integers(1, 255),
        st.sampled_from(["", "group", "host"]),
        st.sampled_from(["", "memory", "storage", "error"]),
        st.text(max_size=9),
    )
    | st.none(),
    st.integers(0, 255),
    st.booleans(),
    st.lists(st.text(max_size=9)),
)
def test_every_end_has_a_cause_and_a_sentence(
    first: FirstExit | None, code: int, started: bool, words: list[str]
) -> None:
    cause, evidence = classify(first, code, started, words)
    assert cause in (
        Cause.PROGRAM_ERROR,
        Cause.OUT_OF_MEMORY,
        Cause.PROGRAM_KILLED,
        Cause.STORAGE,
        Cause.SLURM,
    )
    assert evidence
    if first is not None:
        assert evidence.startswith(f"rank {first.rank} on n1")
