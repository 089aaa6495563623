"""Judges the rendezvous of a check: which hosts are missing and why, and which addresses others cannot use. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence

from lockstep.doctor.check.cluster.probe_rendezvous import MissingHost, ProbeRendezvous
from lockstep.doctor.check.facts.host_facts import HostInterface, interface_with_address
from lockstep.doctor.check.probe.probe_protocol import ProbeInfo
from lockstep.doctor.check.rules.interface_selection import Reachability, is_public_address, reachable_addresses
from lockstep.doctor.check.rules.interface_selection import judge_address as judge_address
from lockstep.doctor.output.findings import Finding, Severity

_BRIDGE_DOC = "https://docs.docker.com/engine/network/drivers/bridge/"
_IFNAME_DOC = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname"
_RAY_DOC = "https://docs.ray.io/en/latest/cluster/cli.html#ray-start"
_UNUSABLE: Mapping[Reachability, tuple[Severity, str, str]] = {
    "unspecified": (
        "error",
        "0.0.0.0 and :: stand for every interface of the listening host; a host that dials them reaches itself and "
        "waits for itself as the head",
        _RAY_DOC,
    ),
    "loopback": ("error", "loopback never leaves a host: every other host that dials it reaches itself", ""),
    "link-local": ("error", "routers do not forward a link-local address, and dialling it requires a scope", ""),
    "bridge": (
        "error", "it belongs to a bridge for the containers of that host, which no other host can reach", _BRIDGE_DOC,
    ),
    "foreign": ("warning", "no interface of that host has it, so others reach it only through address translation", ""),
    "uncertain": ("warning", "its interface connects containers and has no network card: others may not reach it", ""),
    "container": (
        "warning",
        "it belongs to docker's default network, which is the same on every host: others reach a container of their "
        "own host, or none (--network=host gives a container its host's addresses)",
        _BRIDGE_DOC,
    ),
}  # fmt: skip
"""Severity, reason and source for each kind of unusable address."""


def judge_advertised_address(
    host: str,
    address: str,
    of: str,
    fix: str,
    several: bool,
    interfaces: Sequence[HostInterface] = (),
    reached: bool = False,
) -> list[Finding]:
    """Judges whether others can use the address that a head announces.

    Args:
        of: whose address it is, such as `the head of the check`, `MASTER_ADDR` or `the Ray head`.
        fix: how to change the address.
        interfaces: interfaces of the host; empty if they are not known.
        reached: whether another host has used the address, which proves that it works.
    """
    reach = judge_address(address, interfaces).reach
    name = interface_with_address(interfaces, address)
    seen = f"{of} is announced as {address}" + (f" ({name})" if name else "")
    severity, why, source = _UNUSABLE.get(reach, ("note", "", ""))
    if reached and severity == "warning":
        return []
    if reach == "unspecified" or (several and reach in _UNUSABLE):
        return [Finding("head-address", severity, host, seen, why, fix, source)]
    if not several or reach != "public":
        return []  # the addresses of a name are judged elsewhere
    private = next(
        (f"{own} on {which}" for which, own in reachable_addresses(interfaces) if not is_public_address(own)), ""
    )
    why = "traffic to a public address may pass a gateway or be dropped by it, and a run's ports are not encrypted"
    return [
        Finding(
            "head-address", "warning" if private else "note", host, f"{seen}, which is a public address", why,
            f"{fix} (such as {private})" if private else "", _IFNAME_DOC,
        )
    ]  # fmt: skip


def judge_rendezvous(rendezvous: ProbeRendezvous) -> list[Finding]:
    """Reports the findings of a rendezvous, missing hosts first."""
    host_count = (
        len(rendezvous.joined) + len(rendezvous.missing) + len(rendezvous.lost) + len(rendezvous.other_versions)
    )
    found = [_missing_finding(each, rendezvous, host_count) for each in rendezvous.missing]
    found += [
        Finding(
            "rendezvous-version", "error", name, f"{name} was refused: {why}",
            "different versions of lockstep cannot work together, neither in a check nor in a run",
            "install the same version of lockstep on every host, then start its probe again",
        )
        for name, why in rendezvous.other_versions.items()
    ]  # fmt: skip
    found += [
        Finding(
            "rendezvous-lost", "error", name, f"its probe joined and was then lost: {why}",
            "a host that is lost between joining and the first collective blocks all others",
            "check why the probe ended on that host (out of memory, a time limit), and the link",
        )
        for name, why in rendezvous.lost.items()
    ]  # fmt: skip
    for name, info in rendezvous.joined.items():
        found += _probe_findings(name, info, rendezvous, host_count > 1)
    found += [
        Finding(
            "rendezvous-twice", "error", name, "several probes joined under this name",
            "two hosts have the same name, or a probe of an earlier check is still running",
            "give every host its own name, and end leftover probes",
        )
        for name in rendezvous.duplicates
    ]  # fmt: skip
    found += [
        Finding(
            "rendezvous-stranger", "warning", name, "an unexpected probe joined",
            "it has the token of this check: a probe was started on one host too many",
            "add it to --hosts, or do not start it",
        )
        for name in rendezvous.unexpected
    ]  # fmt: skip
    found += judge_same_addresses(rendezvous.joined)
    if not any(each.severity == "error" for each in found):
        rows = ", ".join(f"{name} ({info.address})" for name, info in rendezvous.joined.items())
        seen = f"{len(rendezvous.joined)} of {host_count} hosts joined within {rendezvous.took_s:.1f} s: {rows}"
        found.insert(0, Finding("rendezvous", "ok", "", seen))
    return found


def reached_from_outside(rendezvous: ProbeRendezvous) -> bool:
    """Whether another host has joined through the announced address of the head."""
    return any(info.came_from not in ("", rendezvous.head) for info in rendezvous.joined.values())


def judge_same_addresses(joined: Mapping[str, ProbeInfo]) -> list[Finding]:
    """Reports hosts that announce the same address."""
    owners: dict[str, list[str]] = {}
    for name, info in joined.items():
        owners.setdefault(info.address, []).append(name)
    return [
        Finding(
            "rendezvous-address", "error", ", ".join(names), f"{' and '.join(names)} both have the address {address}",
            "a host that dials it reaches only one of them",
            "give each an address that the others can reach (--address)",
        )
        for address, names in owners.items()
        if len(names) > 1 and len({joined[name].hostname for name in names}) > 1
    ]  # fmt: skip


def describe_missing(missing: MissingHost) -> str:
    """Describes a missing host in one line: which head address it was given, and whether the host responds."""
    where = ", ".join(missing.resolves_to[:2])
    if missing.failed:
        known = missing.failed
    elif not missing.looked_up:
        known = "cannot tell yet whether it is up"
    elif not missing.resolves_to:
        known = "its name does not resolve to an address here"
    elif missing.response == "answers":
        known = f"{where} is up and responds, so its probe was not started or cannot reach the head"
    else:
        known = f"{where} does not respond ({missing.response})"
    return f"{missing.name} has not joined yet. Head address: {missing.head_address}; {known}"


def _missing_finding(missing: MissingHost, rendezvous: ProbeRendezvous, host_count: int) -> Finding:
    joined = ", ".join(rendezvous.joined) or "none"
    given = f"Head address: {missing.head_address}; joined: {joined}"
    seen = (
        f"{missing.name} did not join within {rendezvous.took_s:.1f} s ({len(rendezvous.joined)} of {host_count} did)"
    )
    if missing.failed:
        return Finding(
            "rendezvous-missing", "error", missing.name, f"{seen}: {missing.failed}. {given}",
            "a rendezvous waits for all hosts", _missing_fix(missing.failed, missing),
        )  # fmt: skip
    if not missing.resolves_to:
        return Finding(
            "rendezvous-missing", "error", missing.name,
            f"{seen}, and its name does not resolve to an address here. {given}",
            "a host without an address cannot be started or dialled",
            f"check the name, add it to DNS or to the hosts file of every host, or start its probe by hand with "
            f"`lockstep check --join {missing.head_address} --name {missing.name}`",
        )  # fmt: skip
    address = ", ".join(missing.resolves_to[:2])
    if missing.response == "answers":
        return Finding(
            "rendezvous-missing", "error", missing.name,
            f"{seen}. The host itself ({address}) is up and responds; its probe does not. {given}",
            "the probe was not started, or it cannot reach the head",
            f"on {missing.name} run `lockstep check --join {missing.head_address} --name {missing.name}`: it reports "
            "within seconds whether it reaches the head. If not, open the head's port or choose another address with "
            "--address",
        )  # fmt: skip
    return Finding(
        "rendezvous-missing", "error", missing.name,
        f"{seen}. Its address {address} does not respond either ({missing.response or 'not tried'}). {given}",
        "the host is down, or the network between that host and this one is blocked",
        f"check that {missing.name} is up, and the route and firewall between {rendezvous.head} and {address}",
    )  # fmt: skip


def _missing_fix(failed: str, missing: MissingHost) -> str:
    if "cannot be reached" in failed:
        return (
            f"{missing.name} cannot reach the head at this address: choose another one with "
            "--address, or open its port in the firewall"
        )
    if "refuses" in failed:
        return "use the same token and the same version of lockstep on every host"
    return f"fix the error that its probe reported, then start it again on {missing.name}"


def _probe_findings(name: str, info: ProbeInfo, rendezvous: ProbeRendezvous, several: bool) -> list[Finding]:
    found = judge_advertised_address(
        name, info.address, f"{name}", f"start its probe with --address and an address of {name} that others can "
        "reach, and set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME there to that interface", several, info.interfaces,
        reached_from_outside(rendezvous) if info.address == rendezvous.head
        else bool(info.ports) and name not in rendezvous.dial_back_errors,
    )  # fmt: skip
    why = rendezvous.dial_back_errors.get(name, "")
    if why:
        found.append(
            Finding(
                "rendezvous-back", "error", name,
                f"{name} ({info.address}) reached the head at {info.dialled}:{rendezvous.port}, but the head cannot "
                f"reach {name} back: {why}",
                "a run connects in both directions: this host joins, and then all ranks wait for it",
                f"open the ports of {name} for the other hosts, or set an address that they can reach (--address)",
            )
        )  # fmt: skip
    if info.came_from and info.came_from != info.address and not _is_loopback(info.came_from):
        found.append(
            Finding(
                "rendezvous-translated", "warning", name,
                f"{name} announces {info.address} but connects from {info.came_from}",
                "its address is translated on the way, so peers cannot dial the announced one",
                "use a network in which hosts see each other's own addresses (for containers: host networking)",
            )
        )  # fmt: skip
    loops = [each for each in info.resolves_to if _is_loopback(each)]
    if loops and several:
        found.append(
            Finding(
                "name-loopback", "warning", name,
                f"its own name {info.hostname} resolves to {', '.join(loops)} there",
                "software that looks up its own address by name (gloo without GLOO_SOCKET_IFNAME, torchrun's "
                "rendezvous) makes the others dial themselves",
                f"remove the name from the 127.0.1.1 line of the hosts file on {name}, or set GLOO_SOCKET_IFNAME"
                + (f"={info.interface}" if info.interface else ""),
                "https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use",
            )
        )  # fmt: skip
    for port, why_not in info.taken.items():
        found.append(port_taken_finding(name, int(port), why_not))
    return found


def port_taken_finding(host: str, port: int, why: str) -> Finding:
    """The finding for a named port that could not be bound."""
    return Finding(
        "port-taken", "error", host, f"port {port} cannot be bound on {host}: {why}",
        "a rendezvous or server on this port fails to start, or two jobs share one store",
        f"end the process that listens on it (`ss -ltnp 'sport = :{port}'`), or choose another port. Port 0 is "
        "best: the listening process then gets a free port and announces it",
    )  # fmt: skip


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def missing_names(found: Sequence[Finding]) -> list[str]:
    """Names of missing hosts."""
    return [each.host for each in found if each.id == "rendezvous-missing"]
