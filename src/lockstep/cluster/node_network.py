"""How nodes reach each other: the address and interface of a host.

A name that resolves, or the address that a process bound to, proves little: the kernel's route to the peer does.
"""

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from lockstep.base.errors import PicklableError
from lockstep.base.network import SYS_CLASS_NET, is_physical_interface, route_source_address

_CONTAINER_PREFIXES = (
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
"""Prefixes of the names that container runtimes give to bridges and virtual interfaces."""


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """One address of a network interface of a host."""

    name: str
    address: str
    bridge: bool = False
    """Whether the kernel reports it as a bridge."""
    up: bool = True
    carries_host: bool = False
    """Whether a network card of the host is below it: then it is the host's own, even if it is a bridge."""


class UnreachableAddress(PicklableError, ValueError):
    """Other nodes cannot reach a host at this address; names host, interface and fix."""

    def __init__(self, host: str, interface: str | None, address: str, why: str, remedy: str) -> None:
        where = f" (interface {interface})" if interface else ""
        super().__init__(f"{host} is known as {address}{where}, {why}: {remedy}")
        self.host, self.interface, self.address, self.why, self.remedy = host, interface, address, why, remedy


def network_interfaces() -> list[NetworkInterface]:
    """The interfaces of this host that have an IPv4 or IPv6 address."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        folder = SYS_CLASS_NET / name
        bridge, carries = (folder / "bridge").is_dir(), is_physical_interface(folder)
        up = name not in states or states[name].isup
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found.append(NetworkInterface(name, each.address.partition("%")[0], bridge, up, carries))
    return found


def reachable_address(
    host: str, found: Sequence[NetworkInterface], peer: str | None, prefix: str | None, several: bool
) -> NetworkInterface:
    """The interface at which other nodes reach this host: the one that the config names, else that of the route to the
    peer.

    Args:
        host: as users know it, for errors.
        found: the host's interfaces.
        peer: IP address of the cluster's head, or of another node if this is the head.
        prefix: `cluster.interface`.
        several: whether the run has other hosts; with one host, loopback is right.

    Raises:
        UnreachableAddress: there is no such interface, no route, or its address is not reachable.
    """
    if prefix is not None:
        return _configured_interface(host, found, prefix, several)
    if peer is None:
        return check_reachable_address(host, NetworkInterface("lo", "127.0.0.1"), several)
    try:
        address = route_source_address(peer)
    except OSError as error:
        raise UnreachableAddress(
            host, None, peer, f"but this host has no route to it ({error})", "check the address and the routes"
        ) from error
    return check_reachable_address(
        host, interface_with_address(address, found) or NetworkInterface("", address), several
    )


def interface_with_address(address: str, found: Iterable[NetworkInterface]) -> NetworkInterface | None:
    """The interface with that address; None if it is not this host's."""
    return next((each for each in found if each.address == address), None)


def _configured_interface(host: str, found: Sequence[NetworkInterface], prefix: str, several: bool) -> NetworkInterface:
    matching = [each for each in found if each.name.startswith(prefix) and each.up and _ip_version(each.address) == 4]
    matching = matching or [each for each in found if each.name.startswith(prefix) and each.up]
    if not matching:
        names = ", ".join(dict.fromkeys(each.name for each in found if each.up))
        raise UnreachableAddress(
            host, prefix, "nothing", "an interface without an address there", f"set cluster.interface to one of {names}"
        )
    refused: UnreachableAddress | None = None
    for each in matching:
        try:
            return check_reachable_address(host, each, several, named=True)
        except UnreachableAddress as error:
            refused = refused or error
    assert refused is not None
    raise refused


def check_reachable_address(
    host: str, interface: NetworkInterface, several: bool, named: bool = False
) -> NetworkInterface:
    """Returns the interface if other nodes can reach its address.

    Args:
        named: whether the config names the interface: then even a container bridge is accepted.

    Raises:
        UnreachableAddress: it is unspecified, loopback, link-local, or a container bridge without a network card.
    """
    name, address = interface.name or None, interface.address
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError as error:
        raise UnreachableAddress(host, name, address, "which is not an IP address", _INTERFACE_FIX) from error
    if parsed.is_unspecified:
        raise UnreachableAddress(host, name, address, "which means every interface and reaches none", _NODE_IP_FIX)
    if not several:
        return interface
    if parsed.is_loopback:
        raise UnreachableAddress(host, name, address, "which other hosts cannot reach", _NODE_IP_FIX)
    if parsed.is_link_local:
        raise UnreachableAddress(host, name, address, "which is link-local: no router forwards it", _INTERFACE_FIX)
    inner = interface.bridge or interface.name.startswith(_CONTAINER_PREFIXES)
    if inner and not interface.carries_host and not named:
        raise UnreachableAddress(host, name, address, "a bridge that only containers on that host use", _INTERFACE_FIX)
    return interface


_NODE_IP_FIX = (
    "restart its Ray with `ray start --node-ip-address ADDRESS`, where ADDRESS is the one at which other nodes reach "
    "it (with `--node-ip-address 0.0.0.0`, workers on other nodes connect to themselves)"
)
_INTERFACE_FIX = (
    "set cluster.interface to the interface at which other nodes reach it, or restart its Ray with that address"
)


def check_node_addresses(used: Iterable[tuple[str, str]], every: Sequence[tuple[str, str]]) -> None:
    """Rejects impossible node addresses before anything is started on the nodes.

    Args:
        used: name and address of the nodes that a run would use.
        every: name and address of all nodes of the cluster: reservations identify a node by its address.

    Raises:
        UnreachableAddress: an address is unspecified, loopback or link-local beside other nodes, or not unique.
    """
    for host, address in used:
        check_reachable_address(host, NetworkInterface("", address), len(every) > 1)
        same = [other for other, its in every if its == address]
        if len(same) > 1:
            whose = next((other for other in same if other != host), "another Ray of that host")
            raise UnreachableAddress(
                host, None, address, f"which is also the address of {whose}",
                "restart one of them with its own address, or stop it: a host needs only one Ray",
            )  # fmt: skip


def _ip_version(address: str) -> int:
    return ipaddress.ip_address(address).version
