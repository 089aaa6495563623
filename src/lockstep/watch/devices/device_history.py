"""Derives from samples of devices when each last moved, since when it is idle, and which errors it has had.

What the counters prove: `utilization.gpu` is the share of time in which any kernel ran. A kernel of NCCL that waits for
another rank polls memory in a loop and counts like one that computes, so that a GPU in a hung collective shows 100 %
(https://github.com/cupy/cupy/issues/3557) at little more than its idle power
(https://github.com/NVIDIA/nccl/issues/968: about 70 W; https://github.com/Theano/libgpuarray/issues/387). So:

- A device *moves* if its memory is read or written, if it draws half of its power limit or more, or if data passes over
  NVLink: a kernel that polls a flag does none of these.
- A device is *idle* if no kernel runs, its memory rests, and no data passes.
- Anything between, such as 100 % busy at a fifth of the power, proves neither: a kernel that waits and a narrow one
  that computes look the same.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from lockstep.watch.devices.device_samples import NAN, DeviceFault, DeviceProcess, DeviceSample, DeviceState

MOVING_MEMORY = 10
"""Percent of the time in which the memory was read or written."""
MOVING_POWER = 0.5
"""Share of the power limit."""
MOVING_LINK_KIB_S = 10 << 10
RESTING_KIB_S = 1 << 10
"""A link with less traffic rests; the driver's own traffic over PCIe is less."""
GAP_S = 5.0
"""After a longer pause between two samples, the time of idleness begins anew."""
REPEATED_S = 60.0
"""The same Xid after this time is a new error."""
_MOST_FAULTS = 8


def shows_movement(sample: DeviceSample) -> bool:
    """Whether a sample proves that the device did more than wait."""
    power = sample.power_w is not None and bool(sample.power_limit_w)
    return (
        (sample.memory_busy or 0) >= MOVING_MEMORY
        or (power and (sample.power_w or 0.0) >= MOVING_POWER * (sample.power_limit_w or 0.0))
        or (sample.link_kib_s or 0.0) >= MOVING_LINK_KIB_S
    )


def shows_idleness(sample: DeviceSample) -> bool:
    """Whether a sample proves that no kernel ran, and that nothing was copied as far as this is known."""
    resting = max(sample.link_kib_s or 0.0, sample.pcie_kib_s or 0.0) < RESTING_KIB_S
    return sample.busy == 0 and not sample.memory_busy and resting and not sample.lost


@dataclass(slots=True)
class _Activity:
    """When a device, or a process on it, moved and since when it is idle; NaN if unknown."""

    moved_at: float = NAN
    idle_since: float = NAN

    def update(self, moved: bool, idle: bool, at: float, gap: bool) -> None:
        if moved:
            self.moved_at = at
        if not idle:
            self.idle_since = NAN
        elif gap or self.idle_since != self.idle_since:
            self.idle_since = at


@dataclass(slots=True)
class _Device:
    sample: DeviceSample
    at: float
    activity: _Activity = field(default_factory=_Activity)
    by_pid: dict[int, _Activity] = field(default_factory=dict)
    """Of the processes that the driver has named in its utilisation per process."""
    faults: list[tuple[float, DeviceFault]] = field(default_factory=list)

    def add_fault(self, fault: DeviceFault, at: float) -> None:
        """Adds an error, unless it is known: an Xid for `REPEATED_S`, a loss for good."""
        known = [when for when, each in self.faults if (each.kind, each.code) == (fault.kind, fault.code)]
        if not known or fault.kind == "ecc" or (fault.kind == "xid" and at - known[-1] > REPEATED_S):
            self.faults = [*self.faults, (at, fault)][-_MOST_FAULTS:]


class DeviceHistory:
    """The devices of a host over all samples. Times are seconds on the clock of the caller."""

    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}

    def add_samples(self, samples: Iterable[DeviceSample], at: float) -> None:
        """Adds one round of samples."""
        for sample in samples:
            known = self._devices.get(sample.uuid)
            if known is None:
                known = self._devices[sample.uuid] = _Device(sample, at)
            gap = at - known.at > GAP_S
            known.activity.update(shows_movement(sample), shows_idleness(sample), at, gap)
            self._add_processes(known, sample, at, gap)
            _add_faults(known, sample, at)
            known.sample, known.at = sample, at

    def add_xid(self, uuid: str, code: int, at: float) -> None:
        """Adds an error that the driver has reported of a device."""
        if uuid in self._devices:
            self._devices[uuid].add_fault(DeviceFault("xid", f"the driver reported Xid {code}", code=code), at)

    def states(self, now: float) -> tuple[DeviceState, ...]:
        """All devices, each instance of a GPU with the errors of that GPU."""
        found = []
        for each in self._devices.values():
            parent = self._devices.get(each.sample.parent)
            faults = [*each.faults, *(parent.faults if parent is not None else ())]
            found.append(
                DeviceState(
                    each.sample, now - each.at, now - each.activity.moved_at, now - each.activity.idle_since,
                    tuple(replace(fault, age=now - at) for at, fault in faults),
                )
            )  # fmt: skip
        return tuple(found)

    def is_shared(self, uuid: str, pids: Collection[int]) -> bool:
        """Whether processes other than these use the device, or may do."""
        listed = self._devices[uuid].sample.processes
        if listed is None:
            return True
        return any(each.pid not in pids for each in listed) if _names_any(listed, pids) else len(listed) > 1

    def process_activity(self, uuid: str, pids: Collection[int]) -> tuple[float, float]:
        """When these processes last moved the device, and since when they let it rest; NaN if unknown.

        A process that the driver has never named in its utilisation per process may have another pid there, as in a
        container: it is not known to rest, unless the whole device does.
        """
        device = self._devices[uuid]
        if not self.is_shared(uuid, pids):
            return device.activity.moved_at, device.activity.idle_since
        own = [device.by_pid[pid] for pid in pids if pid in device.by_pid]
        moved = [each.moved_at for each in own if each.moved_at == each.moved_at]
        idle = [each.idle_since for each in own]
        rests = max(idle) if idle and all(each == each for each in idle) else device.activity.idle_since
        return max(moved, default=NAN), rests

    def _add_processes(self, device: _Device, sample: DeviceSample, at: float, gap: bool) -> None:
        if not sample.per_process:
            device.by_pid.clear()
            return
        seen = {each.pid: each for each in sample.processes or () if each.busy is not None}
        for pid in seen:
            device.by_pid.setdefault(pid, _Activity())
        for pid, activity in device.by_pid.items():
            each = seen.get(pid)
            moved = each is not None and (each.memory_busy or 0) >= MOVING_MEMORY
            activity.update(moved, each is None or not (each.busy or each.memory_busy), at, gap)


def _names_any(listed: Iterable[DeviceProcess], pids: Collection[int]) -> bool:
    return any(each.pid in pids for each in listed)


def _add_faults(device: _Device, sample: DeviceSample, at: float) -> None:
    before = device.sample.uncorrected
    if sample.lost:
        device.add_fault(DeviceFault("lost", f"the driver says: {sample.lost}"), at)
    if before is not None and sample.uncorrected is not None and sample.uncorrected > before:
        more = sample.uncorrected - before
        device.add_fault(DeviceFault("ecc", f"{more} new uncorrected memory errors (ECC)"), at)
