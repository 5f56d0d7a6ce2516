"""Submission in its three forms, and what is refused before anything is submitted; on a real Slurm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import transom_hpc

from .conftest import PYTHON, Runs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

OK = ["--nodes", "1", "--site", "lab"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*OK, "--partition", "gpu", "--", "true"], "no partition 'gpu' here; there are main, urgent"),
        ([*OK, "--", "no-such-program"], "no such program: 'no-such-program' is not on PATH"),
        ([*OK, "--", sys.executable, "missing.py"], "no such program: there is no file 'missing.py'"),
        ([*OK, "--run-dir", "/proc/run", "--", "true"], "can't write run directory /proc/run"),
        ([*OK, "--run-dir", "/dev/shm/run", "--", "true"], "/dev/shm/run is not shared: it lies on tmpfs"),
        (
            ["--nodes", "1", "--site", "bad.toml", "--", "true"],
            "bad.toml: there is no key 'partitoin': did you mean 'partition'?",
        ),
        (["--nodes", "0", "--site", "lab", "--", "true"], "nodes must be a whole number of at least 1, not 0"),
        (
            ["--nodes", "0", "--spares", "2", "--site", "lab", "--", "true"],
            "nodes must be a whole number of at least 1",
        ),
        (
            ["--nodes", "5", "--spares", "1", "--site", "lab", "--", "true"],
            "6 nodes are asked for and there are 5 here",
        ),
        ([*OK, "--time", "soon", "--", "true"], "soon"),
        ([*OK, "--exclude", "n[1-", "--", "true"], "n[1-"),
        ([*OK], "Missing argument 'PROGRAM...'"),
    ],
)
def test_refused(runs: Runs, arguments: list[str], message: str) -> None:
    (runs.folder / "bad.toml").write_text('partitoin = "main"\n')
    answer = runs.transom("submit", *arguments, check=False)
    assert answer.returncode == 2, answer.stderr
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    if not message.startswith("Missing"):
        assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr
    assert runs.lab.run("login", ["squeue", "-h"]).stdout == ""
    assert sorted(path.name for path in runs.folder.iterdir()) == ["bad.toml"], "nothing is left behind"


def test_no_slurm(tmp_path: Path) -> None:
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path)}
    command = [*PYTHON, "-m", "transom_hpc", "submit", "--", sys.executable, "-V"]
    answer = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60, check=False
    )
    assert answer.returncode == 2
    assert answer.stderr.startswith("transom: no Slurm on this machine")
    assert len(answer.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_sbatch_itself_says_no(runs: Runs) -> None:
    (runs.folder / "odd.toml").write_text('partition = "main"\nsbatch = { "begin" = "yesteryear" }\n')
    answer = runs.transom("submit", "--site", "odd.toml", "--", "true", check=False)
    assert answer.returncode == 1
    assert "sbatch refused the job: " in answer.stderr
    assert "yesteryear" in answer.stderr
    assert list(runs.folder.glob("transom-runs/*")) == []
    assert "Traceback" not in answer.stderr


def test_two_jobs_on_one_directory(runs: Runs) -> None:
    run = runs.submit("--nodes", "1", program=["sleep", "100"])
    answer = runs.transom("submit", *OK, "--run-dir", str(run.path), "--", "true", check=False)
    assert answer.returncode == 2
    assert f"job {run.job_id} uses the run directory {run.path} already" in answer.stderr


def test_render_is_what_submit_uses(runs: Runs) -> None:
    run = runs.submit("--nodes", "2", "--time", "5", program=["true"])
    text = runs.transom(
        "render", "--nodes", "2", "--time", "5", "--site", "lab", "--run-dir", str(run.path), "--", "true"
    ).stdout.strip()
    script = (run.path / "logs" / f"{run.job_id}_submission.sh").read_text().strip()
    marks = [line for line in script.splitlines() if "--comment=" in line]
    assert text.replace("#SBATCH --comment=transom:ID", marks[0]) == script
    assert "#SBATCH --requeue" in text
    assert "#SBATCH --no-kill" in text
    assert "#SBATCH --signal=B:USR1@60" in text


FUNCTION = """
import os, sys, time
import transom_hpc as transom

def work(factor, *, offset):
    rank = int(os.environ["RANK"])
    if factor == 0:
        raise ValueError("factor must not be 0")
    return factor * rank + offset

spec = transom.JobSpec(nodes=2, tasks_per_node=2, site="lab", run_dir=sys.argv[1])
run = transom.submit(spec, work, 10, offset=3)
print(run.job.results(), run.job.result(), run.spec.nodes)
deadline = time.monotonic() + 60  # the accounting comes late
while run.job.watcher.get_state(run.job.job_id, "force") != "COMPLETED" and time.monotonic() < deadline:
    time.sleep(0.2)
