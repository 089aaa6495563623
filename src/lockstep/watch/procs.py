"""Facts about processes of this host, from /proc."""

import contextlib
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


def _read(path: str) -> str | None:
    """A file of /proc, None when its process is gone. Many times a second: pathlib takes five times as long."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 8192).decode(errors="replace")
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
    """User and system time of all its threads."""
    read: int | None = None
    """Bytes read from anywhere, page cache and pipes included; None where nobody asked or the kernel does not say."""
    written: int | None = None


def usage(pid: int, start: int | None = None, moved: bool = False) -> Usage | None:
    """What a process has used (with `moved`, the bytes as well), None when it is gone or is another one."""
    facts = _proc_stat(pid)
    if facts is None or (start is not None and int(facts[19]) != start):
        return None
    read, written = _bytes_moved(pid) if moved else (None, None)
    return Usage(facts[0], _cpu_s(facts), read, written)


def descendants(pid: int) -> list[int]:
    """Pids of all living processes below this one; empty where the kernel does not list children."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children(todo.pop())
        found += below
        todo += below
    return found


def children(pid: int) -> list[int]:
    """Pids of the living processes that it has started; empty where the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # ended meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _cpu_s(facts: list[str]) -> float:
    return (int(facts[11]) + int(facts[12])) * TICK_S


def _bytes_moved(pid: int) -> tuple[int | None, int | None]:
    try:
        words = (_read(f"/proc/{pid}/io") or "").split()
    except PermissionError:
        words = []
    return (int(words[1]), int(words[3])) if words else (None, None)
