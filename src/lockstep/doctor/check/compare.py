"""What differs between hosts of one run, and must not: pure functions of what is known about several."""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from lockstep.doctor.check.addresses import judge
from lockstep.doctor.check.facts import HostFacts, Network
from lockstep.doctor.check.interfaces import Choice, choices
from lockstep.doctor.check.judge_gpus import summary
from lockstep.doctor.check.versions import compare_versions
from lockstep.doctor.finding import Finding
from lockstep.watch.naming import some


def compare(facts: Sequence[HostFacts]) -> list[Finding]:
    """All of it; one finding for a thing, with who has which. Nothing where there is one host."""
    if len(facts) < 2:
        return []
    return [
        *compare_versions({each.host: each.versions for each in facts if each.versions is not None}),
        *_same_name(facts),
        *_hardware(facts),
        *_clocks(facts),
        *_networks(facts),
    ]


def _same_name(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    names = [each.host for each in facts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        said = f"{names.count(name)} hosts call themselves {name}"
        why = "NCCL takes hosts of one name and boot id for one, and what is keyed by name is overwritten"
        yield Finding("same-name", "warning", name, said, why, "hostnamectl set-hostname (or export NCCL_HOSTID)")


def _by_value(values: Mapping[str, str]) -> tuple[str, str, str]:
    """What is said, the odd hosts, and what most have."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    most = max(hosts, key=lambda value: len(hosts[value]))
    odd = ",".join(host for value, which in hosts.items() if value != most for host in which)
    return "; ".join(f"{value} on {some(which, 4)}" for value, which in hosts.items()), odd, most


def _differing(
    id: str, what: str, values: Mapping[str, str], why: str, fix: str = "", note: bool = False
) -> Iterator[Finding]:
    if len(set(values.values())) > 1:
        said, odd, _ = _by_value(values)
        yield Finding(id, "note" if note else "warning", odd, f"{what}: {said}", why, fix)


def _hardware(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    gpus = {each.host: summary(each.gpus) or "no GPU" for each in facts if each.gpus is not None}
    yield from _differing("differs-gpus", "hosts have different GPUs", gpus, "ranks wait for the slowest")
    rates = {
        each.host: ", ".join(
            sorted(f"{port.rate_gbps or 0:g} Gb/s" for port in each.rdma.ports if port.state == "ACTIVE")
        )
        or "no active port"
        for each in facts
        if each.rdma is not None
    }
    why = "collectives go at the pace of the slowest host; a host without a rail hangs where others use it"
    yield from _differing("differs-rdma", "InfiniBand and RoCE differ", rates, why, "ibstat on those hosts")
    shm = {each.host: "none" for each in facts if each.limits is not None and each.limits.shm is None}
    if shm and len(shm) < len(facts):
        yield Finding(
            "differs-shm", "warning", ",".join(shm), f"/dev/shm is missing on {some(list(shm), 4)}", "ranks fail there"
        )


def _clocks(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    known = {each.host: each.clock.offset_s for each in facts if each.clock and each.clock.offset_s is not None}
    if len(known) < 2:
        return
    first, last = min(known, key=lambda host: known[host]), max(known, key=lambda host: known[host])
    apart = known[last] - known[first]
    if apart > 0.5:
        said = f"clocks of {first} and {last} are {apart:.2f} s apart"
        why = "logs cannot be put in order, and tokens and leases expire early or late"
        yield Finding("clock-skew", "warning", f"{first},{last}", said, why, "chronyc makestep on both")


def _networks(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    known = {each.host: each for each in facts if each.network is not None}
    picked = {
        host: {choice.who: choice for choice in choices(each.network, each.names)}
        for host, each in known.items()
        if each.network is not None
    }
    for who in ("NCCL", "Gloo", "Ray", "vLLM"):
        chosen = {host: choice[who] for host, choice in picked.items() if choice[who].picks}
        networks = {host: each.network for host, each in known.items() if host in chosen and each.network is not None}
        yield from _same_address(who, chosen)
        yield from _subnets(who, chosen, networks)
        yield from _units(who, chosen, networks)


def _same_address(who: str, chosen: Mapping[str, Choice]) -> Iterator[Finding]:
    owners: dict[str, list[str]] = {}
    for host, choice in chosen.items():
        owners.setdefault(choice.picks[0][1], []).append(host)
    for address, hosts in owners.items():
        if len(hosts) > 1:
            said = f"{who} of {some(hosts, 4)} would use the same address, {address}"
            why = "a peer that is told it reaches one of them, or itself"
            fix = "set the interface or address for each host (see the findings of each)"
            yield Finding(f"same-address-{who.lower()}", "error", ",".join(hosts), said, why, fix)


def _network(network: Network, address: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    for each in network.interfaces:
        for own in each.addresses:
            if own.partition("/")[0] == address:
                return ipaddress.ip_interface(own).network
    return None


def _subnets(who: str, chosen: Mapping[str, Choice], networks: Mapping[str, Network]) -> Iterator[Finding]:
    """Different subnets may be routed; that they hide a common one is worth a word."""
    subnets: dict[str, str] = {}
    for host, choice in chosen.items():
        address = choice.picks[0][1]
        network = _network(networks[host], address)
        if network is not None and judge(address, networks[host].interfaces).reach in ("fine", "public"):
            subnets[host] = str(network)
    if len(set(subnets.values())) < 2:
        return
    common = _common(networks)
    said, odd, _ = _by_value(subnets)
    why = "peers reach each other only where a router between these subnets lets every port through"
    fix = f"all of them are in {common}: set {who}'s interface to the one of it" if common else ""
    yield Finding(
        f"subnets-{who.lower()}",
        "warning" if common else "note",
        odd,
        f"{who} is on different subnets: {said}",
        why,
        fix,
    )


def _common(networks: Mapping[str, Network]) -> str | None:
    """A subnet that every host is in, with an address by which peers reach it."""
    sets = []
    for network in networks.values():
        sets.append({
            str(ipaddress.ip_interface(own).network)
            for each in network.interfaces
            for own in each.addresses
            if each.running and judge(own.partition("/")[0], network.interfaces, each.name).reach in ("fine", "public")
        })  # fmt: skip
    shared = set.intersection(*sets) if sets else set()
    return min(shared, key=lambda subnet: (":" in subnet, subnet), default=None)


def _units(who: str, chosen: Mapping[str, Choice], networks: Mapping[str, Network]) -> Iterator[Finding]:
    """Packets of the larger size vanish where a path does not take them: connections open and then hang."""
    if who != "NCCL":
        return
    sizes = {}
    for host, choice in chosen.items():
        for each in networks[host].interfaces:
            if each.name == choice.picks[0][0] and each.mtu:
                sizes[host] = each.mtu
    for first, second in combinations(sorted(set(sizes.values())), 2):
        hosts = [host for host, mtu in sizes.items() if mtu == first]
        said = f"interfaces of NCCL have MTU {first} on {some(hosts, 4)} and {second} on others"
        why = "small messages pass, large ones vanish where the network does not divide them: a collective hangs"
        yield Finding("mtu", "warning", ",".join(hosts), said, why, "ip link set DEVICE mtu N, the same on all")
        return
