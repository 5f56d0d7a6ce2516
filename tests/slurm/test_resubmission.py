"""What sbatch is told for a job that is to be as another was."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transom_hpc.slurm.environment import environment_of_a_new_job
from transom_hpc.slurm.resubmission import arguments, options
from transom_hpc.slurm.text import parse_show_job

RECORDED = Path(__file__).parents[1] / "recorded"
# A running job that was sent with: sbatch --no-requeue -N 2 --ntasks-per-node=2 --time=10 --mem=100 --exclude=n3 ...
SHOWN = (RECORDED / "slurm-22.05.8" / "follow-up-show-job.txt").read_text()


def test_all_that_scontrol_shows_is_said_again() -> None:
    (job,) = parse_show_job(SHOWN)
    assert options(job) == [
        "--time=00:10:00",
        "--partition=main",
        "--account=lab",
        "--qos=normal",
        "--cpus-per-task=1",
        "--mem=100M",
        "--job-name=tpl",
        "--no-kill",
        "--open-mode=append",
        "--no-requeue",
        f"--chdir={job.work_dir}",
        f"--output={job.work_dir}/slurm-%j.out",
    ]
    assert arguments(job.command, ["python", "train.py", "a b", "--lr", "3"], lambda _: False) == [
        *["python", "train.py", "a b", "--lr", "3"]
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"TresPerNode": "gres:gpu:2"}, "--gres=gpu:2"),
        ({"TresPerNode": "gres/gpu:a100:4"}, "--gres=gpu:a100:4"),
        ({"TresPerJob": "gres:gpu:8"}, "--gpus=8"),
        ({"TresPerTask": "cpu=1,gres/gpu=1"}, "--gpus-per-task=1"),
        ({"Features": "ib&fast"}, "--constraint=ib&fast"),
        ({"Reservation": "mine"}, "--reservation=mine"),
        ({"MinMemoryCPU": "2G"}, "--mem-per-cpu=2G"),
        ({"OverSubscribe": "NO"}, "--exclusive"),
    ],
)
def test_other_wishes(words: dict[str, str], said: str) -> None:
    (job,) = parse_show_job(SHOWN)
    assert said not in options(job)
    assert said in options(dataclasses.replace(job, words={**job.words, **words}))


@pytest.mark.parametrize("nothing", ["(null)", "N/A", "0", "None", ""])
def test_what_is_nothing_is_not_said(nothing: str) -> None:
    (job,) = parse_show_job(SHOWN)
    job = dataclasses.replace(job, words=dict.fromkeys(job.words, nothing), work_dir="", std_out="", std_err="")
    assert options(job) == ["--job-name=tpl", "--no-kill", "--open-mode=append", "--no-requeue"]


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("/home/u12/12/out-12.log", "/home/u12/12/out-%j.log"),  # folders are there, and others may not be
        ("/x/a%b.12", "/x/a%%b.%j"),
        ("/x/112.log", "/x/112.log"),
        ("/x/v12.log", "/x/v12.log"),
    ],
)
def test_output_goes_to_a_file_of_its_own(path: str, pattern: str) -> None:
    (job,) = parse_show_job(SHOWN)
    said = options(dataclasses.replace(job, job_id=12, std_out=path, std_err="/x/err"))
    assert f"--output={pattern}" in said
    assert "--error=/x/err" in said


@pytest.mark.parametrize(
    ("command", "program", "files", "expected"),
    [
        ("", [], (), []),
        ("/x/train.sbatch", ["python", "fixed.py"], ("/x/train.sbatch",), []),
        ("/x/train.sbatch python a b.py", ["python", "a b.py"], ("/x/train.sbatch",), ["python", "a b.py"]),
        ("/x/train.sbatch python a.py", ["python", "a.py"], (), ["python", "a.py"]),  # its file is gone
        ("/x/my job.sh python a.py", ["python", "a.py"], ("/x/my job.sh",), ["python", "a.py"]),
        ("/x/my job.sh 8 python a.py", ["python", "a.py"], ("/x/my job.sh",), ["8", "python", "a.py"]),
        ("/x/j.sh 8 --fast", ["python", "made", "up.py"], ("/x/j.sh",), ["8", "--fast"]),
    ],
)
def test_arguments(command: str, program: list[str], files: tuple[str, ...], expected: list[str]) -> None:
    assert arguments(command, program, lambda path: path in files) == expected


words = st.lists(st.text(alphabet="ab -=", min_size=1, max_size=5), min_size=1, max_size=5)


@given(words)
def test_the_program_comes_back_as_it_was(program: list[str]) -> None:
    assert arguments(" ".join(["/x/j.sh", *program]), program, lambda path: path == "/x/j.sh") == program


def test_the_environment_of_a_new_job() -> None:
    ours = {"HOME": "/home/me", "SLURM_CONF": "/etc/slurm.conf", "SQUEUE_FORMAT": "%i"}
    leaks = ["SLURM_JOB_ID", "SBATCH_EXCLUSIVE", "SRUN_CPUS_PER_TASK", "PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK"]
    leaks += ["TRANSOM_ATTEMPT", "SLURMD_NODENAME"]
    assert environment_of_a_new_job({**ours, **dict.fromkeys(leaks, "1")}) == ours
