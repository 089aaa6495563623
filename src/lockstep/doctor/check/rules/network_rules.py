"""Judges the interfaces, addresses, names, ports and Ray token of one host. Pure."""

from collections.abc import Iterator, Mapping, Sequence

from lockstep.doctor.check.facts.host_facts import HostNetwork, NameResolution, PlannedPort, RayToken
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.rules.interface_selection import (
    VLLM_SOURCE,
    AddressVerdict,
    InterfaceChoice,
    Reachability,
    interface_choices,
    is_public_address,
    judge_address,
    reachable_addresses,
)
from lockstep.doctor.output.findings import Finding, Severity

_INTERFACE_FIXES = {
    "NCCL": "export NCCL_SOCKET_IFNAME={name}",
    "Gloo": "export GLOO_SOCKET_IFNAME={name}",
    "Ray": "ray start --node-ip-address {address}",
    "vLLM": "export VLLM_HOST_IP={address} (on each host its own)",
}


def judge_network(
    host: str, network: HostNetwork, names: NameResolution | None, needs: HostRequirements
) -> Iterator[Finding]:
    """Judges whether peers can reach the address that each library picks, and suggests a better one."""
    choices = interface_choices(network, names)
    for choice in choices:
        yield _judge_choice(host, choice, network, needs)
    yield from _report_different_interfaces(host, choices, needs)
    if network.environ.get("HOST_IP") and not network.environ.get("VLLM_HOST_IP"):
        seen = f"HOST_IP={network.environ['HOST_IP']} is set, which vLLM no longer reads"
        fix = f"export VLLM_HOST_IP={network.environ['HOST_IP']}"
        yield Finding("host-ip", "note", host, seen, "", fix, VLLM_SOURCE)
    if needs.interface is not None:
        yield _judge_configured_interface(host, network, needs.interface)
    for each in network.interfaces:
        if each.up and not each.running and each.kind in ("physical", "infiniband") and each.addresses:
            seen = f"{each.name} ({', '.join(each.addresses)}) is up but has no carrier"
            why = "its cable, switch port or peer is off; NCCL and other libraries skip the interface, or wait for it"
            yield Finding("carrier", "warning", host, seen, why, f"ethtool {each.name}")


def best_address(network: HostNetwork) -> tuple[str, str] | None:
    """The interface and address that peers can most likely reach.

    Private networks come first, then addresses on the route to the internet, then IPv4.
    """
    routes = (network.route_v4, network.route_v6)
    found = reachable_addresses(network.interfaces)
    return min(
        found, key=lambda pair: (is_public_address(pair[1]), pair[1] not in routes, ":" in pair[1]), default=None
    )


def _judge_choice(host: str, choice: InterfaceChoice, network: HostNetwork, needs: HostRequirements) -> Finding:
    id = f"interface-{choice.library.lower()}"
    if choice.problem:
        why = f"{choice.library} refuses to start: the name must match an interface on every host"
        return Finding(id, "error", host, choice.problem, why, _interface_fix(choice.library, network), choice.source)
    if not choice.picks:
        return Finding(id, "unchecked", host, f"cannot tell what {choice.library} picks: {choice.because}")
    name, address = choice.picks[0]
    judged = judge_address(address, network.interfaces, name)
    seen = f"{choice.library} will use {judged.text}{_further_picks(choice)} ({choice.because})"
    best = best_address(network)
    severity = _choice_severity(judged, best, needs)
    if judged.never_reachable and not needs.several and judged.reach != "foreign":
        seen += "; that is correct as long as the job has no other host"
    if severity == "ok":
        return Finding(id, "ok", host, seen, source=choice.source)
    fix = "" if best is not None and best[1] == address else _interface_fix(choice.library, network)
    return Finding(id, severity, host, seen, _WHY_UNREACHABLE.get(judged.reach, _WHY_BY_DEFAULT), fix, choice.source)


def _further_picks(choice: InterfaceChoice) -> str:
    """The further addresses that the library uses, as the continuation of a sentence."""
    rest = [f"{address} on {name}" for name, address in choice.picks[1:]]
    return f" and also {', '.join(rest)}" if rest else ""


def _choice_severity(judged: AddressVerdict, best: tuple[str, str] | None, needs: HostRequirements) -> Severity:
    if judged.reach == "foreign":
        return "error"
    if judged.reach in ("reachable", "name") or (not needs.several and judged.reach not in ("bridge", "unspecified")):
        return "ok"
    if not needs.several:
        return "note"
    if judged.reach == "public":
        return "warning" if best is not None and not is_public_address(best[1]) else "note"
    return "error" if judged.never_reachable else "warning"


_WHY_BY_DEFAULT = "peers on other hosts wait for a connection that never comes"
_WHY_UNREACHABLE: Mapping[Reachability, str] = {
    "foreign": "nothing can listen there: the value was copied from another host, or the address was removed",
    "public": "traffic between hosts may pass a gateway that slows it down or drops it",
    "uncertain": "if it is not open to other hosts, they wait for a connection that never comes",
    "container": "every host has this address: peers reach a container of their own host, or none",
}


def _interface_fix(library: str, network: HostNetwork) -> str:
    there = best_address(network)
    if there is None:
        return "give this host an address that its peers can reach"
    return _INTERFACE_FIXES[library].format(name=there[0], address=there[1])


