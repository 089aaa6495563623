"""Which interface and address NCCL, Gloo, Ray and vLLM will pick on a host: pure functions of its interfaces and the
environment, written after their sources."""

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.doctor.check.facts import Interface, Names, Network

NCCL_SOURCE = "https://github.com/NVIDIA/nccl/blob/081eafafc98385c45e38d5f5a35b3175735a5847/src/misc/socket.cc"
GLOO_SOURCE = "https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/distributed/c10d/ProcessGroupGloo.cpp"
RAY_SOURCE = (
    "https://github.com/ray-project/ray/blob/0ae84124b9effc0037423239de3d3c5227707238/src/ray/util/network_util.cc"
)
VLLM_SOURCE = (
    "https://github.com/vllm-project/vllm/blob/0c175ae9295b575078961a68c4d3a2a838dce5ef/vllm/utils/network_utils.py"
)

NCCL_MOST = 16
"""Interfaces that NCCL keeps (MAX_IFS)."""
VARIABLES = (
    "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME",
    "VLLM_HOST_IP", "HOST_IP", "RAY_ADDRESS", "RAY_NODE_IP_ADDRESS", "MASTER_ADDR",
)  # fmt: skip
"""Those that choose, or are taken to."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one library will use on this host."""

    who: str
    picks: list[tuple[str, str]] = field(default_factory=list)
    """Interface and address, the first of which is where it listens for its peers; the name is empty where no
    interface has the address."""
    because: str = ""
    problem: str = ""
    """Why it will not start, where it picks nothing."""
    source: str = ""


def choices(network: Network, names: Names | None) -> list[Choice]:
    """Of all four."""
    resolved = names.addresses if names is not None else None
    return [
        nccl(network.interfaces, network.environ),
        gloo(network.interfaces, network.environ, resolved),
        ray(network, resolved),
        vllm(network),
    ]


def nccl(interfaces: Sequence[Interface], environ: Mapping[str, str]) -> Choice:
    """`NCCL_SOCKET_IFNAME`: a list of prefixes; `=` in front makes them whole names, `^` those not to be used. Without
    it, or with a single character: names that begin with ib, then the subnet of NCCL_COMM_ID, then anything but
    docker, lo and virbr, then docker, lo, virbr."""
    family = {"AF_INET": 4, "AF_INET6": 6}.get(environ.get("NCCL_SOCKET_FAMILY", ""))
    wanted = environ.get("NCCL_SOCKET_IFNAME", "")
    if len(wanted) > 1:
        picks = nccl_matches(interfaces, wanted, family)
        if picks:
            return Choice("NCCL", picks, f"NCCL_SOCKET_IFNAME={wanted}", source=NCCL_SOURCE)
        there = ", ".join(each.name for each in interfaces if each.running and each.addresses) or "none"
        problem = f"NCCL_SOCKET_IFNAME={wanted} matches no running interface that has an address (there are: {there})"
        return Choice("NCCL", [], "", problem, NCCL_SOURCE)
    for why, find in _nccl_order(interfaces, environ, family):
        if picks := find():
            return Choice("NCCL", picks, why, source=NCCL_SOURCE)
    return Choice("NCCL", [], "", "no interface is running and has an address", NCCL_SOURCE)


def _nccl_order(
    interfaces: Sequence[Interface], environ: Mapping[str, str], family: int | None
) -> Iterator[tuple[str, Callable[[], list[tuple[str, str]]]]]:
    def matching(pattern: str) -> Callable[[], list[tuple[str, str]]]:
        return lambda: nccl_matches(interfaces, pattern, family)

    yield "names that begin with ib come first", matching("ib")
    if len(peer := environ.get("NCCL_COMM_ID", "")) > 1:
        yield f"it is in the subnet of NCCL_COMM_ID={peer}", lambda: _in_subnet(interfaces, peer)
    yield "the first that is not docker, lo or virbr", matching("^docker,lo,virbr")
    yield "there is nothing but docker's bridge", matching("docker")
    yield "there is nothing but loopback", matching("lo")
    yield "there is nothing but a bridge of virtual machines", matching("virbr")


def nccl_matches(interfaces: Sequence[Interface], pattern: str, family: int | None = None) -> list[tuple[str, str]]:
    """Running interfaces that a value of NCCL_SOCKET_IFNAME means, each with its first address."""
    inverted = pattern.startswith("^")
    rest = pattern.removeprefix("^")
    exact = rest.startswith("=")
    names = [part.partition(":")[0] for part in rest.removeprefix("=").split(",") if part.partition(":")[0]]

    def listed(name: str) -> bool:
        return not names or any(name == each if exact else name.startswith(each) for each in names)

    found: dict[str, str] = {}
    for name, address in _by_family(interfaces):
        if family in (None, address.version) and not _six_loopback(address) and listed(name) is not inverted:
            found.setdefault(name, str(address))
    return list(found.items())[:NCCL_MOST]


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _by_family(interfaces: Sequence[Interface]) -> list[tuple[str, _Address]]:
    """Addresses of running interfaces as `getifaddrs` tells them on Linux: IPv4 of all, then IPv6 of all."""
    pairs = [
        (each.name, ipaddress.ip_interface(address).ip)
        for each in interfaces
        if each.running
        for address in each.addresses
    ]
    return sorted(pairs, key=lambda pair: pair[1].version)


