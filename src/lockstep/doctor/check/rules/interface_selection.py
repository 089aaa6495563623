"""Predicts which interface and address NCCL, Gloo, Ray and vLLM pick on a host, as their source code does, and judges
whether other hosts can reach that address. Pure.
"""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from lockstep.doctor.check.facts.host_facts import (
    HostInterface,
    HostNetwork,
    NameResolution,
    interface_addresses,
    interface_with_address,
)

NCCL_SOURCE = "https://github.com/NVIDIA/nccl/blob/081eafafc98385c45e38d5f5a35b3175735a5847/src/misc/socket.cc"
GLOO_SOURCE = "https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"
RAY_SOURCE = (
    "https://github.com/ray-project/ray/blob/0ae84124b9effc0037423239de3d3c5227707238/src/ray/util/network_util.cc"
)
VLLM_SOURCE = (
    "https://github.com/vllm-project/vllm/blob/0c175ae9295b575078961a68c4d3a2a838dce5ef/vllm/utils/network_utils.py"
)

NCCL_MAX_INTERFACES = 16
"""Maximum number of interfaces that NCCL uses (MAX_IFS)."""


@dataclass(frozen=True, slots=True)
class InterfaceChoice:
    """Which interface a library picks on this host."""

    library: str
    picks: list[tuple[str, str]] = field(default_factory=list)
    """Interfaces and addresses, of which the library listens for peers on the first. The name of the interface is empty
    if none has the address."""
    because: str = ""
    """Why the library picks them."""
    problem: str = ""
    """Why the library refuses to start, if it picks nothing."""
    source: str = ""


def interface_choices(network: HostNetwork, names: NameResolution | None) -> list[InterfaceChoice]:
    """The choices of NCCL, Gloo, Ray and vLLM."""
    resolved = names.addresses if names is not None else None
    return [
        nccl_choice(network.interfaces, network.environ),
        gloo_choice(network.interfaces, network.environ, resolved),
        ray_choice(network, resolved),
        vllm_choice(network),
    ]


def nccl_choice(interfaces: Sequence[HostInterface], environ: Mapping[str, str]) -> InterfaceChoice:
    """NCCL's choice.

    `NCCL_SOCKET_IFNAME` is a list of prefixes; with a leading `=` names must match exactly, and with a leading `^` they
    are excluded. Without it, or if it is a single character, NCCL takes names that begin with ib, then the subnet of
    NCCL_COMM_ID, then anything but docker, lo and virbr, then docker, lo, virbr.
    """
    family = {"AF_INET": 4, "AF_INET6": 6}.get(environ.get("NCCL_SOCKET_FAMILY", ""))
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    if len(wanted) > 1:
        picks = nccl_matches(interfaces, wanted, family)
        if picks:
            return InterfaceChoice("NCCL", picks, f"NCCL_SOCKET_IFNAME={wanted}", source=NCCL_SOURCE)
        there = ", ".join(each.name for each in interfaces if each.running and each.addresses) or "none"
        problem = f"NCCL_SOCKET_IFNAME={wanted} matches no running interface with an address (available: {there})"
        return InterfaceChoice("NCCL", [], "", problem, NCCL_SOURCE)
    for why, find in _nccl_order(interfaces, environ, family):
        if picks := find():
            return InterfaceChoice("NCCL", picks, why, source=NCCL_SOURCE)
    return InterfaceChoice("NCCL", [], "", "no running interface has an address", NCCL_SOURCE)


def _nccl_order(
    interfaces: Sequence[HostInterface], environ: Mapping[str, str], family: int | None
) -> Iterator[tuple[str, Callable[[], list[tuple[str, str]]]]]:
    def matching(pattern: str) -> Callable[[], list[tuple[str, str]]]:
        return lambda: nccl_matches(interfaces, pattern, family)

    yield "interfaces whose names begin with ib come first", matching("ib")
    if len(peer := environ.get("NCCL_COMM_ID", "")) > 1:
        yield f"it is in the subnet of NCCL_COMM_ID={peer}", lambda: _in_subnet(interfaces, peer)
    yield "the first interface other than docker, lo or virbr", matching("^docker,lo,virbr")
    yield "only docker's bridge is available", matching("docker")
    yield "only loopback is available", matching("lo")
    yield "only a bridge of virtual machines is available", matching("virbr")


