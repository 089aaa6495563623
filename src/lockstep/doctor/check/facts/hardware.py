"""Gathers facts about the PCI bus and RDMA adapters from sysfs, and hardware events from the kernel log."""

import ipaddress
import re
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.doctor.check.facts.host_facts import KernelEvent, KernelLog, PciBus, PciDevice, RdmaAdapters, RdmaPort
from lockstep.doctor.check.facts.host_system import HostSystem, SourceUnavailable, list_folder, read_int, read_text

KERNEL_LOG_TIMEOUT_S = 2.0
MAX_KERNEL_LOG_LINES = 200_000
_KERNEL_EVENTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("xid", re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")),
    ("sxid", re.compile(r"nvidia-nvswitch\S*: SXid \((?:PCI:)?(?P<device>[0-9A-Fa-f:.]+)\): (?P<code>\d+)")),
    ("bus", re.compile(r"NVRM: GPU (?:at PCI:)?(?P<device>[0-9A-Fa-f:.]+): GPU has fallen off the bus")),
    ("driver", re.compile(r"NVRM: (?:API mismatch|RmInitAdapter failed|No NVIDIA GPU found)")),
    ("oom", re.compile(r"(?:Out of memory|Memory cgroup out of memory): Killed process \d+ \((?P<device>[^)]*)\)")),
    ("memory", re.compile(r"EDAC \S+: \d+ UE |mce: \[Hardware Error\].*Uncorrected|Memory failure: 0x")),
    ("pcie", re.compile(r"(?P<device>[0-9a-f]{4}:[0-9a-f:.]+): PCIe Bus Error: severity=Uncorrect")),
    ("nic", re.compile(r"mlx5_core (?P<device>[0-9a-f:.]+).*(?:health compromised|internal error|Link down)")),
    ("hung", re.compile(r"INFO: task (?P<device>\S+?):\d+ blocked for more than")),
)


def gather_kernel_log(system: HostSystem, bound_s: float = KERNEL_LOG_TIMEOUT_S) -> KernelLog:
    """Relevant events since boot, from `dmesg`, else from the journal.

    Raises:
        SourceUnavailable: neither of them is readable.
    """
    failures = []
    for command in (["dmesg"], ["journalctl", "--dmesg", "--boot", "--no-pager", "--quiet", "--output=short-iso"]):
        try:
            ran = system.run(command, bound_s)
        except (SourceUnavailable, TimeoutError) as error:
            failures.append(str(error))
            continue
        if ran.code == 0 and ran.out.strip():
            return KernelLog(list(kernel_events(ran.out.splitlines()[-MAX_KERNEL_LOG_LINES:])), command[0])
        failures.append(f"{command[0]}: {(ran.err or ran.out or 'no output').strip().splitlines()[0][:120]}")
    raise SourceUnavailable(f"{'; '.join(failures)} (readable as root, or with kernel.dmesg_restrict=0)")


def kernel_events(lines: Iterable[str]) -> Iterator[KernelEvent]:
    """The relevant events in these lines, one per kind and device, with their count and last line."""
    counts: Counter[tuple[str, int | None, str]] = Counter()
    last: dict[tuple[str, int | None, str], str] = {}
    for line in lines:
        for kind, pattern in _KERNEL_EVENTS:
            if (found := pattern.search(line)) is None:
                continue
            groups = found.groupdict()
            code = groups.get("code")
            key = kind, int(code) if code else None, groups.get("device") or ""
            counts[key] += 1
            last[key] = line[found.start() :].strip()[:300]
            break
    for (kind, number, device), count in counts.items():
        yield KernelEvent(kind, last[kind, number, device], number, device, count)


NVIDIA = 0x10DE
_DISPLAY, _NETWORK, _INFINIBAND, _BRIDGE = 0x03, 0x02, 0x0207, 0x0604
"""Class codes from the PCI Code and ID Assignment Specification."""
_ACS = 0x000D
"""Extended capability of access control services (PCI Express base specification, 7.7.8)."""
REDIRECT = 0x04 | 0x08
"""The bits P2P Request Redirect and P2P Completion Redirect of the ACS control register."""


def gather_pci(system: HostSystem) -> PciBus:
    """GPUs, fast network cards and the bridges above them.

    Raises:
        SourceUnavailable: sysfs has no PCI bus.
    """
    folder = system.sys / "bus/pci/devices"
    if not folder.is_dir():
        raise SourceUnavailable(f"there is no {folder}")
    found, redirecting, known = [], [], False
    for path in list_folder(folder):
        code = read_int(path / "class") or 0
        kind = pci_device_kind(code, read_int(path / "vendor") or 0)
        if kind is not None:
            found.append(_pci_device(path, kind))
        if code >> 8 == _BRIDGE:
            control = acs_control(_config_space(path))
            known = known or control is not None or len(_config_space(path)) > 256
            if control is not None and control & REDIRECT:
                redirecting.append(path.name)
    words = (read_text(system.proc / "cpuinfo") or "").split()
    iommu = bool(list_folder(system.sys / "class/iommu"))
    return PciBus(found, redirecting, known, iommu, "hypervisor" in words)


