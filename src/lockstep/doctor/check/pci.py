"""The PCI bus from sysfs: links of GPUs and network cards against their slots, access control, IOMMU."""

import struct
from collections.abc import Iterator
from pathlib import Path

from lockstep.doctor.check.facts import Pci, PciDevice
from lockstep.doctor.check.system import System, Unavailable, entries, number_of, text_of

NVIDIA = 0x10DE
_DISPLAY, _NETWORK, _INFINIBAND, _BRIDGE = 0x03, 0x02, 0x0207, 0x0604
"""Class codes of the PCI code and ID assignment specification."""
_ACS = 0x000D
"""Extended capability of access control services (PCI Express base specification, 7.7.8)."""
REDIRECT = 0x04 | 0x08
"""P2P Request Redirect and P2P Completion Redirect of the ACS control register."""


def gather_pci(system: System) -> Pci:
    """GPUs, fast network cards and the bridges above them.

    Raises:
        Unavailable: there is no PCI bus in sysfs.
    """
    folder = system.sys / "bus/pci/devices"
    if not folder.is_dir():
        raise Unavailable(f"there is no {folder}")
    found, redirecting, known = [], [], False
    for path in entries(folder):
        code = number_of(path / "class") or 0
        kind = kind_of(code, number_of(path / "vendor") or 0)
        if kind is not None:
            found.append(_device(path, kind))
        if code >> 8 == _BRIDGE:
            control = acs_control(_config(path))
            known = known or control is not None or len(_config(path)) > 256
            if control is not None and control & REDIRECT:
                redirecting.append(path.name)
    words = (text_of(system.proc / "cpuinfo") or "").split()
    iommu = bool(entries(system.sys / "class/iommu"))
    return Pci(found, redirecting, known, iommu, "hypervisor" in words)


def kind_of(code: int, vendor: int) -> str | None:
    """`gpu`, `nic` or None, of the class code and the vendor."""
    if code >> 16 == _DISPLAY and vendor == NVIDIA:
        return "gpu"
    return "nic" if code >> 8 == _INFINIBAND or code >> 16 == _NETWORK else None


def _device(path: Path, kind: str) -> PciDevice:
    above = path.resolve().parent
    slot = above if (above / "max_link_width").exists() else None
    numa = number_of(path / "numa_node")
    return PciDevice(
        bus=path.name,
        kind=kind,
        width=_width(path / "current_link_width"),
        width_max=_width(path / "max_link_width"),
        speed_gts=_speed(path / "current_link_speed"),
        speed_max_gts=_speed(path / "max_link_speed"),
        slot_width=_width(slot / "max_link_width") if slot is not None else None,
        slot_speed_gts=_speed(slot / "max_link_speed") if slot is not None else None,
        numa=None if numa is None or numa < 0 else numa,
        iommu=text_of(path / "iommu_group/type") or "",
    )


def _width(path: Path) -> int | None:
    """Lanes; 0 and 255 are written where there is no link."""
    lanes = number_of(path)
    return lanes if lanes is not None and 0 < lanes < 255 else None


def _speed(path: Path) -> float | None:
    """Of `16.0 GT/s PCIe`."""
    words = (text_of(path) or "").split()
    try:
        return float(words[0]) if words else None
    except ValueError:
        return None


def generation(speed_gts: float | None) -> int | None:
    """The PCIe generation of a speed: 16 GT/s are the fourth."""
    if speed_gts is None:
        return None
    return {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}.get(speed_gts)


def _config(path: Path) -> bytes:
    """The configuration space: 4096 bytes for root, 64 for others."""
    try:
        return (path / "config").read_bytes()
    except OSError:
        return b""


def acs_control(config: bytes) -> int | None:
    """The ACS control register; None where the device has none, or the extended part could not be read."""
    for at, capability in _extended(config):
        if capability == _ACS and at + 8 <= len(config):
            return int(struct.unpack_from("<H", config, at + 6)[0])
    return None


def _extended(config: bytes) -> Iterator[tuple[int, int]]:
    """Offset and id of each extended capability; a chain that goes in circles ends."""
    at, seen = 0x100, set()
    while 0x100 <= at <= len(config) - 4 and at not in seen:
        seen.add(at)
        (head,) = struct.unpack_from("<I", config, at)
        if head in (0, 0xFFFFFFFF):
            return
        yield at, head & 0xFFFF
        at = head >> 20
