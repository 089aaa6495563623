"""Judges a rendezvous: which hosts joined, which are missing and why, and which addresses others cannot use. Pure."""

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
        "0.0.0.0 and :: mean every interface of the one who listens; who dials them reaches itself, so that every host "
        "waits for a head that it takes itself to be",
        _RAY_DOC,
    ),
    "loopback": ("error", "loopback never leaves a host: every other host dials itself and finds nobody there", ""),
    "link-local": ("error", "a link-local address is not forwarded by any router, and needs a scope to be dialled", ""),
    "bridge": (
        "error", "it belongs to a bridge for the containers of that host, which no other host can reach", _BRIDGE_DOC,
    ),
    "strange": ("warning", "no interface of that host has it: only what is translated on the way gets there", ""),
    "doubtful": ("warning", "its interface joins containers and no card of that host, so others may not reach it", ""),
    "container": (
        "warning",
        "docker gives it to containers on its default network, and every host has the same: others reach a container "
        "of their own, or nobody (--network=host gives a container its host's addresses)",
        _BRIDGE_DOC,
    ),
}  # fmt: skip
"""How bad an address is for others, why, and who says so."""


def judge_advertised_address(
    host: str,
    address: str,
    of: str,
    fix: str,
    several: bool,
    interfaces: Sequence[HostInterface] = (),
    reached: bool = False,
) -> list[Finding]:
    """Whether others can use an address that a head gives them.

    Args:
        of: what it is the address of: `the head of the check`, `MASTER_ADDR`, `the Ray head`.
        fix: the setting that gives another one.
        interfaces: of the host; none where they are not known.
        reached: another host has got there by it: then there is no doubt of it.
    """
    reach = judge_address(address, interfaces).reach
    name = interface_with_address(interfaces, address)
    seen = f"{of} is given to others as {address}" + (f" ({name})" if name else "")
    severity, why, source = _UNUSABLE.get(reach, ("note", "", ""))
    if reached and severity == "warning":
        return []
    if reach == "unspecified" or (several and reach in _UNUSABLE):
        return [Finding("head-address", severity, host, seen, why, fix, source)]
    if not several or reach != "public":
        return []  # a name: what it resolves to is looked at elsewhere
    private = next(
        (f"{own} on {which}" for which, own in reachable_addresses(interfaces) if not is_public_address(own)), ""
    )
    why = (
        "traffic to a public address may go through a gateway or be dropped by it, and a run's ports have no encryption"
    )
    return [
        Finding(
            "head-address", "warning" if private else "note", host, f"{seen}, which is a public address", why,
            f"{fix} (such as {private})" if private else "", _IFNAME_DOC,
        )
    ]  # fmt: skip


def judge_rendezvous(meeting: ProbeRendezvous) -> list[Finding]:
    """All that a rendezvous showed, those that are missing first."""
    many = len(meeting.joined) + len(meeting.missing) + len(meeting.lost) + len(meeting.other)
    found = [_missing_finding(each, meeting, many) for each in meeting.missing]
    found += [
        Finding(
            "rendezvous-version", "error", name, f"{name} was not taken: {why}",
            "two versions of lockstep do not understand each other, neither in a check nor in a run",
            "install the same version of lockstep on every host, then start its probe again",
        )
        for name, why in meeting.other.items()
    ]  # fmt: skip
    found += [
        Finding(
            "rendezvous-lost", "error", name, f"its probe joined and was then lost: {why}",
            "a host that is lost between joining and the first collective stops everybody",
            "look for the end of the probe on that host (out of memory, a time limit), and at the link",
        )
        for name, why in meeting.lost.items()
    ]  # fmt: skip
    for name, card in meeting.joined.items():
        found += _probe_findings(name, card, meeting, many > 1)
    found += [
        Finding(
            "rendezvous-twice", "error", name, "more than one probe came under this name",
            "two hosts with one name have one rank's place twice; of two launches, one is left over",
            "give every host a name of its own, and end what is left of an earlier launch",
        )
        for name in meeting.twice
    ]  # fmt: skip
    found += [
        Finding(
            "rendezvous-stranger", "warning", name, "a probe came that was not asked for",
            "it knows this check's token: a host too many was started", "name it with --hosts, or do not start it",
        )
        for name in meeting.strangers
    ]  # fmt: skip
    found += judge_same_addresses(meeting.joined)
    if not any(each.severity == "error" for each in found):
        rows = ", ".join(f"{name} ({card.address})" for name, card in meeting.joined.items())
        seen = f"{len(meeting.joined)} of {many} hosts joined within {meeting.took_s:.1f} s: {rows}"
        found.insert(0, Finding("rendezvous", "ok", "", seen))
    return found


def reached_from_outside(meeting: ProbeRendezvous) -> bool:
    """Whether a host that is not the head's own has come by the address that it was given for the head."""
    return any(card.came_from not in ("", meeting.head) for card in meeting.joined.values())


def judge_same_addresses(joined: Mapping[str, ProbeInfo]) -> list[Finding]:
    """Hosts that have the same address for others."""
    owners: dict[str, list[str]] = {}
    for name, card in joined.items():
        owners.setdefault(card.address, []).append(name)
    return [
        Finding(
            "rendezvous-address", "error", ", ".join(names), f"{' and '.join(names)} both have the address {address}",
            "who dials it reaches only one of them", "give each the address by which the others reach it (--address)",
        )
        for address, names in owners.items()
        if len(names) > 1 and len({joined[name].hostname for name in names}) > 1
    ]  # fmt: skip


