"""Processes of this host, as /proc and pidfds describe them: state, start time, usage, children, exit codes."""

import contextlib
import errno
import fcntl
import os
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

_PIDFD_GET_INFO = 0xC040FF0B
"""`_IOWR(0xFF, 11, struct pidfd_info)`, 64 bytes in its first version (linux/pidfd.h)."""
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60


class PidfdHandle:
    """Watches for the end of a process: `fileno` becomes readable then."""

    def __init__(self, pid: int) -> None:
        """Raises OSError if there is no such process, or no support for pidfds (Linux before 5.3)."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._descriptor

    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the process; None if unknown (kernels before
        6.15 report it to the parent only)."""
        info = bytearray(struct.pack("<Q", _PIDFD_INFO_EXIT) + bytes(56))
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info)
        except OSError:
            return self._zombie_code()
        (known,) = struct.unpack_from("<Q", info)
        if not known & _PIDFD_INFO_EXIT:
            return self._zombie_code()
        (status,) = struct.unpack_from("<i", info, _EXIT_CODE_AT)
        return os.waitstatus_to_exitcode(status)

    def _zombie_code(self) -> int | None:
        """The exit code of a zombie; None if the process is not a zombie."""
        try:
            facts = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return os.waitstatus_to_exitcode(int(facts[49])) if facts[0] == "Z" and len(facts) > 49 else None

    def close(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def start_ticks(pid: int) -> int | None:
    """The start time of a process in clock ticks since boot, None when there is no such process. Together
    with the pid it identifies a process uniquely."""
    facts = _proc_stat(pid)
    return None if facts is None else int(facts[19])


def process_state(pid: int, start: int | None = None) -> str | None:
    """The state letter in /proc (R, S, D, T, Z, ...); None if the process has ended, or if the pid now belongs to a
    process with another start time."""
    facts = _proc_stat(pid)
    if facts is None or (start is not None and int(facts[19]) != start):
        return None
    return facts[0]


def parent_pid(pid: int) -> int | None:
    """Returns the pid of a process's parent; None when there is no such process."""
    facts = _proc_stat(pid)
    return None if facts is None else int(facts[1])


def is_alive(pid: int, start: int | None = None) -> bool:
    """Whether the process exists and is not a zombie."""
    return process_state(pid, start) not in (None, "Z", "X")


def ancestor_pids() -> list[int]:
    """The pids of this process and of its parents, up to the first process of the pid namespace."""
    found, pid = list[int](), os.getpid()
    while pid:
        found.append(pid)
        pid = parent_pid(pid) or 0
    return found


def send_signal(pid: int, start: int | None, number: int) -> bool:
    """Sends a signal to the process with this pid and start time; returns whether it was sent. Never sends one to
    process 1, to this process or to its parents, whoever asks for it, and never to a process that reuses the pid."""
    if pid <= 1 or pid in ancestor_pids():
        return False
    with contextlib.suppress(ProcessLookupError):
        try:
            descriptor = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # Linux before 5.3, or a sandbox without pidfds
                return False
            if is_alive(pid, start):
                os.kill(pid, number)
                return True
            return False
        try:
            if is_alive(pid, start):  # from here on, the descriptor is that of this process
                signal.pidfd_send_signal(descriptor, number)
                return True
        finally:
            os.close(descriptor)
    return False


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty if it has ended or is no longer readable."""
    try:
        return [word for word in (_read_proc(f"/proc/{pid}/cmdline", 1 << 16) or "").split("\0") if word]
    except PermissionError:
        return []


def environment(pid: int) -> dict[str, str]:
    """The environment that a process started with; empty if it has ended or belongs to another user."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (part.decode(errors="replace").partition("=") for part in raw.split(b"\0") if b"=" in part)
    return {name: value for name, _, value in pairs}


def owner_uid(pid: int) -> int | None:
    """The user of a process; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return None


def writing_below(folder: Path) -> list[int]:
    """Pids of the living processes of this user, without this one, that have a file below the folder open for
    writing."""
    start, user, found = f"{folder.resolve()}/", os.geteuid(), list[int]()
    with os.scandir("/proc") as entries:
        pids = [int(each.name) for each in entries if each.name.isdecimal()]
    for pid in pids:
        if pid != os.getpid() and owner_uid(pid) == user:
            found += [pid] if any(writes and path.startswith(start) for path, writes in open_files(pid) or ()) else []
    return found


def open_files(pid: int) -> list[tuple[str, bool]] | None:
    """The paths that a process has open, each with whether it may write there; None if they cannot be read: it has
    ended, or belongs to another user."""
    found = []
    try:
        with os.scandir(f"/proc/{pid}/fd") as descriptors:
            for each in descriptors:
                with contextlib.suppress(OSError):  # closed meanwhile
                    writes = each.stat(follow_symlinks=False).st_mode & 0o200  # the link has the file's access
                    found.append((str(Path(each.path).readlink()), bool(writes)))
    except OSError:
        return None
    return found


def _proc_stat(pid: int) -> list[str] | None:
    text = _read_proc(f"/proc/{pid}/stat")
    return None if text is None else text[text.rindex(")") + 2 :].split()


def _read_proc(path: str, most: int = 8192) -> str | None:
    """The text of a file in /proc; None if the process has ended. Called many times a second; pathlib would take five
    times as long."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, most).decode(errors="replace")
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None


def pid_namespace() -> str:
    """Identifies the set of processes that see each other's pids: this boot of this host, and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The resources that a process has used so far; counters only grow while the process lives."""

    state: str
    """The state letter in /proc."""
    cpu_s: float
    """User and system time of all threads of the process, and of the children that it has reaped."""
    faults: int = 0
    """Page faults of the process and of the children that it has reaped: pages of memory that it has touched anew."""
    read: int | None = None
    """Bytes read from anywhere, page cache and pipes included; None when not requested or not reported by the
    kernel."""
    written: int | None = None
    stored: int | None = None
    """Bytes read from or written to storage: page faults on a mapped file count here and nowhere else."""
    ran_ns: int = 0
    """CPU time of the main thread in nanoseconds; 0 if the kernel does not report it."""

    @property
    def total_bytes(self) -> int | None:
        """The sum of all bytes, some of which are counted twice."""
        if self.read is None or self.written is None:
            return None
        return self.read + self.written + (self.stored or 0)


def process_usage(pid: int, start: int | None = None, with_bytes: bool = False) -> ProcessUsage | None:
    """The resources that a process has used, including bytes if requested; None if the process has ended, or if the pid
    now belongs to a process with another start time."""
    facts = _proc_stat(pid)
    if facts is None or (start is not None and int(facts[19]) != start):
        return None
    read, written, stored = _io_bytes(pid) if with_bytes else (None, None, None)
    ran, _ = _schedstat(f"/proc/{pid}") if facts[0] in "Tt" else (0, 0)
    faults = sum(map(int, facts[7:11]))
    return ProcessUsage(facts[0], _cpu_s(facts), faults, read, written, stored, ran)


def thread_ids(pid: int) -> list[str]:
    """Returns the ids of a process's threads; empty when the process has ended."""
    try:
        with os.scandir(f"/proc/{pid}/task") as found:
            return [each.name for each in found]
    except (FileNotFoundError, ProcessLookupError):
        return []


def thread_state(pid: int, tid: str) -> str | None:
    """Returns the state letter of a thread; None when the thread has ended."""
    text = _read_proc(f"/proc/{pid}/task/{tid}/stat")
    return None if not text else text[text.rindex(")") + 2]


def runnable_ns(pid: int, tid: str) -> int:
    """Returns how long a thread has run or waited for a core so far; 0 if the kernel does not report it."""
    return sum(_schedstat(f"/proc/{pid}/task/{tid}"))


def is_frozen(pid: int) -> bool:
    """Whether the freezer of the process's cgroup (version 1 or 2) has frozen it; False if that cannot be read."""
    for line in (_read_proc(f"/proc/{pid}/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if (
            controllers == "freezer"
            and (_read_proc(f"/sys/fs/cgroup/freezer{path}/freezer.state") or "").strip() == "FROZEN"
        ):
            return True
        if number == "0" and "frozen 1" in (_read_proc(f"/sys/fs/cgroup{path}/cgroup.events") or ""):
            return True
    return False


def descendant_pids(pid: int) -> list[int]:
    """Pids of all living descendants of a process; empty where the kernel does not list children."""
    found: list[int] = []
    todo = [pid]
    while todo:
        below = child_pids(todo.pop())
        found += below
        todo += below
    return found


def descendants_cpu_s(pid: int) -> float:
    """CPU time that all descendants of a process have used."""
    return sum(used.cpu_s for below in descendant_pids(pid) if (used := process_usage(below)) is not None)


def child_pids(pid: int) -> list[int]:
    """Returns the pids of a process's living children; empty where the kernel does not list them."""
    found: list[int] = []
    for task in thread_ids(pid):
        found += [int(child) for child in (_read_proc(f"/proc/{pid}/task/{task}/children") or "").split()]
    return found


def transferred_bytes() -> tuple[int, int]:
    """Bytes that this host's block devices have read and written so far, those of partitions twice; and bytes of all
    requests to network file systems (NFS) that their servers have answered."""
    lines = [line.split() for line in (_read_proc("/proc/diskstats", 1 << 18) or "").splitlines()]
    disks = 512 * sum(int(words[5]) + int(words[9]) for words in lines if len(words) > 9)
    return disks, answered_bytes(_read_proc("/proc/self/mountstats", 1 << 20) or "")


def answered_bytes(mountstats: str) -> int:
    """Bytes sent and received in the answered requests of all mounts, reads, writes and look-ups of names included,
    according to the text of /proc/PID/mountstats (net/sunrpc/stats.c: `OPERATION: requests transmissions timeouts sent
    received ...`)."""
    found, counts = 0, False
    for line in mountstats.splitlines():
        words = line.split()
        if line.startswith("device "):
            counts = False
        elif counts and len(words) > 5 and words[0].endswith(":"):
            found += int(words[4]) + int(words[5])
        else:
            counts |= words == ["per-op", "statistics"]
    return found


def _cpu_s(facts: list[str]) -> float:
    return sum(int(ticks) for ticks in facts[11:15]) * TICK_S


def _schedstat(folder: str) -> tuple[int, int]:
    """Nanoseconds for which a thread has run and waited for a core; 0 if the kernel does not report it."""
    words = (_read_proc(f"{folder}/schedstat") or "").split()
    return (int(words[0]), int(words[1])) if words else (0, 0)


def _io_bytes(pid: int) -> tuple[int | None, int | None, int | None]:
    try:
        words = (_read_proc(f"/proc/{pid}/io") or "").split()
    except PermissionError:
        words = []
    return (int(words[1]), int(words[3]), int(words[9]) + int(words[11])) if words else (None, None, None)
