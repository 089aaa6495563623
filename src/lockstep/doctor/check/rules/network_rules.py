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

_FIX = {
    "NCCL": "export NCCL_SOCKET_IFNAME={name}",
    "Gloo": "export GLOO_SOCKET_IFNAME={name}",
    "Ray": "ray start --node-ip-address {address}",
    "vLLM": "export VLLM_HOST_IP={address} (on each host its own)",
}


def judge_network(
    host: str, network: HostNetwork, names: NameResolution | None, needs: HostRequirements
) -> Iterator[Finding]:
    """Which interface each library picks, whether peers could reach it, and what would be better."""
    picked = interface_choices(network, names)
    for choice in picked:
        yield _judge_choice(host, choice, network, needs)
    yield from _different_interfaces(host, picked, needs)
    if network.environ.get("HOST_IP") and not network.environ.get("VLLM_HOST_IP"):
        said = f"HOST_IP={network.environ['HOST_IP']} is set, which vLLM no longer reads"
        fix = f"export VLLM_HOST_IP={network.environ['HOST_IP']}"
        yield Finding("host-ip", "note", host, said, "", fix, VLLM_SOURCE)
    if needs.interface is not None:
        yield _configured_interface(host, network, needs.interface)
    for each in network.interfaces:
        if each.up and not each.running and each.kind in ("physical", "infiniband") and each.addresses:
            said = f"{each.name} ({', '.join(each.addresses)}) is up but has no carrier"
            why = "a cable, a switch port or the other end is off; NCCL and others pass over it, or wait on it"
            yield Finding("carrier", "warning", host, said, why, f"ethtool {each.name}")


def best_address(network: HostNetwork) -> tuple[str, str] | None:
    """The interface and address that peers probably reach: of a private network before a public one, on the route to
    the internet before others, IPv4 first."""
    routes = (network.route_v4, network.route_v6)
    found = reachable_addresses(network.interfaces)
    return min(
        found, key=lambda pair: (is_public_address(pair[1]), pair[1] not in routes, ":" in pair[1]), default=None
    )


def _judge_choice(host: str, choice: InterfaceChoice, network: HostNetwork, needs: HostRequirements) -> Finding:
    id = f"interface-{choice.who.lower()}"
    if choice.problem:
        why = f"{choice.who} stops there: the name must be of an interface on every host"
        return Finding(id, "error", host, choice.problem, why, _fix(choice.who, network), choice.source)
    if not choice.picks:
        return Finding(id, "unchecked", host, f"what {choice.who} picks is not known: {choice.because}")
    name, address = choice.picks[0]
    judged = judge_address(address, network.interfaces, name)
    said = f"{choice.who} will use {judged.said}{_further_picks(choice)} ({choice.because})"
    best = best_address(network)
    severity = _severity(judged, best, needs)
    if judged.hopeless and not needs.several and judged.reach != "strange":
        said += "; that is right as long as the job has no other host"
    if severity == "ok":
        return Finding(id, "ok", host, said, source=choice.source)
    fix = "" if best is not None and best[1] == address else _fix(choice.who, network)
    return Finding(id, severity, host, said, _WHY.get(judged.reach, _UNREACHED), fix, choice.source)


def _further_picks(choice: InterfaceChoice) -> str:
    """What it takes besides the first."""
    rest = [f"{address} on {name}" for name, address in choice.picks[1:]]
    return f" and besides {', '.join(rest)}" if rest else ""


def _severity(judged: AddressVerdict, best: tuple[str, str] | None, needs: HostRequirements) -> Severity:
    if judged.reach == "strange":
        return "error"
    if judged.reach in ("fine", "name") or (not needs.several and judged.reach not in ("bridge", "unspecified")):
        return "ok"
    if not needs.several:
        return "note"
    if judged.reach == "public":
        return "warning" if best is not None and not is_public_address(best[1]) else "note"
    return "error" if judged.hopeless else "warning"


_UNREACHED = "peers on other hosts wait for a connection that never comes"
_WHY: Mapping[Reachability, str] = {
    "strange": "nothing can listen there: a value that was copied from another host, or an address that is gone",
    "public": "between hosts it may go through a gateway, or be dropped by it",
    "doubtful": "where it is not open to other hosts, they wait for a connection that never comes",
    "container": "every host has the same: peers reach a container of their own, or nobody",
}


def _fix(who: str, network: HostNetwork) -> str:
    there = best_address(network)
    if there is None:
        return "give this host an address that its peers reach"
    return _FIX[who].format(name=there[0], address=there[1])


def _different_interfaces(host: str, picked: list[InterfaceChoice], needs: HostRequirements) -> Iterator[Finding]:
    """Libraries of one job on different networks are no fault, but must each be open between hosts."""
    first = {choice.who: choice.picks[0][0] for choice in picked if choice.picks}
    if needs.several and len(set(first.values())) > 1:
        said = ", ".join(f"{who} on {name or 'no interface'}" for who, name in first.items())
        why = "each of these networks must be open between all hosts; setting all to one is simplest"
        yield Finding("interfaces-differ", "note", host, f"libraries use different interfaces: {said}", why)


