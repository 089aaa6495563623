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
    """Results of the tests between hosts. A pair is (dialling host, listening host)."""

    hosts: tuple[str, ...]
    budget: PairTestBudget
    reached: dict[tuple[str, str], float] = field(default_factory=dict)
    """Shortest round trip in ms of each pair that is connected."""
    blocked: dict[tuple[str, str], list[DialResult]] = field(default_factory=dict)
    """By pair, the ports that could not be reached."""
    mb_per_s: dict[tuple[str, str], float] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    """By host, why its probe stopped answering the head."""
    took_s: float = 0.0


def test_host_pairs(head: CheckHead, probes: Mapping[str, ProbeInfo], bound_s: float = PAIRS_TIMEOUT_S) -> PairResults:
    """Makes all probes dial each other, then measures bandwidth for as many rounds as time allows."""
    began = time.monotonic()
    hosts = tuple(name for name in sorted(probes) if name in head.members)
    plan = pair_test_budget(len(hosts), _ports_of_a_pair(len(hosts), probes), bound_s)
    found = PairResults(hosts, plan)
    if len(hosts) < 2:
        return found
    # All hosts get the same table, so that it is serialised only once; each finds its own row.
    table = [(name, probes[name].address, probes[name].ports) for name in hosts]
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
            _measure(head, probes, found, [(hosts[a], hosts[b]) for a, b in one_way])
    found.took_s = time.monotonic() - began
    return found


def _ports_of_a_pair(many: int, probes: Mapping[str, ProbeInfo]) -> int:
    """Maximum number of ports that one host dials on another."""
    named = max(
        (sum(not label.startswith(KERNEL_PORT_PREFIX) for label in info.ports) for info in probes.values()), default=0
    )
    all_of_one = max((len(info.ports) for info in probes.values()), default=1)
    return all_of_one if many <= ALL_PORTS_UP_TO else named + 1


def _measure(
    head: CheckHead, probes: Mapping[str, ProbeInfo], found: PairResults, pairs: Sequence[tuple[str, str]]
) -> None:
    """Measures the bandwidth of one round of pairs in one direction."""
    orders = {}
    listeners = dict(pairs)
    for dialler, listener in pairs:
        closed = {one.label for one in found.blocked.get((dialler, listener), ())}
        open_ports = [label for label in probes[listener].ports if label not in closed]
        if (dialler, listener) in found.reached and open_ports and dialler in head.members:
            port = probes[listener].ports[open_ports[-1]]
            target = [listener, probes[listener].address, port, open_ports[-1]]
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
    """Reports blocked hosts, directions and ports, each once; then slow and distant pairs."""
    many = len(pairs.hosts)
    if many < 2:
        return [
            Finding(
                "pairs", "unchecked", "", "a single host has no pairs; name others with --hosts to test the network"
            )
        ]
    found = [
        Finding(
            "pair-lost", "error", name, f"its probe stopped answering while hosts dialled each other: {why}",
            "traffic between hosts may bring its network link down", "check its log and its kernel log (`dmesg`)",
        )
        for name, why in pairs.lost.items()
    ]  # fmt: skip
    found += _blocked_findings(pairs)
    found += _slow_and_far_findings(pairs)
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


def _blocked_findings(pairs: PairResults) -> list[Finding]:
    """Reports hosts that no other host reaches or that reach no other host, then blocked directions and ports."""
    blocked_pairs = {pair for pair in pairs.blocked if pair not in pairs.reached}
    many = len(pairs.hosts) - 1
    into, out = defaultdict(set), defaultdict(set)
    for dialler, listener in blocked_pairs:
        into[listener].add(dialler)
        out[dialler].add(listener)
    unreachable = {name for name in pairs.hosts if len(into[name]) == many and many > 1}
    isolated = {name for name in pairs.hosts if len(out[name]) == many and many > 1}
    found = []
    for name in sorted(unreachable | isolated):
        kind = _failure_kinds([one for pair in blocked_pairs if name in pair for one in pairs.blocked[pair]])
        if name in unreachable & isolated:
            direction = "reaches no host and no host reaches it"
        elif name in unreachable:
            direction = "no host reaches it, but it reaches others"
        else:
            direction = "it reaches no host, but others reach it"
        found.append(_blocked_finding(name, f"{name}: {direction} ({kind})", kind))
    for dialler, listener in sorted(blocked_pairs):
        if listener in unreachable or dialler in isolated:
            continue
        results = pairs.blocked[dialler, listener]
        back = (
            "the other direction is open"
            if (listener, dialler) in pairs.reached
            else "the other direction is blocked too"
        )
        kind = _failure_kinds(results)
        tried = ", ".join(str(one.port) for one in results[:_SHOWN])
        seen = f"{dialler} cannot reach {listener} (ports {tried}: {kind}); {back}"
        found.append(_blocked_finding(f"{dialler}, {listener}", seen, kind))
    return found + _closed_ports(pairs, blocked_pairs)


def _closed_ports(pairs: PairResults, blocked_pairs: set[tuple[str, str]]) -> list[Finding]:
    """Reports closed ports between hosts that reach each other on other ports."""
    by_port: dict[tuple[str, str], list[tuple[str, str, DialResult]]] = defaultdict(list)
    for (dialler, listener), results in pairs.blocked.items():
        if (dialler, listener) not in blocked_pairs:
            for one in results:
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
        fix = f"end the process that listens on port {port} of the host (`ss -ltnp`), or choose another port"
    else:
        fix = (
            f"open {ports} between the hosts of the run (firewall, security group, network policy), in both "
            "directions; "
            "NCCL, gloo and Ray's workers use ports of the kernel's range unless configured otherwise"
        )
    why = "collectives connect ranks in both directions, and wait silently for dropped packets"
    return Finding("pair-blocked", "error", host, seen, why, fix)


def _failure_kinds(results: Sequence[DialResult]) -> str:
    words = {
        "refused": "refused: a firewall rejects it, or nothing listens",
        "silent": "no answer: packets are dropped",
        "no_route": "no route",
        "stranger": "something else listens there",
        "broke": "the connection breaks",
    }
    kinds = list(dict.fromkeys(words.get(one.kind, one.why) for one in results))
    return "; ".join(kinds[:3]) or "no answer"


def _slow_and_far_findings(pairs: PairResults) -> list[Finding]:
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
    """Names the host that all of several bad directions have in common, if there is one."""
    shared = set.intersection(*(set(pair) for _, pair in worst)) if len(worst) > 2 else set()
    return f"; {shared.pop()} is part of all of them" if len(shared) == 1 else ""
