"""Sums up the samples of all devices of a job, for the report: how evenly they worked, and what held them back.

`devices.json` is a list with an object per device, see `DeviceTotal`; percents and watts are means over the samples.
"""

import json
import logging
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.folders import write_atomically
from lockstep.watch.agent.report_messages import StateReport
from lockstep.watch.devices.device_samples import DeviceSample, DeviceState, device_label
from lockstep.watch.supervisor.evidence_builder import HostState

log = logging.getLogger(__name__)

WRITE_S = 30.0
_SAME_SAMPLE_S = 0.3
"""Two reports whose samples are not further apart carry the same sample."""
_MOST_ERRORS = 8


@dataclass(slots=True)
class _Mean:
    count: int = 0
    total: float = 0.0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.count, self.total = self.count + 1, self.total + value

    @property
    def value(self) -> float | None:
        return round(self.total / self.count, 2) if self.count else None


@dataclass(frozen=True, slots=True)
class DeviceTotal:
    """A device over all samples."""

    host: str
    device: str
    """`GPU 3`, or `GPU 3 instance 1`."""
    name: str
    processes: list[str]
    samples: int
    busy: float | None
    """Percent of the time with a kernel, waiting ones included."""
    memory_busy: float | None
    power_w: float | None
    power_limit_w: float | None
    memory_used: int | None
    """The most, in bytes."""
    memory_total: int | None
    temperature_c: int | None
    """The highest."""
    throttled: dict[str, float]
    """Percent of the samples, by reason."""
    errors: list[str]


@dataclass(slots=True)
class _Sums:
    sample: DeviceSample
    sampled_at: float = float("-inf")
    samples: int = 0
    busy: _Mean = field(default_factory=_Mean)
    memory_busy: _Mean = field(default_factory=_Mean)
    power_w: _Mean = field(default_factory=_Mean)
    memory_used: int | None = None
    temperature_c: int | None = None
    throttled: Counter[str] = field(default_factory=Counter)
    processes: dict[str, None] = field(default_factory=dict)
    errors: dict[str, None] = field(default_factory=dict)

    def add(self, state: DeviceState, at: float) -> None:
        """Adds the sample of a report that arrived at `at`, unless an earlier report had it."""
        sample = self.sample = state.sample
        for fault in state.faults:
            if len(self.errors) < _MOST_ERRORS:
                self.errors.setdefault(fault.text)
        if at - state.age - self.sampled_at < _SAME_SAMPLE_S:
            return
        self.sampled_at, self.samples = at - state.age, self.samples + 1
        self.busy.add(sample.busy)
        self.memory_busy.add(sample.memory_busy)
        self.power_w.add(sample.power_w)
        self.throttled.update(sample.throttled or ())
        self.memory_used = _largest(self.memory_used, sample.memory_used)
        self.temperature_c = _largest(self.temperature_c, sample.temperature_c)

    def total(self, host: str) -> DeviceTotal:
        sample = self.sample
        return DeviceTotal(
            host, device_label(sample), sample.name, list(self.processes), self.samples, self.busy.value,
            self.memory_busy.value, self.power_w.value, sample.power_limit_w, self.memory_used, sample.memory_total,
            self.temperature_c,
            {reason: round(100 * count / self.samples, 1) for reason, count in self.throttled.items()},
            list(self.errors),
        )  # fmt: skip


class DeviceTotals:
    """The totals of all devices, and the file that holds them; None writes none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._sums: dict[tuple[str, str], _Sums] = {}
        self._written_at = float("-inf")

    def add(self, host: HostState) -> None:
        """Adds the newest report of a host."""
        report = host.state if self._path is not None else None
        if report is not None and report.devices.devices:
            self._add(host, report)

    def totals(self) -> list[DeviceTotal]:
        ordered = sorted(self._sums.items(), key=lambda each: (each[0][0], each[1].sample.index, each[0][1]))
        return [sums.total(host) for (host, _), sums in ordered]

    def write(self, now: float, last: bool = False) -> None:
        """Writes the file if it is time, or at the end. A failure is logged, and affects nothing else."""
        if self._path is None or not self._sums or (now - self._written_at < WRITE_S and not last):
            return
        self._written_at = now
        rows: list[dict[str, Any]] = [asdict(each) for each in self.totals()]
        try:
            write_atomically(self._path, json.dumps(rows, indent=1).encode())
        except OSError as error:
            log.warning("the totals of the GPUs could not be written: %s", error)

    def _add(self, host: HostState, report: StateReport) -> None:
        sums = []
        for state in report.devices.devices:
            each = self._sums.setdefault((report.host, state.sample.uuid), _Sums(state.sample))
            each.add(state, host.at)
            sums.append(each)
        for use in report.devices.uses:
            sums[use.device].processes.setdefault(host.roster.processes[use.process].name)


def _largest(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else max(one, other)
