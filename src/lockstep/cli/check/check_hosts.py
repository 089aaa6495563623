"""The part of `lockstep check` that needs several hosts or processes: rendezvous, host pairs, collectives."""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from lockstep.base import waits
from lockstep.base.transport.run_token import check_token
from lockstep.base.wait_state import WaitTimeout
from lockstep.cli.check.check_arguments import HostSelection
from lockstep.cli.terminal import require_extra
from lockstep.cluster.local_cluster import LocalProbes
from lockstep.config.cluster import RayClusterConfig
from lockstep.doctor.check.cluster import collective_test, host_comparison, host_pairs, nccl_isolation, rendezvous_rules
from lockstep.doctor.check.cluster.collective_test import (
    PlannedCommunicator,
    SelfTestResult,
    communicator_processes,
    on_gloo,
    planned_communicators,
)
from lockstep.doctor.check.cluster.probe_rendezvous import (
    CheckHead,
    CombinedLauncher,
    ManualLauncher,
    MissingHost,
    ProbeRendezvous,
)
from lockstep.doctor.check.facts.host_requirements import requirements_of
from lockstep.doctor.check.facts.network_facts import INTERNET_ADDRESSES, local_address_towards
from lockstep.doctor.check.probe.host_probe import host_interfaces, resolve_host
from lockstep.doctor.check.probe.probe_protocol import TOKEN_VARIABLE, ProbeLauncher, new_token
from lockstep.doctor.check.rules.memory_fit import ProcessMemory
from lockstep.doctor.output.findings import CheckReport, Finding

if TYPE_CHECKING:
    from lockstep.config.run_config import RunConfig
    from lockstep.run.planning.run_plan import RunPlan

ShowNote = Callable[[str], None]
"""Prints a line for the user while the check runs."""

LOCAL_START_S = 30.0
"""Time limit for probes that are started automatically: Python starts slowly on a busy host."""
MAX_MISSING_LINES = 8
"""Most missing hosts that are described per update; the others are only named."""
NCCL_BOUND_S = 60.0
"""Time limit of one self-test on NCCL: its start takes seconds on one host and tens of seconds on many."""


def check_hosts(
    report: CheckReport,
    config: "RunConfig | None",
    selection: HostSelection,
    show: ShowNote,
    plan: "RunPlan | None" = None,
) -> None:
    """Runs all checks beyond this host; none if there is neither another host nor a config.

    Args:
        plan: the plan of the run, with the placement of its processes.
    """
    given_token = os.environ.get(TOKEN_VARIABLE, "")
    token = check_token(given_token, TOKEN_VARIABLE) if given_token else new_token()
    try:
        launcher, address = _launcher(selection, show, show_token=not given_token)
        cluster_findings = []
    except (OSError, ValueError) as error:
        # The cluster is unreachable: test only this host.
        launcher, address = _local_probes(), selection.address
        cluster_findings = [_unknown_cluster(error)]
    several = len(launcher.hosts) > 1
    communicators = planned_communicators(config, _device(config)) if config is not None else []
    if not several and not communicators:
        if cluster_findings:
            report.add("rendezvous", "Rendezvous", cluster_findings)
        return
    address = address or (_own_address(launcher.hosts) if several else "127.0.0.1")
    unusable = (
        [each for each in _head_address_findings(address, several) if each.severity == "error"] if address else []
    )
    if several and not address:
        unusable = [_no_address(launcher.hosts)]
    if unusable:
        report.add("rendezvous", "Rendezvous", [*cluster_findings, *unusable])
        return
    try:
        with CheckHead(token, address) as head:
            _run_rendezvous(
                report, config, selection, show, head, launcher, communicators, planned_hosts(plan), cluster_findings
            )
    finally:
        launcher.stop()


def _head_address_findings(address: str, several: bool, reached_from_outside: bool = False) -> list[Finding]:
    fix = "give an address of this host that the others can reach with --address"
    return rendezvous_rules.judge_advertised_address(
        socket.gethostname(), address, "the head of the check", fix, several, host_interfaces(), reached_from_outside
    )


def _unknown_cluster(error: Exception) -> Finding:
    return Finding(
        "cluster-unknown", "error", "", f"the hosts of the cluster cannot be listed: {error}",
        "a run on this cluster would not start; only this host is tested",
        "run `ray status` on its head node, or name another cluster: --cluster HOST:PORT",
    )  # fmt: skip


