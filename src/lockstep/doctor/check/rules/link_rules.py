"""Judges how the devices of one host are connected: topology, PCI bus, InfiniBand, kernel log. Pure."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from lockstep.base.text import count_noun, summarize_list
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
    "?": "over an unknown path",
}
"""The path types of `nvidia-smi topo -m`, fastest first, in words."""
_PATHS_BEST_FIRST = list(PATHS)
_MAX_FINDINGS = 8
"""Maximum number of events of one kind that are reported individually."""
_MAX_MATRIX = 20
"""Maximum number of devices of which the matrix is shown, so that it fits a terminal."""


def judge_topology(host: str, topology: GpuTopology) -> Iterator[Finding]:
    """Judges the paths between GPUs, and from each GPU to its nearest network card."""
    gpus = [at for at, name in enumerate(topology.names) if name.startswith("GPU")]
    nics = [at for at in range(len(topology.names)) if at not in gpus]
    pairs = {(a, b): _kind(topology.paths[a][b]) for a in gpus for b in gpus if a < b}
    if pairs:
        counts = Counter(pairs.values())
        parts = [
            f"{count} {'pairs' if count > 1 else 'pair'} {PATHS[kind]} ({kind})" for kind, count in _best_first(counts)
        ]
        worst = max(pairs, key=lambda pair: _PATHS_BEST_FIRST.index(pairs[pair]))
        seen = f"paths between GPUs: {'; '.join(parts)}"
        if len(counts) > 1:
            seen += f"; the slowest is {topology.names[worst[0]]} with {topology.names[worst[1]]}"
        if len(topology.names) <= _MAX_MATRIX:
            seen += f"\n{topology_matrix(topology)}"
        why = ""
        if "NV" in counts and len(counts) > 1:
            why = "a ring is as slow as its slowest pair: keep tensor parallelism among GPUs that share NVLink"
        yield Finding("topology", "note" if why else "ok", host, seen, why, source=TOPO_SOURCE)
    for at in gpus if nics else ():
        best = min(nics, key=lambda nic: _PATHS_BEST_FIRST.index(_kind(topology.paths[at][nic])))
        kind, nic = _kind(topology.paths[at][best]), topology.names[best]
        if kind in ("SYS", "SOC", "NODE", "PHB"):
            card = topology.nics.get(nic, nic)
            seen = f"{topology.names[at]} reaches its nearest network card, {card}, {PATHS[kind]} ({kind})"
            why = "GPUDirect RDMA is slow or not used over that path: data takes a detour through host memory"
            yield Finding("gpu-nic", "note", host, seen, why, source=TOPO_SOURCE)


def topology_matrix(topology: GpuTopology) -> str:
    """Formats the matrix of `nvidia-smi topo -m`, with the device names of the network cards."""
    names = [topology.nics.get(name, name) for name in topology.names]
    width = max(len(word) for word in (*names, *(path for row in topology.paths for path in row)))
    rows = [["", *names], *([name, *row] for name, row in zip(names, topology.paths, strict=True))]
    return "\n".join("  ".join(word.ljust(width) for word in row).rstrip() for row in rows)


def _kind(path: str) -> str:
    return "NV" if path.startswith("NV") else path if path in PATHS else "?"


def _best_first(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda each: _PATHS_BEST_FIRST.index(each[0]))


def judge_pci(host: str, pci: PciBus, gpus: int) -> Iterator[Finding]:
    """Judges link widths and speeds, access control (ACS) and the IOMMU.

    Args:
        gpus: number of GPUs of the host.
    """
    for device in pci.devices:
        yield from _judge_pci_device(host, device)
    cards = [device for device in pci.devices if device.kind == "gpu"]
    if gpus < 2 and len(cards) < 2:
        return
    if pci.redirecting:
        few = summarize_list(pci.redirecting, 4)
        seen = f"access control (ACS) redirects traffic between PCIe devices to the CPU, at {few}"
        why = "traffic between GPUs is slow or blocked: the first collective hangs with all GPUs at 100%"
        fix = "disable ACS in the BIOS, or after each boot: setpci -s BRIDGE ECAP_ACS+0x6.w=0000"
        severity: Severity = "note" if pci.virtual else "warning"
        yield Finding("acs", severity, host, seen, why, fix, ACS_SOURCE)
    elif pci.acs_known:
        yield Finding("acs", "ok", host, "no PCIe bridge redirects traffic between devices (ACS)")
    else:
        seen = "only root can read whether PCIe bridges redirect traffic between GPUs (ACS)"
        yield Finding("acs", "unchecked", host, seen, fix="sudo lspci -vvv | grep ACSCtl", source=ACS_SOURCE)
    translated = [card.bus for card in cards if card.iommu.startswith("DMA")]
    if translated and not pci.virtual:
        seen = f"the IOMMU translates addresses of {len(translated)} GPUs ({', '.join(translated[:4])})"
        why = "traffic between GPUs passes through the CPU, and on some boards hangs or is corrupted"
        fix = "boot with iommu=pt, or disable the IOMMU in the BIOS (workaround: NCCL_P2P_DISABLE=1)"
        yield Finding("iommu", "warning", host, seen, why, fix, ACS_SOURCE)


def _judge_pci_device(host: str, device: PciDevice) -> Iterator[Finding]:
    what = f"{'GPU' if device.kind == 'gpu' else 'network card'} {device.bus}"
    most = min(device.width_max or 0, device.slot_width or device.width_max or 0)
    fix = "reseat the card or its riser; check the BIOS settings"
    if device.width and most and device.width < most:
        seen = f"{what} runs with {device.width} PCIe lanes; it and its slot support {most}"
        yield Finding("pcie-width", "warning", host, seen, "its bandwidth is reduced proportionally", fix)
    if device.slot_width and device.width_max and device.slot_width < device.width_max:
        seen = f"{what} supports {device.width_max} PCIe lanes, but its slot has {device.slot_width}"
        yield Finding("pcie-slot", "note", host, seen, "another slot may have more lanes")
    # An idle GPU slows its link down to save power, so only the speed of a network card's link is meaningful.
    top = min(device.speed_max_gts or 0, device.slot_speed_gts or device.speed_max_gts or 0)
    if device.kind == "nic" and device.speed_gts and device.speed_gts < top:
        seen = (
            f"{what} runs at PCIe generation {pci_generation(device.speed_gts) or device.speed_gts}; "
            f"it and its slot support {pci_generation(top) or top}"
        )
        yield Finding("pcie-speed", "warning", host, seen, "each lower generation halves its bandwidth", fix)


def judge_rdma(host: str, rdma: RdmaAdapters, gpus: int) -> Iterator[Finding]:
    """Judges ports, their error counters, and GPUDirect RDMA."""
    if not rdma.ports:
        yield Finding("rdma", "ok", host, "no InfiniBand or RoCE adapter; NCCL uses TCP between hosts")
        return
    selected = [port for port in rdma.ports if hca_matches(rdma.hca, port)]
    active = [port for port in selected if port.state == "ACTIVE"]
    main = Counter(port.board for port in active).most_common(1)[0][0] if active else ""
    for port in selected:
        yield from _judge_port(host, port, bool(active), bool(rdma.hca) or not active or port.board == main)
    if not selected:
        names = ", ".join(dict.fromkeys(port.device for port in rdma.ports))
        seen = f"NCCL_IB_HCA={rdma.hca} matches none of this host's adapters ({names})"
        yield Finding("rdma", "warning", host, seen, "NCCL falls back to TCP", "list one, or unset it", HCA_SOURCE)
    if active:
        seen = f"{len(active)} of {len(rdma.ports)} ports are active: " + ", ".join(
            f"{port.device} {port.rate_gbps or 0:g} Gb/s {port.layer}" for port in active[:8]
        )
        yield Finding("rdma", "ok", host, seen)
        yield from _judge_rates(host, active)
    if not rdma.device_files:
        seen = "the host has adapters, but /dev/infiniband is missing"
        why = "programs in this container cannot use them, and NCCL falls back to TCP"
        fix = "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1"
        yield Finding("rdma-devices", "error", host, seen, why, fix)
    if gpus:
        yield _gpudirect_finding(host, rdma)


def _judge_rates(host: str, active: Sequence[RdmaPort]) -> Iterator[Finding]:
    """Reports different rates of active ports.

    Between ports of the same card model that is a fault; cards of another model are often for storage.
    """
    why = "NCCL uses them in parallel, at the rate of the slowest"
    boards = {port.board: [each for each in active if each.board == port.board] for port in active}
    for ports in boards.values():
        if len({port.rate_gbps for port in ports}) > 1:
            seen = "active ports of the same card model have different rates: " + _ports_by_rate(ports)
            fix = "ibstat; reseat the cable of the slower one"
            yield Finding("rdma-rate", "warning", host, seen, f"{why}; a cable or port may have negotiated less", fix)
            return
    if len({port.rate_gbps for port in active}) > 1:
        seen = f"active ports have different rates: {_ports_by_rate(active)}"
        fast = max(port.rate_gbps or 0 for port in active)
        names = ",".join(port.device for port in active if port.rate_gbps == fast)
        fix = f"export NCCL_IB_HCA=={names} if the others are for storage"
        yield Finding("rdma-rate", "note", host, seen, why, fix, HCA_SOURCE)


def _ports_by_rate(ports: Sequence[RdmaPort]) -> str:
    return ", ".join(f"{port.device} {port.rate_gbps or 0:g} Gb/s" for port in ports)


def hca_matches(wanted: str, port: RdmaPort) -> bool:
    """Whether a value of `NCCL_IB_HCA` selects a port.

    The value is a comma-separated list of name prefixes, each optionally with `:PORT`; with a leading `=` names must
    match exactly, and with a leading `^` the listed ports are excluded.
    """
    rest = wanted.removeprefix("^")
    exact = rest.startswith("=")
    listed = [part.partition(":") for part in rest.removeprefix("=").split(",") if part]
    named = any(
        (port.device == name if exact else port.device.startswith(name)) and (not number or number == str(port.port))
        for name, _, number in listed
    )
    return not listed or named is not wanted.startswith("^")


def _gpudirect_finding(host: str, rdma: RdmaAdapters) -> Finding:
    if rdma.peer_memory:
        return Finding("gpudirect", "ok", host, "network cards access GPU memory directly (nvidia_peermem is loaded)")
    if rdma.open_driver:
        seen = "nvidia_peermem is not loaded; with the open driver, network cards access GPU memory by dma-buf"
        return Finding("gpudirect", "ok", host, seen)
    why = "data between hosts passes through host memory, at a fraction of the speed"
    return Finding(
        "gpudirect", "warning", host, "nvidia_peermem is not loaded", why, "modprobe nvidia-peermem", GDR_SOURCE
    )


def _judge_port(host: str, port: RdmaPort, others_active: bool, in_main_use: bool) -> Iterator[Finding]:
    """Judges one port.

    Args:
        others_active: whether another port is active.
        in_main_use: whether the port is selected by name, or its card is of the same model as most active ones.
    """
    label = f"{port.device} port {port.port}"
    wrong: Severity = "warning" if in_main_use else "note"
    if port.state == "INIT":
        why = "a cable is connected, but no subnet manager has configured the port"
        yield Finding(
            "rdma-port", wrong if others_active else "error", host, f"{label} is INIT", why,
            "start opensm, or check the switch's subnet manager",
        )  # fmt: skip
    elif port.state == "DOWN" and port.physical != "Disabled":
        seen = f"{label} is down ({port.physical or 'no link'})"
        why = (
            "if other hosts use this rail, they wait for it"
            if others_active
            else "no adapter of this host is connected"
        )
        yield Finding(
            "rdma-port", wrong if others_active else "error", host, seen, why,
            f"check the cable and the switch; workaround: NCCL_IB_HCA=^{port.device}",
        )  # fmt: skip
    if port.errors:
        seen = f"{label} has error counts: " + ", ".join(f"{name} {count}" for name, count in port.errors.items())
        why = "packets were lost or resent since the counters were cleared: check cable, connectors and switch load"
        yield Finding(
            "rdma-errors", wrong, host, seen, why,
            f"perfquery -x; cat /sys/class/infiniband/{port.device}/ports/{port.port}/counters/*",
        )  # fmt: skip
    if port.routable_gid is False and port.state == "ACTIVE":
        seen = f"{label} ({port.netdev or port.layer}) has no routable RoCE v2 address"
        why = "NCCL picks a link-local GID, and queue pairs between hosts time out"
        fix = f"give {port.netdev or 'its interface'} an IP address, or set NCCL_IB_GID_INDEX to one of show_gids"
        yield Finding("rdma-gid", wrong, host, seen, why, fix)


def judge_kernel_log(host: str, kernel: KernelLog) -> Iterator[Finding]:
    """Judges faults in the kernel log since boot."""
    kinds = Counter(event.kind for event in kernel.events)
    for kind, count in kinds.items():
        seen = [_event_finding(host, event) for event in kernel.events if event.kind == kind]
        seen.sort(key=lambda each: SEVERITIES.index(each.severity))
        yield from seen[:_MAX_FINDINGS]
        if count > _MAX_FINDINGS:
            more = f"the kernel log has {count_noun(count - _MAX_FINDINGS, 'more event')} of this kind ({kind})"
            yield Finding(f"kernel-{kind}", "note", host, more, "", kernel.said_by)
    if not kernel.events:
        yield Finding(
            "kernel-log",
            "ok",
            host,
            f"the kernel log ({kernel.said_by}) reports no fault of GPUs, memory or PCI bus",
        )


@cache
def xid_table() -> dict[str, Any]:
    """The table of Xid errors, from xids.yaml."""
    text = resources.files(__package__).joinpath("xids.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def _event_finding(host: str, event: KernelEvent) -> Finding:
    times = f" ({event.count} times)" if event.count > 1 else ""
    if event.kind == "xid" and event.code is not None:
        return _xid_finding(host, event, event.code, times)
    severity, why, fix = _EVENT_FINDINGS[event.kind]
    return Finding(f"kernel-{event.kind}", severity, host, f"{event.text}{times}", why, fix)


def _xid_finding(host: str, event: KernelEvent, code: int, times: str) -> Finding:
    table = xid_table()
    seen, source = f"{event.text}{times}", str(table["source"])
    group = next((each for each in table["groups"].values() if code in each["codes"]), None)
    if group is None:
        return Finding("xid", "note", host, seen, f"Xid {code}: see the catalogue", "", source)
    severity: Severity = group["severity"]
    if "fatal" in group and re.search(r"\bFatal\b", event.text):
        severity = group["fatal"]
    if "without" in group and re.search(r"\(None\)\s*$|to 0x0\b", event.text):
        severity = group["without"]
    device = event.device if "." in event.device else f"{event.device}.0"
    fix = str(group["fix"]).format(device=device) if severity != "note" else ""
    return Finding("xid", severity, host, seen, f"Xid {code}: {group['codes'][code]}", fix, source)


_EVENT_FINDINGS: Mapping[str, tuple[Severity, str, str]] = {
    "sxid": ("warning", "a fault of NVSwitch or its links", "nvidia-smi nvlink -e; restart nvidia-fabricmanager"),
    "bus": ("error", "the GPU is unusable until the host reboots", "reboot the host; check power and risers"),
    "driver": ("error", "driver and libraries do not match, or a GPU does not start", "reboot the host"),
    "oom": (
        "note",
        "the host or control group ran out of memory, and a process was killed",
        "free -g; use fewer workers",
    ),
    "memory": ("error", "a memory module or a CPU is defective", "replace it; ras-mc-ctl --errors"),
    "pcie": ("error", "a PCIe device or slot lost data", "reseat the card or its riser"),
    "nic": ("warning", "a network card lost its link or reported a failure", "ethtool; mlxlink"),
    "hung": (
        "warning",
        "a task was blocked in the kernel for more than two minutes: by a disk, NFS or the driver",
        "cat /proc/PID/stack",
    ),
}


def gpu_count(facts: HostFacts) -> int:
    """Number of GPUs of a host, according to the driver or the PCI bus."""
    cards = sum(device.kind == "gpu" for device in facts.pci.devices) if facts.pci is not None else 0
    return max(len(facts.gpus or ()), cards)