def nccl_matches(interfaces: Sequence[HostInterface], pattern: str, family: int | None = None) -> list[tuple[str, str]]:
    """The running interfaces that a value of NCCL_SOCKET_IFNAME selects, each with its first address."""
    inverted = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    exact = rest.startswith("=")
    names = [part.partition(":")[0] for part in rest.removeprefix("=").split(",") if part.partition(":")[0]]

    def listed(name: str) -> bool:
        return not names or any(name == each if exact else name.startswith(each) for each in names)

    found: dict[str, str] = {}
    for name, address in _by_family(interfaces):
        if family in (None, address.version) and not _is_ipv6_loopback(address) and listed(name) is not inverted:
            found.setdefault(name, str(address))
    return list(found.items())[:NCCL_MAX_INTERFACES]


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _by_family(interfaces: Sequence[HostInterface]) -> list[tuple[str, _Address]]:
    """Addresses of running interfaces in the order of `getifaddrs` on Linux: all IPv4 addresses, then all IPv6."""
    pairs = [
        (each.name, ipaddress.ip_interface(address).ip)
        for each in interfaces
        if each.running
        for address in each.addresses
    ]
    return sorted(pairs, key=lambda pair: pair[1].version)


def _is_ipv6_loopback(address: _Address) -> bool:
    return address.version == 6 and address.is_loopback


def _in_subnet(interfaces: Sequence[HostInterface], peer: str) -> list[tuple[str, str]]:
    """The first interface in the subnet of `ADDRESS:PORT` or `[ADDRESS]:PORT`; none for a name."""
    text = peer[1:].partition("]")[0] if peer.startswith("[") else peer.rpartition(":")[0]
    try:
        wanted = ipaddress.ip_address(text)
    except ValueError:
        return []
    for each in interfaces:
        for address in each.addresses:
            own = ipaddress.ip_interface(address)
            if wanted in own.network:
                return [(each.name, str(own.ip))]
    return []


def gloo_choice(
    interfaces: Sequence[HostInterface], environ: Mapping[str, str], resolved: Sequence[str] | None
) -> InterfaceChoice:
    """Gloo's choice.

    `GLOO_SOCKET_IFNAME` is a comma-separated list of exact names. Without it, or if it is a single character, Gloo
    takes the first address of the host's name that can be bound, else loopback.

    Args:
        resolved: addresses of the host's name; None if they are not known.
    """
    wanted = environ.get("GLOO_SOCKET_IFNAME", "")
    if len(wanted) > 1:
        picks = []
        for name in wanted.split(","):
            first = next((address for each, address in interface_addresses(interfaces) if each == name), None)
            if first is None:
                there = ", ".join(each.name for each in interfaces if each.addresses)
                problem = f"GLOO_SOCKET_IFNAME={wanted}: no interface {name!r} with an address (available: {there})"
                return InterfaceChoice("Gloo", [], "", problem, GLOO_SOURCE)
            picks.append((name, first))
        return InterfaceChoice("Gloo", picks, f"GLOO_SOCKET_IFNAME={wanted}", source=GLOO_SOURCE)
    if resolved is None:
        return InterfaceChoice("Gloo", [], "the host's name was not resolved", source=GLOO_SOURCE)
    for address in resolved:
        name = interface_with_address(interfaces, address)
        if name or ipaddress.ip_address(address).is_loopback:
            return InterfaceChoice(
                "Gloo", [(name or "lo", address)], "the host's name resolves to this address", source=GLOO_SOURCE
            )
    why = "the host's name resolves to no address of this host, so Gloo falls back to loopback"
    return InterfaceChoice("Gloo", [("lo", "127.0.0.1")], why, source=GLOO_SOURCE)


def ray_choice(network: HostNetwork, resolved: Sequence[str] | None) -> InterfaceChoice:
    """Ray's choice: the address on the route to the internet, else the first one of the host's name, else 127.0.0.1.

    IPv4 comes before IPv6. `ray start --node-ip-address` takes precedence, but is not visible here.
    """
    route = network.route_v4 or network.route_v6
    if route:
        why = f"it is on the route to {'8.8.8.8' if network.route_v4 else '2001:4860:4860::8888'}"
        return InterfaceChoice(
            "Ray", [(interface_with_address(network.interfaces, route), route)], why, source=RAY_SOURCE
        )
    known = sorted(resolved or (), key=lambda address: ipaddress.ip_address(address).version)
    if known:
        why = "there is no route to the internet, and the host's name resolves to this address"
        return InterfaceChoice(
            "Ray", [(interface_with_address(network.interfaces, known[0]), known[0])], why, source=RAY_SOURCE
        )
    why = "there is no route to the internet, and the host's name does not resolve"
    return InterfaceChoice("Ray", [("lo", "127.0.0.1")], why, source=RAY_SOURCE)


