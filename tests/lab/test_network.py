"""Addresses of a lab; its cables are tried in test_lab."""

from __future__ import annotations

import pytest

from transom_hpc.base.errors import LabError
from transom_hpc.lab import network


def test_the_first_network_that_overlaps_none_in_use_is_chosen() -> None:
    assert network.choose_subnet([]) == "10.77.0"
    assert network.choose_subnet(["10.77.0.0/24", "10.77.1.1", "192.168.0.0/16", "fd00::/64"]) == "10.77.2"


def test_no_free_network_is_an_error() -> None:
    with pytest.raises(LabError, match="no free network"):
        network.choose_subnet(["10.0.0.0/8"])


def test_each_host_has_an_address() -> None:
    hosts = network.addresses("10.77.3", ["n1", "n2"], "login")
    assert hosts == {"login": "10.77.3.1", "n1": "10.77.3.11", "n2": "10.77.3.12"}


def test_the_largest_lab_fits_below_the_machines_own_address() -> None:
    hosts = network.addresses("10.77.3", [f"n{n}" for n in range(network.MOST_NODES)], "login")
    assert max(int(address.rpartition(".")[2]) for address in hosts.values()) < network.UPLINK_HOST
