"""Which addresses other hosts cannot reach, and why: pure."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.check.facts import Interface
from lockstep.doctor.check.interfaces import owner

Reach = Literal["unspecified", "loopback", "link-local", "bridge", "public", "strange", "name", "fine"]

CONTAINERS = (
    "docker", "podman", "cni", "br-", "virbr", "lxcbr", "lxdbr", "flannel", "cali", "cilium", "veth", "vxlan",
    "nerdctl",
)  # fmt: skip
"""Beginnings of names that runtimes of containers and virtual machines give to bridges and their ends."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Whether an address is one by which peers reach its host."""

    reach: Reach
    said: str
    """`127.0.0.1 on lo, which other hosts do not reach`."""

    @property
    def hopeless(self) -> bool:
        """Whether no other host can reach it, whatever the network."""
        return self.reach in ("unspecified", "loopback", "link-local", "bridge", "strange")


_WHY: dict[Reach, str] = {
    "unspecified": "which means every interface, and reaches none: peers that are told it dial themselves",
    "loopback": "which other hosts do not reach: peers that are told it dial themselves",
    "link-local": "which is link-local: no router forwards it, and hosts often have the same",
    "bridge": "a bridge for the containers of that host alone",
    "public": "which is a public address: clouds and firewalls mostly close its ports between hosts",
    "strange": "which is no address of this host",
    "name": "which is a name",
    "fine": "",
}


def judge(address: str, interfaces: Sequence[Interface], interface: str = "") -> Judged:
    """An address that this host would give to its peers.

    Args:
        interface: the one that has it, where that is known.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return Judged("name", f"{address}, {_WHY['name']}")
    name = interface or owner(interfaces, address)
    where = f"{address} on {name}" if name else address
    reach = _reach(parsed, name, next((each for each in interfaces if each.name == name), None))
    return Judged(reach, f"{where}, {_WHY[reach]}" if _WHY[reach] else where)


def _reach(address: ipaddress.IPv4Address | ipaddress.IPv6Address, name: str, interface: Interface | None) -> Reach:
    if address.is_unspecified:
        return "unspecified"
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if not name:
        return "strange"
    if name.startswith(CONTAINERS):
        return "bridge"
    if interface is not None and interface.kind == "bridge" and not interface.carries_host:
        return "bridge"
    return "public" if address.is_global else "fine"
