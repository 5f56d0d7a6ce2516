"""A run that was hurt ends with bitwise the result of one that was not: on a real Slurm, as an ordinary user."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

import transom_hpc
from transom_hpc import load_run

from .conftest import Runs, Submitted, same_bits

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

Unhurt = Callable[..., numpy.ndarray]


def test_host_crashed_with_a_spare(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "4", "--spares", "1", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.crash("n3")
    run.wait_end()
    assert same_bits(run.field(), unhurt(150)), run.story()
    (restart,) = run.entries("restart")
    assert (restart.facts["cause"], restart.facts["host_out"]) == ("host silent", "n3")
    assert restart.facts["committed"] >= 40
    assert [entry.facts["hosts"] for entry in run.entries("launch")] == [
        ["n1", "n2", "n3", "n4"],
        ["n1", "n2", "n5", "n4"],
    ]
    assert run.entries("requeue") == []
    facts = json.loads(runs.transom("status", str(run.job_id), "--json").stdout)
    assert (facts["phase"], facts["step"], facts["committed"]) == ("ended well", 150, 140)
    assert facts["excluded"][0]["host"] == "n3"
    assert "n3 has not been heard" in facts["restarts"][0]["evidence"]
    history = load_run(run.path).history()
    assert list(history[history.kind == "restart"].host_out) == ["n3"]


def test_host_crashed_without_a_spare(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "3", "--save-every", "20", "--exclude", "n5", steps=150)
    run.wait_saved(40)
    runs.lab.crash("n2")
    run.wait_entry("requeued")
    runs.lab.boot("n2")  # it is back, and looks healthy: only the exclusion keeps the job away from it
    run.release()
    assert run.slurm()["ExcNodeList"] == "n[2,5]", "the union with the user's own"
    run.wait_end()
    assert same_bits(run.field(), unhurt(150, 3)), run.story()
    assert [entry.facts["hosts"] for entry in run.entries("start")] == [["n1", "n2", "n3"], ["n1", "n3", "n4"]]


@pytest.mark.soak
def test_excluding_more_than_the_cluster_has_lets_the_job_start_again(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "4", "--save-every", "20", "--exclude", "n5", steps=150)
    run.wait_saved(40)
    runs.lab.crash("n2")
    requeue = run.wait_entry("requeue")
    assert (requeue.facts["avoid"], requeue.facts["let_back"]) == ([], ["n2"]), "four are needed, and n5 is not ours"
    runs.lab.boot("n2")
    run.release()
    run.wait_end()
    assert same_bits(run.field(), unhurt(150)), run.story()


def test_misplaced(runs: Runs, unhurt: Unhurt) -> None:
    """The exclusion is lost on the way: the job starts on the bad host all the same, and notices."""
    run = runs.heat("--nodes", "3", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.crash("n2")
    run.wait_entry("requeued")
    runs.lab.boot("n2")
    run.wait("pending", lambda: run.slurm()["JobState"] == "PENDING", 60)
    runs.lab.run("login", ["scontrol", "update", f"jobid={run.job_id}", "ExcNodeList=", "StartTime=now"])
    run.wait_entry("requeued", 2)
    assert run.entries("start")[1].facts["hosts"] == ["n1", "n2", "n3"]
    assert run.entries("restart")[1].facts["cause"] == "misplaced"
    run.release()
    run.wait_end()
    assert "n2" not in run.entries("start")[2].facts["hosts"]
    assert same_bits(run.field(), unhurt(150, 3)), run.story()


def test_first_host_crashed(runs: Runs, unhurt: Unhurt) -> None:
    """With --no-kill Slurm leaves an orphan that runs for ever: a survivor takes over, and has too few hosts."""
    run = runs.heat("--nodes", "3", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.crash("n1")
    restart = run.wait_entry("restart", seconds=30)
    assert (restart.host, restart.attempt.number, restart.facts["host_out"]) == ("n2", 2, "n1")
    run.release()
    run.wait_end()
    assert same_bits(run.field(), unhurt(150, 3)), run.story()
    assert [entry.facts["hosts"] for entry in run.entries("start")] == [
        ["n1", "n2", "n3"],
        ["n2", "n3"],
        ["n2", "n3", "n4"],
    ]
    assert len(run.entries("restart")) == len(run.entries("requeue")) == 1


def test_program_killed(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "4", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.run("n2", ["pkill", "-KILL", "-f", "heat_mpi.py"])
    run.wait_end()
    assert same_bits(run.field(), unhurt(150)), run.story()
    (restart,) = run.entries("restart")
    assert restart.facts["cause"] == "program killed"
    assert run.entries("host out") == []


def test_requeued_by_a_person(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "4", "--save-every", "20", steps=150)
    run.wait_saved(40)
    runs.lab.run("login", ["scontrol", "requeue", str(run.job_id)])
    run.release()
    run.wait_end()
    assert same_bits(run.field(), unhurt(150)), run.story()
    assert [entry.facts["requeues"] for entry in run.entries("start")] == [0, 1]


def test_program_hung(runs: Runs, unhurt: Unhurt) -> None:
    run = runs.heat("--nodes", "3", "--save-every", "20", "--hang-after", "6", steps=150)
    run.wait_saved(40)
    runs.lab.run("n2", ["pkill", "-STOP", "-f", "heat_mpi.py"])
    run.wait_end()
    assert same_bits(run.field(), unhurt(150, 3)), run.story()
    (restart,) = run.entries("restart")
    assert restart.facts["cause"] == "program hung"
    assert re.fullmatch(r"no step for \d+ s after step \d+; 6 s are allowed", restart.facts["evidence"])


def test_host_cut_off_and_mended(runs: Runs, unhurt: Unhurt) -> None:
    """The cut-off side ends its own program; what it left can't harm the run that went on without it."""
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=400)
    run.wait_saved(40)
    runs.lab.cut("n2")
    run.wait_entry("running", 2)
    run.wait("its end", lambda: not heat_pids(runs, "n2") and not server_pids(runs, "n2"), 30)
    run.wait("its memory given back", lambda: runs.lab.run("n2", ["ls", "-A", "/dev/shm"]).stdout == "", 10)
    runs.lab.mend("n2")
    run.wait_end()
    assert same_bits(run.field(), unhurt(400, 3)), run.story()
    (restart,) = run.entries("restart")
    assert (restart.facts["cause"], restart.facts["host_out"]) == ("host silent", "n2")


