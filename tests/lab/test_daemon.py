"""What can happen to Slurm's central daemons, and to a cable that does not fail but is slow."""

from __future__ import annotations

import pytest

from transom_hpc.base.errors import LabError, UsageError
from transom_hpc.lab import Lab

pytestmark = pytest.mark.slurm


def state(lab: Lab, host: str) -> str:
    return next(one.state for one in lab.status().hosts if one.name == host)


def test_the_controller_dies_stands_still_and_comes_back(healthy_lab: Lab) -> None:
    daemon = healthy_lab.daemon("slurmctld")
    assert daemon.state == "up"
    daemon.pause()
    assert daemon.state == "still"
    with pytest.raises(LabError, match="did not end within 2 s"):
        healthy_lab.run("login", ["squeue"], timeout=2)
    daemon.go_on()
    healthy_lab.run("login", ["squeue"])
    daemon.kill()
    assert daemon.state == "dead"
    with pytest.raises(LabError):
        healthy_lab.run("login", ["scontrol", "ping"])
    daemon.heal()
    healthy_lab.run("login", ["squeue"])
    with pytest.raises(UsageError, match="slurmctld is up already"):
        daemon.start()


def test_the_accounting_dies_and_comes_back(healthy_lab: Lab) -> None:
    daemon = healthy_lab.daemon("slurmdbd")
    daemon.kill()
    with pytest.raises(LabError):
        healthy_lab.run("login", ["sacct", "-n"])
    healthy_lab.run("login", ["squeue"])
    daemon.start()
    healthy_lab.run("login", ["sacct", "-n"])


def test_a_slow_cable(healthy_lab: Lab) -> None:
    healthy_lab.slow("n2", 400)
    assert (state(healthy_lab, "n2"), state(healthy_lab, "n3")) == ("slow", "up")
    for host, device in (("n2", "eth0"), ("n3", "eth0")):
        shown = healthy_lab.run(host, ["tc", "qdisc", "show", "dev", device], root=True).stdout
        assert ("rate 400Kbit" in shown) == (host == "n2")
    healthy_lab.run("n2", ["squeue"])  # it answers
    healthy_lab.mend("n2")
    assert state(healthy_lab, "n2") == "up"
    assert "tbf" not in healthy_lab.run("n2", ["tc", "qdisc", "show", "dev", "eth0"], root=True).stdout
    with pytest.raises(UsageError, match="`cut` takes it away"):
        healthy_lab.slow("n2", 0)