def pci_device_kind(code: int, vendor: int) -> str | None:
    """`gpu`, `nic` or None, according to class code and vendor."""
    if code >> 16 == _DISPLAY and vendor == NVIDIA:
        return "gpu"
    return "nic" if code >> 8 == _INFINIBAND or code >> 16 == _NETWORK else None


def _pci_device(path: Path, kind: str) -> PciDevice:
    above = path.resolve().parent
    slot = above if (above / "max_link_width").exists() else None
    numa = read_int(path / "numa_node")
    return PciDevice(
        bus=path.name,
        kind=kind,
        width=_link_width(path / "current_link_width"),
        width_max=_link_width(path / "max_link_width"),
        speed_gts=_link_speed(path / "current_link_speed"),
        speed_max_gts=_link_speed(path / "max_link_speed"),
        slot_width=_link_width(slot / "max_link_width") if slot is not None else None,
        slot_speed_gts=_link_speed(slot / "max_link_speed") if slot is not None else None,
        numa=None if numa is None or numa < 0 else numa,
        iommu=read_text(path / "iommu_group/type") or "",
    )


def _link_width(path: Path) -> int | None:
    """Lanes; 0 and 255 mean no link."""
    lanes = read_int(path)
    return lanes if lanes is not None and 0 < lanes < 255 else None


def _link_speed(path: Path) -> float | None:
    """Parses `16.0 GT/s PCIe`."""
    words = (read_text(path) or "").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def pci_generation(speed_gts: float | None) -> int | None:
    """PCIe generation of a speed: 16 GT/s is generation 4."""
    if speed_gts is None:
        return None
    return {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(speed_gts)


def _config_space(path: Path) -> bytes:
    """The configuration space of a device: 4096 bytes if read by root, else 64."""
    try:
        return (path / "config").read_bytes()
    except OSError:
        return b""


def acs_control(config: bytes) -> int | None:
    """The ACS control register; None if the device has none or the extended space is not readable."""
    for at, capability in _extended_capabilities(config):
        if capability == _ACS and at + 8 <= len(config):
            return int(struct.unpack_from("<H", config, at + 6)[0])
    return None


def _extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Offset and id of each extended capability; stops at a cycle."""
    at, seen = 0x100, set()
    while 0x100 <= at <= len(config) - 4 and at not in seen:
        seen.add(at)
        (head,) = struct.unpack_from("<I", config, at)
        if head in (0, 0xFFFFFFFF):
            return
        yield at, head & 0xFFFF
        at = head >> 20


PORT_COUNTERS = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "port_rcv_constraint_errors", "VL15_dropped",
)  # fmt: skip
"""Counters of a port's link, as named in the kernel's Documentation/ABI/stable/sysfs-class-infiniband."""
HARDWARE_COUNTERS = (
    "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "out_of_buffer", "implied_nak_seq_err",
    "req_cqe_error", "resp_cqe_error", "duplicate_request",
)  # fmt: skip
"""Transport counters of an mlx5 port."""


def gather_rdma(system: HostSystem) -> RdmaAdapters:
    """All ports of all InfiniBand and RoCE adapters, and how NCCL can use them."""
    ports = [
        _rdma_port(device.name, port)
        for device in list_folder(system.sys / "class/infiniband")
        for port in list_folder(device / "ports")
    ]
    modules = system.sys / "module"
    peer = (modules / "nvidia_peermem").is_dir() or (modules / "nv_peer_mem").is_dir()
    open_kind = "Open Kernel Module" in (read_text(system.proc / "driver/nvidia/version") or "")
    hca = system.environ.get("NCCL_IB_HCA", "")
    return RdmaAdapters(ports, peer, open_kind, bool(list_folder(system.dev / "infiniband")), hca)


def _rdma_port(device: str, folder: Path) -> RdmaPort:
    words = (read_text(folder / "rate") or "").split()
    rate = float(words[0]) if words and words[0].replace(".", "", 1).isdigit() else None
    layer = read_text(folder / "link_layer") or ""
    netdev = read_text(folder / "gid_attrs/ndevs/0") or ""
    errors = {name: count for name in PORT_COUNTERS if (count := read_int(folder / "counters" / name))}
    errors |= {name: count for name in HARDWARE_COUNTERS if (count := read_int(folder / "hw_counters" / name))}
    return RdmaPort(
        device,
        int(folder.name) if folder.name.isdigit() else 0,
        _sysfs_state(folder / "state"),
        _sysfs_state(folder / "phys_state"),
        layer,
        rate,
        errors,
        netdev,
        read_text(folder.parents[1] / "board_id") or "",
        _has_routable_gid(folder) if layer == "Ethernet" else None,
    )


def _sysfs_state(path: Path) -> str:
    """Parses `4: ACTIVE`."""
    return (read_text(path) or "").rpartition(":")[2].strip()


def _has_routable_gid(folder: Path) -> bool:
    """Whether there is a RoCE v2 GID that is not link-local: IPv4 as ::ffff:a.b.c.d, or a global IPv6 address."""
    for path in list_folder(folder / "gids"):
        if read_text(folder / "gid_attrs/types" / path.name) != "RoCE v2":
            continue
        try:
            gid = ipaddress.IPv6Address(read_text(path) or "::")
        except ValueError:
            continue
        if not gid.is_unspecified and not gid.is_link_local:
            return True
    return False
