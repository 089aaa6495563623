"""Which addresses other hosts cannot reach, and why: pure."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.doctor.check.facts import Interface
from lockstep.doctor.check.interfaces import owner

Reach = Literal[
    "unspecified", "loopback", "link-local", "bridge", "strange", "doubtful", "container", "public", "name", "fine"
]

_RUNTIMES = re.compile(
    r"docker\d|podman\d|cni\d|cni-podman\d|nerdctl\d|virbr\d|lxcbr\d|lxdbr\d|incusbr\d|br-[0-9a-f]{12}$"
)
"""Names that runtimes of containers and virtual machines give to their own bridges."""
_OVERLAYS = ("veth", "cali", "cilium", "flannel", "vxlan", "weave")
"""Beginnings of names of what joins containers across hosts, or one of them to its host."""
_DOCKER = ipaddress.ip_network("172.17.0.0/16")
"""Of docker's default network, unless somebody has changed it; the bridge itself has the first address."""


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
    "strange": "which is no address of this host",
    "doubtful": "which joins containers, and no card of this host: other hosts may not reach it",
    "container": "which docker's default network gives: containers of other hosts do not reach it",
    "public": "which is a public address: clouds and firewalls mostly close its ports between hosts",
    "name": "which is a name",
    "fine": "",
}


def judge(address: str, interfaces: Sequence[Interface], interface: str = "") -> Judged:
    """An address that this host would give to its peers.

    Args:
        interfaces: of the host; none where they are not known.
        interface: the one that has it, where that is known.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return Judged("name", f"{address}, {_WHY['name']}")
    name = interface or owner(interfaces, address)
    where = f"{address} on {name}" if name else address
    reach = _reach(parsed, next((each for each in interfaces if each.name == name), None), bool(interfaces))
    return Judged(reach, f"{where}, {_WHY[reach]}" if _WHY[reach] else where)


def reachable(interfaces: Sequence[Interface]) -> list[tuple[str, str]]:
    """Interfaces and addresses by which other hosts probably reach this one, those of private networks first."""
    found = [
        (each.name, address)
        for each in interfaces
        if each.running
        for address in each.plain
        if judge(address, interfaces, each.name).reach in ("fine", "public")
    ]
    return sorted(found, key=lambda pair: is_public(pair[1]))


def is_public(address: str) -> bool:
    """Of the internet, in either family."""
    return ipaddress.ip_address(address).is_global


def _reach(address: ipaddress.IPv4Address | ipaddress.IPv6Address, interface: Interface | None, known: bool) -> Reach:
    if address.is_unspecified:
        return "unspecified"
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if interface is None and known:
        return "strange"
    if interface is None:
        if address in _DOCKER:
            return "bridge" if address == _DOCKER[1] else "container"
    elif not interface.carries_host:
        if interface.kind == "bridge":
            return "bridge" if _RUNTIMES.match(interface.name) else "doubtful"
        if interface.name.startswith(_OVERLAYS):
            return "doubtful"
        if address in _DOCKER:
            return "container"
    # A global IPv6 address is what every host of an IPv6 network has.
    return "public" if address.version == 4 and address.is_global else "fine"
