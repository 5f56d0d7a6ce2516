"""The network of a lab: a switch of its own, one cable to each host, one to the machine.

The switch is a bridge in a network namespace that lives as long as one small process. So nothing is left of the network
once the lab's processes are gone, and the machine's firewall never sees what hosts say to each other.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable

from transom_hpc.base.errors import LabError
from transom_hpc.lab.processes import call

MASK = 24
MOST_NODES = 200
BURST_BYTES = 16 << 10  # what passes a slow cable at once: more than one packet, less than a message of any size
UPLINK_HOST = 254  # the machine's own address in the lab's network


def addresses(subnet: str, nodes: Iterable[str], login: str) -> dict[str, str]:
    """Give each host its address: the login host .1, the others from .11 on.

    Args:
        subnet: the first three numbers, as "10.77.0".
    """
    return {login: f"{subnet}.1"} | {name: f"{subnet}.{11 + index}" for index, name in enumerate(nodes)}


def choose_subnet(taken: Iterable[str]) -> str:
    """The first of 10.77.0 to 10.77.255 that overlaps none of the networks taken.

    Args:
        taken: networks as "10.77.0.0/24".

    Raises:
        LabError: all are taken.
    """
    networks = [ipaddress.ip_network(text, strict=False) for text in taken]
    for third in range(256):
        mine = ipaddress.ip_network(f"10.77.{third}.0/{MASK}")
        if not any(mine.overlaps(other) for other in networks if other.version == 4):
            return f"10.77.{third}"
    raise LabError("no free network among 10.77.0.0/24 to 10.77.255.0/24")


def machine_networks() -> list[str]:
    """The networks that this machine already reaches; its default route is none of them."""
    routes = json.loads(call(["ip", "-json", "-4", "route", "show", "table", "all"]) or "[]")
    return [route["dst"] for route in routes if route.get("dst", "default") != "default"]


class Switch:
    """The bridge, and the cables in it.

    Args:
        pid: the process that holds the switch's network namespace.
        uplink: name of the machine's own end of its cable, at most 15 characters.
    """

    def __init__(self, pid: int, uplink: str) -> None:
        self._enter = ["nsenter", f"--net=/proc/{pid}/ns/net"]
        self._pid = pid
        self._uplink = uplink

    def start(self, subnet: str) -> None:
        """Make the bridge and connect the machine."""
        call([*self._enter, "ip", "link", "set", "lo", "up"])
        call([*self._enter, "ip", "link", "add", "sw0", "type", "bridge", "stp_state", "0", "forward_delay", "0"])
        call([*self._enter, "ip", "link", "set", "sw0", "up"])
        call(["ip", "link", "add", self._uplink, "type", "veth", "peer", "name", "uplink", "netns", str(self._pid)])
        call([*self._enter, "ip", "link", "set", "uplink", "master", "sw0", "up"])
        call(["ip", "address", "add", f"{subnet}.{UPLINK_HOST}/{MASK}", "dev", self._uplink])
        call(["ip", "link", "set", self._uplink, "up"])

    def plug(self, name: str, pid: int) -> None:
        """Connect a host: its end of the cable appears as eth0 in the network namespace of process `pid`."""
        if name in self.cables():  # a host that was just ended: the kernel takes its cable away a little later
            call([*self._enter, "ip", "link", "delete", name])
        call([*self._enter, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid)])
        call([*self._enter, "ip", "link", "set", name, "master", "sw0", "up"])

    def cut(self, name: str) -> None:
        """Pull a host's cable."""
        call([*self._enter, "ip", "link", "set", name, "down"])

    def mend(self, name: str) -> None:
        """Put a host's cable back."""
        call([*self._enter, "ip", "link", "set", name, "up"])

    def slow(self, name: str, host: int, kbit_s: int) -> None:
        """Let a host's cable carry no more than so much, each way.

        Args:
            name: the host.
            host: a process in its network namespace.
            kbit_s: 1000 bits a second; 0 takes the limit away.
        """
        # A token bucket, which every kernel has; netem is often left out.
        limit = ["root", "tbf", "rate", f"{kbit_s}kbit", "burst", str(BURST_BYTES), "latency", "500ms"]
        change = ["replace", *limit] if kbit_s else ["delete", "root"]
        for enter, device in ((self._enter, name), (["nsenter", f"--net=/proc/{host}/ns/net"], "eth0")):
            call([*enter, "tc", "qdisc", change[0], "dev", device, *change[1:]])

    def slowed(self) -> set[str]:
        """The hosts whose cable is slow."""
        links = json.loads(call([*self._enter, "ip", "-json", "link", "show", "master", "sw0"]) or "[]")
        return {link["ifname"] for link in links if link.get("qdisc") == "tbf"}

    def cables(self) -> dict[str, bool]:
        """Each connected host, and whether its cable is in."""
        links = json.loads(call([*self._enter, "ip", "-json", "link", "show", "master", "sw0"]) or "[]")
        return {link["ifname"]: "UP" in link["flags"] for link in links if link.get("ifname") != "uplink"}


def remove_uplink(name: str) -> None:
    """Take the machine's end of its cable away, where the kernel has not done so yet."""
    try:
        call(["ip", "link", "delete", name])
    except LabError:
        pass  # gone already, with the switch
