"""Load on the machine: busy loops, writers, and cgroups with little CPU and a slow disk."""

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks.soak.activities import QUOTA, THROTTLE

SPIN = "while True: pass"
WRITE = """
import os, sys
while True:
    with open(sys.argv[1], "wb", buffering=0) as file:
        for _ in range(4):
            file.write(os.urandom(1 << 20) * 4)
            os.fsync(file.fileno())
"""
CGROUPS = Path("/sys/fs/cgroup")
BYTES_PER_S = 1 << 20


class Load:
    """Switches busy loops on every core and writers on and off, from a thread."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._chance = folder, random.Random(f"{seed} load")
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(10)

    def _go(self) -> None:
        while not self._end.is_set():
            spinning = self._chance.choice((0, 1, 1, 2)) * len(os.sched_getaffinity(0))
            with ExitStack() as stack:
                stack.enter_context(busy(spinning))
                for number in range(self._chance.choice((0, 0, 1, 2))):
                    stack.enter_context(_running(WRITE, str(self._folder / f"load-{number}")))
                self._end.wait(self._chance.uniform(5.0, 25.0))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Busy loops."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(_running(SPIN))
        yield


@contextmanager
def _running(code: str, *words: str) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-S", "-c", code, *words])
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def cgroups(name: str) -> Iterator[dict[str, str]]:
    """Environment variables that name a cgroup with a fiftieth of a core and one with a slow disk; empty if they cannot
    be created, and then the activities are not throttled."""
    made: list[Path] = []
    found: dict[str, str] = {}
    try:
        with suppress(OSError):
            quota = CGROUPS / "cpu" / name
            quota.mkdir()
            made.append(quota)
            (quota / "cpu.cfs_period_us").write_text("100000")
            (quota / "cpu.cfs_quota_us").write_text("2000")
            found[QUOTA] = str(quota)
        with suppress(OSError):
            slow = CGROUPS / "blkio" / name
            slow.mkdir()
            made.append(slow)
            device = Path.cwd().stat().st_dev
            limit = f"{os.major(device)}:{os.minor(device)} {BYTES_PER_S}"
            (slow / "blkio.throttle.write_bps_device").write_text(limit)
            (slow / "blkio.throttle.read_bps_device").write_text(limit)
            found[THROTTLE] = str(slow)
        yield found
    finally:
        for each in made:
            with suppress(OSError):  # a process is in it still: the machine's owner sees an empty group
                for pid in (each / "cgroup.procs").read_text().split():
                    with suppress(OSError):
                        (each.parent / "cgroup.procs").write_text(pid)
                each.rmdir()
