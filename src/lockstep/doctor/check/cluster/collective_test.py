"""The collective self-test of a check: the communicators that a run will create, the test of them on all hosts, and
findings about the results.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lockstep.base.text import summarize_list
from lockstep.config.run_config import RunConfig
from lockstep.config.train_role import TrainRole
from lockstep.doctor.check.cluster.probe_rendezvous import CheckHead
from lockstep.doctor.check.probe import probe_protocol
from lockstep.doctor.check.probe.probe_protocol import AwaitRanksAnswer, ProbeInfo, StartRanksAnswer
from lockstep.doctor.output.findings import Finding

CollectiveBackend = Literal["nccl", "gloo"]
CollectiveOperation = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast"]
OPERATIONS: tuple[CollectiveOperation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True, slots=True)
class PlannedCommunicator:
    """A communicator that a run will create."""

    name: str
    backend: CollectiveBackend
    members: tuple[str, ...]
    """Names of processes, in the order of their ranks."""
    operations: tuple[CollectiveOperation, ...]
    does: str
    """What the run uses it for, in a few words."""

    def json(self, ranks: Sequence[str]) -> dict[str, Any]:
        """Converts to plain data for the self-test, with the members as rank numbers."""
        return {**asdict(self), "members": [ranks.index(each) for each in self.members]}


def planned_communicators(config: RunConfig, device: Literal["cpu", "cuda"]) -> list[PlannedCommunicator]:
    """The communicators that the trained roles, served roles and weight sync of a run with this config create. If there
    are several trained roles, their names begin with the role's.

    A trainer's default communicator carries weights, gradients and metrics; with replicas (HSDP) there is one per
    replica, and gradients are summed on one per shard. Checkpoints use gloo. Weights are sent to engines on a
    communicator of trainer and engines (NCCL) or in pairs (gloo), unless both share memory."""
    roles = config.train_roles
    found = [
        replace(each, name=f"{role.name} {each.name}") if len(roles) > 1 else each
        for role in roles
        for each in _trainer_communicators(role, device)
    ]
    fast: CollectiveBackend = "nccl" if device == "cuda" else "gloo"
    for served in config.serve_roles:
        if served.ranks > 1:
            members = tuple(f"{served.name}-{rank}" for rank in range(served.ranks))
            found.append(PlannedCommunicator(served.name, fast, members, ("all_gather",), "FSDP2's weights"))
    return found + _weight_sync_communicators(config, _rank_names(roles[0]), device)


def _rank_names(role: TrainRole) -> tuple[str, ...]:
    return tuple(f"{role.name}-{rank}" for rank in range(role.trainer.ranks))


def _trainer_communicators(role: TrainRole, device: Literal["cpu", "cuda"]) -> list[PlannedCommunicator]:
    trainer, ranks = role.trainer, _rank_names(role)
    fast: CollectiveBackend = "nccl" if device == "cuda" else "gloo"
    found = []
    if trainer.ranks > 1:
        found.append(PlannedCommunicator("trainer", fast, ranks, OPERATIONS, "weights, gradients and metrics"))
        found.append(PlannedCommunicator("checkpoint", "gloo", ranks, ("all_gather", "broadcast"), "checkpoints"))
    if trainer.replicas > 1:
        shards = trainer.shards
        for copy in range(trainer.replicas):
            members = ranks[copy * shards : (copy + 1) * shards]
            operations: tuple[CollectiveOperation, ...] = ("all_gather", "reduce_scatter")
            found.append(
                PlannedCommunicator(f"copy {copy}", fast, members, operations, "weights and gradients of one copy")
            )
        for shard in range(shards):
            members = ranks[shard::shards]
            found.append(
                PlannedCommunicator(f"across copies {shard}", fast, members, ("all_reduce",), "gradients across copies")
            )
    return found


def _weight_sync_communicators(config: RunConfig, policy: Sequence[str], device: str) -> list[PlannedCommunicator]:
    if not config.needs_engines:
        return []
    transport = config.weights.transport
    engines = tuple(f"engine-{number}" for number in range(config.rollout.engine.count))
    if transport in ("nccl", "auto") and device == "cuda" and not config.placement.shared:
        return [PlannedCommunicator("weights", "nccl", (policy[0], *engines), ("broadcast",), "weights to all engines")]
    if transport == "gloo" or (transport == "auto" and config.cluster.kind == "ray"):
        return [
            PlannedCommunicator(
                f"weights {engine}", "gloo", (policy[0], engine), ("broadcast",), f"weights to {engine}"
            )
            for engine in engines
        ]
    return []


def communicator_processes(found: Iterable[PlannedCommunicator]) -> list[str]:
    """The processes that belong to any of the communicators, trainer ranks first."""
    return list(dict.fromkeys(name for each in found for name in each.members))


def on_gloo(found: Iterable[PlannedCommunicator]) -> list[PlannedCommunicator]:
    """Copies of the communicators that use gloo."""
    return [replace(each, backend="gloo") for each in found]


SELF_TEST_TIMEOUT_S = 30.0
SELF_TEST_START_S = 8.0
"""Part of the time limit for importing torch and starting the store."""
TEST_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of one collective: large enough to be limited by bandwidth."""
_SLOW = 0.5
_BUS_BANDWIDTH_SOURCE = "https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"


