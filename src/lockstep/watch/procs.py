"""Facts about processes of this host, from /proc."""

import os
from dataclasses import dataclass
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot, None when there is no such process. With the pid it
    identifies a process for good."""
    facts = _proc_stat(pid)
    return None if facts is None else int(facts[19])


def process_state(pid: int, start: int | None = None) -> str | None:
    """The state letter of /proc (R, S, D, T, Z, ...), None when the process is gone or is another one."""
    facts = _proc_stat(pid)
    if facts is None or (start is not None and int(facts[19]) != start):
        return None
    return facts[0]


def parent(pid: int) -> int | None:
    """Its parent's pid, None when there is no such process."""
    facts = _proc_stat(pid)
    return None if facts is None else int(facts[1])


def alive(pid: int, start: int | None = None) -> bool:
    """Whether the process exists and is no zombie."""
    return process_state(pid, start) not in (None, "Z", "X")


def _proc_stat(pid: int) -> list[str] | None:
    text = _read(f"/proc/{pid}/stat")
    return None if text is None else text[text.rindex(")") + 2 :].split()


def _read(path: str, most: int = 8192) -> str | None:
    """A file of /proc, None when its process is gone. Many times a second: pathlib takes five times as long."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, most).decode(errors="replace")
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None


def place() -> str:
    """Names the set of processes that see each other's pids: this boot of this host, and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used so far; counters only grow while it lives."""

    state: str
    """Its letter in /proc."""
    cpu_s: float
    """User and system time of all its threads, and of the children that it has collected."""
    read: int | None = None
    """Bytes read from anywhere, page cache and pipes included; None where nobody asked or the kernel does not say."""
    written: int | None = None
    stored: int | None = None
    """Bytes that storage had to fetch or is to keep: page faults on a mapped file are here and nowhere else."""
    ran_ns: int = 0
    """CPU time of its main thread, to the nanosecond; 0 where the kernel does not say."""

    @property
    def moved(self) -> int | None:
        """All bytes, some of them twice."""
        if self.read is None or self.written is None:
            return None
        return self.read + self.written + (self.stored or 0)


def usage(pid: int, start: int | None = None, moved: bool = False) -> Usage | None:
    """What a process has used (with `moved`, the bytes as well), None when it is gone or is another one."""
    facts = _proc_stat(pid)
    if facts is None or (start is not None and int(facts[19]) != start):
        return None
    read, written, stored = _bytes_moved(pid) if moved else (None, None, None)
    ran, _ = _scheduled(f"/proc/{pid}") if facts[0] in "Tt" else (0, 0)
    return Usage(facts[0], _cpu_s(facts), read, written, stored, ran)


def threads(pid: int) -> list[str]:
    """The ids of its threads, empty when it has ended."""
    try:
        with os.scandir(f"/proc/{pid}/task") as found:
            return [each.name for each in found]
    except (FileNotFoundError, ProcessLookupError):
        return []


def thread_state(pid: int, tid: str) -> str | None:
    """The state letter of a thread, None when it has ended."""
    text = _read(f"/proc/{pid}/task/{tid}/stat")
    return None if not text else text[text.rindex(")") + 2]


def wanted_ns(pid: int, tid: str) -> int:
    """How long a thread has run or waited for a core so far; 0 where the kernel does not say."""
    return sum(_scheduled(f"/proc/{pid}/task/{tid}"))


def frozen(pid: int) -> bool:
    """Whether the freezer of its cgroup (version 1 or 2) holds it; False where that cannot be read."""
    for line in (_read(f"/proc/{pid}/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if (
            controllers == "freezer"
            and (_read(f"/sys/fs/cgroup/freezer{path}/freezer.state") or "").strip() == "FROZEN"
        ):
            return True
        if number == "0" and "frozen 1" in (_read(f"/sys/fs/cgroup{path}/cgroup.events") or ""):
            return True
    return False


def descendants(pid: int) -> list[int]:
    """Pids of all living processes below this one; empty where the kernel does not list children."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children(todo.pop())
        found += below
        todo += below
    return found


def cpu_seconds_below(pid: int) -> float:
    """CPU time that all its descendants have used."""
    return sum(used.cpu_s for below in descendants(pid) if (used := usage(below)) is not None)


def children(pid: int) -> list[int]:
    """Pids of the living processes that it has started; empty where the kernel does not list them."""
    found: list[int] = []
    for task in threads(pid):
        found += [int(child) for child in (_read(f"/proc/{pid}/task/{task}/children") or "").split()]
    return found


def disk_bytes() -> int:
    """Bytes that all block devices of this host have read and written so far, partitions counted again."""
    lines = [line.split() for line in (_read("/proc/diskstats", 1 << 18) or "").splitlines()]
    return 512 * sum(int(words[5]) + int(words[9]) for words in lines if len(words) > 9)


def _cpu_s(facts: list[str]) -> float:
    return sum(int(ticks) for ticks in facts[11:15]) * TICK_S


def _scheduled(folder: str) -> tuple[int, int]:
    """Nanoseconds that a thread ran, and waited for a core; 0 where the kernel does not say."""
    words = (_read(f"{folder}/schedstat") or "").split()
    return (int(words[0]), int(words[1])) if words else (0, 0)


def _bytes_moved(pid: int) -> tuple[int | None, int | None, int | None]:
    try:
        words = (_read(f"/proc/{pid}/io") or "").split()
    except PermissionError:
        words = []
    return (int(words[1]), int(words[3]), int(words[9]) + int(words[11])) if words else (None, None, None)
