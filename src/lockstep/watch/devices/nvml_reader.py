"""The child of an agent that reads NVML (`python -m lockstep.watch.devices.nvml_reader`).

A call of NVML may block for ever, in the kernel, when a GPU is sick; a process in such a call cannot even be killed.
So the calls are made in a process of their own, which nobody waits for. It writes JSON lines to its standard output:

    {"unavailable": why}       and ends: there is no package, no library or no driver
    {"reading": 3}             before it reads GPU 3: if nothing follows, a call about GPU 3 has not returned
    {"xid": 79, "uuid": ...}   an error of a GPU
    {"devices": [...]}         after each round, see `DeviceSample`

It ends when its standard input is closed.
"""

import argparse
import contextlib
import ctypes
import json
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from lockstep.watch.devices.device_samples import DeviceProcess, DeviceSample, record_to_json

T = TypeVar("T")

_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Bits of nvmlClocksEventReasons, by the names of nvidia-smi; without idleness, settings of users and sync boost."""
_LINK_ERRORS = (
    "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
)  # fmt: skip
_LINK_BYTES = ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX")
_ALL_LINKS = 0xFFFFFFFF
_MOST_EVENTS = 64
"""Per round; the rest is read in the next one."""


class _DeviceLost(Exception):
    """The device can no longer be used."""


@dataclass
class _Gpu:
    """A GPU, and what its last reading left for the next one."""

    index: int
    handle: Any
    uuid: str = ""
    name: str = ""
    minor: int | None = None
    energy: tuple[float, float] | None = None
    """Time and millijoules."""
    link_bytes: tuple[float, float] | None = None
    """Time and KiB."""
    processes_us: int | None = None
    """The time of the newest utilisation per process, on the driver's clock; None before the first reading."""
    pcie_kib_s: float | None = None