def _six_loopback(address: _Address) -> bool:
    return address.version == 6 and address.is_loopback


def _in_subnet(interfaces: Sequence[Interface], peer: str) -> list[tuple[str, str]]:
    """The first whose subnet the address of `ADDRESS:PORT` or `[ADDRESS]:PORT` is in; a name is not looked up."""
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


def gloo(interfaces: Sequence[Interface], environ: Mapping[str, str], resolved: Sequence[str] | None) -> Choice:
    """`GLOO_SOCKET_IFNAME`: whole names, joined by commas. Without it, or with a single character: the first address of
    the host's name that can be bound, else loopback.

    Args:
        resolved: addresses of the host's name; None where that is not known.
    """
    wanted = environ.get("GLOO_SOCKET_IFNAME", "")
    if len(wanted) > 1:
        picks = []
        for name in wanted.split(","):
            first = next((address for each, address in _pairs(interfaces) if each == name), None)
            if first is None:
                there = ", ".join(each.name for each in interfaces if each.addresses)
                problem = f"GLOO_SOCKET_IFNAME={wanted}: no interface {name!r} with an address (there are: {there})"
                return Choice("Gloo", [], "", problem, GLOO_SOURCE)
            picks.append((name, first))
        return Choice("Gloo", picks, f"GLOO_SOCKET_IFNAME={wanted}", source=GLOO_SOURCE)
    if resolved is None:
        return Choice("Gloo", [], "the host's own name was not looked up", source=GLOO_SOURCE)
    for address in resolved:
        name = owner(interfaces, address)
        if name or ipaddress.ip_address(address).is_loopback:
            return Choice("Gloo", [(name or "lo", address)], "the host's own name has this address", source=GLOO_SOURCE)
    why = "the host's own name has no address of this host, and then Gloo takes loopback"
    return Choice("Gloo", [("lo", "127.0.0.1")], why, source=GLOO_SOURCE)


def ray(network: Network, resolved: Sequence[str] | None) -> Choice:
    """The address of the route to 8.8.8.8, else of that to 2001:4860:4860::8888, else the first IPv4 (then IPv6)
    address of the host's name, else 127.0.0.1; `ray start --node-ip-address` goes before, and is not seen here."""
    route = network.route_v4 or network.route_v6
    if route:
        why = f"it is on the route to {'8.8.8.8' if network.route_v4 else '2001:4860:4860::8888'}"
        return Choice("Ray", [(owner(network.interfaces, route), route)], why, source=RAY_SOURCE)
    known = sorted(resolved or (), key=lambda address: ipaddress.ip_address(address).version)
    if known:
        why = "there is no route to the internet, and the host's own name has this address"
        return Choice("Ray", [(owner(network.interfaces, known[0]), known[0])], why, source=RAY_SOURCE)
    why = "there is no route to the internet, and the host's own name has no address"
    return Choice("Ray", [("lo", "127.0.0.1")], why, source=RAY_SOURCE)


def vllm(network: Network) -> Choice:
    """`VLLM_HOST_IP`, else the address of the route to 8.8.8.8, else of that to 2001:4860:4860::8888, else 0.0.0.0."""
    wanted = network.environ.get("VLLM_HOST_IP", "")
    if wanted:
        return Choice(
            "vLLM", [(owner(network.interfaces, wanted), wanted)], f"VLLM_HOST_IP={wanted}", source=VLLM_SOURCE
        )
    route = network.route_v4 or network.route_v6
    if route:
        why = f"it is on the route to {'8.8.8.8' if network.route_v4 else '2001:4860:4860::8888'}"
        return Choice("vLLM", [(owner(network.interfaces, route), route)], why, source=VLLM_SOURCE)
    return Choice("vLLM", [("", "0.0.0.0")], "there is no route to the internet", source=VLLM_SOURCE)


def _pairs(interfaces: Sequence[Interface]) -> Iterator[tuple[str, str]]:
    for each in interfaces:
        for address in each.addresses:
            yield each.name, str(ipaddress.ip_interface(address).ip)


def owner(interfaces: Sequence[Interface], address: str) -> str:
    """The interface that has the address; empty where none has it, or it is none."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return next((name for name, own in _pairs(interfaces) if ipaddress.ip_address(own) == wanted), "")