def describe_missing(missing: MissingHost) -> str:
    """Of a host that is not there yet, in one line: which address it was given, and what is known of the way there."""
    where = ", ".join(missing.resolves_to[:2])
    if missing.failed:
        known = missing.failed
    elif not missing.sought:
        known = "whether it is up is not known yet"
    elif not missing.resolves_to:
        known = "its name does not resolve to an address here"
    elif missing.there == "answers":
        known = f"{where} is up and answers from here, so its probe is not started, or its way to the head is closed"
    else:
        known = f"{where} does not answer from here ({missing.there})"
    return f"{missing.name} is not here yet. It was given {missing.given} for the head; {known}"


def _missing_finding(missing: MissingHost, meeting: ProbeRendezvous, many: int) -> Finding:
    joined = ", ".join(meeting.joined) or "nobody"
    given = f"It was given {missing.given} for the head; joined: {joined}"
    seen = f"{missing.name} did not join within {meeting.took_s:.1f} s ({len(meeting.joined)} of {many} did)"
    if missing.failed:
        return Finding(
            "rendezvous-missing", "error", missing.name, f"{seen}: {missing.failed}. {given}",
            "a rendezvous waits for everybody", _missing_fix(missing.failed, missing),
        )  # fmt: skip
    if not missing.resolves_to:
        return Finding(
            "rendezvous-missing", "error", missing.name,
            f"{seen}, and its name does not resolve to an address here. {given}",
            "a host that cannot be found cannot be started or dialled",
            f"check the name, add it to DNS or to the hosts file of every host, or start the probe on it by hand with "
            f"`lockstep check --join {missing.given} --name {missing.name}`",
        )  # fmt: skip
    address = ", ".join(missing.resolves_to[:2])
    if missing.there == "answers":
        return Finding(
            "rendezvous-missing", "error", missing.name,
            f"{seen}. The host itself ({address}) is up and answers from here; its probe does not. {given}",
            "the probe was not started, or its way back to the head is closed",
            f"on {missing.name} run `lockstep check --join {missing.given} --name {missing.name}`: it says within "
            f"seconds whether it reaches the head. If not, open the head's port or give --address another address",
        )  # fmt: skip
    return Finding(
        "rendezvous-missing", "error", missing.name,
        f"{seen}. Its address {address} does not answer from here either ({missing.there or 'not tried'}). {given}",
        "the host is down, or nothing passes between it and this one",
        f"check that {missing.name} is up, and the route and firewall between {meeting.head} and {address}",
    )  # fmt: skip


def _missing_fix(failed: str, missing: MissingHost) -> str:
    if "cannot be reached" in failed:
        return (
            f"the address given for the head does not lead there from {missing.name}: choose one that does with "
            "--address, or open its port in the firewall"
        )
    if "refuses" in failed:
        return "use the same token and the same version of lockstep on every host"
    return f"mend what its probe said, then start it again on {missing.name}"


def _probe_findings(name: str, card: ProbeInfo, meeting: ProbeRendezvous, several: bool) -> list[Finding]:
    found = judge_advertised_address(
        name, card.address, f"{name}", f"start its probe with --address and an address of {name} that others can "
        "reach, and set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME there to that interface", several, card.interfaces,
        reached_from_outside(meeting) if card.address == meeting.head else bool(card.ports) and name not in meeting.back,
    )  # fmt: skip
    why = meeting.back.get(name, "")
    if why:
        found.append(
            Finding(
                "rendezvous-back", "error", name,
                f"{name} ({card.address}) reached the head at {card.dialled}:{meeting.port}, and the head cannot "
                f"reach {name} back: {why}",
                "store and collectives dial in both directions: this host joins, and then everybody waits for it",
                f"open the ports of {name} for the other hosts, or give it the address that they reach (--address)",
            )
        )  # fmt: skip
    if card.came_from and card.came_from != card.address and not _is_loopback(card.came_from):
        found.append(
            Finding(
                "rendezvous-translated", "warning", name,
                f"{name} knows itself as {card.address} and arrives as {card.came_from}",
                "an address is translated or routed in between: peers that are told the one it knows cannot dial it",
                "take a network on which hosts see each other's own addresses (for containers: host networking)",
            )
        )  # fmt: skip
    loops = [each for each in card.resolves_to if _is_loopback(each)]
    if loops and several:
        found.append(
            Finding(
                "name-loopback", "warning", name,
                f"its own name {card.hostname} resolves to {', '.join(loops)} there",
                "what finds its own address by its name (gloo without GLOO_SOCKET_IFNAME, torchrun's rendezvous) tells "
                "the others to dial themselves",
                f"remove the name from the 127.0.1.1 line of the hosts file on {name}, or set GLOO_SOCKET_IFNAME"
                + (f"={card.interface}" if card.interface else ""),
                "https://docs.pytorch.org/docs/stable/distributed.html#choosing-the-network-interface-to-use",
            )
        )  # fmt: skip
    for port, why_not in card.taken.items():
        found.append(port_taken_finding(name, int(port), why_not))
    return found


def port_taken_finding(host: str, port: int, why: str) -> Finding:
    """A named port that could not be bound."""
    return Finding(
        "port-taken", "error", host, f"port {port} cannot be bound on {host}: {why}",
        "a rendezvous or server that is told to use it fails there, or two jobs meet in one store",
        f"end what listens on it (`ss -ltnp 'sport = :{port}'`), or choose another; best is port 0, where the process "
        "that listens takes a free one and tells it: a port that is looked for first and bound later can be lost in "
        "between",
    )  # fmt: skip


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def missing_names(found: Sequence[Finding]) -> list[str]:
    """Hosts that are missing, for summaries."""
    return [each.host for each in found if each.id == "rendezvous-missing"]
