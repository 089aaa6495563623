"""Tests every pair of hosts in both directions on the run's ports: reachability, round trip and bandwidth."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.doctor.check.cluster.probe_rendezvous import CheckHead
from lockstep.doctor.check.probe import probe_protocol
from lockstep.doctor.check.probe.peer_connections import KERNEL_PORT_PREFIX
from lockstep.doctor.check.probe.probe_protocol import DialResult, ProbeInfo
from lockstep.doctor.check.probe.round_robin import (
    ALL_PORTS_UP_TO,
    LANES,
    PairTestBudget,
    measurement_rounds,
    pair_test_budget,
)
from lockstep.doctor.output.findings import Finding

PAIRS_TIMEOUT_S = 10.0
_SHOWN = 6
_SLOW = 0.5
"""Pairs below this share of the median bandwidth are reported."""
_FAR = 5.0
"""Pairs above this multiple of the median round trip are reported, if above `_FAR_MS`."""
_FAR_MS = 2.0
_MIN_SAMPLES = 6
"""Minimum number of measurements for a meaningful median."""


@dataclass(slots=True)
class PairResults:
    """Results between hosts. A pair is (dialling host, listening host)."""

    hosts: tuple[str, ...]
    budget: PairTestBudget
    reached: dict[tuple[str, str], float] = field(default_factory=dict)
    """Round trip in ms, over the kernel's port or the first one that worked."""
    blocked: dict[tuple[str, str], list[DialResult]] = field(default_factory=dict)
    """Ports that were not reached."""
    mb_per_s: dict[tuple[str, str], float] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """Hosts that stopped answering the head, with the reason."""
    took_s: float = 0.0


def test_host_pairs(head: CheckHead, cards: Mapping[str, ProbeInfo], bound_s: float = PAIRS_TIMEOUT_S) -> PairResults:
    """Makes all members dial each other, then measures bandwidth for as many rounds as time allows."""
    began = time.monotonic()
    hosts = tuple(name for name in sorted(cards) if name in head.members)
    plan = pair_test_budget(len(hosts), _ports_of_a_pair(len(hosts), cards), bound_s)
    found = PairResults(hosts, plan)
    if len(hosts) < 2:
        return found
    # One table for all: a table of a thousand hosts is serialised once, and each host finds its own row.
    table = [(name, cards[name].address, cards[name].ports) for name in hosts]
    order = {
        "do": "reach", "hosts": table,
        "dial_s": plan.dial_s, "bound_s": plan.reach_s, "lanes": LANES,
    }  # fmt: skip
    why = "which peers they reach"
    reached, lost = head.ask(
        dict.fromkeys(hosts, order), plan.reach_s + 1.0, why, probe_protocol.reach_answer_reader(hosts)
    )
    found.lost |= lost
    for name, answer in reached.items():
        found.reached |= {(name, peer): trip for peer, trip in zip(hosts, answer.ms, strict=True) if trip}
        for one in answer.failed:
            found.blocked.setdefault((name, one.peer), []).append(one)
    for pairs in measurement_rounds(len(hosts), plan.slots):
        if time.monotonic() - began > bound_s - 2 * plan.slot_s:
            break
        for one_way in (pairs, [(b, a) for a, b in pairs]):
            _measure(head, cards, found, [(hosts[a], hosts[b]) for a, b in one_way])
    found.took_s = time.monotonic() - began
    return found


def _ports_of_a_pair(many: int, cards: Mapping[str, ProbeInfo]) -> int:
    """Maximum number of ports that a host dials on another host."""
    named = max(
        (sum(not label.startswith(KERNEL_PORT_PREFIX) for label in info.ports) for info in cards.values()), default=0
    )
    all_of_one = max((len(info.ports) for info in cards.values()), default=1)
    return all_of_one if many <= ALL_PORTS_UP_TO else named + 1