def _no_address(hosts: Sequence[str]) -> Finding:
    return Finding(
        "head-address", "error", socket.gethostname(),
        f"this host has no route to {', '.join(hosts)} or to the internet",
        "the head of the check has no address to give to the probes",
        "give an address of this host that the others can reach with --address, or check `ip route` and the names",
    )  # fmt: skip


class MissingHostNotes:
    """Prints a line about each missing host, and another one whenever what is known about it changes."""

    def __init__(self, show: ShowNote) -> None:
        self._show = show
        self._reported: dict[str, str] = {}

    def __call__(self, missing: Sequence[MissingHost]) -> None:
        lines = {each.name: rendezvous_rules.describe_missing(each) for each in missing}
        new = [name for name, line in lines.items() if self._reported.get(name) != line]
        for name in new[:MAX_MISSING_LINES]:
            self._reported[name] = lines[name]
            self._show(lines[name])
        rest = [name for name in lines if name not in new[:MAX_MISSING_LINES]]
        if rest:
            self._show(f"also missing: {', '.join(rest)}" if new else f"still missing: {', '.join(rest)}")


def _run_rendezvous(
    report: CheckReport, config: "RunConfig | None", selection: HostSelection, show: ShowNote, head: CheckHead,
    launcher: ProbeLauncher, communicators: Sequence[PlannedCommunicator], planned: Mapping[str, str],
    cluster_findings: Sequence[Finding],
) -> None:  # fmt: skip
    began = time.monotonic()
    rendezvous = head.gather(
        launcher,
        selection.wait_s if _starts_by_hand(launcher) else LOCAL_START_S,
        selection.ports,
        report=MissingHostNotes(show),
    )
    several = len(launcher.hosts) > 1
    if several or cluster_findings or set(rendezvous.joined) != set(launcher.hosts):
        of_head = _head_address_findings(rendezvous.head, several, rendezvous_rules.reached_from_outside(rendezvous))
        findings = [*cluster_findings, *of_head, *rendezvous_rules.judge_rendezvous(rendezvous)]
        report.add("rendezvous", "Rendezvous", findings, time.monotonic() - began)
    if several:
        found = host_pairs.test_host_pairs(head, rendezvous.joined)
        report.add("pairs", "Pairs of hosts", host_pairs.judge_pairs(found), found.took_s)
        _compare_hosts(report, config, head, rendezvous)
    if communicators:
        _run_self_test(report, config, head, rendezvous, communicators, planned, show)


def _starts_by_hand(launcher: ProbeLauncher) -> bool:
    """Whether the user has to start some of the probes."""
    parts = launcher.parts if isinstance(launcher, CombinedLauncher) else (launcher,)
    return any(isinstance(each, ManualLauncher) and each.hosts for each in parts)


def _compare_hosts(
    report: CheckReport, config: "RunConfig | None", head: CheckHead, rendezvous: ProbeRendezvous
) -> None:
    began = time.monotonic()
    own = {address for each in host_interfaces() for address in each.plain}
    on_this_host = {name for name, probe in rendezvous.joined.items() if probe.address in own}
    needs = requirements_of(config, several=True)
    facts, lost = host_comparison.gather_from_hosts(head, list(head.members), needs)
    findings = host_comparison.judge_other_hosts(facts, lost, needs, on_this_host)
    report.add("hosts", "All hosts", findings, time.monotonic() - began)
    began = time.monotonic()
    found = host_comparison.compare_environments(head, list(head.members))
    report.add("environments", "Environments of all hosts", found, time.monotonic() - began)


