"""By which address and interface other nodes reach this one.

A name that resolves, or what somebody bound to, says little: the kernel's route to the peer does.
"""

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from lockstep.watch.errors import Carried
from lockstep.watch.network import NET, on_card, route_to

_CONTAINERS = (
    "docker",
    "podman",
    "cni",
    "br-",
    "virbr",
    "lxcbr",
    "lxdbr",
    "flannel",
    "cali",
    "cilium",
    "veth",
    "vxlan",
)
"""Beginnings of names that container runtimes give to bridges and their ends."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of a host's network interface."""

    name: str
    address: str
    bridge: bool = False
    """Whether the kernel says that it is a bridge."""
    up: bool = True
    carries_host: bool = False
    """Whether a card of the host is below it: then it is the host's own, bridge or not."""


class UnreachableAddress(Carried, ValueError):
    """An address by which other nodes do not reach the host; names host, interface and remedy."""

    def __init__(self, host: str, interface: str | None, address: str, why: str, remedy: str) -> None:
        where = f" (interface {interface})" if interface else ""
        super().__init__(f"{host} is known as {address}{where}, {why}: {remedy}")
        self.host, self.interface, self.address, self.why, self.remedy = host, interface, address, why, remedy


def interfaces() -> list[Interface]:
    """This host's, with their IPv4 and IPv6 addresses; none that has no address."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        folder = NET / name
        bridge, carries = (folder / "bridge").is_dir(), on_card(folder)
        up = name not in states or states[name].isup
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.append(Interface(name, each.address.partition("%")[0], bridge, up, carries))
    return found


def own_address(
    host: str, found: Sequence[Interface], peer: str | None, prefix: str | None, several: bool
) -> Interface:
    """How other nodes reach this host: by the interface that the config names, else by the one of the route to the
    peer.

    Args:
        host: as its user knows it, for errors.
        found: its interfaces.
        peer: IP address of the cluster's head, or of another node where this is the head.
        prefix: `cluster.interface`.
        several: whether the run has other hosts; alone, loopback is right.

    Raises:
        UnreachableAddress: there is no such interface, no route, or what there is reaches nobody.
    """
    if prefix is not None:
        return _named(host, found, prefix, several)
    if peer is None:
        return check(host, Interface("lo", "127.0.0.1"), several)
    try:
        address = route_to(peer)
    except OSError as error:
        raise UnreachableAddress(
            host, None, peer, f"but the way there is not known here ({error})", "check the address and the routes"
        ) from error
    return check(host, interface_of(address, found) or Interface("", address), several)


def interface_of(address: str, found: Iterable[Interface]) -> Interface | None:
    """Whose address it is; None where it is none of this host's."""
    return next((each for each in found if each.address == address), None)


def _named(host: str, found: Sequence[Interface], prefix: str, several: bool) -> Interface:
    matching = [each for each in found if each.name.startswith(prefix) and each.up and _version(each.address) == 4]
    matching = matching or [each for each in found if each.name.startswith(prefix) and each.up]
    if not matching:
        names = ", ".join(dict.fromkeys(each.name for each in found if each.up))
        raise UnreachableAddress(
            host, prefix, "nothing", "which has no address there", f"set cluster.interface to one of {names}"
        )
    refused: UnreachableAddress | None = None
    for each in matching:
        try:
            return check(host, each, several, named=True)
        except UnreachableAddress as error:
            refused = refused or error
    assert refused is not None
    raise refused


def check(host: str, interface: Interface, several: bool, named: bool = False) -> Interface:
    """The interface, where other nodes can reach its address.

    Args:
        named: the config names it: then a container's bridge is what is wanted.

    Raises:
        UnreachableAddress: it is unspecified, loopback, link-local, or a bridge for containers (no card is in it).
    """
    name, address = interface.name or None, interface.address
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError as error:
        raise UnreachableAddress(host, name, address, "which is no IP address", _SET) from error
    if parsed.is_unspecified:
        raise UnreachableAddress(host, name, address, "which means every interface and reaches none", _NODE_IP)
    if not several:
        return interface
    if parsed.is_loopback:
        raise UnreachableAddress(host, name, address, "which other hosts do not reach", _NODE_IP)
    if parsed.is_link_local:
        raise UnreachableAddress(host, name, address, "which is link-local: no router forwards it", _SET)
    inner = interface.bridge or interface.name.startswith(_CONTAINERS)
    if inner and not interface.carries_host and not named:
        raise UnreachableAddress(host, name, address, "a bridge for the containers of that host alone", _SET)
    return interface


_NODE_IP = (
    "restart its Ray with `ray start --node-ip-address ADDRESS`, ADDRESS being the one that other nodes reach it by "
    "(`--node-ip-address 0.0.0.0` makes workers elsewhere dial themselves)"
)
_SET = "set cluster.interface to the interface that other nodes reach it by, or restart its Ray with that address"


def check_nodes(used: Iterable[tuple[str, str]], every: Sequence[tuple[str, str]]) -> None:
    """Refuses addresses of nodes that cannot be right, before anything is started on them.

    Args:
        used: name and address of those that a run would be on.
        every: of all nodes of the cluster: what is reserved goes by the address.

    Raises:
        UnreachableAddress: one is unspecified, or loopback or link-local beside others, or another has the same.
    """
    for host, address in used:
        check(host, Interface("", address), len(every) > 1)
        same = [other for other, its in every if its == address]
        if len(same) > 1:
            whose = next((other for other in same if other != host), "another Ray of that host")
            raise UnreachableAddress(
                host, None, address, f"and so is {whose}",
                "restart one of them with an address of its own, or stop it: a host has one Ray",
            )  # fmt: skip


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version
