"""Gathers facts from every host through its probe, judges each host, and compares the hosts with each other."""

import ipaddress
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from lockstep.base.text import summarize_list
from lockstep.doctor.check.cluster.probe_rendezvous import CheckHead
from lockstep.doctor.check.facts.host_facts import MAX_TEXT, HostFacts, HostNetwork, host_facts_from_json, parser_of
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.facts.host_system import HostSystem
from lockstep.doctor.check.host_check import GATHER_TIMEOUT_S, gather_host, judge_host
from lockstep.doctor.check.probe.probe_protocol import ProbeMessage
from lockstep.doctor.check.rules.gpu_rules import gpu_summary
from lockstep.doctor.check.rules.interface_selection import InterfaceChoice, interface_choices, judge_address
from lockstep.doctor.check.rules.version_rules import compare_versions
from lockstep.doctor.environment.environment_lint import JobTraits, ProcessEnvironment, lint_environments
from lockstep.doctor.environment.environment_sources import shareable_variables
from lockstep.doctor.output.findings import Finding


def compare_hosts(facts: Sequence[HostFacts]) -> list[Finding]:
    """Reports differences between hosts, each with the hosts per value."""
    if len(facts) < 2:
        return []
    return [
        *compare_versions({each.host: each.versions for each in facts if each.versions is not None}),
        *_same_name(facts),
        *_compare_hardware(facts),
        *_compare_clocks(facts),
        *_compare_networks(facts),
    ]


