"""What the devices of a process say about it, for all detectors. `devices.device_history` says what counters prove."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.watch.devices.device_samples import DeviceFault, DeviceSample, HostDevices, device_label, device_summary
from lockstep.watch.devices.xid_errors import WHOLE_DEVICE_XIDS, xid_class

CERTAIN_SOURCES = ("driver", "file")
"""Sources of `DeviceUse` that show which device a process uses; the environment shows which it should use."""


@dataclass(frozen=True, slots=True)
class ProcessDevice:
    """A device that a process uses. Times are on the clock of the evidence, NaN if unknown."""

    sample: DeviceSample
    certain: bool = True
    """Whether the process is known to use the device, so that the device's movement is its own."""
    moved_at: float = math.nan
    """When the counters last proved that the process's kernels did more than wait."""
    idle_since: float = math.nan
    """Since when the process has run no kernel."""
    faults: tuple[tuple[float, DeviceFault], ...] = ()
    """Errors of the device, and when they were noticed."""
    shared: bool = False
    """Whether other processes use the device, too, or another part of it, so that an error may be theirs."""


def process_devices(report: HostDevices, first: int, at: float) -> dict[int, tuple[ProcessDevice, ...]]:
    """The devices of each process of a host's report, which arrived at `at`. `first` is the index of the host's first
    process."""
    found: dict[int, tuple[ProcessDevice, ...]] = {}
    for use in report.uses:
        state = report.devices[use.device]
        device = ProcessDevice(
            state.sample, use.source in CERTAIN_SOURCES, at - use.moved, at - use.idle,
            tuple((at - each.age, each) for each in state.faults), use.shared or bool(state.sample.parent),
        )  # fmt: skip
        found[first + use.process] = (*found.get(first + use.process, ()), device)
    return found


def last_moved_at(devices: Sequence[ProcessDevice]) -> float:
    """When a device last moved for the process; NaN if that is not known."""
    return float(np.fmax.reduce([math.nan, *(each.moved_at for each in devices if each.certain)]))


def idle_s(devices: Sequence[ProcessDevice], at: float) -> float:
    """For how many seconds all devices of the process have run no kernel of it; NaN unless this is known of all."""
    if not devices or not all(each.certain for each in devices):
        return math.nan
    return at - float(np.max([each.idle_since for each in devices]))


def device_texts(devices: Sequence[ProcessDevice], at: float) -> list[str]:
    """A line per device: `GPU 3: 100% busy, memory 0% busy, 118 of 700 W; runs a kernel that may only wait`."""
    found = []
    for each in devices:
        text = f"{device_label(each.sample)}: {device_summary(each.sample)}"
        state = _state_text(each, at)
        text += f"; {state}" if state else ""
        found.append(text + "".join(f"; {fault.text} {at - when:.0f} s ago" for when, fault in each.faults))
    return found


def throttled_text(devices: Sequence[ProcessDevice]) -> str:
    """`GPU 3 is throttled: sw_thermal_slowdown, 91 C, 1,200 of 1,980 MHz.`, empty if none is."""
    found = []
    for sample in (each.sample for each in devices if each.sample.throttled):
        text = f"{device_label(sample)} is throttled: {', '.join(sample.throttled or ())}"
        text += "" if sample.temperature_c is None else f", {sample.temperature_c} C"
        if sample.sm_mhz is not None and sample.sm_max_mhz is not None:
            text += f", {sample.sm_mhz:,} of {sample.sm_max_mhz:,} MHz"
        found.append(f"{text}.")
    return " ".join(found)


def fault_class(fault: DeviceFault) -> str:
    """The failure class that an error of a device proves; empty if it proves none: a driver that does not answer a
    question about one device may be held up by another."""
    if fault.kind == "xid":
        return xid_class(fault.code)
    return "gpu_hardware_fault" if fault.kind in ("lost", "ecc") else ""


def strikes(device: ProcessDevice, fault: DeviceFault) -> bool:
    """Whether an error of a device strikes all processes that use it, or there is only one."""
    return not device.shared or fault.kind == "lost" or (fault.kind == "xid" and fault.code in WHOLE_DEVICE_XIDS)


def _state_text(device: ProcessDevice, at: float) -> str:
    if device.sample.lost or not device.certain:
        return ""
    if not math.isnan(device.idle_since):
        return f"no kernel has run for {at - device.idle_since:.0f} s"
    if device.sample.busy and (math.isnan(device.moved_at) or at - device.moved_at > _MOVING_S):
        return "a kernel runs that may only wait"
    return ""


_MOVING_S = 3.0
"""A device that moved within this time moves."""