def _measure(
    head: CheckHead, cards: Mapping[str, ProbeInfo], found: PairResults, pairs: Sequence[tuple[str, str]]
) -> None:
    """Measures one round in one direction."""
    orders = {}
    listeners = dict(pairs)
    for dialler, listener in pairs:
        closed = {one.label for one in found.blocked.get((dialler, listener), ())}
        open_ports = [label for label in cards[listener].ports if label not in closed]
        if (dialler, listener) in found.reached and open_ports and dialler in head.members:
            port = cards[listener].ports[open_ports[-1]]
            target = [listener, cards[listener].address, port, open_ports[-1]]
            orders[dialler] = {
                "do": "rate", "target": target, "seconds": found.budget.slot_s, "dial_s": found.budget.dial_s,
            }  # fmt: skip
    bound_s = found.budget.slot_s + 2 * found.budget.dial_s + 1.0
    rated, lost = head.ask(orders, bound_s, "their bandwidth", probe_protocol.read_rate_answer)
    found.lost |= lost
    for name, answer in rated.items():
        if answer.mb_per_s is not None:
            found.mb_per_s[name, listeners[name]] = answer.mb_per_s


def judge_pairs(pairs: PairResults) -> list[Finding]:
    """Reports blocked hosts, directions and ports, each once; then distant and slow pairs."""
    many = len(pairs.hosts)
    if many < 2:
        return [Finding("pairs", "unchecked", "", "one host has no pair: list others with --hosts to test the network")]
    found = [
        Finding(
            "pair-lost", "error", name, f"its probe stopped answering while hosts dialled each other: {why}",
            "traffic between hosts may take its link down", "check its log and its kernel log (`dmesg`)",
        )
        for name, why in pairs.lost.items()
    ]  # fmt: skip
    found += _blocked(pairs)
    found += _uneven(pairs)
    if not any(each.severity == "error" for each in found):
        found.insert(0, Finding("pairs", "ok", "", _summary(pairs)))
    return found


def _summary(pairs: PairResults) -> str:
    many = len(pairs.hosts)
    trips = f"round trips {_spread(pairs.reached.values(), 'ms', 2)}" if pairs.reached else ""
    rates = f"; bandwidth {_spread(pairs.mb_per_s.values(), 'MB/s', 0)}" if pairs.mb_per_s else ""
    of_all = many * (many - 1)
    part = f" (of {len(pairs.mb_per_s)} of {of_all} directions)" if 0 < len(pairs.mb_per_s) < of_all else ""
    return f"{len(pairs.reached)} of {of_all} directions between {many} hosts are open: {trips}{rates}{part}"


def _spread(values: Iterable[float], unit: str, digits: int) -> str:
    ordered = sorted(values)
    low, middle, high = ordered[0], statistics.median(ordered), ordered[-1]
    return f"{low:,.{digits}f} to {high:,.{digits}f} {unit}, median {middle:,.{digits}f}"


def _blocked(pairs: PairResults) -> list[Finding]:
    """Groups blocked pairs: hosts that no other reaches or that reach no other, then single directions and ports."""
    whole = {pair for pair in pairs.blocked if pair not in pairs.reached}
    many = len(pairs.hosts) - 1
    into, out = defaultdict(set), defaultdict(set)
    for dialler, listener in whole:
        into[listener].add(dialler)
        out[dialler].add(listener)
    deaf = {name for name in pairs.hosts if len(into[name]) == many and many > 1}
    mute = {name for name in pairs.hosts if len(out[name]) == many and many > 1}
    found = []
    for name in sorted(deaf | mute):
        kind = _failure_kinds([one for pair in whole if name in pair for one in pairs.blocked[pair]])
        both = "reaches no host and no host reaches it" if name in deaf & mute else (
            "no host reaches it, but it reaches others" if name in deaf else "it reaches no host, but others reach it"
        )  # fmt: skip
        found.append(_blocked_finding(name, f"{name}: {both} ({kind})", kind))
    for dialler, listener in sorted(whole):
        if listener in deaf or dialler in mute:
            continue
        ones = pairs.blocked[dialler, listener]
        back = (
            "the other direction is open"
            if (listener, dialler) in pairs.reached
            else "the other direction is blocked too"
        )
        kind = _failure_kinds(ones)
        tried = ", ".join(str(one.port) for one in ones[:_SHOWN])
        seen = f"{dialler} cannot reach {listener} (ports {tried}: {kind}); {back}"
        found.append(_blocked_finding(f"{dialler}, {listener}", seen, kind))
    return found + _closed_ports(pairs, whole)