@dataclass
class NvmlReader:
    """Reads the GPUs of this host. `nvml` is the module pynvml, initialised."""

    nvml: ModuleType
    gpus: list[_Gpu] = field(default_factory=list)
    _events: Any = None
    _round: int = 0

    def open(self) -> None:
        """Finds the GPUs, and registers for their errors."""
        self.gpus = [self._open_gpu(index) for index in range(self.nvml.nvmlDeviceGetCount())]
        with contextlib.suppress(self.nvml.NVMLError, AttributeError):
            self._events = self.nvml.nvmlEventSetCreate()
        for gpu in self.gpus:
            if self._events is not None and gpu.handle is not None:
                with contextlib.suppress(self.nvml.NVMLError):
                    self.nvml.nvmlDeviceRegisterEvents(
                        gpu.handle, self.nvml.nvmlEventTypeXidCriticalError, self._events
                    )

    def read(self, announce: Callable[[int], None]) -> list[DeviceSample]:
        """One round over all GPUs. `announce` is called with the index of each before it is read."""
        self._round += 1
        found: list[DeviceSample] = []
        for gpu in self.gpus:
            announce(gpu.index)
            try:
                found += self._read_gpu(gpu)
            except _DeviceLost as lost:
                uuid = gpu.uuid or f"GPU {gpu.index}"  # it was lost from the beginning
                found.append(DeviceSample(uuid, gpu.index, gpu.name, minor=gpu.minor, lost=str(lost)))
        return found

    def xids(self) -> Iterator[tuple[str, int]]:
        """The errors since the last call, as uuid and Xid."""
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            try:
                event = self.nvml.nvmlEventSetWait(self._events, 0)
            except (self.nvml.NVMLError, AttributeError):  # none (a time-out), or a device is lost: reading it tells
                return
            handle = _handle_value(event.device)
            gpu = next((each for each in self.gpus if _handle_value(each.handle) == handle), None)
            if gpu is not None and event.eventType == self.nvml.nvmlEventTypeXidCriticalError:
                yield gpu.uuid, int(event.eventData)

    def _open_gpu(self, index: int) -> _Gpu:
        gpu = _Gpu(index, None)
        with contextlib.suppress(self.nvml.NVMLError):
            gpu.handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
            gpu.uuid = _text(self.nvml.nvmlDeviceGetUUID(gpu.handle))
            gpu.name = _text(self.nvml.nvmlDeviceGetName(gpu.handle))
            gpu.minor = self.nvml.nvmlDeviceGetMinorNumber(gpu.handle)
        return gpu

    def _read_gpu(self, gpu: _Gpu) -> list[DeviceSample]:
        nvml, handle = self.nvml, gpu.handle
        if handle is None or not gpu.uuid:
            self._value(lambda: nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(gpu.index)))  # it may be lost
            return []
        utilisation = self._value(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        memory = self._value(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        limit = self._value(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
        used = self._process_use(gpu)
        sample = DeviceSample(
            uuid=gpu.uuid, index=gpu.index, name=gpu.name, minor=gpu.minor,
            busy=None if utilisation is None else int(utilisation.gpu),
            memory_busy=None if utilisation is None else int(utilisation.memory),
            memory_used=None if memory is None else int(memory.used),
            memory_total=None if memory is None else int(memory.total),
            power_w=self._power_w(gpu),
            power_limit_w=None if limit is None else limit / 1000,
            sm_mhz=self._value(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            sm_max_mhz=self._value(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            temperature_c=self._value(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            throttled=self._throttled(handle),
            uncorrected=self._value(lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)),
            link_kib_s=self._link_kib_s(gpu),
            link_errors=_sum(self._fields(handle, _LINK_ERRORS, None)),
            pcie_kib_s=self._pcie_kib_s(gpu),
            pcie_replays=self._value(lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle)),
            processes=self._processes(handle, used or {}),
            per_process=used is not None,
        )  # fmt: skip
        return [sample, *self._instances(gpu)]

    def _instances(self, gpu: _Gpu) -> Iterator[DeviceSample]:
        """The instances of a partitioned GPU, of which the driver reports memory and processes only."""
        mode = self._value(lambda: self.nvml.nvmlDeviceGetMigMode(gpu.handle))
        if mode is None or mode[0] != self.nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for number in range(self._value(lambda: self.nvml.nvmlDeviceGetMaxMigDeviceCount(gpu.handle)) or 0):
            handle = self._value(partial(self.nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu.handle, number))
            uuid = None if handle is None else self._value(partial(self.nvml.nvmlDeviceGetUUID, handle))
            if uuid is None:
                continue
            memory = self._value(partial(self.nvml.nvmlDeviceGetMemoryInfo, handle))
            yield DeviceSample(
                uuid=_text(uuid), index=gpu.index, name=gpu.name, parent=gpu.uuid, instance=number, minor=gpu.minor,
                memory_used=None if memory is None else int(memory.used),
                memory_total=None if memory is None else int(memory.total),
                processes=self._processes(handle, {}),
            )  # fmt: skip

    def _power_w(self, gpu: _Gpu) -> float | None:
        """Mean power since the last reading by the counter of energy; without it, power at this moment."""
        now, energy = time.monotonic(), self._value(lambda: self.nvml.nvmlDeviceGetTotalEnergyConsumption(gpu.handle))
        before, gpu.energy = gpu.energy, None if energy is None else (now, float(energy))
        if before is not None and energy is not None and now > before[0] and energy >= before[1]:
            return (float(energy) - before[1]) / 1000 / (now - before[0])
        power = self._value(lambda: self.nvml.nvmlDeviceGetPowerUsage(gpu.handle))
        return None if power is None else power / 1000

    def _link_kib_s(self, gpu: _Gpu) -> float | None:
        now, total = time.monotonic(), _sum(self._fields(gpu.handle, _LINK_BYTES, _ALL_LINKS))
        before, gpu.link_bytes = gpu.link_bytes, None if total is None else (now, float(total))
        if before is None or total is None or total < before[1] or now <= before[0]:
            return None
        return float(total - before[1]) / (now - before[0])

    def _pcie_kib_s(self, gpu: _Gpu) -> float | None:
        """Each call measures for 20 ms, so that a round asks one GPU only; the others keep their last value."""
        if self._round % len(self.gpus) == gpu.index % len(self.gpus):
            names = ("NVML_PCIE_UTIL_TX_BYTES", "NVML_PCIE_UTIL_RX_BYTES")
            counters = [getattr(self.nvml, name) for name in names]
            values = [
                self._value(partial(self.nvml.nvmlDeviceGetPcieThroughput, gpu.handle, each)) for each in counters
            ]
            gpu.pcie_kib_s = _sum([None if each is None else float(each) for each in values])
        return gpu.pcie_kib_s

    def _throttled(self, handle: Any) -> tuple[str, ...] | None:
        mask = self._value(lambda: self.nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if mask is None:  # drivers before 535 know the older name only
            mask = self._value(lambda: self.nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return None if mask is None else tuple(name for bit, name in _REASONS.items() if mask & bit)

    def _processes(self, handle: Any, used: dict[int, tuple[int, int]]) -> tuple[DeviceProcess, ...] | None:
        """The processes that use the device; also those that only the utilisation per process names."""
        listed = self._value(lambda: self.nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if listed is None and not used:
            return None
        memory = {int(each.pid): each.usedGpuMemory for each in listed or ()}
        return tuple(
            DeviceProcess(pid, memory.get(pid), *used.get(pid, (None, None))) for pid in sorted({*memory, *used})
        )

    def _process_use(self, gpu: _Gpu) -> dict[int, tuple[int, int]] | None:
        """By pid, the percent of time in kernels and in accesses of the memory since the last reading. None if the
        driver does not report it, as with MIG, and in the first reading, which may be of long ago."""
        since = gpu.processes_us or 0
        try:
            samples = self.nvml.nvmlDeviceGetProcessUtilization(gpu.handle, since)
        except self.nvml.NVMLError as error:
            self._raise_lost(error)
            if error.value != self.nvml.NVML_ERROR_NOT_FOUND:
                return None
            samples = []  # no process has used the device
        except AttributeError:
            return None
        first, gpu.processes_us = gpu.processes_us is None, max([since, *(int(each.timeStamp) for each in samples)])
        found: dict[int, tuple[int, int]] = {}
        for each in samples:
            busy, memory = found.get(int(each.pid), (0, 0))
            if int(each.timeStamp) > since and each.pid:
                found[int(each.pid)] = max(busy, int(each.smUtil)), max(memory, int(each.memUtil))
        return None if first else found

    def _fields(self, handle: Any, names: tuple[str, ...], scope: int | None) -> list[int | None]:
        """Values of nvmlDeviceGetFieldValues; None for each that the device does not have."""
        known = [getattr(self.nvml, name) for name in names if hasattr(self.nvml, name)]
        wanted = known if scope is None else [(each, scope) for each in known]
        values = self._value(lambda: self.nvml.nvmlDeviceGetFieldValues(handle, wanted)) if wanted else None
        return [int(each.value.ullVal) if each.nvmlReturn == self.nvml.NVML_SUCCESS else None for each in values or ()]

    def _value(self, call: Callable[[], T]) -> T | None:
        """The value of one call; None if the device, the driver or the package does not have it.

        Raises:
            _DeviceLost: the device can no longer be used.
        """
        try:
            return call()
        except self.nvml.NVMLError as error:
            self._raise_lost(error)
        except (AttributeError, UnicodeDecodeError):
            pass
        return None

    def _raise_lost(self, error: Any) -> None:
        if error.value in (self.nvml.NVML_ERROR_GPU_IS_LOST, self.nvml.NVML_ERROR_RESET_REQUIRED):
            raise _DeviceLost(str(error)) from error


def _sum(values: "list[int | None] | list[float | None]") -> Any:
    """The sum of the known values; None if all are unknown."""
    known = [each for each in values if each is not None]
    return sum(known) if known else None


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _handle_value(handle: Any) -> int | None:
    """The address in a ctypes pointer."""
    return None if handle is None else ctypes.cast(handle, ctypes.c_void_p).value


def _write(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lockstep.watch.devices.nvml_reader")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two rounds")
    every_s: float = parser.parse_args().every
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import pynvml
    except ImportError:
        _write({"unavailable": "the package nvidia-ml-py is not installed"})
        return
    try:
        pynvml.nvmlInit()
        reader = NvmlReader(pynvml)
        reader.open()
    except (pynvml.NVMLError, AttributeError) as error:
        _write({"unavailable": str(error)})
        return
    with contextlib.suppress(BrokenPipeError):
        while True:
            began = time.monotonic()
            samples = reader.read(lambda index: _write({"reading": index}))
            for uuid, code in reader.xids():
                _write({"xid": code, "uuid": uuid})
            _write({"devices": [record_to_json(each) for each in samples]})
            if select.select([sys.stdin], [], [], max(0.05, every_s - (time.monotonic() - began)))[0]:
                return


if __name__ == "__main__":
    main()
