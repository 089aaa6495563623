"""Samples the devices of this host through a child process, because a call of NVML may never return.

Nothing here blocks: the child writes lines to a pipe, and `tick` reads what is there. A child that stays in one call is
killed, as far as that is possible, and its silence is reported as evidence. Without the package nvidia-ml-py or without
NVIDIA's library there is no child, and no devices are reported.
"""

import ctypes
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lockstep.watch.devices.device_history import DeviceHistory
from lockstep.watch.devices.device_mapping import DeviceMapping, ProcessFacts
from lockstep.watch.devices.device_samples import (
    DeviceFault,
    DeviceSample,
    DeviceState,
    DeviceUse,
    HostDevices,
    device_label,
    record_from_json,
)
from lockstep.watch.procfs.processes import process_usage

log = logging.getLogger(__name__)

EVERY_S = 1.0
"""NVML's own figures cover between a sixth of a second and a second."""
SILENT_S = 10.0
"""A call that has not returned after this long counts as one that never will."""
START_S = 60.0
"""The driver may need seconds per GPU for the first call, without persistence mode."""
RESTART_S = 30.0
MOST_RESTARTS = 5
BLOCKED_CPU_S = 0.1
"""A child that is blocked uses less CPU time than this."""
NVML_LIBRARY = "libnvidia-ml.so.1"
_MOST_PENDING = 4 << 20


def nvml_at_hand() -> bool:
    """Whether the package nvidia-ml-py and NVIDIA's library are installed. Neither is used."""
    if importlib.util.find_spec("pynvml") is None:
        return False
    try:
        ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return False
    return True


