"""Facts about processes of this host, from /proc."""

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


def alive(pid: int, start: int | None = None) -> bool:
    """Whether the process exists and is no zombie."""
    return process_state(pid, start) not in (None, "Z", "X")


def _proc_stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def place() -> str:
    """Names the set of processes that see each other's pids: this boot of this host, and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
