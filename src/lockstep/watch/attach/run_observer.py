"""Observes a run on this host from outside, read-only, with the monitoring and diagnosis of the run itself."""

import contextlib
import subprocess
import time
from dataclasses import dataclass, field

from lockstep.base import waits
from lockstep.base.folders import shm_root
from lockstep.base.wait_state import WaitTimeout
from lockstep.watch.agent.process_monitor import ProcessMonitor
from lockstep.watch.agent.report_builder import ReportBuilder
from lockstep.watch.agent.report_messages import encode_report
from lockstep.watch.beacon.reader import read_beacon
from lockstep.watch.devices.device_sampler import DeviceSampler
from lockstep.watch.devices.device_samples import DeviceSample, DeviceState
from lockstep.watch.diagnosis.diagnose import diagnose
from lockstep.watch.diagnosis.evidence import drop_uninformative
from lockstep.watch.diagnosis.evidence_types import WaitAlias
from lockstep.watch.diagnosis.verdict import StallThresholds, Verdict
from lockstep.watch.procfs import py_spy
from lockstep.watch.supervisor.message_store import MessageStore

FIRST_SAMPLE_S = 3.0
"""How long a single look waits for the first sample of the GPUs, on a host that has any."""
STACK_INTERVAL_S = 3.0
"""Seconds between two samples of the stacks of inactive processes."""


def run_of_process(pid: int) -> str | None:
    """The run in which a process of this host has a beacon; None if the process has no beacon."""
    with contextlib.suppress(OSError):
        for path in shm_root().glob("*/*.beacon"):
            state = read_beacon(path, events=False)
            if state is not None and state.pid == pid:
                return state.run
    return None


@dataclass
class RunObserver:
    """Diagnoses a run repeatedly. The confidence of verdicts grows with the time of observation."""

    run: str
    patience: StallThresholds = field(default_factory=StallThresholds)
    aliases: dict[str, WaitAlias] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._devices = DeviceSampler()
        self._monitor, self._reports = ProcessMonitor(self.run), ReportBuilder("", devices=self._devices)
        self._messages = MessageStore(aliases=self.aliases)
        self._sampled_stacks_at = 0.0

    def poll(self) -> list[Verdict]:
        """Samples the run and returns the current verdicts; the first one explains the others."""
        self._devices.start()
        self._devices.tick()
        self._monitor.sample({})
        self._sample_stacks()
        for report in self._reports.build(self._monitor):
            self._messages.receive(encode_report(report), time.monotonic())
        return diagnose(drop_uninformative(self._messages.evidence(time.monotonic())), self.patience)

    def devices(self) -> dict[int, list[DeviceSample]]:
        """The GPUs of each process at the last poll, by pid, as far as they are known."""
        report, found = self._reports.last_devices, dict[int, list[DeviceSample]]()
        for use in report.uses:
            pid = self._reports.roster.processes[use.process].pid
            found.setdefault(pid, []).append(report.devices[use.device].sample)
        return found

    def device_states(self) -> tuple[DeviceState, ...]:
        """All GPUs of this host at the last poll, as far as they are known."""
        return self._reports.last_devices.devices

    def await_devices(self) -> None:
        """Waits for the first sample of the GPUs, if there are any."""
        self._devices.start()
        with contextlib.suppress(WaitTimeout):
            waits.poll(
                self._has_sample, kind="read", waits_for="the driver of the GPUs", why="first sample",
                timeout_s=FIRST_SAMPLE_S, notice_after_s=None,
            )  # fmt: skip

    def close(self) -> None:
        """Ends the sampling of GPUs. Idempotent."""
        self._devices.close()

    def _has_sample(self) -> bool | None:
        self._devices.tick()
        return bool(self._devices.sampled or self._devices.unavailable) or None

    def _sample_stacks(self) -> None:
        """Samples the stacks of one inactive process if it is time."""
        now = time.monotonic()
        if now - self._sampled_stacks_at < STACK_INTERVAL_S:
            return
        for process in self._monitor.stack_candidates(self.patience.notice_s):
            argv = py_spy.py_spy_command(process.pid)
            if argv is None:
                return
            self._sampled_stacks_at, taken_ns = now, time.monotonic_ns()
            with contextlib.suppress(OSError, WaitTimeout, subprocess.SubprocessError):
                done = waits.run(argv, why=f"the stacks of {process.name}", timeout_s=2.0, notice_after_s=None)
                process.store_stacks(py_spy.parse_stacks(done.stdout.encode()), taken_ns)
            process.stack_ns = taken_ns
            return
