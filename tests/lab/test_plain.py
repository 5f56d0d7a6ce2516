"""The lab without root: its hosts are processes of this machine."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import need_lab
from transom_hpc.lab import Lab, account, processes, reach
from transom_hpc.lab.plain import PlainHosts

pytestmark = pytest.mark.slurm


class Somebody:
    """An ordinary user of this machine, with the command line.

    Args:
        name: the user.
        stage: an empty folder.
    """

    def __init__(self, name: str, stage: Path) -> None:
        self.account = account.lookup(name)
        self.lab = f"plain-{os.getpid()}"
        self.root = Path(f"/var/tmp/transom-lab-{self.account.uid}")
        self._prefix: list[str] = []
        if os.geteuid() == 0:
            # The checkout may lie where only root can go.
            must, _ = reach.needed_paths()
            covers = reach.covers(must, [], reach.closed_folders(self.account, must))
            opened = "".join(reach.script(cover, stage) for cover in covers)
            self._prefix = ["unshare", "--mount", "bash", "-euc", opened + 'exec "$@"', "bash"]
            self._prefix += account.as_user(self.account)

    def __call__(self, verb: str, *rest: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        argv = [*self._prefix, sys.executable, "-m", "transom_hpc", "lab", verb, "--name", self.lab, *rest]
        env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
        return subprocess.run(argv, capture_output=True, text=True, check=check, env=env, cwd="/", timeout=90)

    def states(self) -> dict[str, str]:
        facts = json.loads(self("status", "--json").stdout)
        return {host["name"]: host["state"] for host in facts["hosts"]}

    def alive(self) -> list[dict[str, str]]:
        marks = (processes.environment(facts.process.pid) for facts in processes.everyone())
        return [mark for mark in marks if mark.get("TRANSOM_LAB_STATE") == str(self.root / self.lab)]


@pytest.fixture
def somebody(tmp_path: Path) -> Somebody:
    need_lab()
    stage = tmp_path / "stage"
    stage.mkdir()
    return Somebody("nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name, stage)


@pytest.fixture
def plain(somebody: Somebody) -> Iterator[Somebody]:
    yield somebody
    somebody("down")


@pytest.mark.slow
def test_a_lab_without_root(plain: Somebody) -> None:
    somebody = plain
    told = somebody("up", "--nodes", "2").stdout
    assert "without root: hosts share this machine's network" in told
    facts = json.loads(somebody("status", "--json").stdout)
    assert facts["kind"] == "processes"
    assert "without root" in somebody("status").stdout
    where = ["login", "--", "sh", "-c"]
    assert somebody("exec", *where, "srun -N2 sh -c 'echo $SLURMD_NODENAME' | sort").stdout == "n1\nn2\n"
    assert somebody("exec", *where, "exit 7", check=False).returncode == 7

    submit = f"cd {facts['shared']} && sbatch --parsable -w n2 --wrap 'sleep 4323'"
    somebody("exec", *where, submit)
    asked = PlainHosts(somebody.root / somebody.lab, somebody.lab)
    processes.wait_until(lambda: bool(asked._of_jobs("n2")), "the job does not start", 20)
    somebody("freeze", "n2")
    assert somebody.states()["n2"] == "frozen"
    somebody("thaw", "n2")
    assert somebody.states() == {"login": "up", "n1": "up", "n2": "up"}
    somebody("crash", "n2")
    assert somebody.states()["n2"] == "crashed"
    assert asked._of_jobs("n2") == set()
    somebody("boot", "n2")
    assert somebody("exec", *where, "srun -w n2 hostname").returncode == 0

    refused = somebody("cut", "n1", check=False)
    assert refused.returncode == 2
    assert refused.stderr == "transom: can't cut n1: without root the hosts of a lab have no network of their own\n"
    sacct = ["exec", *where, "sacct -n -X -o JobName"]
    processes.wait_until(lambda: "hostname" in somebody(*sacct).stdout, "sacct does not know the job", 20)
    somebody("down")
    assert somebody.alive() == []
    assert not somebody.root.exists()


def test_another_user_can_look_but_not_touch(lab: Lab, somebody: Somebody) -> None:
    somebody.lab = lab.name
    assert somebody("env").stdout.startswith("export SLURM_CONF=/var/lib/transom-lab/")
    assert somebody.states()["n1"] == "unknown"
    for verb in (["crash", "n1"], ["exec", "n1", "true"], ["down"]):
        done = somebody(*verb, check=False)
        assert done.returncode == 2
        assert "use sudo" in done.stderr
        assert done.stderr.count("\n") == 1