def _same_name(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    names = [each.host for each in facts]
    for name in sorted({name for name in names if names.count(name) > 1}):
        seen = f"{names.count(name)} hosts have the host name {name}"
        why = "NCCL treats hosts with equal name and boot id as one, and data keyed by host name is overwritten"
        yield Finding("same-name", "warning", name, seen, why, "hostnamectl set-hostname (or export NCCL_HOSTID)")


def _hosts_by_value(values: Mapping[str, str]) -> tuple[str, str, str]:
    """Hosts per value as text, the hosts without the most common value, and that value."""
    hosts: dict[str, list[str]] = {}
    for host, value in values.items():
        hosts.setdefault(value, []).append(host)
    most = max(hosts, key=lambda value: len(hosts[value]))
    deviating = ",".join(host for value, which in hosts.items() if value != most for host in which)
    return "; ".join(f"{value} on {summarize_list(which, 4)}" for value, which in hosts.items()), deviating, most


def _report_difference(
    id: str, what: str, values: Mapping[str, str], why: str, fix: str = "", note: bool = False
) -> Iterator[Finding]:
    if len(set(values.values())) > 1:
        seen, deviating, _ = _hosts_by_value(values)
        yield Finding(id, "note" if note else "warning", deviating, f"{what}: {seen}", why, fix)


def _compare_hardware(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    gpus = {each.host: gpu_summary(each.gpus) or "no GPU" for each in facts if each.gpus is not None}
    yield from _report_difference("differs-gpus", "hosts have different GPUs", gpus, "all ranks wait for the slowest")
    rates = {
        each.host: ", ".join(
            sorted(f"{port.rate_gbps or 0:g} Gb/s" for port in each.rdma.ports if port.state == "ACTIVE")
        )
        or "no active port"
        for each in facts
        if each.rdma is not None
    }
    why = "collectives are as slow as the slowest host, and hang if a host lacks a rail that others use"
    yield from _report_difference("differs-rdma", "InfiniBand and RoCE differ", rates, why, "ibstat on those hosts")
    shm = {each.host: "none" for each in facts if each.limits is not None and each.limits.shm is None}
    if shm and len(shm) < len(facts):
        yield Finding(
            "differs-shm",
            "warning",
            ",".join(shm),
            f"/dev/shm is missing on {summarize_list(list(shm), 4)}",
            "ranks on these hosts fail",
        )


def _compare_clocks(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    known = {each.host: each.clock.offset_s for each in facts if each.clock and each.clock.offset_s is not None}
    if len(known) < 2:
        return
    first, last = min(known, key=lambda host: known[host]), max(known, key=lambda host: known[host])
    apart = known[last] - known[first]
    if apart > 0.5:
        seen = f"clocks of {first} and {last} are {apart:.2f} s apart"
        why = "logs cannot be ordered, and tokens and leases expire early or late"
        yield Finding("clock-skew", "warning", f"{first},{last}", seen, why, "chronyc makestep on both")


def _compare_networks(facts: Sequence[HostFacts]) -> Iterator[Finding]:
    known = {each.host: each for each in facts if each.network is not None}
    choices_by_host = {
        host: {choice.library: choice for choice in interface_choices(each.network, each.names)}
        for host, each in known.items()
        if each.network is not None
    }
    for library in ("NCCL", "Gloo", "Ray", "vLLM"):
        chosen = {host: choice[library] for host, choice in choices_by_host.items() if choice[library].picks}
        networks = {host: each.network for host, each in known.items() if host in chosen and each.network is not None}
        yield from _same_address(library, chosen)
        yield from _compare_subnets(library, chosen, networks)
        yield from _compare_mtu(library, chosen, networks)


def _same_address(library: str, chosen: Mapping[str, InterfaceChoice]) -> Iterator[Finding]:
    owners: dict[str, list[str]] = {}
    for host, choice in chosen.items():
        owners.setdefault(choice.picks[0][1], []).append(host)
    for address, hosts in owners.items():
        if len(hosts) > 1:
            seen = f"{library} of {summarize_list(hosts, 4)} would use the same address, {address}"
            why = "a peer that dials this address reaches one of them, or itself"
            fix = "set interface or address on each host (see the findings about each host)"
            yield Finding(f"same-address-{library.lower()}", "error", ",".join(hosts), seen, why, fix)


def _subnet_of(network: HostNetwork, address: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    for each in network.interfaces:
        for own in each.addresses:
            if own.partition("/")[0] == address:
                return ipaddress.ip_interface(own).network
    return None


def _compare_subnets(
    library: str, chosen: Mapping[str, InterfaceChoice], networks: Mapping[str, HostNetwork]
) -> Iterator[Finding]:
    """Reports different subnets, and a subnet that all hosts have in common, if there is one."""
    subnets: dict[str, str] = {}
    for host, choice in chosen.items():
        address = choice.picks[0][1]
        network = _subnet_of(networks[host], address)
        if network is not None and judge_address(address, networks[host].interfaces).reach in ("reachable", "public"):
            subnets[host] = str(network)
    if len(set(subnets.values())) < 2:
        return
    common = _common_subnet(networks)
    seen, deviating, _ = _hosts_by_value(subnets)
    why = "peers reach each other only if a router connects these subnets on every port"
    fix = f"all hosts are in {common}: set {library}'s interface to the one in this subnet" if common else ""
    yield Finding(
        f"subnets-{library.lower()}",
        "warning" if common else "note",
        deviating,
        f"{library} is on different subnets: {seen}",
        why,
        fix,
    )


def _common_subnet(networks: Mapping[str, HostNetwork]) -> str | None:
    """A subnet in which peers can reach every host; None if there is none."""
    sets = []
    for network in networks.values():
        sets.append({
            str(ipaddress.ip_interface(own).network)
            for each in network.interfaces
            for own in each.addresses
            if each.running
            and judge_address(own.partition("/")[0], network.interfaces, each.name).reach in ("reachable", "public")
        })  # fmt: skip
    shared = set.intersection(*sets) if sets else set()
    return min(shared, key=lambda subnet: (":" in subnet, subnet), default=None)


def _compare_mtu(
    library: str, chosen: Mapping[str, InterfaceChoice], networks: Mapping[str, HostNetwork]
) -> Iterator[Finding]:
    """Reports different MTUs, with which connections open but hang at the first large packet."""
    if library != "NCCL":
        return
    sizes = {}
    for host, choice in chosen.items():
        for each in networks[host].interfaces:
            if each.name == choice.picks[0][0] and each.mtu:
                sizes[host] = each.mtu
    for first, second in combinations(sorted(set(sizes.values())), 2):
        hosts = [host for host, mtu in sizes.items() if mtu == first]
        seen = f"interfaces of NCCL have MTU {first} on {summarize_list(hosts, 4)} and {second} on others"
        why = "small messages pass, but large ones are lost if the network does not fragment them: a collective hangs"
        yield Finding("mtu", "warning", ",".join(hosts), seen, why, "ip link set DEVICE mtu N, the same on all")
        return


ENVIRONMENT_S = 5.0
_SERIOUS = ("error", "warning")
_JUDGE_ERRORS = ValueError, LookupError, TypeError, ArithmeticError, OSError
"""Errors that judging raises if facts have valid types but impossible values."""


@dataclass(frozen=True, slots=True)
class FactsOrder:
    """Order to gather the facts of a host for a run with these requirements."""

    needs: HostRequirements
    bound_s: Annotated[float, Field(gt=0, le=60)]


@dataclass(frozen=True, slots=True)
class VariablesAnswer:
    """The environment variables of a host that may be shown."""

    variables: dict[str, str]


_parse_facts_order, _parse_variables = parser_of(FactsOrder), parser_of(VariablesAnswer)


def answer_facts_order(order: Mapping[str, Any]) -> ProbeMessage:
    """Carries out an order in the probe: returns the facts about its host, or its environment variables."""
    if order.get("what") == "environment":
        return {"variables": shareable_variables(os.environ)}
    request = _parse_facts_order(dict(order))
    return gather_host(HostSystem(), request.needs, request.bound_s).json()


def gather_from_hosts(
    head: CheckHead, names: Sequence[str], needs: HostRequirements
) -> tuple[dict[str, HostFacts], dict[str, str]]:
    """Requests facts from all hosts in parallel; returns facts, and reasons for missing answers, by host."""
    folders = {str(Path(path).absolute()): purpose for path, purpose in needs.folders.items()}
    order = {"do": "look", "needs": asdict(replace(needs, folders=folders)), "bound_s": GATHER_TIMEOUT_S}
    facts, lost = head.ask(dict.fromkeys(names, order), GATHER_TIMEOUT_S + 3.0, "the facts of their hosts", _read_facts)
    return dict(sorted(facts.items())), lost


def _read_facts(name: str, answer: ProbeMessage) -> HostFacts:
    return replace(host_facts_from_json(answer), host=name)


def compare_environments(head: CheckHead, names: Sequence[str]) -> list[Finding]:
    """Judges the environment variables of the probes, and their differences.

    A difference is at most a warning, because a job on these hosts may be started with other variables.
    """
    order = {"do": "look", "what": "environment"}
    why = "the variables of their hosts"
    answers, lost = head.ask(
        dict.fromkeys(names, order), ENVIRONMENT_S, why, lambda name, answer: _parse_variables(answer)
    )
    environments = [ProcessEnvironment(name, each.variables) for name, each in sorted(answers.items())]
    found = [
        replace(each, severity="warning") if (each.id, each.severity) == ("env-differs", "error") else each
        for each in lint_environments(environments, job=JobTraits(multi_host=True))
    ]
    return [
        *found, *(Finding("env-fine", "unchecked", name, f"{name} did not report its variables: {why}")
                  for name, why in lost.items()),
    ]  # fmt: skip


def judge_other_hosts(
    facts: Mapping[str, HostFacts], lost: Mapping[str, str], needs: HostRequirements, own_names: Collection[str]
) -> list[Finding]:
    """Judges the other hosts, merges equal findings, and reports differences between all hosts.

    Args:
        own_names: names of this host, which is already judged.
    """
    others = {name: known for name, known in facts.items() if name not in own_names}
    seen: list[Finding] = []
    unjudged: dict[str, str] = {}
    for name, known in others.items():
        try:
            seen += [finding for section in judge_host(known, needs).values() for finding in section]
        except _JUDGE_ERRORS as error:
            unjudged[name] = f"its facts cannot be judged: {type(error).__name__}: {error}"[:MAX_TEXT]
    wrong = merge_findings([finding for finding in seen if finding.severity != "ok"])
    unknown = [
        Finding("host", "unchecked", name, f"{name} did not report its facts: {why}")
        for name, why in {**lost, **unjudged}.items()
    ]
    differing = _compare_or_report_error([known for name, known in facts.items() if name not in unjudged])
    named = {name for each in [*seen, *differing] if each.severity in _SERIOUS for name in each.host.split(",")}
    clean = sorted(set(others) - named - set(unjudged))
    fine = [Finding("hosts", "ok", ",".join(clean), f"nothing is wrong on {summarize_list(clean, 8)}")] if clean else []
    return [*differing, *wrong, *unknown, *fine]


def _compare_or_report_error(facts: Sequence[HostFacts]) -> list[Finding]:
    try:
        return compare_hosts(facts)
    except _JUDGE_ERRORS as error:
        seen = f"hosts cannot be compared: {type(error).__name__}: {error}"[:MAX_TEXT]
        return [Finding("hosts", "unchecked", "", seen)]


def merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Merges equal findings about several hosts into one."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts.setdefault(replace(finding, host=""), []).append(finding.host)
    return [replace(finding, host=",".join(dict.fromkeys(names))) for finding, names in hosts.items()]