def _run_self_test(
    report: CheckReport, config: "RunConfig | None", head: CheckHead, rendezvous: ProbeRendezvous,
    communicators: Sequence[PlannedCommunicator], planned: Mapping[str, str], show: ShowNote,
) -> None:  # fmt: skip
    device = _device(config)
    connected = sorted(set(rendezvous.joined) & head.members.keys())
    hosts = spread_over_hosts(communicator_processes(communicators), connected)
    if set(planned.values()) <= set(connected):
        hosts |= {name: planned[name] for name in hosts if name in planned}
    if not hosts:
        report.add("collectives", "Collectives", [Finding("collectives", "unchecked", "", "no host has joined")])
        return

    def test(
        tested: Sequence[PlannedCommunicator], bound_s: float, environment: Mapping[str, str] | None = None
    ) -> SelfTestResult:
        return collective_test.run_self_test(head, rendezvous.joined, tested, hosts, device, bound_s, environment)

    nccl = any(each.backend == "nccl" for each in communicators)
    result = test(communicators, NCCL_BOUND_S if nccl else collective_test.SELF_TEST_TIMEOUT_S)
    findings = collective_test.judge_collectives(result)
    if nccl and not result.passed:
        interface = rendezvous.joined[next(iter(hosts.values()))].interface

        def rerun(variables: Mapping[str, str]) -> SelfTestResult:
            assignments = " ".join(f"{name}={value}" for name, value in variables.items())
            show(f"the test on NCCL failed; repeating it with {assignments}, for up to {NCCL_BOUND_S:.0f} s")
            return test(communicators, NCCL_BOUND_S, variables)

        outcome = nccl_isolation.run_isolation(result, rerun, interface)
        show(f"repeating the test on gloo, for up to {collective_test.SELF_TEST_TIMEOUT_S:.0f} s")
        gloo = test(on_gloo(communicators), collective_test.SELF_TEST_TIMEOUT_S)
        findings += [
            *nccl_isolation.judge_isolation(outcome, gloo, interface),
            *collective_test.judge_collectives(gloo),
        ]
    report.add("collectives", "Collectives", findings, result.took_s)


def planned_hosts(plan: "RunPlan | None") -> dict[str, str]:
    """Host of each process according to the plan; empty if the plan has no placement."""
    if plan is None or plan.assignment is None:
        return {}
    return {name: node.name for name, node in plan.assignment.node_of.items()}


def spread_over_hosts(names: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """Distributes processes evenly over hosts; neighbouring ranks share a host."""
    if not hosts:
        return {}
    per_host = -(-len(names) // len(hosts))
    return {name: hosts[index // per_host] for index, name in enumerate(names)}


def _device(config: "RunConfig | None") -> Literal["cpu", "cuda"]:
    if config is not None and config.cluster.device != "auto":
        return config.cluster.device
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cuda" if Path("/dev/nvidiactl").exists() and not hidden else "cpu"


def process_memory(config: "RunConfig | None") -> ProcessMemory:
    """Memory that one process of a run can use on this host: that of a GPU, or of the host."""
    if _device(config) == "cpu":
        return ProcessMemory("cpu", psutil.virtual_memory().available)
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        rows = waits.run(query, why="name and memory of the GPUs", timeout_s=5.0).stdout.splitlines()
        name, size = rows[0].rsplit(",", 1)
        return ProcessMemory("cuda", int(size) << 20, name.strip())
    except (OSError, ValueError, IndexError, WaitTimeout):
        return ProcessMemory("cuda", 0)


def _launcher(selection: HostSelection, show: ShowNote, show_token: bool) -> tuple[ProbeLauncher, str | None]:
    """The launcher of the probes, and the address of this host if the launcher knows it.

    Raises:
        ConnectionError: the cluster cannot be reached.
        UnreachableAddress: the cluster's nodes cannot reach this process.
    """
    if selection.hosts:
        own = [name for name in selection.hosts if _is_this_host(name)]
        others = [name for name in selection.hosts if name not in own]
        local = LocalProbes(dict.fromkeys(own, ()), TOKEN_VARIABLE)
        return CombinedLauncher([local, ManualLauncher(others, show, show_token)]), selection.address
    if isinstance(selection.cluster, RayClusterConfig):
        require_extra("train", "lockstep check of a Ray cluster")
        from lockstep.run.planning.resources import list_cluster_nodes, uses_existing_cluster  # imports torch

        if not uses_existing_cluster(selection.cluster):
            return _local_probes(), selection.address
        nodes = list_cluster_nodes(selection.cluster)
        from lockstep.cluster.ray.ray_nodes import RayProbes  # imports ray

        launcher = RayProbes(selection.cluster, nodes, TOKEN_VARIABLE)
        return launcher, selection.address or launcher.address
    return _local_probes(), selection.address


def _local_probes() -> LocalProbes:
    return LocalProbes({socket.gethostname(): ()}, TOKEN_VARIABLE)


def _is_this_host(name: str) -> bool:
    addresses = {address for each in host_interfaces() for address in each.plain}
    return name in (socket.gethostname(), "localhost") or bool(addresses & set(resolve_host(name)))


def _own_address(hosts: Sequence[str]) -> str:
    """Address of this host on the route to the first resolvable host, else to the internet; empty without a route."""
    others = (peer for name in hosts if not _is_this_host(name) for peer in resolve_host(name)[:1])
    return next(filter(None, map(local_address_towards, chain(others, INTERNET_ADDRESSES))), "")
