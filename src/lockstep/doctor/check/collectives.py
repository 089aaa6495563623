"""The collective self-test, seen from the head: started on all hosts at once, its results, what they mean."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lockstep.doctor.check import answers
from lockstep.doctor.check.answers import Said, Started
from lockstep.doctor.check.communicators import Communicator, processes
from lockstep.doctor.check.meeting import Head
from lockstep.doctor.check.protocol import Card
from lockstep.doctor.finding import Finding
from lockstep.watch.naming import some

BOUND_S = 30.0
START_S = 8.0
"""Of the bound, for importing torch and telling the port of the store."""
BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Of one collective: large enough to be limited by bandwidth."""
_SLOW = 0.5
_BUS = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"


@dataclass(slots=True)
class Tested:
    """What the ranks of one self-test said."""

    communicators: tuple[Communicator, ...]
    ranks: tuple[str, ...]
    """Names of processes; a rank is a place in here."""
    hosts: Mapping[str, str]
    """Of processes."""
    device: Literal["cpu", "cuda"]
    at: dict[str, str] = field(default_factory=dict)
    """By process, what it was last about to do; `done` where it has finished."""
    failed: dict[str, str] = field(default_factory=dict)
    """By process, what it failed with."""
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By communicator and operation, the bus bandwidth in MB/s on each rank."""
    latency_ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    pairs: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """By communicator and two processes, MB/s each way while both send."""
    lost: dict[str, str] = field(default_factory=dict)
    """Hosts whose probe did not answer, or whose ranks could not be started, and why."""
    took_s: float = 0.0

    @property
    def passed(self) -> bool:
        done = all(self.at.get(each) == "done" for each in self.ranks)
        return done and not self.failed and not self.lost and not self.untold

    @property
    def untold(self) -> list[str]:
        """Operations of which no rank said anything, though all ended."""
        return [
            f"{operation} on {each.name}"
            for each in self.communicators
            for operation in each.operations
            if (each.name, operation) not in self.rates
        ]

    @property
    def why_not(self) -> str:
        """The first reasons, each once; empty where it passed."""
        if self.passed:
            return ""
        reasons = [*self.failed.values(), *self.lost.values()]
        reasons.sort(key=lambda why: why.startswith(("WaitTimeout", "did not end", "DistNetworkError")))
        stuck = [f"{name} did not finish (at: {at})" for name, at in self.at.items() if at != "done"]
        untold = [f"no rank told the result of {each}" for each in self.untold]
        return "; ".join(list(dict.fromkeys([*reasons, *stuck, *untold]))[:2]) or "no rank said anything"


def self_test(
    head: Head,
    cards: Mapping[str, Card],
    communicators: Sequence[Communicator],
    hosts: Mapping[str, str],
    device: Literal["cpu", "cuda"],
    bound_s: float = BOUND_S,
    environment: Mapping[str, str] | None = None,
) -> Tested:
    """Has the hosts of the processes run all communicators' collectives.

    Args:
        hosts: of every process that is in a communicator.
        environment: variables of the ranks beside those of the probes, those of `orders.VARIABLES`.
    """
    began = time.monotonic()
    ranks = tuple(processes(communicators))
    found = Tested(tuple(communicators), ranks, hosts, device)
    absent = sorted({hosts[name] for name in ranks} - head.members.keys())
    if absent or not ranks:
        found.lost = dict.fromkeys(absent, "it has not joined")
        return found
    first = hosts[ranks[0]]
    on_host: dict[str, list[int]] = {}
    for rank, name in enumerate(ranks):
        on_host.setdefault(hosts[name], []).append(rank)
    spec: dict[str, Any] = {
        "world": len(ranks), "device": device, "bound_s": max(5.0, bound_s - START_S), "bytes": BYTES[device],
        "communicators": [each.json(ranks) for each in communicators], "host": cards[first].address, "port": 0,
    }  # fmt: skip

    def order(host: str, **more: Any) -> dict[str, Any]:
        own = {**_interface(cards[host], len(cards) > 1), **(environment or {})}
        task = {**spec, "ranks": on_host[host], "address": cards[host].address, **more}
        return {"do": "ranks", "what": "start", "environment": own, "spec": task}

    ask_first = {first: order(first, serve=True)}
    begun, lost = head.ask(ask_first, bound_s, "the store of the self-test", answers.started)
    port = begun.get(first, Started(-1)).port
    if port <= 0:
        results, gone = head.ask(_await(head, [first], 1.0), 5.0, "why", answers.said(on_host, len(ranks)))
        last = results.get(first, Said()).last
        found.lost = {first: (lost | gone).get(first) or f"its ranks could not be started: {last}"}
        return found
    spec["port"] = port
    others = {host: order(host) for host in on_host if host != first}
    _, lost = head.ask(others, 10.0, "ranks of the self-test start", answers.started)
    found.lost |= lost
    left = max(2.0, bound_s - (time.monotonic() - began))
    said = answers.said(on_host, len(ranks))
    told, lost = head.ask(_await(head, on_host, left), left + 5.0, "the self-test", said)
    found.lost |= lost
    for host, answer in sorted(told.items()):
        _take(found, host, answer)
    found.took_s = time.monotonic() - began
    return found


def _await(head: Head, hosts: Iterable[str], bound_s: float) -> dict[str, dict[str, object]]:
    order: dict[str, object] = {"do": "ranks", "what": "results", "bound_s": bound_s}
    return {host: order for host in hosts if host in head.members}


def _interface(card: Card, several: bool) -> dict[str, str]:
    """Of gloo and NCCL, as Lockstep sets it for its workers: the one that has the host's address."""
    if not card.interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": card.interface}


