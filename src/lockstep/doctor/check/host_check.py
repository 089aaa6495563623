"""Checks one host: gathers all facts in parallel within a time limit, then judges them."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.base import waits
from lockstep.doctor.check.facts import host_resources, network_facts, nvidia_smi
from lockstep.doctor.check.facts.hardware import gather_kernel_log, gather_pci, gather_rdma
from lockstep.doctor.check.facts.host_facts import HostFacts
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.facts.host_resources import gather_clock, gather_limits
from lockstep.doctor.check.facts.host_system import HostSystem, SourceFault
from lockstep.doctor.check.facts.installed_versions import gather_versions
from lockstep.doctor.check.facts.network_facts import gather_ports, gather_ray_token
from lockstep.doctor.check.rules import version_rules
from lockstep.doctor.check.rules.gpu_rules import judge_gpus
from lockstep.doctor.check.rules.limit_rules import judge_clock, judge_disk, judge_limits
from lockstep.doctor.check.rules.link_rules import gpu_count, judge_kernel_log, judge_pci, judge_rdma, judge_topology
from lockstep.doctor.check.rules.network_rules import judge_names, judge_network, judge_ports, judge_ray_token
from lockstep.doctor.output.findings import Finding

GATHER_TIMEOUT_S = 5.0
"""Time limit for gathering all facts of a host."""
_RESERVE_S = 0.4
"""Part of the time limit that is reserved for the work after gathering."""

_TIMED_OUT = "it did not answer within"

Gatherer = Callable[[], Any]


def gather_host(system: HostSystem, needs: HostRequirements, bound_s: float = GATHER_TIMEOUT_S) -> HostFacts:
    """Gathers all facts about this host in parallel; lists those that are not available in time in `unchecked`."""
    return run_gatherers(host_gatherers(system, needs, bound_s), bound_s)


def host_gatherers(
    system: HostSystem, needs: HostRequirements, bound_s: float = GATHER_TIMEOUT_S
) -> dict[str, Gatherer]:
    """The functions that gather the parts of HostFacts, by field name."""
    return {
        "versions": lambda: gather_versions(system),
        "gpus": lambda: nvidia_smi.gather_gpus(system, bound_s - 2 * _RESERVE_S),
        "topology": lambda: nvidia_smi.gather_topology(system, bound_s - 2 * _RESERVE_S),
        "pci": lambda: gather_pci(system),
        "rdma": lambda: gather_rdma(system),
        "kernel": lambda: gather_kernel_log(system, bound_s / 3),
        "limits": lambda: gather_limits(system),
        "disks": lambda: [host_resources.gather_disk(system, Path(path), why) for path, why in needs.folders.items()],
        "clock": lambda: gather_clock(system, bound_s / 3),
        "names": lambda: network_facts.gather_names(system, needs.names),
        "network": lambda: network_facts.gather_network(system),
        "ports": lambda: gather_ports(system, needs.ports),
        "ray_token": lambda: gather_ray_token(system.environ),
    }


def run_gatherers(parts: Mapping[str, Gatherer], bound_s: float) -> HostFacts:
    """Runs each gatherer in a thread of its own, and abandons threads that hang."""
    found: dict[str, Any] = {}
    unchecked: dict[str, str] = {}
    faults: dict[str, str] = {}
    seconds: dict[str, float] = {}
    begun = time.monotonic()

    def gather(part: str) -> None:
        start = time.monotonic()
        try:
            value = parts[part]()
        except SourceFault as error:
            faults[part] = str(error)
        except (OSError, ValueError, LookupError) as error:
            unchecked[part] = str(error) or type(error).__name__
        else:
            found[part] = value
        seconds[part] = round(time.monotonic() - start, 3)

    threads = {part: threading.Thread(target=gather, args=(part,), name=f"check-{part}", daemon=True) for part in parts}
    for thread in threads.values():
        thread.start()
    until = begun + bound_s - _RESERVE_S
    for part, thread in threads.items():
        _join_gatherer(thread, part, max(0.0, until - time.monotonic()))
    late = {part: f"{_TIMED_OUT} {bound_s - _RESERVE_S:.1f} s" for part in parts if part not in seconds}
    return HostFacts(
        socket.gethostname(),
        time.time(),
        **dict(found),
        unchecked={**unchecked, **late},
        faults=dict(faults),
        seconds=dict(seconds),
    )


def _join_gatherer(thread: threading.Thread, part: str, left_s: float) -> None:
    try:
        waits.join(
            thread, waits_for=part, why="facts about this host", timeout_s=max(left_s, 0.01), notice_after_s=None
        )
    except TimeoutError:
        return


HOST_SECTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "versions": ("Versions", ("versions",)),
    "gpus": ("GPUs", ("gpus",)),
    "links": ("Links between devices", ("topology", "pci", "rdma", "kernel")),
    "limits": ("Limits", ("limits", "disks", "clock")),
    "network": ("Network of this host", ("network", "names", "ports", "ray_token")),
}
"""By section of the report, its title and the parts of HostFacts that it judges."""

_PART_NAMES = {
    "versions": "versions", "limits": "limits", "disks": "disks", "clock": "the clock", "names": "name resolution",
    "network": "interfaces", "gpus": "GPUs", "topology": "how GPUs are connected", "pci": "the PCI bus",
    "rdma": "InfiniBand and RoCE", "kernel": "the kernel's log", "ports": "ports",
    "ray_token": "Ray's token",
}  # fmt: skip


def judge_host(facts: HostFacts, needs: HostRequirements) -> dict[str, list[Finding]]:
    """Judges the facts about a host; returns the findings by section."""
    findings = {
        "versions": list(_judge_versions(facts, needs)),
        "gpus": list(judge_gpus(facts, needs)),
        "links": list(_judge_links(facts)),
        "limits": list(_judge_limits(facts, needs)),
        "network": list(_judge_network(facts, needs)),
    }
    for section, (_, parts) in HOST_SECTIONS.items():
        for part in parts:
            why = facts.unchecked.get(part) or (facts.faults.get(part) if part != "gpus" else None)
            if why is not None:
                seen = f"{_PART_NAMES[part]} could not be checked: {why}"
                findings[section].append(Finding(part, "unchecked", facts.host, seen))
    return findings


def _judge_versions(facts: HostFacts, needs: HostRequirements) -> Iterator[Finding]:
    if facts.versions is not None:
        yield from version_rules.judge_versions(facts.host, facts.versions, facts.gpus, needs.packages)


def _judge_links(facts: HostFacts) -> Iterator[Finding]:
    gpus = gpu_count(facts)
    if facts.topology is not None:
        yield from judge_topology(facts.host, facts.topology)
    if facts.pci is not None:
        yield from judge_pci(facts.host, facts.pci, gpus)
    if facts.rdma is not None:
        yield from judge_rdma(facts.host, facts.rdma, gpus)
    if facts.kernel is not None:
        yield from judge_kernel_log(facts.host, facts.kernel)


def _judge_limits(facts: HostFacts, needs: HostRequirements) -> Iterator[Finding]:
    if facts.limits is not None:
        yield from judge_limits(
            facts.host, facts.limits, needs, bool(facts.rdma and facts.rdma.ports), gpu_count(facts)
        )
    for disk in facts.disks or ():
        yield from judge_disk(facts.host, disk)
    if facts.clock is not None:
        yield judge_clock(facts.host, facts.clock, needs.several)


def _judge_network(facts: HostFacts, needs: HostRequirements) -> Iterator[Finding]:
    if facts.network is not None:
        yield from judge_network(facts.host, facts.network, facts.names, needs)
    names_problem = facts.unchecked.get("names", "")
    if _TIMED_OUT in names_problem:
        why = "every connection of every rank waits as long; often the first DNS server does not answer"
        fix = "resolvectl status, cat /etc/resolv.conf; or write the hosts' names into /etc/hosts"
        seen = f"looking up the name of this host: {names_problem}"
        yield Finding("resolver", "warning", facts.host, seen, why, fix)
    if facts.names is not None:
        yield from judge_names(facts.host, facts.names, facts.network, needs)
    if facts.ports is not None:
        yield from judge_ports(facts.host, facts.ports)
    if facts.ray_token is not None:
        yield from judge_ray_token(facts.host, facts.ray_token, needs)
