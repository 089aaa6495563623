"""Counts CPU time as the progress of a stage that has no other measure, such as compilation.

A process that waits for a lock, or whose child was stopped, uses no CPU: it makes no progress, and its stall is named
like any other.
"""

import os
import threading
from collections import deque

from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.procfs.processes import descendants_cpu_s, process_usage

SAMPLE_S = 0.5
WINDOW = 4
"""Samples over which work is measured: a busy host may give a process no core for a while."""
MIN_WORK_S = 0.02
"""CPU time within the window that counts as work. The threads that write heartbeats use less."""


class CpuProgress:
    """Adds the CPU time of this process and of its descendants, in milliseconds, to a counter of the beacon, from
    `start` to `stop`."""

    def __init__(self, counter: str) -> None:
        self._counter = counter
        self._over = threading.Event()

    def start(self) -> None:
        self._over = threading.Event()
        threading.Thread(target=self._run, args=(self._over,), name="cpu progress", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self, over: threading.Event) -> None:
        samples = deque([_cpu_s()], maxlen=WINDOW)
        while not over.wait(SAMPLE_S):  # not shown as a wait: the process works meanwhile
            now = _cpu_s()
            spent_ms = int(1000 * (now - samples[-1]))
            if spent_ms > 0 and now - samples[0] >= MIN_WORK_S:
                current_beacon().add(self._counter, spent_ms)
            samples.append(now)


def _cpu_s() -> float:
    """CPU time of this process and its descendants, those that have ended included."""
    usage = process_usage(os.getpid())
    return descendants_cpu_s(os.getpid()) + (0.0 if usage is None else usage.cpu_s)
