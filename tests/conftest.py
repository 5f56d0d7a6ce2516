"""What all tests share: a clean environment, and one lab for the whole run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import Lab, take_down

LEAKS = ("SLURM_", "SBATCH_", "PMIX_", "PMI_", "OMPI_", "TRANSOM_")
NODES = 5


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the job or the lab that it happens to be started from."""
    for name in list(os.environ):
        if name.startswith(LEAKS):
            monkeypatch.delenv(name)


def missing_for_lab() -> str | None:
    """Why there can be no lab of isolated hosts here; None if there can."""
    if os.geteuid() != 0:
        return "the lab's hosts need root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in ("slurmctld", "slurmd", "munged", "srun", "ip") if not shutil.which(name, path=path)]
    return f"not on this machine: {', '.join(missing)} (scripts/setup)" if missing else None


def need_lab() -> None:
    """Skip the test where there can be no lab; fail it in CI, where nothing may be skipped."""
    if (why := missing_for_lab()) is None:
        return
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(why)
    pytest.skip(why)


def _forget_killed_runs() -> None:
    """Take down the labs of test runs that were killed before they could."""
    root = Path("/var/lib/transom-lab")
    for folder in root.glob("test-*") if root.is_dir() else ():
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            take_down(folder.name)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """A lab of five hosts, set down after 20 s of silence. Leave it as you found it, or use `healthy_lab`."""
    need_lab()
    _forget_killed_runs()
    one = Lab.up(f"test-{os.getpid()}", nodes=NODES, slurmd_timeout=20)
    try:
        yield one
    finally:
        take_down(one.name)


@pytest.fixture
def healthy_lab(lab: Lab) -> Iterator[Lab]:
    """The lab with every host up and idle and no job in the queue, however the test before left it."""
    heal(lab)
    yield lab
    heal(lab)


def heal(lab: Lab, seconds: float = 60) -> None:
    """Cancel all jobs, bring every host back, and wait until all are idle.

    Raises:
        LabError: they are not, after all that time. Facts: slurm.
    """
    for host in lab.status().hosts:
        if host.state == "frozen":
            lab.thaw(host.name)
        elif host.state in ("cut", "slow"):
            lab.mend(host.name)
        elif host.state == "crashed":
            lab.boot(host.name)
    lab.run("login", ["scancel", "--user", lab.user], root=True)
    deadline = time.monotonic() + seconds
    while True:
        status = lab.status()
        ill = {host.name: host.slurm for host in status.hosts if host.slurm not in ("idle", "controller")}
        queue = lab.run("login", ["squeue", "-h"], root=True, check=False).stdout
        if not ill and not queue.strip():
            return
        if time.monotonic() > deadline:
            raise LabError(f"the lab does not heal: {ill or queue}", lab=lab.name, slurm=ill)
        for name, state in ill.items():
            if state.startswith(("down", "drain")) and not state.endswith("*"):
                try:
                    lab.run("login", ["scontrol", "update", f"nodename={name}", "state=resume"], root=True)
                except (LabError, UsageError):
                    pass  # it came back by itself meanwhile
        lab.run("login", ["scancel", "--user", lab.user], root=True, check=False)
        time.sleep(0.2)
