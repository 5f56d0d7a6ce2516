"""The lab as a whole, with a real Slurm in it."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import need_lab
from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import Lab, processes, take_down

pytestmark = pytest.mark.slurm

ROOT = Path("/var/lib/transom-lab")
TRANSOM = [sys.executable, "-m", "transom_hpc"]


def eventually(check: Callable[[], bool], what: str, seconds: float = 30) -> float:
    """Wait for something; returns the seconds it took."""
    begin = time.monotonic()
    processes.wait_until(check, what, seconds)
    return time.monotonic() - begin


def slurm_state(lab: Lab, host: str) -> str:
    return next(one.slurm for one in lab.status().hosts if one.name == host)


def state(lab: Lab, host: str) -> str:
    return next(one.state for one in lab.status().hosts if one.name == host)


def machine() -> dict[str, set[str]]:
    """What a lab could leave on this machine. Other labs come and go meanwhile: only names of ours count."""
    links = {path.name for path in Path("/sys/class/net").iterdir()}
    mounts = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    netns = {path.name for path in Path("/run/netns").iterdir()} if Path("/run/netns").is_dir() else set()
    temporary = {path.name for pattern in ("ompi.n*", "spmix*", "pmix*") for path in Path("/tmp").glob(pattern)}
    return {"links": links, "mounts": mounts, "network namespaces": netns, "temporary": temporary}


def left_over(name: str, before: dict[str, set[str]]) -> dict[str, object]:
    """What is left of a lab, by kind; empty when nothing is."""
    folder = ROOT / name
    marked = processes.marked("TRANSOM_LAB_STATE", str(folder))
    words = [process.pid for process in marked]
    now = machine()
    others = {Path("/var/lib/transom-lab") / path.name for path in ROOT.iterdir()} if ROOT.is_dir() else set()
    found: dict[str, object] = {
        "processes": words,
        "folder": [str(folder)] if folder.exists() else [],
        "mounts": [mount for mount in now["mounts"] if mount.startswith(str(folder))],
        "network namespaces": sorted(now["network namespaces"] - before["network namespaces"]),
        "temporary": sorted(now["temporary"] - before["temporary"]),
    }
    if not others:  # the last lab takes the links and the account along
        found["links"] = sorted(link for link in now["links"] if link.startswith("lab"))
        found["account"] = [user.pw_name for user in pwd.getpwall() if user.pw_gecos == "made by transom lab"]
        found["home"] = [str(path) for path in (Path("/home/transom"), ROOT) if path.exists()]
    return {kind: things for kind, things in found.items() if things}


@pytest.fixture
def name() -> Iterator[str]:
    """A name for one more lab, which is down afterwards."""
    need_lab()
    name = f"test-{os.getpid()}-b"
    yield name
    take_down(name)


def test_a_command_runs_on_the_host_as_the_ordinary_user(lab: Lab) -> None:
    done = lab.run("n2", ["sh", "-c", "hostname; id -un; cat /etc/hosts; ls -d /run/node; echo $SLURM_CONF"])
    assert done.stdout.split("\n")[0:2] == ["n2", lab.user]
    assert "n5" in done.stdout
    assert str(lab.slurm_conf) in done.stdout
    assert lab.run("login", ["id", "-u"], root=True).stdout == "0\n"


def test_hosts_have_processes_and_memory_of_their_own(lab: Lab) -> None:
    assert lab.run("n1", ["sh", "-c", "echo $$ > /dev/shm/one; ls /dev/shm"]).stdout == "one\n"
    assert lab.run("n2", ["ls", "/dev/shm"]).stdout == ""
    assert "slurmd -D -N n1" in (tree := lab.run("n1", ["ps", "ax"]).stdout)
    assert "slurmd -D -N n2" not in tree
    lab.run("n1", ["rm", "/dev/shm/one"])


def test_the_shared_folder_is_shared_and_writable(lab: Lab) -> None:
    lab.run("n1", ["sh", "-c", f"echo hello > {lab.shared}/greeting"])
    assert lab.run("n3", ["cat", str(lab.shared / "greeting")]).stdout == "hello\n"
    assert (lab.shared / "greeting").read_text() == "hello\n"


def test_a_command_that_fails_or_hangs_is_an_error_with_its_facts(lab: Lab) -> None:
    with pytest.raises(LabError, match=r"on n1 failed \(3\): oh no") as failed:
        lab.run("n1", ["sh", "-c", "echo oh no >&2; exit 3"])
    assert failed.value.code == 3
    assert lab.run("n1", ["sh", "-c", "exit 3"], check=False).returncode == 3
    with pytest.raises(LabError, match=r"did not end within 0.5 s"):
        lab.run("n1", ["sleep", "4321"], timeout=0.5)
    eventually(lambda: "sleep 4321" not in lab.run("n1", ["ps", "ax"]).stdout, "the command is not ended", 5)


def test_a_command_ends_when_its_popen_is_killed(lab: Lab) -> None:
    process = lab.popen("n1", ["sleep", "4322"])
    eventually(lambda: "sleep 4322" in lab.run("n1", ["ps", "ax"]).stdout, "it has not started", 5)
    process.kill()
    process.wait()
    eventually(lambda: "sleep 4322" not in lab.run("n1", ["ps", "ax"]).stdout, "it is not ended", 5)


def test_the_command_line_passes_exit_code_and_arguments_on(lab: Lab) -> None:
    run = [*TRANSOM, "lab", "exec", "--name", lab.name, "n4", "--", "sh", "-c", 'hostname; echo "$2"; exit 7', "sh"]
    done = subprocess.run([*run, "--root", "a b"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (7, "n4\na b\n")


def test_an_interrupt_is_for_the_command(lab: Lab) -> None:
    program = (
        "import time\ntry: print('up', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    time.sleep(0.3); print('interrupted', flush=True)"
    )
    argv = [*TRANSOM, "lab", "exec", "--name", lab.name, "login", sys.executable, "-c", program]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("interrupted\n", 0)


@pytest.mark.parametrize("host", ["n6", "n0", "", "../n1", "n1,n2", "None"])
def test_a_wrong_host_name_is_one_line_and_exit_code_2(lab: Lab, host: str) -> None:
    for verb in (["crash", host], ["boot", host], ["exec", host, "true"]):
        line = [*TRANSOM, "lab", verb[0], "--name", lab.name, *verb[1:]]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == f"transom: no host {host!r} in lab {lab.name!r}: it has login and n1 to n5\n"


def test_mpi_runs_across_hosts_in_a_batch_job_of_the_ordinary_user(healthy_lab: Lab) -> None:
    lab = healthy_lab
    program = "from mpi4py import MPI as m; c = m.COMM_WORLD; print(m.Get_processor_name(), c.allreduce(c.rank))"
    script = lab.shared / "mpi.sh"
    script.write_text(f"#!/bin/sh\nid -un\nsrun --mpi=pmix '{sys.executable}' -c '{program}'\n")
    sbatch = ["sbatch", "--wait", "-N4", "-n8", "--ntasks-per-node=2", "-o", "mpi.out", str(script)]
    lab.run("login", sbatch, timeout=60)
    lines = (lab.shared / "mpi.out").read_text().split("\n")
    assert lines[0] == lab.user
    assert sorted(lines[1:-1]) == sorted(f"n{host} 28" for host in (1, 2, 3, 4) for _ in (1, 2))
    sacct = ["sacct", "-n", "-X", "-o", "JobName,State"]
    eventually(lambda: lab.run("login", sacct).stdout.split()[-2:] == ["mpi.sh", "COMPLETED"], "sacct does not know it")


def test_an_allocation_can_be_used_from_the_login_host_and_from_outside(healthy_lab: Lab) -> None:
    lab = healthy_lab
    done = lab.run("login", ["salloc", "-Q", "-N2", "srun", "hostname"])
    assert sorted(done.stdout.split()) == ["n1", "n2"]
    lines = subprocess.run([*TRANSOM, "lab", "env", "--name", lab.name], capture_output=True, text=True, check=True)
    shell = f'eval "{lines.stdout}"; srun -N3 hostname'
    outside = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True, cwd="/", timeout=30)
    assert sorted(outside.stdout.split()) == ["n1", "n2", "n3"]


def test_an_urgent_job_takes_the_hosts_of_another_which_is_requeued(healthy_lab: Lab) -> None:
    lab = healthy_lab
    submit = ["sbatch", "--parsable", "--requeue", "-N5", "-o", "/dev/null"]
    first = lab.run("login", [*submit, "--exclusive", "--wrap", "sleep 300"]).stdout.strip()

    def job(number: str) -> str:
        return lab.run("login", ["squeue", "-h", "-j", number, "-o", "%T"]).stdout.strip()

    eventually(lambda: job(first) == "RUNNING", "the first job does not run")
    second = lab.run("login", [*submit, "-p", "urgent", "--wrap", "sleep 300"]).stdout.strip()
    eventually(lambda: job(second) == "RUNNING", "the urgent job does not run")
    assert job(first) in ("PENDING", "COMPLETING")


@pytest.mark.slow
def test_a_crash_is_noticed_after_the_timeout_and_boot_brings_the_host_back(healthy_lab: Lab) -> None:
    lab = healthy_lab
    lab.run("n5", ["sh", "-c", "echo lost > /dev/shm/memory"])
    lab.crash("n5")
    assert state(lab, "n5") == "crashed"
    with pytest.raises(UsageError, match="n5 is crashed"):
        lab.run("n5", ["true"])
    with pytest.raises(UsageError, match="crashed already"):
        lab.crash("n5")
    took = eventually(lambda: slurm_state(lab, "n5").startswith("down"), "Slurm does not notice", 60)
    assert took > 5  # it was silent: Slurm had to wait for its timeout
    lab.boot("n5")
    eventually(lambda: slurm_state(lab, "n5") == "idle", "the host is not idle again")
    assert lab.run("n5", ["ls", "/dev/shm"]).stdout == ""
    assert lab.run("login", ["srun", "-w", "n5", "hostname"]).stdout == "n5\n"


def test_a_frozen_host_stands_still_until_it_is_thawed(healthy_lab: Lab) -> None:
    lab = healthy_lab
    beat = lab.shared / "beat"
    program = lab.popen("n3", ["sh", "-c", f"while :; do date +%N > {beat}; sleep 0.02; done"])
    eventually(beat.exists, "it does not run", 5)
    lab.freeze("n3")
    assert state(lab, "n3") == "frozen"
    with pytest.raises(UsageError, match="n3 is frozen"):
        lab.run("n3", ["true"])
    before = beat.read_text()
    time.sleep(0.5)
    assert beat.read_text() == before
    lab.thaw("n3")
    eventually(lambda: beat.read_text() != before, "it does not go on", 5)
    assert state(lab, "n3") == "up"
    program.kill()
    program.wait()


def test_a_cut_host_runs_on_and_nobody_reaches_it_until_it_is_mended(healthy_lab: Lab) -> None:
    lab = healthy_lab
    reach = ["bash", "-c", "timeout 1 bash -c '< /dev/tcp/n4/6818'"]
    assert lab.run("n1", reach, check=False).returncode == 0
    lab.cut("n4")
    assert state(lab, "n4") == "cut"
    assert lab.run("n4", ["hostname"]).stdout == "n4\n"
    assert lab.run("n1", reach, check=False).returncode != 0
    lab.mend("n4")
    assert state(lab, "n4") == "up"
    eventually(lambda: lab.run("n1", reach, check=False).returncode == 0, "it can't be reached", 10)


def test_the_controller_can_lose_its_power_and_keeps_its_jobs(healthy_lab: Lab) -> None:
    lab = healthy_lab
    submit = ["sbatch", "--parsable", "-N2", "-o", "/dev/null", "--wrap", "sleep 300"]
    job = lab.run("login", submit).stdout.strip()
    ask = ["squeue", "-h", "-j", job, "-o", "%T"]
    eventually(lambda: lab.run("login", ask).stdout.strip() == "RUNNING", "the job does not run")
    saved = lab.slurm_conf.parent / "slurmctld" / "job_state"
    began = time.time()
    eventually(lambda: saved.stat().st_mtime > began, "slurmctld does not write down that the job runs")
    lab.crash("login")
    assert slurm_state(lab, "n1") == "unknown"
    lab.boot("login")
    assert lab.run("login", ask).stdout.strip() == "RUNNING"


def test_status_for_programs(lab: Lab) -> None:
    line = [*TRANSOM, "lab", "status", "--json", "--name", lab.name]
    facts = json.loads(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
    assert facts["name"] == lab.name
    assert facts["kind"] == "namespaces"
    assert facts["user"] == lab.user
    assert facts["shared"] == str(lab.shared)
    assert [host["name"] for host in facts["hosts"]] == ["login", "n1", "n2", "n3", "n4", "n5"]
    assert {host["state"] for host in facts["hosts"]} <= {"up", "crashed", "frozen", "cut"}


def test_status_fits_80_columns(lab: Lab) -> None:
    line = [*TRANSOM, "lab", "status", "--name", lab.name]
    text = subprocess.run(line, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "80"}).stdout
    assert max(map(len, text.splitlines())) <= 80


def test_two_labs_stand_side_by_side_and_down_leaves_nothing(lab: Lab, name: str) -> None:
    before = machine()
    with pytest.raises(UsageError, match=f"lab '{lab.name}' is up already, with 5 nodes"):
        Lab.up(lab.name)
    # Through a pipe: a daemon that held it would keep `cat` waiting for ever.
    start = f"'{sys.executable}' -m transom_hpc lab up --name {name} --nodes 2 | cat"
    told = subprocess.run(["sh", "-c", start], capture_output=True, text=True, timeout=60, check=True).stdout
    assert "try it: transom lab exec" in told
    second = Lab.find(name)
    assert second.run("login", ["srun", "-N2", "-n2", "hostname"]).stdout.split() in (["n1", "n2"], ["n2", "n1"])
    addresses = [{host.address for host in one.status().hosts} for one in (lab, second)]
    assert not addresses[0] & addresses[1]
    second.run("login", ["sbatch", "-N2", "--wrap", "srun --mpi=pmix sleep 100"])
    begin = time.monotonic()
    second.down()
    assert time.monotonic() - begin < 5
    assert left_over(name, before) == {}
    assert Lab.find(lab.name).run("login", ["sinfo", "-h"]).returncode == 0
    with pytest.raises(UsageError, match=f"no lab '{name}' is up"):
        Lab.find(name)
    assert take_down(name) is False


def kill_start(name: str, after_s: float) -> None:
    """Start a lab and kill the process that starts it."""
    start = [*TRANSOM, "lab", "up", "--name", name, "--nodes", "3"]
    with subprocess.Popen(start, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        eventually((ROOT / name).exists, "it does not start")
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("after_s", [0.2, 1.0])
def test_a_start_that_was_killed_half_way_is_cleared_by_down(name: str, after_s: float) -> None:
    before = machine()
    kill_start(name, after_s)
    with pytest.raises(UsageError, match="not whole"):
        Lab.find(name)
    done = subprocess.run([*TRANSOM, "lab", "down", "--name", name], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"lab {name}: down\n"), done.stderr
    assert left_over(name, before) == {}


def test_up_clears_what_a_dead_lab_left_and_down_takes_a_killed_one_away(name: str) -> None:
    before = machine()
    kill_start(name, 2.0)
    told: list[str] = []
    again = Lab.up(name, nodes=1, say=told.append)
    assert told[0] == f"clearing what a dead lab '{name}' left"
    again.run("login", ["sbatch", "--wrap", "sleep 100"])
    processes.send(processes.marked("TRANSOM_LAB_STATE", str(ROOT / name)), signal.SIGKILL)
    take_down(name)
    assert left_over(name, before) == {}


def test_a_start_that_fails_says_which_part_and_why_and_leaves_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = machine()
    monkeypatch.setattr("transom_hpc.lab.controller.PATIENCE_S", 5)
    monkeypatch.setattr("transom_hpc.lab.config.MEMORY_MIB", -1)
    with pytest.raises(LabError, match=r"slurmdbd does not answer after 5 s.*Unable to process configuration file"):
        Lab.up(name, nodes=1)
    assert left_over(name, before) == {}


def test_wishes_that_can_not_be_met_are_refused(name: str) -> None:
    for options, words in (
        (["--nodes", "0"], "1 to 200 nodes"),
        (["--slurmd-timeout", "1"], "5 to 65533"),
        (["--user", "nobody-of-that-name"], "no user 'nobody-of-that-name'"),
        (["--user", "root"], "ordinary user"),
    ):
        line = [*TRANSOM, "lab", "up", "--name", name, *options]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    line = [*TRANSOM, "lab", "up", "--name", "../x"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