def _take(found: Tested, host: str, answer: Said) -> None:
    for line in answer.lines:
        name, key = found.ranks[line.rank], (line.communicator, line.operation)
        if line.at is not None:
            found.at[name] = line.at
        elif line.failed is not None:
            found.failed[name] = line.failed
        elif line.pair is not None:
            one, other = (found.ranks[rank] for rank in line.pair)
            found.pairs[line.communicator, one, other] = line.mb_per_s
        elif line.ok:
            found.rates.setdefault(key, []).append(line.mb_per_s)
            found.latency_ms.setdefault(key, []).append(line.ms)
    if not answer.lines:
        code = answer.ended
        how = "in time: the host may be too busy to import torch" if code is None else f"and ended with {code}"
        found.lost[host] = f"its ranks said nothing {how}{': ' if answer.last else ''}{answer.last}"


def judge(tested: Tested) -> list[Finding]:
    """One finding per communicator that is right, the failure where one is not, and the slowest pair."""
    if not tested.communicators:
        what = "the config makes no communicator of two processes (one rank, weights through memory that both see)"
        return [Finding("collectives", "ok", "", what)]
    if not tested.passed:
        return [_failure(tested)]
    found = []
    for each in tested.communicators:
        rows = [
            f"{operation} {statistics.median(tested.latency_ms[each.name, operation]):.2f} ms, "
            f"{min(tested.rates[each.name, operation]):,.0f} MB/s"
            for operation in each.operations
        ]
        found.append(
            Finding(
                "collectives", "ok", "",
                f"{each.name} ({len(each.members)} ranks on {each.backend}: {each.does}): all sums right; "
                + "; ".join(rows), source=_BUS,
            )
        )  # fmt: skip
    return found + _slowest(tested)


def _slowest(tested: Tested) -> list[Finding]:
    found = []
    for communicator in tested.communicators:
        pairs = {key[1:]: rate for key, rate in tested.pairs.items() if key[0] == communicator.name}
        if len(pairs) < 3:
            continue
        (one, other), rate = min(pairs.items(), key=lambda item: item[1])
        middle = statistics.median(pairs.values())
        a, b = tested.hosts[one], tested.hosts[other]
        where = f"both on {a}" if a == b else f"{a} and {b}"
        slow = rate < _SLOW * middle and a != b
        found.append(
            Finding(
                "slowest-pair", "warning" if slow else "note", "" if a == b else f"{a}, {b}",
                f"slowest pair of {communicator.name}: {one} and {other} ({where}) with {rate:,.0f} MB/s each way, the "
                f"median is {middle:,.0f}",
                "a collective is as fast as its slowest link" if slow else "",
                "compare the link's speed and errors on both hosts (`ethtool`, `ip -s link`, `ibstat`)" if slow else "",
            )
        )  # fmt: skip
    return found


def _failure(tested: Tested) -> Finding:
    """Who is to blame: who says what is wrong, else who is behind the others."""
    lost = "; ".join(f"{host}: {why}" for host, why in tested.lost.items())
    said = {
        name: why for name, why in tested.failed.items() if not why.startswith(("WaitTimeout", "did not end"))
    } or tested.failed
    causes: dict[str, list[str]] = {}
    for name, why in said.items():
        causes.setdefault(why, []).append(name)
    rows = [f"{_named(names, tested)}: {why}" for why, names in list(causes.items())[:3]]
    never = [name for name in tested.ranks if name not in tested.at]
    behind = [name for name in tested.ranks if tested.at.get(name) in ("rendezvous",)]
    if never:
        rows.append(f"{_named(never, tested)} never started")
    if behind and len(behind) < len(tested.ranks):
        rows.append(f"{_named(behind, tested)} did not reach the store")
    if not rows and not lost:
        rows = [f"no rank told the result of {each}" for each in tested.untold[:3]]
    stages = {tested.at.get(name, "") for name in said} - {"done", ""}
    where = f" (at: {', '.join(sorted(stages))})" if stages else ""
    backends = " and ".join(sorted({each.backend for each in tested.communicators}))
    told = "; ".join([lost, *rows] if lost else rows)
    seen = f"the self-test of {len(tested.ranks)} ranks on {backends} failed{where}: {told}"
    hosts = ", ".join(dict.fromkeys(tested.hosts[name] for name in [*behind, *never] or said)) or ", ".join(tested.lost)
    return Finding(
        "collectives", "error", hosts, seen, "the run's first collective would fail or hang in the same way",
        _advice(seen, tested),
    )  # fmt: skip


_ADVICE = (
    ("checksum", "data is corrupted between these ranks: on GPUs try NCCL_P2P_DISABLE=1 (see the isolation below) and "
     "read the kernel log for Xid and PCIe errors"),
    ("Duplicate GPU", "two ranks share a GPU, which NCCL refuses: use as many GPUs as ranks"),
    ("no socket interface", "the interface in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is not on every host: unset it "
     "or name one that is"),
    ("nable to find address for", "the interface in GLOO_SOCKET_IFNAME is not there, or has no address: name one that "
     "has"),
    ("nable to resolve", "gloo looks for this host's own name: set GLOO_SOCKET_IFNAME, or put the name into the hosts "
     "file"),
    ("CUDA", "see the checks of the GPUs and versions on the hosts named"),
    ("did not reach the store", "the port of the store is closed from there: see the pairs above"),
)  # fmt: skip


def _advice(seen: str, tested: Tested) -> str:
    for sign, advice in _ADVICE:
        if sign in seen:
            return advice
    nccl = any(each.backend == "nccl" for each in tested.communicators)
    more = "NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=INIT,NET" if nccl else "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    return f"look at the pairs and interfaces above for the hosts named; {more} says more"


def _named(names: Sequence[str], tested: Tested) -> str:
    return some(names, 4, lambda name: f"{name} ({tested.hosts[name]})")