@dataclass(slots=True)
class SelfTestResult:
    """Results of the ranks of one self-test."""

    communicators: tuple[PlannedCommunicator, ...]
    ranks: tuple[str, ...]
    """Names of processes; a rank is an index of this tuple."""
    hosts: Mapping[str, str]
    """Host of each process."""
    device: Literal["cpu", "cuda"]
    at: dict[str, str] = field(default_factory=dict)
    """By process, the last operation that it began; `done` if it finished."""
    failed: dict[str, str] = field(default_factory=dict)
    """By process, its error."""
    rates: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """By communicator and operation, the bus bandwidth in MB/s on each rank."""
    latency_ms: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    pairs: dict[tuple[str, str, str], float] = field(default_factory=dict)
    """By communicator and two processes, MB/s in each direction while both send."""
    lost: dict[str, str] = field(default_factory=dict)
    """By host, why its probe did not answer or its ranks did not start."""
    took_s: float = 0.0

    @property
    def passed(self) -> bool:
        done = all(self.at.get(each) == "done" for each in self.ranks)
        return done and not self.failed and not self.lost and not self.unreported

    @property
    def unreported(self) -> list[str]:
        """Operations of which no rank reported a result."""
        return [
            f"{operation} on {each.name}"
            for each in self.communicators
            for operation in each.operations
            if (each.name, operation) not in self.rates
        ]

    @property
    def why_not(self) -> str:
        """The first two different reasons of a failure; empty if the test passed."""
        if self.passed:
            return ""
        reasons = [*self.failed.values(), *self.lost.values()]
        reasons.sort(key=lambda why: why.startswith(("WaitTimeout", "did not end", "DistNetworkError")))
        stuck = [f"{name} did not finish (at: {at})" for name, at in self.at.items() if at != "done"]
        unreported = [f"no rank reported the result of {each}" for each in self.unreported]
        return "; ".join(list(dict.fromkeys([*reasons, *stuck, *unreported]))[:2]) or "no rank reported anything"