def _configured_interface(host: str, network: HostNetwork, prefix: str) -> Finding:
    matching = [each for each in network.interfaces if each.name.startswith(prefix) and each.up and each.addresses]
    if matching:
        first = matching[0]
        return Finding("cluster-interface", "ok", host, f"cluster.interface {prefix} is {first.name}")
    names = ", ".join(each.name for each in network.interfaces if each.up and each.addresses)
    said = f"cluster.interface is {prefix}, and no interface that is up and has an address begins so"
    return Finding("cluster-interface", "error", host, said, "", f"set cluster.interface to one of {names}")


def judge_names(
    host: str, names: NameResolution, network: HostNetwork | None, needs: HostRequirements
) -> Iterator[Finding]:
    """Whether the own name and those of others resolve, and back."""
    if names.problem:
        fix = f"add a line to /etc/hosts: ADDRESS {names.host}"
        why = "Gloo falls back to loopback, which other hosts do not reach"
        yield Finding("own-name", "error" if needs.several else "warning", host, names.problem, why, fix)
    else:
        yield from _own_name(host, names, network, needs)
    for address, back in names.names.items():
        if back.endswith((".ip6.arpa", ".in-addr.arpa")):
            said = f"{address} has the name {back}, which is made of the address itself and does not resolve"
            why = "torchrun --standalone and others hand that name to their workers"
            yield Finding(
                "reverse-name", "warning", host, said, why, "give MASTER_ADDR or --rdzv-endpoint as an address"
            )
    for name, addresses in names.asked.items():
        if addresses:
            yield Finding("name", "ok", host, f"{name} is {', '.join(addresses)}")
        else:
            said = f"{name} does not resolve here"
            fix = "use its address, or add it to DNS or to /etc/hosts on every host"
            yield Finding("name", "error", host, said, "what is given by this name is not found", fix)
    if names.seconds > 1.0:
        said = f"looking names up took {names.seconds:.1f} s"
        why = "every connection of every rank waits so long; often the first DNS server does not answer"
        yield Finding("resolver", "warning", host, said, why, "resolvectl status, cat /etc/resolv.conf")


def _own_name(
    host: str, names: NameResolution, network: HostNetwork | None, needs: HostRequirements
) -> Iterator[Finding]:
    back = names.names.get(names.addresses[0], "") if names.addresses else ""
    said = f"{names.host} is {', '.join(names.addresses)}" + (f", which is {back}" if back else ", which has no name")
    known = network.interfaces if network is not None else []
    judged = [judge_address(address, known) for address in names.addresses]
    if not (known and judged and all(each.hopeless for each in judged)):
        yield Finding("own-name", "ok", host, said)
    elif network is not None and len(network.environ.get("GLOO_SOCKET_IFNAME", "")) > 1:
        # Without the variable Gloo goes by the name, and interface-gloo says all this.
        fix = f"in /etc/hosts, give {names.host} the address that peers reach"
        why = "what binds to or announces its own name, torchrun's rendezvous among them, is not reached by peers"
        yield Finding("own-name", "warning" if needs.several else "ok", host, said, why, fix if needs.several else "")


def judge_ports(host: str, ports: Sequence[PlannedPort]) -> Iterator[Finding]:
    """What is taken, and what may be taken between now and the start."""
    for each in ports:
        what = f"port {each.port} ({each.purpose})"
        if each.taken_by is not None:
            why = "rank 0 ends with 'Address already in use', and the others wait for it"
            fix = f"end it (ss -ltnp 'sport = :{each.port}'), or take another port"
            yield Finding("port", "error", host, f"{what} is taken by {each.taken_by}", why, fix)
        elif each.fleeting:
            why = "any connection of this host may be given it before the run listens: it fails now and then"
            fix = "take one below 32768, or reserve it: sysctl net.ipv4.ip_local_reserved_ports"
            said = f"{what} is free, but one of those that the kernel hands out to connections"
            yield Finding("port", "note", host, said, why, fix)
        else:
            yield Finding("port", "ok", host, f"{what} is free")


RAY_TOKEN_SOURCE = "https://docs.ray.io/en/latest/ray-security/token-auth.html"


def judge_ray_token(host: str, token: RayToken, needs: HostRequirements) -> Iterator[Finding]:
    """Where a job has other hosts: `ray start --head` takes a token that it finds for the wish to have one, and
    `ray start --address` on another host does not."""
    if not needs.several or "ray" not in needs.packages or token.mode or not token.where:
        return
    said = f"{token.where} is there and RAY_AUTH_MODE is not set"
    why = "a head that is started here asks for the token, other hosts do not send it, and their nodes fail to join"
    fix = "export RAY_AUTH_MODE=token on every host, with the same token on each (or RAY_AUTH_MODE=disabled on all)"
    yield Finding("ray-token", "warning", host, said, why, fix, RAY_TOKEN_SOURCE)