class DeviceSampler:
    """Starts the child, reads its lines, and knows when it hangs. Call `tick` a few times per second."""

    def __init__(self, every_s: float = EVERY_S, silent_s: float = SILENT_S, start_s: float = START_S) -> None:
        self._every_s, self._silent_s, self._start_s = every_s, silent_s, start_s
        self._history, self._mapping = DeviceHistory(), DeviceMapping()
        self._child: subprocess.Popen[bytes] | None = None
        self._pending = b""
        self._heard_at = self._restart_at = 0.0
        self._reading: int | None = None
        """The index of the GPU that the child is reading."""
        self._cpu_s: float | None = None
        """CPU time of the child after half of the time in which it must answer."""
        self._sampled = False
        self._restarts = 0
        self._silent: tuple[float, int | None] | None = None
        """Since when a call has not returned, and about which GPU it is."""
        self.unavailable = ""
        """Why there are no samples; empty if there may be some."""

    @property
    def sampled(self) -> bool:
        """Whether there has been a sample."""
        return self._sampled

    def start(self) -> None:
        """Starts sampling, unless it has begun or there is nothing to sample. Idempotent."""
        if self._child is not None or self.unavailable or time.monotonic() < self._restart_at:
            return
        if not nvml_at_hand():
            self.unavailable = "NVML is not installed"
            return
        argv = [sys.executable, "-m", "lockstep.watch.devices.nvml_reader", "--every", str(self._every_s)]
        try:
            self._child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, close_fds=True
            )
        except OSError as error:
            self.unavailable = f"the sampler could not be started: {error}"
            return
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)
        self._pending, self._reading, self._heard_at, self._cpu_s = b"", None, time.monotonic(), None

    def tick(self) -> None:
        """Reads what the child has written, and checks that it is not stuck."""
        child = self._child
        if child is None:
            if self._restart_at and not self.unavailable:
                self.start()
            return
        if self._read_lines(child):
            self._check_silence(child)
        else:
            self._ended(child)

    def close(self) -> None:
        """Ends the child without waiting for it. Idempotent."""
        child, self._child = self._child, None
        self.unavailable = self.unavailable or "the sampler was closed"
        if child is not None:
            _discard(child)

    def report(self, tracked: Sequence[tuple[int, int]] = ()) -> HostDevices:
        """What is known now. `tracked` are the job's processes, by pid and start time; `DeviceUse.process` counts
        them."""
        if not self._sampled and self._silent is None:
            return HostDevices()
        now = time.monotonic()
        states = [self._with_silence(each, now) for each in self._history.states(now)]
        samples = [each.sample for each in states]
        uses = [
            use
            for process, known in enumerate(self._mapping.uses(tracked, samples))
            for use in self._uses(process, samples, now, *known)
        ]
        return HostDevices(tuple(states), tuple(uses), self._gap(now))

    def _uses(
        self, process: int, samples: Sequence[DeviceSample], now: float,
        facts: ProcessFacts, devices: Sequence[int], source: str,
    ) -> list[DeviceUse]:  # fmt: skip
        uses = []
        for device in devices:
            moved_at, idle_since = self._history.process_activity(samples[device].uuid, facts.pids)
            shared = self._history.is_shared(samples[device].uuid, facts.pids)
            uses.append(DeviceUse(process, device, source, shared, now - moved_at, now - idle_since))
        return uses

    def _with_silence(self, state: DeviceState, now: float) -> DeviceState:
        if self._silent is None or self._silent[1] != state.sample.index:
            return state
        text = f"a call of the driver about {device_label(state.sample)} has not returned"
        return replace(state, faults=(*state.faults, DeviceFault("silent", text, now - self._silent[0])))

    def _gap(self, now: float) -> str:
        if self._silent is None:
            return ""
        since, index = self._silent
        about = "" if index is None else f" about GPU {index}"
        return f"the driver of the GPUs has not answered a call{about} for {now - since:.0f} s"

    # --- the child

    def _read_lines(self, child: "subprocess.Popen[bytes]") -> bool:
        """Reads the lines that are there. Returns False at the end of the child's output."""
        assert child.stdout is not None
        while True:
            try:
                data = os.read(child.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not data or len(self._pending) > _MOST_PENDING:
                return False
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                try:
                    self._receive(json.loads(line))
                except (ValueError, TypeError, LookupError) as error:  # NVIDIA's library may write there, too
                    log.debug("the sampler wrote %r: %s", line[:200], error)

    def _receive(self, line: Mapping[str, Any]) -> None:
        now = self._heard_at = time.monotonic()
        if "unavailable" in line:
            self.unavailable = str(line["unavailable"])
            log.info("no samples of GPUs: %s", self.unavailable)
        elif "reading" in line:
            self._reading = int(line["reading"])
        elif "xid" in line:
            self._history.add_xid(str(line["uuid"]), int(line["xid"]), now)
        elif "devices" in line:
            self._history.add_samples([record_from_json(DeviceSample, each) for each in line["devices"]], now)
            self._reading, self._silent, self._sampled, self._restarts = None, None, True, 0

    def _check_silence(self, child: "subprocess.Popen[bytes]") -> None:
        """Kills a child that has been blocked in a call for too long. One that runs, or waits for a core, is slow."""
        bound = self._silent_s if self._reading is not None or self._sampled else self._start_s
        waited = time.monotonic() - self._heard_at
        if waited < bound / 2:
            self._cpu_s = None
            return
        usage = process_usage(child.pid)
        if usage is None:
            return
        if self._cpu_s is None:
            self._cpu_s = usage.cpu_s
        if waited < bound or usage.state in "RTtZX" or usage.cpu_s - self._cpu_s > BLOCKED_CPU_S:
            return
        if self._silent is None:
            log.warning("NVML has not answered for %.0f s; GPU %s is being read", waited, self._reading)
            self._silent = self._heard_at, self._reading
        child.kill()  # which an uninterruptible wait in the driver outlives: then its pipe stays open, too

    def _ended(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = None
        _discard(child)
        self._restarts += 1
        self._restart_at = time.monotonic() + RESTART_S
        if self._restarts > MOST_RESTARTS and not self.unavailable:
            self.unavailable = f"the sampler has ended {self._restarts} times"


def _discard(child: "subprocess.Popen[bytes]") -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()
    if child.poll() is None:  # also notices that the agent's loop has reaped it
        child.kill()
    child.returncode = child.returncode or 0  # the agent's loop reaps it
