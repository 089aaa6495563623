"""Gathers interfaces, routes and name resolution of this host. Nothing is sent to peers."""

import ipaddress
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from lockstep.doctor.check.facts import Interface, Names, Network
from lockstep.doctor.check.interfaces import VARIABLES
from lockstep.doctor.check.system import System, number_of
from lockstep.watch.network import on_card, route_to

INTERNET = "8.8.8.8", "2001:4860:4860::8888"
"""What Ray and vLLM ask the kernel's route to; no packet is sent."""
_INFINIBAND = 32
"""ARPHRD_INFINIBAND of linux/if_arp.h."""


def gather_network(system: System) -> Network:
    """Of this process's network namespace."""
    route_v4, route_v6 = map(own_address_towards, INTERNET)
    return Network(
        gather_interfaces(system.sys),
        route_v4,
        route_v6,
        {name: system.environ[name] for name in VARIABLES if system.environ.get(name)},
    )


def gather_interfaces(sys: Path) -> list[Interface]:
    """All, also those without an address, in the order in which `getifaddrs` tells their addresses."""
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
        kind, carries = _kind(sys / "class/net" / name, name)
        mtu, speed = (state.mtu, max(0, state.speed)) if state is not None else (0, 0)
        found.append(Interface(name, own, up, "running" in flags or (up and not flags), kind, carries, mtu, speed))
    return found


def _with_prefix(address: str, mask: str | None) -> str:
    plain = address.partition("%")[0]
    parsed = ipaddress.ip_address(plain)
    if not mask:
        return f"{plain}/{parsed.max_prefixlen}"
    bits = int(ipaddress.ip_address(mask)).bit_count()
    return f"{plain}/{bits}"


def _kind(folder: Path, name: str) -> tuple[str, bool]:
    if name == "lo":
        return "loopback", True
    carries = on_card(folder)
    if (folder / "bridge").is_dir():
        return "bridge", carries
    if (folder / "wireless").is_dir() or (folder / "phy80211").exists():
        return "wireless", True
    if number_of(folder / "type") == _INFINIBAND:
        return "infiniband", True
    if folder.exists() and not carries:
        return "virtual", False
    return "physical", True


def own_address_towards(peer: str) -> str:
    """The address of this host that its kernel would use; nothing is sent. Empty where there is no route."""
    try:
        own = route_to(peer, names=True)
    except OSError:
        return ""
    return "" if ipaddress.ip_address(own.partition("%")[0]).is_unspecified else own


def gather_names(system: System, others: Iterable[str] = ()) -> Names:
    """Looks up the own name, its addresses' names, and those of others. A slow resolver is the caller's to bound."""
    host = socket.gethostname()
    begun = time.monotonic()
    problem, addresses = "", []
    try:
        addresses = _addresses(host)
    except OSError as error:
        problem = f"the name of this host, {host}, does not resolve: {error.strerror or error}"
    back = {address: _name(address) for address in addresses}
    asked = {name: _addresses_or_none(name) for name in dict.fromkeys(others)}
    return Names(host, addresses, back, asked, round(time.monotonic() - begun, 3), problem)


def _addresses(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found))


def _addresses_or_none(name: str) -> list[str]:
    try:
        return _addresses(name)
    except OSError:
        return []


def _name(address: str) -> str:
    try:
        return socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        return ""