def test_sidecar_killed(runs: Runs, unhurt: Unhurt) -> None:
    """The program does not notice, no host is blamed, and the hosts are watched again."""
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=600)
    run.wait_saved(20)
    for host in ("n1", "n3"):
        said = len(run.entries("monitoring"))
        runs.lab.run(host, ["pkill", "-KILL", "-f", "transom_hpc.tol.sidecar"])
        run.wait_entry("monitoring", said + 1)
        run.wait("watched again", lambda: run.entries("monitoring")[-1].facts["problem"] == "", 30)
    run.wait_end()
    assert same_bits(run.field(), unhurt(600, 3)), run.story()
    assert run.entries("restart") == run.entries("host out") == run.entries("requeue") == []
    assert [entry.facts["problem"] for entry in run.entries("monitoring")][:3] == [
        "",
        "the sidecar ended and is started again",
        "",
    ]


def test_nothing_outlives_the_job(runs: Runs) -> None:
    run = runs.heat("--nodes", "3", "--spares", "1", "--save-every", "20", steps=60)
    run.wait_saved(20)
    for host in ("n1", "n3"):
        assert runs.lab.run(host, ["ls", "/dev/shm"]).stdout.split() == [f"transom-{uid(runs)}-{run.job_id}"]
    run.wait_end()
    run.wait("the end of the job", lambda: run.slurm()["JobState"] == "COMPLETED", 30)
    for host in ("n1", "n2", "n3", "n4"):
        assert runs.lab.run(host, ["ls", "-A", "/dev/shm"]).stdout == ""
        left = runs.lab.run(host, ["pgrep", "-u", runs.lab.user, "-a"], check=False).stdout
        assert [line for line in left.splitlines() if "pgrep" not in line] == []
    left_on_disk = {path.name for path in (run.path / "checkpoints").glob(".*")}
    assert left_on_disk - {".attempt", ".writer-choice.json"} == set()


def test_nothing_outlives_a_cancelled_job(runs: Runs) -> None:
    run = runs.heat("--nodes", "3", "--save-every", "20", steps=1000)
    run.wait_saved(20)
    runs.lab.run("login", ["scancel", str(run.job_id)])
    for host in ("n1", "n2", "n3"):
        run.wait(f"{host} clean", lambda h=host: runs.lab.run(h, ["ls", "-A", "/dev/shm"]).stdout == "", 15)
        assert heat_pids(runs, host) == []
        run.wait("its server's end", lambda h=host: not server_pids(runs, h), 5)