def run_self_test(
    head: CheckHead,
    probes: Mapping[str, ProbeInfo],
    communicators: Sequence[PlannedCommunicator],
    hosts: Mapping[str, str],
    device: Literal["cpu", "cuda"],
    bound_s: float = SELF_TEST_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> SelfTestResult:
    """Runs the collectives of all communicators, one rank per process on its host.

    Args:
        probes: the joined probes, by host.
        hosts: host of each process.
        environment: additional variables of the ranks; only those of `RankVariable` are allowed.
    """
    began = time.monotonic()
    ranks = tuple(communicator_processes(communicators))
    result = SelfTestResult(tuple(communicators), ranks, hosts, device)
    absent = sorted({hosts[name] for name in ranks} - head.members.keys())
    if absent or not ranks:
        result.lost = dict.fromkeys(absent, "its probe has not joined")
        return result
    first = hosts[ranks[0]]
    on_host: dict[str, list[int]] = {}
    for rank, name in enumerate(ranks):
        on_host.setdefault(hosts[name], []).append(rank)
    spec: dict[str, Any] = {
        "world": len(ranks), "device": device, "bound_s": max(5.0, bound_s - SELF_TEST_START_S),
        "bytes": TEST_BYTES[device],
        "communicators": [each.json(ranks) for each in communicators], "host": probes[first].address, "port": 0,
    }  # fmt: skip

    def order(host: str, **more: Any) -> dict[str, Any]:
        own = {**_interface_variables(probes[host], len(probes) > 1), **(environment or {})}
        task = {**spec, "ranks": on_host[host], "address": probes[host].address, **more}
        return {"do": "ranks", "what": "start", "environment": own, "spec": task}

    first_order = {first: order(first, serve=True)}
    started, lost = head.ask(first_order, bound_s, "the store of the self-test", probe_protocol.read_start_ranks_answer)
    port = started.get(first, StartRanksAnswer(-1)).port
    if port <= 0:
        results, also_lost = head.ask(
            _await_order(head, [first], 1.0),
            5.0,
            "the reason",
            probe_protocol.await_ranks_answer_reader(on_host, len(ranks)),
        )
        last = results.get(first, AwaitRanksAnswer()).last
        result.lost = {first: (lost | also_lost).get(first) or f"its ranks could not be started: {last}"}
        return result
    spec["port"] = port
    others = {host: order(host) for host in on_host if host != first}
    _, lost = head.ask(others, 10.0, "ranks of the self-test start", probe_protocol.read_start_ranks_answer)
    result.lost |= lost
    left = max(2.0, bound_s - (time.monotonic() - began))
    read = probe_protocol.await_ranks_answer_reader(on_host, len(ranks))
    answers, lost = head.ask(_await_order(head, on_host, left), left + 5.0, "the self-test", read)
    result.lost |= lost
    for host, answer in sorted(answers.items()):
        _record_answer(result, host, answer)
    result.took_s = time.monotonic() - began
    return result


def _await_order(head: CheckHead, hosts: Iterable[str], bound_s: float) -> dict[str, dict[str, object]]:
    order: dict[str, object] = {"do": "ranks", "what": "results", "bound_s": bound_s}
    return {host: order for host in hosts if host in head.members}


def _interface_variables(info: ProbeInfo, several: bool) -> dict[str, str]:
    """Variables with which gloo uses the interface of the host's address, as for Lockstep's workers."""
    if not info.interface:
        return {}
    return {"GLOO_SOCKET_IFNAME": info.interface}


def _record_answer(result: SelfTestResult, host: str, answer: AwaitRanksAnswer) -> None:
    for line in answer.lines:
        name, key = result.ranks[line.rank], (line.communicator, line.operation)
        if line.at is not None:
            result.at[name] = line.at
        elif line.failed is not None:
            result.failed[name] = line.failed
        elif line.pair is not None:
            one, other = (result.ranks[rank] for rank in line.pair)
            result.pairs[line.communicator, one, other] = line.mb_per_s
        elif line.ok:
            result.rates.setdefault(key, []).append(line.mb_per_s)
            result.latency_ms.setdefault(key, []).append(line.ms)
    if not answer.lines:
        code = answer.ended
        how = "in time: the host may be too busy to import torch" if code is None else f"and ended with {code}"
        result.lost[host] = f"its ranks reported nothing {how}{': ' if answer.last else ''}{answer.last}"


def judge_collectives(tested: SelfTestResult) -> list[Finding]:
    """Reports each correct communicator and its slowest pair, or the failure of the test."""
    if not tested.communicators:
        what = "the config creates no communicator of two processes (one rank, weights through shared memory)"
        return [Finding("collectives", "ok", "", what)]
    if not tested.passed:
        return [_failure_finding(tested)]
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
                f"{each.name} ({len(each.members)} ranks on {each.backend}: {each.does}): all sums correct; "
                + "; ".join(rows), source=_BUS_BANDWIDTH_SOURCE, measured=_bus_bandwidth(tested, each),
            )
        )  # fmt: skip
    return found + _slowest_pair_findings(tested)


