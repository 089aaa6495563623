"""What is known of the devices of a host, as records that the sampler's child, the agent and the supervisor exchange.

In JSON, a record has only the fields that differ from their defaults, and unknown fields are ignored, so that agents
and supervisors of different versions understand each other. A field that the driver does not report is None.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
NAN = float("nan")


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process that uses a device. The pid is the driver's: in a container it may be that of the host."""

    pid: int
    memory: int | None = None
    """Bytes of the device's memory."""
    busy: int | None = None
    """Percent of the last second in which a kernel of this process was running."""
    memory_busy: int | None = None
    """Percent of the last second in which this process read or wrote the device's memory."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One reading of a GPU, or of an instance of a partitioned one (MIG)."""

    uuid: str
    index: int = 0
    """The driver's number of the GPU, in the order of the PCI bus."""
    name: str = ""
    parent: str = ""
    """The uuid of the GPU that an instance is a part of."""
    instance: int | None = None
    """The number of the instance on its GPU."""
    minor: int | None = None
    """The GPU's device file is /dev/nvidia<minor>."""
    busy: int | None = None
    """Percent of the last second in which any kernel was running; one that only waits in a collective counts as well
    (nvmlUtilization_t)."""
    memory_busy: int | None = None
    """Percent of the last second in which the device's memory was read or written."""
    memory_used: int | None = None
    memory_total: int | None = None
    """Bytes."""
    power_w: float | None = None
    """Mean since the sample before, if the driver counts energy; else at this moment."""
    power_limit_w: float | None = None
    sm_mhz: int | None = None
    sm_max_mhz: int | None = None
    temperature_c: int | None = None
    throttled: tuple[str, ...] | None = None
    """Reasons for lower clocks, as nvidia-smi calls them; without idleness and settings of users."""
    uncorrected: int | None = None
    """Uncorrected errors of the memory since the driver was loaded."""
    link_kib_s: float | None = None
    """KiB per second sent and received over NVLink since the sample before."""
    link_errors: int | None = None
    """Errors, replays and recoveries of all NVLinks since the driver was loaded."""
    pcie_kib_s: float | None = None
    """KiB per second sent and received over PCIe, in 40 ms of the last seconds."""
    pcie_replays: int | None = None
    processes: tuple[DeviceProcess, ...] | None = None
    per_process: bool = False
    """Whether the driver reports utilisation per process: then a process without a figure used none of the device."""
    lost: str = ""
    """The driver's words if the device can no longer be used: it fell off the bus, or needs a reset."""


@dataclass(frozen=True, slots=True)
class DeviceFault:
    """An error of a device that is evidence against it."""

    kind: str
    """`lost`, `xid`, `ecc`, or `silent`: the driver does not answer."""
    text: str
    age: float = NAN
    """Seconds since it was noticed."""
    code: int = 0
    """The Xid."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """A device as an agent knows it from all samples so far. Ages and durations are in seconds, NaN if unknown."""

    sample: DeviceSample
    age: float = NAN
    """Since the sample."""
    moved: float = NAN
    """Since the counters last proved that the device did more than wait."""
    idle: float = NAN
    """For how long every sample has shown a device that runs no kernel."""
    faults: tuple[DeviceFault, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """The use of a device by a process of the job; both are given as indices into the report."""

    process: int
    device: int
    source: str = "driver"
    """How it is known: `driver` (its list of processes), `file` (the only device file that the process has open), or
    `environment` (CUDA_VISIBLE_DEVICES and LOCAL_RANK)."""
    shared: bool = False
    """Whether other processes use the device, too."""
    moved: float = NAN
    idle: float = NAN
    """As in `DeviceState`, of this process alone if the device is shared."""


@dataclass(frozen=True, slots=True)
class HostDevices:
    """The devices of a host in an agent's report."""

    devices: tuple[DeviceState, ...] = ()
    uses: tuple[DeviceUse, ...] = ()
    gap: str = ""
    """Why nothing is known of devices that this host has; empty without a reason."""


def record_to_json(record: Any) -> dict[str, Any]:
    """Converts a record of this module to JSON, without fields that have their defaults."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        if value == each.default or (isinstance(value, float) and math.isnan(value)):
            continue
        found[each.name] = _value_to_json(value)
    return found


def _value_to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_value_to_json(each) for each in value]
    if dataclasses.is_dataclass(value):
        return record_to_json(value)
    return round(value, 3) if isinstance(value, float) else value


def record_from_json(kind: type[T], data: Mapping[str, Any]) -> T:
    """Parses the JSON of a record; unknown fields are ignored.

    Raises:
        ValueError: `data` is not the JSON of such a record.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from error


def device_label(sample: DeviceSample) -> str:
    """`GPU 3`, or `GPU 3 instance 1`."""
    return f"GPU {sample.index}" + ("" if sample.instance is None else f" instance {sample.instance}")


def device_summary(sample: DeviceSample) -> str:
    """The figures of a device: `98% busy, memory 41% busy, 612 of 700 W, throttled: sw_thermal_slowdown`."""
    if sample.lost:
        return sample.lost
    parts = [] if sample.busy is None else [f"{sample.busy}% busy"]
    parts += [] if sample.memory_busy is None else [f"memory {sample.memory_busy}% busy"]
    if sample.power_w is not None:
        limit = "" if sample.power_limit_w is None else f" of {sample.power_limit_w:.0f}"
        parts.append(f"{sample.power_w:.0f}{limit} W")
    parts += [f"throttled: {', '.join(sample.throttled)}"] if sample.throttled else []
    return ", ".join(parts) or "no figures"
