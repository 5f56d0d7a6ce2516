"""The configuration files, as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from transom_hpc.lab import config
from transom_hpc.lab.config import Node, Plan

PLAN = Plan(
    cluster="lab",
    version=(22, 5),
    state=Path("/state"),
    user="root",
    controller="login",
    controller_address="10.77.0.1",
    nodes=(Node("n1", "10.77.0.11", "n1"), Node("n2", "10.77.0.12", "n2")),
    slurmd_timeout_s=30,
    accounting=True,
    pmix=True,
    munge_socket=Path("/state/munge/socket"),
    local=Path("/run/node"),
)


@pytest.mark.parametrize(
    ("text", "version"),
    [("slurm-wlm 22.05.8", (22, 5)), ("slurm 24.11.5\n", (24, 11)), ("slurm-wlm 21.08.5", (21, 8))],
)
def test_versions_are_read(text: str, version: tuple[int, int]) -> None:
    assert config.parse_version(text) == version


def test_no_version_is_an_error() -> None:
    with pytest.raises(ValueError, match="no version"):
        config.parse_version("slurmctld: not found")


def test_every_host_claims_the_same_cpus_and_memory() -> None:
    nodes = [line for line in config.slurm_conf(PLAN).splitlines() if line.startswith("NodeName=")]
    assert nodes == [
        f"NodeName=n{n} NodeAddr=10.77.0.1{n} NodeHostname=n{n} CPUs=4 RealMemory=64000 State=UNKNOWN" for n in (1, 2)
    ]


def test_without_root_hosts_are_told_apart_by_their_ports() -> None:
    plan = dataclasses.replace(
        PLAN, nodes=(Node("n1", "127.0.0.1", "machine", 7001),), controller_port=7000, accounting=False
    )
    text = config.slurm_conf(plan)
    assert "NodeName=n1 NodeAddr=127.0.0.1 NodeHostname=machine Port=7001 " in text
    assert "SlurmctldPort=7000\n" in text
    assert "Accounting" not in text


def test_without_munge_everybody_is_believed() -> None:
    text = config.slurm_conf(dataclasses.replace(PLAN, munge_socket=None))
    assert "AuthType=auth/none\n" in text
    assert "CredType=cred/none\n" in text
    assert "munge" not in text


def test_cgroups_are_left_alone_in_the_words_of_each_version() -> None:
    def text(*version: int) -> str:
        return config.cgroup_conf(dataclasses.replace(PLAN, version=version))

    assert text(21, 8) == "CgroupAutomount=no\n"
    assert text(22, 5) == "CgroupAutomount=no\nCgroupPlugin=cgroup/v1\n"
    assert text(23, 11) == text(24, 11) == "CgroupPlugin=disabled\n"