def _bus_bandwidth(tested: SelfTestResult, of: PlannedCommunicator) -> dict[str, Any]:
    """What a run is compared with: `{"communicator", "members", "bytes", "bus_mb_per_s": {operation: MB/s}}`."""
    rates = {operation: min(tested.rates[of.name, operation]) for operation in of.operations}
    measured = {"communicator": of.name, "members": len(of.members), "bytes": TEST_BYTES[tested.device]}
    return {**measured, "bus_mb_per_s": rates}


def _slowest_pair_findings(tested: SelfTestResult) -> list[Finding]:
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
                f"slowest pair of {communicator.name}: {one} and {other} ({where}) with {rate:,.0f} MB/s in each "
                f"direction, the median is {middle:,.0f}",
                "a collective is as fast as its slowest link" if slow else "",
                "compare the link's speed and errors on both hosts (`ethtool`, `ip -s link`, `ibstat`)" if slow else "",
            )
        )  # fmt: skip
    return found


def _failure_finding(tested: SelfTestResult) -> Finding:
    """Reports the ranks that failed first; if there are none, those that the others waited for."""
    lost = "; ".join(f"{host}: {why}" for host, why in tested.lost.items())
    errors = {
        name: why for name, why in tested.failed.items() if not why.startswith(("WaitTimeout", "did not end"))
    } or tested.failed
    causes: dict[str, list[str]] = {}
    for name, why in errors.items():
        causes.setdefault(why, []).append(name)
    rows = [f"{_names_with_hosts(names, tested)}: {why}" for why, names in list(causes.items())[:3]]
    never = [name for name in tested.ranks if name not in tested.at]
    behind = [name for name in tested.ranks if tested.at.get(name) in ("rendezvous",)]
    if never:
        rows.append(f"{_names_with_hosts(never, tested)} never started")
    if behind and len(behind) < len(tested.ranks):
        rows.append(f"{_names_with_hosts(behind, tested)} did not reach the store")
    if not rows and not lost:
        rows = [f"no rank reported the result of {each}" for each in tested.unreported[:3]]
    stages = {tested.at.get(name, "") for name in errors} - {"done", ""}
    where = f" (at: {', '.join(sorted(stages))})" if stages else ""
    backends = " and ".join(sorted({each.backend for each in tested.communicators}))
    reasons = "; ".join([lost, *rows] if lost else rows)
    seen = f"the self-test of {len(tested.ranks)} ranks on {backends} failed{where}: {reasons}"
    hosts = ", ".join(dict.fromkeys(tested.hosts[name] for name in [*behind, *never] or errors)) or ", ".join(
        tested.lost
    )
    return Finding(
        "collectives", "error", hosts, seen, "the run's first collective would fail or hang in the same way",
        _failure_fix(seen, tested),
    )  # fmt: skip


_FIXES = (
    ("checksum", "data is corrupted between these ranks: on GPUs try NCCL_P2P_DISABLE=1 (see the isolation below) and "
     "check the kernel log for Xid and PCIe errors"),
    ("Duplicate GPU", "two ranks share a GPU, which NCCL refuses: use as many GPUs as ranks"),
    ("no socket interface", "the interface in NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is not on every host: unset it "
     "or name one that is"),
    ("nable to find address "
     "for", "the interface in GLOO_SOCKET_IFNAME does not exist, or has no address: name one that "
     "has"),
    ("nable to resolve", "gloo resolves this host's name: set GLOO_SOCKET_IFNAME, or add the name to the hosts "
     "file"),
    ("CUDA", "see the findings about GPUs and versions of these hosts"),
    ("did not reach the store", "the port of the store is closed from there: see the pairs above"),
)  # fmt: skip


def _failure_fix(seen: str, tested: SelfTestResult) -> str:
    for sign, fix in _FIXES:
        if sign in seen:
            return fix
    nccl = any(each.backend == "nccl" for each in tested.communicators)
    more = "NCCL_DEBUG=INFO with NCCL_DEBUG_SUBSYS=INIT,NET" if nccl else "TORCH_DISTRIBUTED_DEBUG=DETAIL"
    return f"check the pairs and interfaces above for these hosts; {more} shows more"


def _names_with_hosts(names: Sequence[str], tested: SelfTestResult) -> str:
    return summarize_list(names, 4, lambda name: f"{name} ({tested.hosts[name]})")