def test_what_a_killed_job_left_is_reclaimed_by_the_next(runs: Runs) -> None:
    killed = runs.heat("--nodes", "1", "--save-every", "20", steps=1000)
    killed.wait_saved(20)
    runs.lab.run("login", ["scancel", "--signal=KILL", "--full", str(killed.job_id)])
    killed.wait("its end", lambda: killed.slurm()["JobState"] not in ("RUNNING", "COMPLETING"), 30)
    folder = f"/dev/shm/transom-{uid(runs)}-{killed.job_id}"
    runs.lab.run("n1", ["mkdir", "-p", folder])  # whether or not it was left this time
    after = runs.submit("--nodes", "1", program=["sleep", "20"])
    after.wait_entry("monitoring")
    after.wait("reclaimed", lambda: runs.lab.run("n1", ["test", "!", "-e", folder], check=False).returncode == 0, 10)


def heat_pids(runs: Runs, host: str) -> list[str]:
    """Processes of the program on a host."""
    return runs.lab.run(host, ["pgrep", "-f", "heat_mpi.py --steps"], check=False).stdout.split()


def server_pids(runs: Runs, host: str) -> list[str]:
    """Checkpoint servers on a host."""
    return runs.lab.run(host, ["pgrep", "-f", "transom_hpc.ckpt.server"], check=False).stdout.split()


def uid(runs: Runs) -> str:
    """The user id of the lab's user."""
    return runs.lab.run("login", ["id", "-u"]).stdout.strip()


def test_program_that_always_fails(runs: Runs) -> None:
    run = runs.submit("--nodes", "2", program=[sys.executable, "-c", "import sys; sys.exit('no such file: data.bin')"])
    end = run.wait_end("ended badly")
    assert len(run.entries("launch")) == 5
    assert "program error came 5 times without a new checkpoint since the start: rank " in end.facts["why"]
    assert "exit status 1" in end.facts["why"]
    answer = runs.transom("status", str(run.job_id), check=False)
    assert answer.returncode == 3
    assert "stopped for good: program error came 5 times" in " ".join(answer.stdout.split())


def test_time_limit(runs: Runs, unhurt: Unhurt) -> None:
    """Slurm's signal comes before the limit: all ranks save the same step and leave, and the job goes on."""
    site = runs.folder / "short.toml"
    site.write_text('partition = "main"\nsignal_lead_s = 15\nsample_period_s = 1.0\n')
    # Slurm looks every half minute and sends the signal early rather than late: it comes within 45 s of the start, and
    # the program takes longer than that. With a lead of 45 s it could come before anything listens.
    run = runs.heat("--nodes", "4", "--save-every", "10000", "--time", "1", "--site", str(site), steps=800, sleep=0.06)
    asked = run.wait_entry("stop asked", seconds=100)
    assert (asked.facts["cause"], asked.facts["signal"]) == ("time limit", "SIGUSR1")
    restart = run.wait_entry("restart")
    saved = restart.facts["committed"]
    assert 0 < saved < 800, "the save was asked for, none was due"
    run.release()
    for number in range(2, 10):  # each life ends by its time limit, with progress
        run.wait("the next end", lambda n=number: len(run.entries("end")) >= n, 120)
        if run.entries("end")[-1].facts["ending"] != "left":
            break
        run.release()
    run.wait_end()
    assert same_bits(run.field(), unhurt(800)), run.story()


def test_template_as_it_stands(runs: Runs, unhurt: Unhurt) -> None:
    template = Path(transom_hpc.__file__).parent / "sbatch_templates" / "train.sbatch"
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    sbatch = ["env", f"PATH={path}", "TRANSOM_SITE=lab", "TRANSOM_SAVE_EVERY=20", "sbatch", "--parsable", "-N", "5"]
    answer = runs.lab.run("login", [*sbatch, str(template), *runs.heat_program(150, 0.05)], cwd=runs.folder)
    job_id = answer.stdout.strip()
    run = Submitted(runs.lab, runs.folder / "transom-runs" / job_id, int(job_id), runs.folder / "final1.npy")
    run.wait("the journal", run.path.joinpath("journal").exists, 30)
    run.wait_saved(40)
    runs.lab.crash("n4")
    run.wait_end()
    assert same_bits(run.field(), unhurt(150)), run.story()
    facts = json.loads(runs.transom("status", job_id, "--json").stdout)
    assert (facts["run_dir"], facts["phase"]) == (str(run.path), "ended well")
