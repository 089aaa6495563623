"""Judges how the devices of one host are connected: topology, PCI bus, InfiniBand, kernel log. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from lockstep.base.text import summarize_list
from lockstep.doctor.check.facts.hardware import pci_generation
from lockstep.doctor.check.facts.host_facts import (
    GpuTopology,
    HostFacts,
    KernelEvent,
    KernelLog,
    PciBus,
    PciDevice,
    RdmaAdapters,
    RdmaPort,
)
from lockstep.doctor.output.findings import SEVERITIES, Finding, Severity

ACS_SOURCE = (
    "https://docs.nvidia.com/deeplearning/nccl/archives/nccl_2262/user-guide/docs/troubleshooting.html"
    "#pci-access-control-services-acs"
)
GDR_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/archives/nccl_2262/user-guide/docs/troubleshooting.html"
HCA_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-ib-hca"
TOPO_SOURCE = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"

PATHS: Mapping[str, str] = {
    "NV": "over NVLink",
    "PIX": "over one PCIe switch",
    "PXB": "over several PCIe switches, without the CPU",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "through the CPU, between its host bridges",
    "SYS": "through the link between CPU sockets",
    "SOC": "through the link between CPU sockets",
    "?": "in a way that is not known",
}
"""What the words of `nvidia-smi topo -m` mean, best first."""
_PATHS_BEST_FIRST = list(PATHS)
_MAX_FINDINGS = 8
"""Events of one kind that are told one by one."""
_MAX_MATRIX = 20
"""Devices of a matrix that fits a terminal."""


def judge_topology(host: str, topology: GpuTopology) -> Iterator[Finding]:
    """How GPUs reach each other, and each its network card."""
    gpus = [at for at, name in enumerate(topology.names) if name.startswith("GPU")]
    nics = [at for at in range(len(topology.names)) if at not in gpus]
    pairs = {(a, b): _kind(topology.paths[a][b]) for a in gpus for b in gpus if a < b}
    if pairs:
        counts = Counter(pairs.values())
        parts = [
            f"{count} {'pairs' if count > 1 else 'pair'} {PATHS[kind]} ({kind})" for kind, count in _best_first(counts)
        ]
        worst = max(pairs, key=lambda pair: _PATHS_BEST_FIRST.index(pairs[pair]))
        said = f"GPUs reach each other: {'; '.join(parts)}"
        if len(counts) > 1:
            said += f"; the slowest is {topology.names[worst[0]]} with {topology.names[worst[1]]}"
        if len(topology.names) <= _MAX_MATRIX:
            said += f"\n{topology_matrix(topology)}"
        why = ""
        if "NV" in counts and len(counts) > 1:
            why = "a ring goes at the pace of its slowest pair: keep tensor parallelism within those that share NVLink"
        yield Finding("topology", "note" if why else "ok", host, said, why, source=TOPO_SOURCE)
    for at in gpus if nics else ():
        best = min(nics, key=lambda nic: _PATHS_BEST_FIRST.index(_kind(topology.paths[at][nic])))
        kind, nic = _kind(topology.paths[at][best]), topology.names[best]
        if kind in ("SYS", "SOC", "NODE", "PHB"):
            card = topology.nics.get(nic, nic)
            said = f"{topology.names[at]} reaches its nearest network card, {card}, {PATHS[kind]} ({kind})"
            why = "GPUDirect RDMA is not used or slow that far: data goes by way of the host's memory"
            yield Finding("gpu-nic", "note", host, said, why, source=TOPO_SOURCE)


def topology_matrix(topology: GpuTopology) -> str:
    """As `nvidia-smi topo -m` prints it, cards by the names of their devices."""
    names = [topology.nics.get(name, name) for name in topology.names]
    width = max(len(word) for word in (*names, *(path for row in topology.paths for path in row)))
    rows = [["", *names], *([name, *row] for name, row in zip(names, topology.paths, strict=True))]
    return "\n".join("  ".join(word.ljust(width) for word in row).rstrip() for row in rows)


def _kind(path: str) -> str:
    return "NV" if path.startswith("NV") else path if path in PATHS else "?"


def _best_first(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda each: _PATHS_BEST_FIRST.index(each[0]))


def judge_pci(host: str, pci: PciBus, gpus: int) -> Iterator[Finding]:
    """Links against slots, access control, IOMMU.

    Args:
        gpus: how many the host has.
    """
    for device in pci.devices:
        yield from _device(host, device)
    cards = [device for device in pci.devices if device.kind == "gpu"]
    if gpus < 2 and len(cards) < 2:
        return
    if pci.redirecting:
        few = summarize_list(pci.redirecting, 4)
        said = f"access control (ACS) sends traffic between PCIe devices up to the CPU, at {few}"
        why = "GPUs talk to each other slowly or not at all: the first collective hangs with all GPUs at 100%"
        fix = "switch ACS off in the BIOS, or at each start setpci -s BRIDGE ECAP_ACS+0x6.w=0000"
        severity: Severity = "note" if pci.virtual else "warning"
        yield Finding("acs", severity, host, said, why, fix, ACS_SOURCE)
    elif pci.acs_known:
        yield Finding("acs", "ok", host, "no PCIe bridge redirects traffic between devices (ACS)")
    else:
        said = "whether PCIe bridges redirect traffic between GPUs (ACS) is for root to read"
        yield Finding("acs", "unchecked", host, said, fix="sudo lspci -vvv | grep ACSCtl", source=ACS_SOURCE)
    translated = [card.bus for card in cards if card.iommu.startswith("DMA")]
    if translated and not pci.virtual:
        said = f"the IOMMU translates addresses of {len(translated)} GPUs ({', '.join(translated[:4])})"
        why = "traffic between GPUs goes up to the CPU, and on some boards hangs or comes out wrong"
        fix = "boot with iommu=pt, or switch the IOMMU off in the BIOS (NCCL_P2P_DISABLE=1 to go on)"
        yield Finding("iommu", "warning", host, said, why, fix, ACS_SOURCE)


def _device(host: str, device: PciDevice) -> Iterator[Finding]:
    what = f"{'GPU' if device.kind == 'gpu' else 'network card'} {device.bus}"
    most = min(device.width_max or 0, device.slot_width or device.width_max or 0)
    fix = "reseat the card or its riser; look into the BIOS"
    if device.width and most and device.width < most:
        said = f"{what} runs with {device.width} PCIe lanes; it and its slot can do {most}"
        yield Finding("pcie-width", "warning", host, said, "it moves less data by as much", fix)
    if device.slot_width and device.width_max and device.slot_width < device.width_max:
        said = f"{what} could use {device.width_max} PCIe lanes, and its slot has {device.slot_width}"
        yield Finding("pcie-slot", "note", host, said, "another slot may have more")
    # The speed of an idle GPU's link says nothing: it goes down to save power. A network card's does not.
    top = min(device.speed_max_gts or 0, device.slot_speed_gts or device.speed_max_gts or 0)
    if device.kind == "nic" and device.speed_gts and device.speed_gts < top:
        said = (
            f"{what} runs at PCIe generation {pci_generation(device.speed_gts) or device.speed_gts}; "
            f"it and its slot can do {pci_generation(top) or top}"
        )
        yield Finding("pcie-speed", "warning", host, said, "it moves half as much for each generation", fix)


def judge_rdma(host: str, rdma: RdmaAdapters, gpus: int) -> Iterator[Finding]:
    """Ports, their errors, and whether GPUs can be reached directly."""
    if not rdma.ports:
        yield Finding("rdma", "ok", host, "no InfiniBand or RoCE adapter; NCCL uses TCP between hosts")
        return
    taken = [port for port in rdma.ports if hca_matches(rdma.hca, port)]
    active = [port for port in taken if port.state == "ACTIVE"]
    main = Counter(port.board for port in active).most_common(1)[0][0] if active else ""
    for port in taken:
        yield from _port(host, port, bool(active), bool(rdma.hca) or not active or port.board == main)
    if not taken:
        names = ", ".join(dict.fromkeys(port.device for port in rdma.ports))
        said = f"NCCL_IB_HCA={rdma.hca} means none of this host's adapters ({names})"
        yield Finding("rdma", "warning", host, said, "NCCL falls back to TCP", "name one, or unset it", HCA_SOURCE)
    if active:
        said = f"{len(active)} of {len(rdma.ports)} ports are active: " + ", ".join(
            f"{port.device} {port.rate_gbps or 0:g} Gb/s {port.layer}" for port in active[:8]
        )
        yield Finding("rdma", "ok", host, said)
        yield from _rates(host, active)
    if not rdma.device_files:
        said = "there are adapters and no /dev/infiniband"
        why = "programs in this container cannot use them, and NCCL falls back to TCP"
        fix = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
        yield Finding("rdma-devices", "error", host, said, why, fix)
    if gpus:
        yield _gpudirect(host, rdma)


def _rates(host: str, active: Sequence[RdmaPort]) -> Iterator[Finding]:
    """Cards of one kind should have come up alike; another kind is often for storage."""
    why = "NCCL uses them side by side, at the pace of the slowest"
    boards = {port.board: [each for each in active if each.board == port.board] for port in active}
    for ports in boards.values():
        if len({port.rate_gbps for port in ports}) > 1:
            said = "active ports of the same kind of card have different rates: " + _ports_by_rate(ports)
            fix = "ibstat; reseat the cable of the slower one"
            yield Finding("rdma-rate", "warning", host, said, f"{why}; a cable or port may have come up slower", fix)
            return
    if len({port.rate_gbps for port in active}) > 1:
        said = f"active ports have different rates: {_ports_by_rate(active)}"
        fast = max(port.rate_gbps or 0 for port in active)
        names = ",".join(port.device for port in active if port.rate_gbps == fast)
        fix = f"export NCCL_IB_HCA=={names} where the others are for storage"
        yield Finding("rdma-rate", "note", host, said, why, fix, HCA_SOURCE)


def _ports_by_rate(ports: Sequence[RdmaPort]) -> str:
    return ", ".join(f"{port.device} {port.rate_gbps or 0:g} Gb/s" for port in ports)


def hca_matches(wanted: str, port: RdmaPort) -> bool:
    """Whether `NCCL_IB_HCA` means a port: beginnings of names by commas, each with `:PORT` or without; `=` in front
    makes them whole names, `^` those not to take."""
    rest = wanted.removeprefix("^")
    exact = rest.startswith("=")
    listed = [part.partition(":") for part in rest.removeprefix("=").split(",") if part]
    named = any(
        (port.device == name if exact else port.device.startswith(name)) and (not number or number == str(port.port))
        for name, _, number in listed
    )
    return not listed or named is not wanted.startswith("^")


def _gpudirect(host: str, rdma: RdmaAdapters) -> Finding:
    if rdma.peer_memory:
        return Finding("gpudirect", "ok", host, "network cards reach GPU memory directly (nvidia_peermem is loaded)")
    if rdma.open_driver:
        said = "nvidia_peermem is not loaded; the open driver lets network cards reach GPU memory by dma-buf"
        return Finding("gpudirect", "ok", host, said)
    why = "data between hosts goes by way of host memory, at a fraction of the speed"
    return Finding(
        "gpudirect", "warning", host, "nvidia_peermem is not loaded", why, "modprobe nvidia-peermem", GDR_SOURCE
    )


def _port(host: str, port: RdmaPort, others: bool, used: bool) -> Iterator[Finding]:
    """One port.

    Args:
        others: another one is active.
        used: it is of the kind of card that most active ones are of, or asked for by name.
    """
    who = f"{port.device} port {port.port}"
    wrong: Severity = "warning" if used else "note"
    if port.state == "INIT":
        why = "a cable is in, but no subnet manager has set the port up"
        yield Finding(
            "rdma-port", wrong if others else "error", host, f"{who} is INIT", why,
            "start opensm, or see to the switch's subnet manager",
        )  # fmt: skip
    elif port.state == "DOWN" and port.physical != "Disabled":
        said = f"{who} is down ({port.physical or 'no link'})"
        why = "where other hosts use this rail, they wait for it" if others else "no adapter of this host is connected"
        yield Finding(
            "rdma-port", wrong if others else "error", host, said, why,
            f"look at the cable and the switch; NCCL_IB_HCA=^{port.device} to go on",
        )  # fmt: skip
    if port.errors:
        said = f"{who} counts " + ", ".join(f"{name} {count}" for name, count in port.errors.items())
        why = "packets were lost or sent again since the counters were cleared: a cable, a connector or a full switch"
        yield Finding(
            "rdma-errors", wrong, host, said, why,
            f"perfquery -x; cat /sys/class/infiniband/{port.device}/ports/{port.port}/counters/*",
        )  # fmt: skip
    if port.routable_gid is False and port.state == "ACTIVE":
        said = f"{who} ({port.netdev or port.layer}) has no RoCE v2 address that is routed"
        why = "NCCL takes a link-local GID, and queue pairs time out between hosts"
        fix = f"give {port.netdev or 'its interface'} an IP address, or set NCCL_IB_GID_INDEX to one of show_gids"
        yield Finding("rdma-gid", wrong, host, said, why, fix)


def judge_kernel_log(host: str, kernel: KernelLog) -> Iterator[Finding]:
    """Faults that the kernel has told since the host started."""
    kinds = Counter(event.kind for event in kernel.events)
    for kind, count in kinds.items():
        said = [_event(host, event) for event in kernel.events if event.kind == kind]
        said.sort(key=lambda each: SEVERITIES.index(each.severity))
        yield from said[:_MAX_FINDINGS]
        if count > _MAX_FINDINGS:
            more = f"{count - _MAX_FINDINGS} more of this kind ({kind}) are in the kernel's log"
            yield Finding(f"kernel-{kind}", "note", host, more, "", kernel.said_by)
    if not kernel.events:
        yield Finding(
            "kernel-log",
            "ok",
            host,
            f"the kernel's log ({kernel.said_by}) tells of no fault of GPUs, memory or PCI bus",
        )


@cache
def xid_table() -> dict[str, Any]:
    """The table of Xid errors."""
    text = resources.files(__package__).joinpath("xids.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def _event(host: str, event: KernelEvent) -> Finding:
    times = f" ({event.count} times)" if event.count > 1 else ""
    if event.kind == "xid" and event.code is not None:
        return _xid(host, event, event.code, times)
    severity, why, fix = _EVENT_FINDINGS[event.kind]
    return Finding(f"kernel-{event.kind}", severity, host, f"{event.text}{times}", why, fix)


def _xid(host: str, event: KernelEvent, code: int, times: str) -> Finding:
    table = xid_table()
    said, source = f"{event.text}{times}", str(table["source"])
    group = next((each for each in table["groups"].values() if code in each["codes"]), None)
    if group is None:
        return Finding("xid", "note", host, said, f"Xid {code}: see the catalogue", "", source)
    severity: Severity = group["severity"]
    if "fatal" in group and re.search(r"\bFatal\b", event.text):
        severity = group["fatal"]
    if "without" in group and re.search(r"\(None\)\s*$|to 0x0\b", event.text):
        severity = group["without"]
    device = event.device if "." in event.device else f"{event.device}.0"
    fix = str(group["fix"]).format(device=device) if severity != "note" else ""
    return Finding("xid", severity, host, said, f"Xid {code}: {group['codes'][code]}", fix, source)


_EVENT_FINDINGS: Mapping[str, tuple[Severity, str, str]] = {
    "sxid": ("warning", "a fault of NVSwitch or of its links", "nvidia-smi nvlink -e; restart nvidia-fabricmanager"),
    "bus": ("error", "the GPU is gone until the host restarts", "restart the host; look at power and risers"),
    "driver": ("error", "driver and libraries do not fit, or a GPU does not start", "restart the host"),
    "oom": (
        "note",
        "memory of the host or control group was short, and a process was killed",
        "free -g; fewer workers",
    ),
    "memory": ("error", "a memory module or a CPU is broken", "have it replaced; ras-mc-ctl --errors"),
    "pcie": ("error", "a PCIe device or slot has lost data", "reseat the card or its riser"),
    "nic": ("warning", "a network card has lost its link or its health", "ethtool; mlxlink"),
    "hung": (
        "warning",
        "a task waited for more than two minutes in the kernel: a disk, NFS or the driver",
        "cat /proc/PID/stack",
    ),
}


def gpu_count(facts: HostFacts) -> int:
    """As far as is known."""
    cards = sum(device.kind == "gpu" for device in facts.pci.devices) if facts.pci is not None else 0
    return max(len(facts.gpus or ()), cards)
