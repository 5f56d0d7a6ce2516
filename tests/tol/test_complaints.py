"""What Slurm says of a step, found in the job's output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from transom_hpc.tol.causes import Cause
from transom_hpc.tol.complaints import slurm_lines
from transom_hpc.tol.exits import classify

RECORDED = Path(__file__).parents[1] / "recorded/slurm-22.05.8/srun-steps.txt"


def words(number: int) -> list[str]:
    """Slurm's lines about one of the recorded steps."""
    return slurm_lines(RECORDED.read_text().split("=== ")[number + 1])


def test_what_slurm_says() -> None:
    assert words(0) == ["n2: task 1: Killed", "n3: task 2: Terminated", "n1: task 0: Terminated"]
    assert words(1)[0] == "n2: task 1: Exited with exit code 3"
    assert words(3)[1] == "execve(): /nowhere/program: No such file or directory"


def test_what_is_made_of_it() -> None:
    assert classify(None, 143, True, words(0)) == (
        Cause.PROGRAM_KILLED,
        "the program's step died of SIGTERM: n2: task 1: Killed",
    )
    later = [*words(0)[1:], words(0)[0]]  # each host's word comes when it comes
    assert classify(None, 143, True, later)[1] == "the program's step died of SIGTERM: n2: task 1: Killed"
    assert classify(None, 1, False, words(3)[-1:]) == (
        Cause.SLURM,
        "srun did not start the program: Unable to create step for job 1: Requested node configuration is not "
        "available",
    )


def test_lines_of_the_program_are_not_slurms() -> None:
    text = "0: srun: error: n1: task 0: Out Of Memory\nerror: x\nmy srun: error: y\n 0: slurmstepd: error: z\n"
    assert slurm_lines(text) == []


def test_only_what_came_since_and_only_from_a_file(tmp_path: Path) -> None:
    program = """
import os
from transom_hpc.tol.complaints import Complaints
os.write(2, b"srun: error: before\\n")
complaints = Complaints()
os.write(2, b"srun: error: after\\nother\\n" + b"x" * 300_000 + b"\\nsrun: error: at the end\\n")
print(complaints.lines())
"""
    command = [sys.executable, "-c", program]
    for flags, expected in ((os.O_APPEND, "['at the end']\n"), (0, "['at the end']\n")):
        fd = os.open(tmp_path / f"log{flags}", os.O_WRONLY | os.O_CREAT | flags)
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=fd, text=True, check=True, timeout=60)
        os.close(fd)
        assert answer.stdout == expected
    short = program.replace("300_000", "3")
    with (tmp_path / "short").open("wb") as file:
        answer = subprocess.run([*command[:2], short], stdout=subprocess.PIPE, stderr=file, text=True, check=True)
    assert answer.stdout == "['after', 'at the end']\n"
    for stderr in (subprocess.PIPE, subprocess.DEVNULL):
        answer = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True, timeout=60)
        assert answer.stdout == "[]\n"
