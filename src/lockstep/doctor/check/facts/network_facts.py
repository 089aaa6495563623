"""Gathers network interfaces, routes, name resolution, ports in use and Ray's token; sends nothing to other hosts."""

import ipaddress
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from lockstep.base.network import is_physical_interface, route_source_address
from lockstep.doctor.check.facts.host_facts import HostInterface, HostNetwork, NameResolution, PlannedPort, RayToken
from lockstep.doctor.check.facts.host_system import HostSystem, SourceUnavailable, read_int, read_text

NETWORK_VARIABLES = (
    "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "NCCL_COMM_ID", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME",
    "VLLM_HOST_IP", "HOST_IP", "RAY_ADDRESS", "RAY_NODE_IP_ADDRESS", "MASTER_ADDR",
)  # fmt: skip
"""Environment variables that select an interface or address, or that users expect to do so."""


INTERNET_ADDRESSES = "8.8.8.8", "2001:4860:4860::8888"
"""Ray and vLLM ask the kernel for its route to these addresses; that sends no packet."""
_INFINIBAND = 32
"""ARPHRD_INFINIBAND of linux/if_arp.h."""


def gather_network(system: HostSystem) -> HostNetwork:
    """The interfaces and routes of this process's network namespace."""
    route_v4, route_v6 = map(local_address_towards, INTERNET_ADDRESSES)
    return HostNetwork(
        gather_interfaces(system.sys),
        route_v4,
        route_v6,
        {name: system.environ[name] for name in NETWORK_VARIABLES if system.environ.get(name)},
    )


def gather_interfaces(sys: Path) -> list[HostInterface]:
    """All interfaces, including those without an address, in the order of `getifaddrs`."""
    states = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        own = [
            _with_prefix(each.address, each.netmask)
            for each in sorted(addresses, key=lambda each: each.family)
            if each.family in (socket.AF_INET, socket.AF_INET6)
        ]
        state = states.get(name)
        flags = state.flags.split(",") if state is not None and state.flags else []
        up = "up" in flags or (state is not None and state.isup)
        kind, carries = _interface_kind(sys / "class/net" / name, name)
        mtu, speed = (state.mtu, max(0, state.speed)) if state is not None else (0, 0)
        found.append(HostInterface(name, own, up, "running" in flags or (up and not flags), kind, carries, mtu, speed))
    return found


def _with_prefix(address: str, mask: str | None) -> str:
    plain = address.partition("%")[0]
    parsed = ipaddress.ip_address(plain)
    if not mask:
        return f"{plain}/{parsed.max_prefixlen}"
    bits = int(ipaddress.ip_address(mask)).bit_count()
    return f"{plain}/{bits}"


def _interface_kind(folder: Path, name: str) -> tuple[str, bool]:
    if name == "lo":
        return "loopback", True
    carries = is_physical_interface(folder)
    if (folder / "bridge").is_dir():
        return "bridge", carries
    if (folder / "wireless").is_dir() or (folder / "phy80211").exists():
        return "wireless", True
    if read_int(folder / "type") == _INFINIBAND:
        return "infiniband", True
    if folder.exists() and not carries:
        return "virtual", False
    return "physical", True


def local_address_towards(peer: str) -> str:
    """This host's address on the kernel's route to a peer; empty without a route. Sends nothing."""
    try:
        own = route_source_address(peer, names=True)
    except OSError:
        return ""
    return "" if ipaddress.ip_address(own.partition("%")[0]).is_unspecified else own


def gather_names(system: HostSystem, others: Iterable[str] = ()) -> NameResolution:
    """Resolves this host's name, its addresses and other names. A slow resolver may take minutes."""
    host = socket.gethostname()
    begun = time.monotonic()
    problem, addresses = "", []
    try:
        addresses = _resolve(host)
    except OSError as error:
        problem = f"the name of this host, {host}, does not resolve: {error.strerror or error}"
    back = {address: _reverse_name(address) for address in addresses}
    asked = {name: _resolve_or_empty(name) for name in dict.fromkeys(others)}
    return NameResolution(host, addresses, back, asked, round(time.monotonic() - begun, 3), problem)


def _resolve(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def _resolve_or_empty(name: str) -> list[str]:
    try:
        return _resolve(name)
    except OSError:
        return []


def _reverse_name(address: str) -> str:
    try:
        return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        return ""


_LISTEN = "0A"
"""State of a socket in /proc/net/tcp (include/net/tcp_states.h)."""


def gather_ports(system: HostSystem, wanted: Mapping[int, str]) -> list[PlannedPort]:
    """Finds the process that listens on each port that the run will use.

    Raises:
        SourceUnavailable: /proc/net is missing.
    """
    if not wanted:
        return []
    taken = _listening_ports(system)
    words = (read_text(system.proc / "sys/net/ipv4/ip_local_port_range") or "").split()
    low, high = (int(words[0]), int(words[1])) if len(words) == 2 else (1 << 16, 0)
    return [
        PlannedPort(port, purpose, _port_owner(port) if port in taken else None, low <= port <= high)
        for port, purpose in wanted.items()
    ]


def _listening_ports(system: HostSystem) -> set[int]:
    tables = [read_text(system.proc / "self/net" / name) for name in ("tcp", "tcp6")]
    if tables == [None, None]:
        raise SourceUnavailable(f"{system.proc}/self/net/tcp is missing")
    found = set()
    for line in "\n".join(table or "" for table in tables).splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3] == _LISTEN:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def _port_owner(port: int) -> str:
    """Name and pid of the process that listens on a port, if this user may see them."""
    try:
        for each in psutil.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port and each.pid:
                return f"{psutil.Process(each.pid).name()} (pid {each.pid})"
    except psutil.Error:
        pass
    return "a process that cannot be seen from here"


def gather_ray_token(environ: Mapping[str, str], home: Path | None = None) -> RayToken:
    """Finds where Ray would find a token on this host, without reading the token."""
    mode = environ.get("RAY_AUTH_MODE", "")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if environ.get(name):
            return RayToken(mode, name)
    file = (home or Path.home()) / ".ray" / "auth_token"
    return RayToken(mode, "~/.ray/auth_token" if file.is_file() else "")
