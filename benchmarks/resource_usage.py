"""CPU seconds and memory of a process and everything it started."""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a process tree since it began."""

    cpu_s: float
    """User and system time of all processes that live, and of all that ended and were waited for."""
    by_process: dict[int, float]
    """By process id, children that ended included in those who waited for them."""


def members(root: int) -> list[int]:
    """The process and all its descendants that live; empty when it does not."""
    try:
        process = psutil.Process(root)
        return [root, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def usage(root: int) -> Usage:
    """CPU time of the tree below `root`. Processes that ended count as long as somebody in the tree waited for them:
    the kernel adds their time to the parent's. Exact to one tick (10 ms) per process."""
    each = {}
    for pid in members(root):
        ticks = cpu_ticks(pid)
        if ticks is not None:
            each[pid] = ticks * TICK_S
    return Usage(sum(each.values()), each)


def cpu_ticks(pid: int) -> int | None:
    """Clock ticks of a process and the children it has waited for, None when it is gone. See proc(5), fields 14-17."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return sum(int(value) for value in text.rpartition(")")[2].split()[11:15])


def cpu_ns(pid: int) -> int:
    """Nanoseconds on a CPU of the threads a process has now: finer than ticks, for what lasts milliseconds."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(task.read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def pss(root: int) -> int:
    """Bytes of memory of the tree, what processes share counted once (proportional set size)."""
    total = 0
    for pid in members(root):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


class PeakMemory:
    """The largest memory of a tree while the block runs, looked at four times a second from this process."""

    def __init__(self, root: int) -> None:
        self.bytes = 0
        self._root = root
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)
        self.bytes = max(self.bytes, pss(self._root))

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.bytes = max(self.bytes, pss(self._root))