def vllm_choice(network: HostNetwork) -> InterfaceChoice:
    """vLLM's choice: `VLLM_HOST_IP`, else the address on the route to the internet (IPv4 first), else 0.0.0.0."""
    wanted = network.environ.get("VLLM_HOST_IP", "")
    if wanted:
        return InterfaceChoice(
            "vLLM",
            [(interface_with_address(network.interfaces, wanted), wanted)],
            f"VLLM_HOST_IP={wanted}",
            source=VLLM_SOURCE,
        )
    route = network.route_v4 or network.route_v6
    if route:
        why = f"it is on the route to {'8.8.8.8' if network.route_v4 else '2001:4860:4860::8888'}"
        return InterfaceChoice(
            "vLLM", [(interface_with_address(network.interfaces, route), route)], why, source=VLLM_SOURCE
        )
    return InterfaceChoice("vLLM", [("", "0.0.0.0")], "there is no route to the internet", source=VLLM_SOURCE)


Reachability = Literal[
    "unspecified",
    "loopback",
    "link-local",
    "bridge",
    "foreign",
    "uncertain",
    "container",
    "public",
    "name",
    "reachable",
]

_RUNTIME_BRIDGES = re.compile(
    r"docker\d|podman\d|cni\d|cni-podman\d|nerdctl\d|virbr\d|lxcbr\d|lxdbr\d|incusbr\d|br-[0-9a-f]{12}$"
)
"""Names that runtimes of containers and virtual machines give to their bridges."""
_OVERLAY_PREFIXES = ("veth", "cali", "cilium", "flannel", "vxlan", "weave")
"""Name prefixes of overlay interfaces, which connect containers across hosts or to their host."""
_DOCKER_NETWORK = ipaddress.ip_network("172.17.0.0/16")
"""Docker's default network, unless it is reconfigured; the bridge has the first address."""


@dataclass(frozen=True, slots=True)
class AddressVerdict:
    """Whether peers can reach a host by an address."""

    reach: Reachability
    text: str
    """The address with the judgement, such as `127.0.0.1 on lo, which other hosts cannot reach`."""

    @property
    def never_reachable(self) -> bool:
        """Whether other hosts cannot reach the address in any network."""
        return self.reach in ("unspecified", "loopback", "link-local", "bridge", "foreign")


_REACHABILITY_TEXT: dict[Reachability, str] = {
    "unspecified": "which stands for every interface: peers that dial it reach themselves",
    "loopback": "which other hosts cannot reach: peers that dial it reach themselves",
    "link-local": "which is link-local: routers do not forward it, and hosts often share it",
    "bridge": "a bridge for the containers of that host only",
    "foreign": "which is not an address of this host",
    "uncertain": "which connects containers and has no network card: other hosts may not reach it",
    "container": "which belongs to docker's default network: containers of other hosts cannot reach it",
    "public": "which is a public address: clouds and firewalls usually close its ports between hosts",
    "name": "which is a name",
    "reachable": "",
}


def judge_address(address: str, interfaces: Sequence[HostInterface], interface: str = "") -> AddressVerdict:
    """Judges an address that this host would announce to its peers.

    Args:
        interfaces: interfaces of the host; empty if they are not known.
        interface: name of the interface that has the address, if known.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return AddressVerdict("name", f"{address}, {_REACHABILITY_TEXT['name']}")
    name = interface or interface_with_address(interfaces, address)
    where = f"{address} on {name}" if name else address
    reach = _reachability(parsed, next((each for each in interfaces if each.name == name), None), bool(interfaces))
    return AddressVerdict(reach, f"{where}, {_REACHABILITY_TEXT[reach]}" if _REACHABILITY_TEXT[reach] else where)


def reachable_addresses(interfaces: Sequence[HostInterface]) -> list[tuple[str, str]]:
    """Interfaces and addresses at which other hosts can probably reach this one, private networks first."""
    found = [
        (each.name, address)
        for each in interfaces
        if each.running
        for address in each.plain
        if judge_address(address, interfaces, each.name).reach in ("reachable", "public")
    ]
    return sorted(found, key=lambda pair: is_public_address(pair[1]))


def is_public_address(address: str) -> bool:
    """Whether an address is reachable from the internet, according to its range."""
    return ipaddress.ip_address(address).is_global


def _reachability(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address, interface: HostInterface | None, known: bool
) -> Reachability:
    if address.is_unspecified:
        return "unspecified"
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if interface is None and known:
        return "foreign"
    if interface is None:
        if address in _DOCKER_NETWORK:
            return "bridge" if address == _DOCKER_NETWORK[1] else "container"
    elif not interface.carries_host:
        if interface.kind == "bridge":
            return "bridge" if _RUNTIME_BRIDGES.match(interface.name) else "uncertain"
        if interface.name.startswith(_OVERLAY_PREFIXES):
            return "uncertain"
        if address in _DOCKER_NETWORK:
            return "container"
    # A global IPv6 address is no exception: every host in an IPv6 network has one.
    return "public" if address.version == 4 and address.is_global else "reachable"
