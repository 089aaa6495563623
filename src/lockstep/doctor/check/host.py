"""Everything about one host: gathered side by side within a bound, judged by pure functions."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.doctor.check import disks, network, smi, versions
from lockstep.doctor.check.clock import gather_clock
from lockstep.doctor.check.facts import HostFacts
from lockstep.doctor.check.judge_gpus import judge_gpus
from lockstep.doctor.check.judge_limits import judge_clock, judge_disk, judge_limits
from lockstep.doctor.check.judge_links import gpu_count, judge_kernel, judge_pci, judge_rdma, judge_topology
from lockstep.doctor.check.judge_network import judge_names, judge_network
from lockstep.doctor.check.kernel_log import gather_kernel
from lockstep.doctor.check.limits import gather_limits
from lockstep.doctor.check.needs import Needs
from lockstep.doctor.check.pci import gather_pci
from lockstep.doctor.check.ports import gather_ports, judge_ports
from lockstep.doctor.check.ray_token import gather_ray_token, judge_ray_token
from lockstep.doctor.check.rdma import gather_rdma
from lockstep.doctor.check.system import Fault, System
from lockstep.doctor.finding import Finding
from lockstep.watch import waits

HOST_S = 5.0
"""The whole look at a host."""
_LAST_S = 0.4
"""Of it, left for what comes after the looks."""

_LATE = "it did not answer within"

Look = Callable[[], Any]


def gather(system: System, needs: Needs, bound_s: float = HOST_S) -> HostFacts:
    """Looks at this host, all parts side by side; what does not answer in time is `unchecked`."""
    return run_looks(looks(system, needs, bound_s), bound_s)


def looks(system: System, needs: Needs, bound_s: float = HOST_S) -> dict[str, Look]:
    """By the part of HostFacts, how it is found out."""
    return {
        "versions": lambda: versions.gather_versions(system),
        "gpus": lambda: smi.gather_gpus(system, bound_s - 2 * _LAST_S),
        "topology": lambda: smi.gather_topology(system, bound_s - 2 * _LAST_S),
        "pci": lambda: gather_pci(system),
        "rdma": lambda: gather_rdma(system),
        "kernel": lambda: gather_kernel(system, bound_s / 3),
        "limits": lambda: gather_limits(system),
        "disks": lambda: [disks.gather_disk(system, Path(path), why) for path, why in needs.folders.items()],
        "clock": lambda: gather_clock(system, bound_s / 3),
        "names": lambda: network.gather_names(system, needs.names),
        "network": lambda: network.gather_network(system),
        "ports": lambda: gather_ports(system, needs.ports),
        "ray_token": lambda: gather_ray_token(system.environ),
    }


def run_looks(parts: Mapping[str, Look], bound_s: float) -> HostFacts:
    """Each in a thread of its own, which is left behind where it hangs."""
    found: dict[str, Any] = {}
    unchecked: dict[str, str] = {}
    faults: dict[str, str] = {}
    seconds: dict[str, float] = {}
    begun = time.monotonic()

    def look(part: str) -> None:
        start = time.monotonic()
        try:
            value = parts[part]()
        except Fault as error:
            faults[part] = str(error)
        except (OSError, ValueError, LookupError) as error:
            unchecked[part] = str(error) or type(error).__name__
        else:
            found[part] = value
        seconds[part] = round(time.monotonic() - start, 3)

    threads = {part: threading.Thread(target=look, args=(part,), name=f"check-{part}", daemon=True) for part in parts}
    for thread in threads.values():
        thread.start()
    until = begun + bound_s - _LAST_S
    for part, thread in threads.items():
        _join(thread, part, max(0.0, until - time.monotonic()))
    late = {part: f"{_LATE} {bound_s - _LAST_S:.1f} s" for part in parts if part not in seconds}
    return HostFacts(
        socket.gethostname(),
        time.time(),
        **dict(found),
        unchecked={**unchecked, **late},
        faults=dict(faults),
        seconds=dict(seconds),
    )


def _join(thread: threading.Thread, part: str, left_s: float) -> None:
    try:
        waits.join(thread, whom=part, why="a look at this host", timeout_s=max(left_s, 0.01), notice_after_s=None)
    except TimeoutError:
        return


RUNGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "versions": ("Versions", ("versions",)),
    "gpus": ("GPUs", ("gpus",)),
    "links": ("Links between devices", ("topology", "pci", "rdma", "kernel")),
    "limits": ("Limits", ("limits", "disks", "clock")),
    "network": ("Network of this host", ("network", "names", "ports", "ray_token")),
}
"""By rung, its title and the parts of the facts that it judges."""

_WORDS = {
    "versions": "versions", "limits": "limits", "disks": "disks", "clock": "the clock", "names": "name resolution",
    "network": "interfaces", "gpus": "GPUs", "topology": "how GPUs are connected", "pci": "the PCI bus",
    "rdma": "InfiniBand and RoCE", "kernel": "the kernel's log", "ports": "ports",
    "ray_token": "Ray's token",
}  # fmt: skip


def judge(facts: HostFacts, needs: Needs) -> dict[str, list[Finding]]:
    """By rung, what is said about a host."""
    said = {
        "versions": list(_versions(facts, needs)),
        "gpus": list(judge_gpus(facts, needs)),
        "links": list(_links(facts)),
        "limits": list(_limits(facts, needs)),
        "network": list(_network(facts, needs)),
    }
    for rung, (_, parts) in RUNGS.items():
        for part in parts:
            why = facts.unchecked.get(part) or (facts.faults.get(part) if part != "gpus" else None)
            if why is not None:
                seen = f"{_WORDS[part]} could not be checked: {why}"
                said[rung].append(Finding(part, "unchecked", facts.host, seen))
    return said


def _versions(facts: HostFacts, needs: Needs) -> Iterator[Finding]:
    if facts.versions is not None:
        yield from versions.judge_versions(facts.host, facts.versions, facts.gpus, needs.packages)


def _links(facts: HostFacts) -> Iterator[Finding]:
    gpus = gpu_count(facts)
    if facts.topology is not None:
        yield from judge_topology(facts.host, facts.topology)
    if facts.pci is not None:
        yield from judge_pci(facts.host, facts.pci, gpus)
    if facts.rdma is not None:
        yield from judge_rdma(facts.host, facts.rdma, gpus)
    if facts.kernel is not None:
        yield from judge_kernel(facts.host, facts.kernel)


def _limits(facts: HostFacts, needs: Needs) -> Iterator[Finding]:
    if facts.limits is not None:
        yield from judge_limits(
            facts.host, facts.limits, needs, bool(facts.rdma and facts.rdma.ports), gpu_count(facts)
        )
    for disk in facts.disks or ():
        yield from judge_disk(facts.host, disk)
    if facts.clock is not None:
        yield judge_clock(facts.host, facts.clock, needs.several)


def _network(facts: HostFacts, needs: Needs) -> Iterator[Finding]:
    if facts.network is not None:
        yield from judge_network(facts.host, facts.network, facts.names, needs)
    silent = facts.unchecked.get("names", "")
    if _LATE in silent:
        why = "every connection of every rank waits so long; often the first DNS server does not answer"
        fix = "resolvectl status, cat /etc/resolv.conf; or write the hosts' names into /etc/hosts"
        yield Finding("resolver", "warning", facts.host, f"looking up the own name: {silent}", why, fix)
    if facts.names is not None:
        yield from judge_names(facts.host, facts.names, facts.network, needs)
    if facts.ports is not None:
        yield from judge_ports(facts.host, facts.ports)
    if facts.ray_token is not None:
        yield from judge_ray_token(facts.host, facts.ray_token, needs)