def _closed_ports(pairs: PairResults, whole: set[tuple[str, str]]) -> list[Finding]:
    """Reports closed ports between hosts that reach each other on other ports."""
    by_port: dict[tuple[str, str], list[tuple[str, str, DialResult]]] = defaultdict(list)
    for (dialler, listener), ones in pairs.blocked.items():
        if (dialler, listener) not in whole:
            for one in ones:
                by_port[listener, one.label].append((dialler, listener, one))
    found = []
    for (listener, label), closed in sorted(by_port.items()):
        port = closed[0][2].port
        kind = _failure_kinds([one for _, _, one in closed])
        dialling = ", ".join(dialler for dialler, _, _ in closed[:_SHOWN]) + (
            " and more" if len(closed) > _SHOWN else ""
        )
        what = f"port {port}" + (
            " (of the range that the kernel assigns)" if label.startswith(KERNEL_PORT_PREFIX) else ""
        )
        seen = f"{dialling} cannot reach {what} of {listener}, although other ports are open ({kind})"
        found.append(_blocked_finding(listener, seen, kind, port=port, kernels=label.startswith(KERNEL_PORT_PREFIX)))
    return found


def _blocked_finding(host: str, seen: str, kind: str, port: int | None = None, kernels: bool = False) -> Finding:
    ports = f"port {port}" if port else "all TCP ports"
    if kernels:
        ports = "all ports of the range in /proc/sys/net/ipv4/ip_local_port_range"
    if "something else" in kind:
        fix = f"end what listens on that port of the host (`ss -ltnp`), or choose another port than {port}"
    else:
        fix = (
            f"open {ports} between the hosts of the run (firewall, security group, network policy), in both "
            "directions; "
            "NCCL, gloo and Ray's workers use ports of the kernel's range unless configured otherwise"
        )
    why = "collectives connect ranks in both directions, and wait silently for dropped packets"
    return Finding("pair-blocked", "error", host, seen, why, fix)


def _failure_kinds(ones: Sequence[DialResult]) -> str:
    words = {
        "refused": "refused: a firewall rejects it, or nothing listens",
        "silent": "no answer: packets are dropped",
        "no_route": "no route",
        "stranger": "something else listens there",
        "broke": "the connection breaks",
    }
    kinds = list(dict.fromkeys(words.get(one.kind, one.why) for one in ones))
    return "; ".join(kinds[:3]) or "no answer"


def _uneven(pairs: PairResults) -> list[Finding]:
    found = []
    if len(pairs.mb_per_s) >= _MIN_SAMPLES:
        middle = statistics.median(pairs.mb_per_s.values())
        slow = sorted((rate, pair) for pair, rate in pairs.mb_per_s.items() if rate < _SLOW * middle)
        if slow:
            rate, (one, other) = slow[0]
            rest = f", and {len(slow) - 1} more directions" if len(slow) > 1 else ""
            found.append(
                Finding(
                    "pair-slow", "warning", f"{one}, {other}",
                    f"{one} to {other} reaches {rate:,.0f} MB/s, the median is {middle:,.0f}{rest}"
                    + _common_host(slow),
                    "a collective is as fast as its slowest link",
                    "compare the link's speed and errors on both (`ethtool`, `ip -s link`) and the interface in use",
                )
            )  # fmt: skip
    if len(pairs.reached) >= _MIN_SAMPLES:
        middle = statistics.median(pairs.reached.values())
        far = sorted((-trip, pair) for pair, trip in pairs.reached.items() if trip > max(_FAR_MS, _FAR * middle))
        if far:
            trip, (one, other) = far[0]
            rest = f", and {len(far) - 1} more directions" if len(far) > 1 else ""
            found.append(
                Finding(
                    "pair-far", "warning", f"{one}, {other}",
                    f"the round trip from {one} to {other} takes {-trip:.2f} ms, the median is {middle:.2f}{rest}"
                    + _common_host(far),
                    "each small collective takes a round trip",
                    "check for a VPN, another site or zone, or a busy host between them",
                )
            )  # fmt: skip
    return found


def _common_host(worst: Sequence[tuple[float, tuple[str, str]]]) -> str:
    """The one host that several bad directions have in common."""
    shared = set.intersection(*(set(pair) for _, pair in worst)) if len(worst) > 2 else set()
    return f"; {shared.pop()} is part of all of them" if len(shared) == 1 else ""
