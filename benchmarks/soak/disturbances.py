"""Disturbances of healthy processes from outside: stopped for less than the notice, starved of CPU for seconds."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path


class Disturber:
    """Disturbs random processes from a thread, and restores them.

    `processes()` returns the pids of the running ones by name. `throttle` names a cgroup (v1) with a slow disk, where
    there is one."""

    def __init__(
        self, processes: Callable[[], Mapping[str, int]], notice_s: float, seed: int, throttle: str | None = None
    ) -> None:
        self._throttle = throttle
        self._processes, self._notice_s, self._chance = processes, notice_s, random.Random(f"{seed} disturb")
        self.done: list[tuple[float, str, str, float]] = []
        """(wall time, what, target, seconds)"""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> "Disturber":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(60)

    def late(self, name: str, at: float) -> bool:
        """Whether a process was stopped for longer than intended shortly before this wall time, because the machine was
        too busy to resume it in time. Then a verdict that it was stopped is right."""
        return any(
            what == "stopped" and target == name and took >= 0.9 * self._notice_s and 0 <= at - began < 15.0
            for began, what, target, took in self.done
        )

    def _go(self) -> None:
        with suppress(PermissionError):  # so that stopped processes are resumed in time
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        while not self._end.wait(self._chance.uniform(0.3, 2.5)):
            running = sorted(self._processes().items())
            if not running:
                continue
            name, pid = self._chance.choice(running)
            acts = [self._stop, self._stop, self._stop_again_and_again, self._starve]
            act = self._chance.choice([*acts, self._slow_disk] if self._throttle else acts)
            with suppress(OSError):
                act(name, pid)

    def _stop(self, name: str, pid: int) -> None:
        seconds = self._chance.uniform(0.05, 0.8) * self._notice_s
        wall, began = time.time(), time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            self._end.wait(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
            self.done.append((wall, "stopped", name, round(time.monotonic() - began, 3)))

    def _stop_again_and_again(self, name: str, pid: int) -> None:
        for _ in range(self._chance.randrange(3, 9)):
            self._stop(name, pid)
            self._end.wait(0.02)

    def _starve(self, name: str, pid: int) -> None:
        """Lower the priority of every thread of the process: priorities are per thread."""
        seconds = self._chance.uniform(1.0, 12.0) * self._notice_s
        self.done.append((time.time(), "starved", name, round(seconds, 3)))
        before = {tid: os.getpriority(os.PRIO_PROCESS, tid) for tid in _threads(pid)}
        for tid in before:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, tid, 19)
        self._end.wait(seconds)
        for tid in _threads(pid):
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, tid, before.get(tid, before.get(pid, 0)))

    def _slow_disk(self, name: str, pid: int) -> None:
        seconds = self._chance.uniform(2.0, 16.0) * self._notice_s
        self.done.append((time.time(), "slow disk", name, round(seconds, 3)))
        slow = Path(self._throttle or "")
        (slow / "cgroup.procs").write_text(str(pid))
        self._end.wait(seconds)
        (slow.parent / "cgroup.procs").write_text(str(pid))


def _threads(pid: int) -> list[int]:
    return [int(each.name) for each in Path(f"/proc/{pid}/task").iterdir()]