def _report_different_interfaces(
    host: str, choices: list[InterfaceChoice], needs: HostRequirements
) -> Iterator[Finding]:
    """Notes that libraries use different interfaces, so that each of these networks must be open between hosts."""
    first = {choice.library: choice.picks[0][0] for choice in choices if choice.picks}
    if needs.several and len(set(first.values())) > 1:
        seen = ", ".join(f"{library} on {name or 'no interface'}" for library, name in first.items())
        why = "each of these networks must be open between all hosts; it is simplest to use one for all libraries"
        yield Finding("interfaces-differ", "note", host, f"libraries use different interfaces: {seen}", why)


def _judge_configured_interface(host: str, network: HostNetwork, prefix: str) -> Finding:
    matching = [each for each in network.interfaces if each.name.startswith(prefix) and each.up and each.addresses]
    if matching:
        first = matching[0]
        return Finding("cluster-interface", "ok", host, f"cluster.interface {prefix} selects {first.name}")
    names = ", ".join(each.name for each in network.interfaces if each.up and each.addresses)
    seen = f"cluster.interface is {prefix}, but it matches no interface that is up and has an address"
    return Finding("cluster-interface", "error", host, seen, "", f"set cluster.interface to one of {names}")


def judge_names(
    host: str, names: NameResolution, network: HostNetwork | None, needs: HostRequirements
) -> Iterator[Finding]:
    """Judges how the host's own name and other names resolve."""
    if names.problem:
        fix = f"add a line to /etc/hosts: ADDRESS {names.host}"
        why = "Gloo falls back to loopback, which other hosts cannot reach"
        yield Finding("own-name", "error" if needs.several else "warning", host, names.problem, why, fix)
    else:
        yield from _judge_own_name(host, names, network, needs)
    for address, reverse_name in names.names.items():
        if reverse_name.endswith((".ip6.arpa", ".in-addr.arpa")):
            seen = f"{address} has the name {reverse_name}, which is derived from the address and does not resolve"
            why = "torchrun --standalone and other launchers pass that name to their workers"
            yield Finding(
                "reverse-name", "warning", host, seen, why, "give MASTER_ADDR or --rdzv-endpoint as an address"
            )
    for name, addresses in names.asked.items():
        if addresses:
            yield Finding("name", "ok", host, f"{name} is {', '.join(addresses)}")
        else:
            seen = f"{name} does not resolve here"
            fix = "use its address, or add it to DNS or to /etc/hosts on every host"
            yield Finding("name", "error", host, seen, "whatever uses this name fails to connect", fix)
    if names.seconds > 1.0:
        seen = f"name resolution took {names.seconds:.1f} s"
        why = "every connection of every rank waits as long; often the first DNS server does not answer"
        yield Finding("resolver", "warning", host, seen, why, "resolvectl status, cat /etc/resolv.conf")


def _judge_own_name(
    host: str, names: NameResolution, network: HostNetwork | None, needs: HostRequirements
) -> Iterator[Finding]:
    reverse_name = names.names.get(names.addresses[0], "") if names.addresses else ""
    seen = f"{names.host} is {', '.join(names.addresses)}" + (
        f", which is {reverse_name}" if reverse_name else ", which has no name"
    )
    known = network.interfaces if network is not None else []
    judged = [judge_address(address, known) for address in names.addresses]
    if not (known and judged and all(each.never_reachable for each in judged)):
        yield Finding("own-name", "ok", host, seen)
    elif network is not None and len(network.environ.get("GLOO_SOCKET_IFNAME", "")) > 1:
        # Without the variable, Gloo uses the host's name, and the finding interface-gloo reports this.
        fix = f"in /etc/hosts, give {names.host} an address that peers can reach"
        why = "peers cannot reach services that use this name, such as torchrun's rendezvous"
        yield Finding("own-name", "warning" if needs.several else "ok", host, seen, why, fix if needs.several else "")


def judge_ports(host: str, ports: Sequence[PlannedPort]) -> Iterator[Finding]:
    """Reports ports of the run that are taken, or that may be taken before the run starts."""
    for each in ports:
        what = f"port {each.port} ({each.purpose})"
        if each.taken_by is not None:
            why = "rank 0 ends with 'Address already in use', and the others wait for it"
            fix = f"end that process (ss -ltnp 'sport = :{each.port}'), or use another port"
            yield Finding("port", "error", host, f"{what} is taken by {each.taken_by}", why, fix)
        elif each.fleeting:
            why = "any connection of this host may get the port before the run listens, and then the run does not start"
            fix = "use a port below 32768, or reserve it: sysctl net.ipv4.ip_local_reserved_ports"
            seen = f"{what} is free, but belongs to the range that the kernel assigns to connections"
            yield Finding("port", "note", host, seen, why, fix)
        else:
            yield Finding("port", "ok", host, f"{what} is free")


RAY_TOKEN_SOURCE = "https://docs.ray.io/en/latest/ray-security/token-auth.html"


def judge_ray_token(host: str, token: RayToken, needs: HostRequirements) -> Iterator[Finding]:
    """Reports a token that only the head of a Ray cluster would use.

    `ray start --head` enables authentication if it finds a token, but `ray start --address` on another host does not.
    """
    if not needs.several or "ray" not in needs.packages or token.mode or not token.where:
        return
    seen = f"{token.where} exists, but RAY_AUTH_MODE is not set"
    why = "a head started here requires the token, but other hosts do not send it and their nodes fail to join"
    fix = "export RAY_AUTH_MODE=token on every host, with the same token on each (or RAY_AUTH_MODE=disabled on all)"
    yield Finding("ray-token", "warning", host, seen, why, fix, RAY_TOKEN_SOURCE)