print(run.job.state)
print(transom.load_run(sys.argv[1]).job.results())
"""


def test_function(runs: Runs) -> None:
    script = runs.folder / "function.py"
    script.write_text(FUNCTION)
    answer = runs.lab.run("login", [*PYTHON, str(script), str(runs.folder / "run")], cwd=runs.folder, timeout=100)
    assert answer.stdout.splitlines() == ["[3, 13, 23, 33] 3 2", "COMPLETED", "[3, 13, 23, 33]"]


COMMAND = """
import sys
import transom_hpc as transom

spec = transom.JobSpec(nodes=1, site="lab", run_dir=sys.argv[1])
run = transom.submit(spec, *sys.argv[2:])
try:
    print("result", run.job.result())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_command_through_submitit(runs: Runs) -> None:
    script = runs.folder / "command.py"
    script.write_text(COMMAND)

    def result(name: str, *program: str) -> str:
        argv = [*PYTHON, str(script), str(runs.folder / name), *program]
        return runs.lab.run("login", argv, cwd=runs.folder, timeout=100).stdout

    assert result("good", "true") == "result 0\n"
    bad = result("bad", "false")
    assert bad.startswith("FailedJobError")
    assert "program error came 5 times" in bad


def test_local(tmp_path: Path) -> None:
    """submitit's local executor: no Slurm, for debugging."""
    script = tmp_path / "local.py"
    script.write_text(
        "import os, sys\nimport transom_hpc as transom\n"
        "def work(x):\n"
        "    ckpt = transom.Checkpointer.from_env()\n"
        "    state = {'x': x}\n"
        "    start = ckpt.restore(state)\n"
        "    ckpt.step(start + 1, state)\n"
        "    ckpt.close()\n"
        "    return start, int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
        "spec = transom.JobSpec(local=True, run_dir=sys.argv[1], save_every=1)\n"
        "print(transom.submit(spec, work, 5).job.result())\n"
        "print(transom.submit(spec, work, 5).job.result())\n"
        "print(transom.submit(spec, sys.executable, '-c', 'import transom_hpc').job.result())\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    answer = subprocess.run(
        [*PYTHON, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=100,
        check=False,
    )
    assert answer.stdout.splitlines() == ["(0, 0, 1)", "(1, 0, 1)", "0"], answer.stderr


def test_the_program_gets_what_was_asked_for(runs: Runs) -> None:
    code = "import os; print('CPUS', os.environ['SLURM_CPUS_PER_TASK'], os.environ['LOCAL_WORLD_SIZE'], flush=True)"
    run = runs.submit(
        "--nodes", "2", "--tasks-per-node", "2", "--cpus-per-task", "2", program=[sys.executable, "-c", code]
    )
    run.wait_end()
    log = (run.path / "logs" / f"{run.job_id}_0_log.out").read_text()
    assert log.count("CPUS 2 2") == 4, log


def test_user_files_named_like_standard_modules(runs: Runs) -> None:
    for name in ("signal", "queue", "ckpt", "monitors", "transom_hpc"):
        (runs.folder / f"{name}.py").write_text("raise RuntimeError('the wrong file was imported')\n")
    run = runs.submit("--nodes", "1", program=["true"])
    run.wait_end()
    assert run.entries("monitoring") == [] or run.entries("monitoring")[-1].facts["problem"] == ""


def test_status_without_slurm(runs: Runs) -> None:
    run = runs.submit("--nodes", "1", program=["true"])
    run.wait_end()
    environment = {**os.environ, "PATH": "/nowhere"}
    command = [*PYTHON, "-m", "transom_hpc", "status", str(run.path), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    facts = json.loads(answer.stdout)
    assert (facts["phase"], facts["job_state"]) == ("ended well", "unknown")
    assert "no Slurm on this machine" in facts["advice"][0]


@pytest.mark.parametrize(("flags", "tasks"), [(["-N", "1", "-n", "3"], 3), (["-N", "1", "--ntasks-per-node=2"], 2)])
def test_template_with_several_tasks(runs: Runs, flags: list[str], tasks: int) -> None:
    template = Path(transom_hpc.__file__).parent / "sbatch_templates" / "train.sbatch"
    program = [sys.executable, "-c", "import os; print('RANK', os.environ['RANK'], flush=True)"]
    log = runs.folder / "log"
    sbatch = ["env", "TRANSOM_SITE=lab", "sbatch", "--wait", f"--output={log}", *flags, str(template), *program]
    runs.lab.run("login", sbatch, cwd=runs.folder)
    assert log.read_text().count("RANK") == tasks


def test_template_with_tasks_that_do_not_fit(runs: Runs) -> None:
    template = Path(transom_hpc.__file__).parent / "sbatch_templates" / "train.sbatch"
    log = runs.folder / "log"
    sbatch = ["sbatch", "--wait", f"--output={log}", "-N", "2", "-n", "3", str(template), "true"]
    assert runs.lab.run("login", sbatch, cwd=runs.folder, check=False).returncode == 2
    assert "3 tasks can't be spread evenly over 2 nodes: ask with --ntasks-per-node" in log.read_text()
