"""Resources of this host: shared memory, resource limits, control groups, disks and clock synchronisation."""

import ctypes
import os
import resource
import time
from pathlib import Path

import psutil

from lockstep.base.wait_state import WaitTimeout
from lockstep.doctor.check.facts.host_facts import ClockSync, DiskSpace, ResourceLimits, ShmSpace
from lockstep.doctor.check.facts.host_system import (
    HostSystem,
    SourceUnavailable,
    first_line,
    list_folder,
    read_int,
    read_text,
)

CLOCK_FROM_KERNEL = "the kernel"


def gather_clock(system: HostSystem, bound_s: float = 2.0) -> ClockSync:
    """Clock synchronisation according to chrony, else systemd, else the kernel.

    Raises:
        SourceUnavailable: no source answers.
    """
    failures = []
    for ask in (_clock_from_chrony, _clock_from_systemd, _clock_from_kernel):
        try:
            return ask(system, bound_s)
        except (SourceUnavailable, WaitTimeout, ValueError) as error:
            failures.append(str(error))
    raise SourceUnavailable("; ".join(failures))


def _clock_from_chrony(system: HostSystem, bound_s: float) -> ClockSync:
    """Parses `chronyc -c tracking`: reference, its name, stratum, time, offset in seconds, ..., leap status."""
    ran = system.run(["chronyc", "-c", "tracking"], bound_s)
    fields = ran.out.strip().split(",")
    if ran.code or len(fields) < 14:
        raise SourceUnavailable(f"chronyc did not answer ({first_line(ran.err or ran.out)})")
    return ClockSync(fields[-1] != "Not synchronised" and fields[0] != "00000000", float(fields[4]), "chronyc")


def _clock_from_systemd(system: HostSystem, bound_s: float) -> ClockSync:
    ran = system.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"], bound_s)
    answer = ran.out.strip()
    if ran.code or answer not in ("yes", "no"):
        raise SourceUnavailable(f"timedatectl did not answer ({first_line(ran.err or ran.out)})")
    return ClockSync(answer == "yes", None, "timedatectl")


class _Timex(ctypes.Structure):
    """The beginning of `struct timex` (adjtimex(2)), with padding for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_long * 32),
    )  # fmt: skip


_UNSYNCHRONISED = 0x0040
"""STA_UNSYNC of sys/timex.h."""


def _clock_from_kernel(system: HostSystem, bound_s: float) -> ClockSync:
    """Asks the kernel, which knows whether a daemon steers the clock; a container sees the clock of its host."""
    status = _Timex()  # `modes` 0: adjtimex only reads
    call = getattr(ctypes.CDLL(None), "adjtimex", None)
    if call is None or not (system.proc / "self").exists() or call(ctypes.byref(status)) < 0:
        raise SourceUnavailable("the kernel does not report it")
    return ClockSync(not status.status & _UNSYNCHRONISED, None, CLOCK_FROM_KERNEL)


SEGMENT_PREFIXES = ("nccl-", "torch_", "psm_", "sem.mp-", "cuda.shm", "plasma", "vllm", "ray")
"""Name prefixes of the segments that NCCL, torch, Python, CUDA, Ray and vLLM create in /dev/shm."""
SEGMENT_SCAN_S = 1.5
"""Time limit for finding open segments: a host may have thousands of processes with thousands of mappings each."""
_NO_LIMIT = 1 << 60
"""Limits above this mean none: version 1 control groups report a number near 2^63."""


def gather_limits(system: HostSystem) -> ResourceLimits:
    """The limits of this process and its control group."""
    version, limit, used = _cgroup_memory(system)
    pids_max, pids_used = _cgroup_pids(system)
    soft, hard = (_rlimit(each) for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    swap = psutil.swap_memory().total
    return ResourceLimits(
        gather_shm(system),
        _rlimit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        soft,
        hard,
        _rlimit(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        _threads_of_user(system.proc),
        pids_max,
        pids_used,
        limit,
        used,
        psutil.virtual_memory().total,
        swap,
        read_int(system.proc / "sys/vm/max_map_count"),
        version,
        _cgroup_cpus(system),
        os.cpu_count() or 0,
    )


def _rlimit(value: int) -> int | None:
    return None if value in (resource.RLIM_INFINITY, -1) else value


def gather_shm(system: HostSystem) -> ShmSpace | None:
    """Space in /dev/shm, and stale segments; None if the folder does not exist."""
    folder = system.dev / "shm"
    if not folder.is_dir():
        return None
    usage = os.statvfs(folder)
    stale = [path for path in list_folder(folder) if path.name.startswith(SEGMENT_PREFIXES) and _is_own_file(path)]
    opened = _open_segments(system.proc, folder, time.monotonic() + SEGMENT_SCAN_S) if stale else set()
    left = [path for path in stale if path.name not in opened] if opened is not None else []
    return ShmSpace(
        usage.f_blocks * usage.f_frsize,
        usage.f_bavail * usage.f_frsize,
        filesystem_of(system.proc, folder)[0] or "tmpfs",
        bool(usage.f_flag & os.ST_NOEXEC),
        sum(_allocated_bytes(path) for path in left),
        [path.name for path in left[:20]],
    )


def _is_own_file(path: Path) -> bool:
    """Whether this user owns the file (or is root), and so can see which processes have it open."""
    try:
        return os.getuid() in (0, path.lstat().st_uid)
    except OSError:
        return False


def _allocated_bytes(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _open_segments(proc: Path, folder: Path, until: float) -> set[str] | None:
    """Names of the folder's files that a visible process has open or mapped; None if the time limit is reached."""
    prefix = f"{folder}/"
    found = set()
    for process in list_folder(proc):
        if not process.name.isdigit():
            continue
        if time.monotonic() > until:
            return None
        for line in (read_text(process / "maps") or "").splitlines():
            at = line.find(prefix)
            if at >= 0:
                found.add(line[at + len(prefix) :].removesuffix(" (deleted)"))
        for handle in list_folder(process / "fd"):
            try:
                target = str(handle.readlink())
            except OSError:
                continue
            if target.startswith(prefix):
                found.add(target[len(prefix) :].removesuffix(" (deleted)"))
    return found


def filesystem_of(proc: Path, folder: Path) -> tuple[str, str]:
    """Type and source of the mount that contains a folder, such as `ext4` and `/dev/sda1`; empty if not known."""
    try:
        real = folder.resolve()
    except OSError:
        return "", ""
    best = ("", "", "")
    for line in (read_text(proc / "mounts") or "").splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = parts[1].replace("\\040", " ")
        inside = str(real) == point or str(real).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, parts[2], parts[0])
    return best[1], best[2]


def _threads_of_user(proc: Path) -> int | None:
    """Number of threads of this user, which count against its process limit; None if not visible."""
    user, total = str(os.getuid()), 0
    for process in list_folder(proc):
        if not process.name.isdigit():
            continue
        status = read_text(process / "status")
        fields = dict(line.split(":", 1) for line in (status or "").splitlines() if ":" in line)
        if fields.get("Uid", "").split()[:1] == [user] and fields.get("Threads", "").strip().isdigit():
            total += int(fields["Threads"])
    return total or None


def _cgroup_paths(system: HostSystem) -> dict[str, str]:
    """Path of this process's control group by controller; version 2 has the empty name."""
    found = {}
    for line in (read_text(system.proc / "self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _cgroup_and_parents(root: Path, path: str) -> list[Path]:
    """Folders of a control group and its parents, of which the smallest limit applies.

    In a container the path may be the host's, while the group's folder is the root.
    """
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _smallest_limit(folders: list[Path], name: str) -> tuple[int | None, Path | None]:
    """The smallest limit, and the folder that sets it."""
    least: tuple[int | None, Path | None] = (None, None)
    for folder in folders:
        value = read_int(folder / name)
        if value is not None and value < _NO_LIMIT and (least[0] is None or value < least[0]):
            least = value, folder
    return least


def _cgroup_controller(system: HostSystem, name: str) -> tuple[str, list[Path]]:
    """Version and folders of a controller."""
    groups, root = _cgroup_paths(system), system.sys / "fs/cgroup"
    if name in groups and (root / name).is_dir():
        return "v1", _cgroup_and_parents(root / name, groups[name])
    if "" in groups:
        unified = root / "unified" if (root / "unified").is_dir() else root
        return "v2", _cgroup_and_parents(unified, groups[""])
    return "", []


def _cgroup_memory(system: HostSystem) -> tuple[str, int | None, int | None]:
    """Version of the control group, its memory limit, and the memory in use without reclaimable page cache."""
    version, folders = _cgroup_controller(system, "memory")
    if version == "v1":
        limit, where = _smallest_limit(folders, "memory.limit_in_bytes")
        names = "memory.usage_in_bytes", "total_inactive_file"
    else:
        limit, where = _smallest_limit(folders, "memory.max")
        names = "memory.current", "inactive_file"
    if where is None:
        return version, None, None
    used = read_int(where / names[0])
    stat = dict(line.split()[:2] for line in (read_text(where / "memory.stat") or "").splitlines() if " " in line)
    cache = int(value) if (value := stat.get(names[1], "0")).isdecimal() else 0
    return version, limit, None if used is None else max(0, used - cache)


def _cgroup_pids(system: HostSystem) -> tuple[int | None, int | None]:
    _, folders = _cgroup_controller(system, "pids")
    limit, where = _smallest_limit(folders, "pids.max")
    return (None, None) if where is None else (limit, read_int(where / "pids.current"))


def _cgroup_cpus(system: HostSystem) -> float | None:
    """The control group's CPU time limit, in CPUs; None means no limit."""
    version, folders = _cgroup_controller(system, "cpu")
    found = []
    for folder in folders:
        if version == "v1":
            quota, period = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
        else:
            words = (read_text(folder / "cpu.max") or "max").split()
            quota = int(words[0]) if words[0].isdigit() else None
            period = int(words[1]) if len(words) > 1 and words[1].isdigit() else 100_000
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)


DISK_WRITE_BYTES = 64 << 20
DISK_WRITE_S = 1.0
_BLOCK = bytes(4 << 20)
_flush = getattr(os, "fdatasync", os.fsync)
"""macOS has no fdatasync."""


def gather_disk(
    system: HostSystem, folder: Path, purpose: str, most: int = DISK_WRITE_BYTES, bound_s: float = DISK_WRITE_S
) -> DiskSpace:
    """Space of a folder or its nearest existing parent, and how fast a temporary file is written there.

    Args:
        most: maximum number of bytes to write.
        bound_s: maximum time of writing.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    usage = os.statvfs(existing)
    kind, _ = filesystem_of(system.proc, existing)
    total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    files = usage.f_favail if usage.f_files else None
    if usage.f_flag & os.ST_RDONLY:
        return DiskSpace(str(folder), purpose, kind, total, free, files, True, problem="the file system is read-only")
    try:
        written, took = _measure_write(existing, min(most, free // 4), bound_s)
    except OSError as error:
        return DiskSpace(str(folder), purpose, kind, total, free, files, problem=f"{error.strerror} ({existing})")
    return DiskSpace(str(folder), purpose, kind, total, free, files, False, written, round(took, 4))


def _measure_write(folder: Path, most: int, bound_s: float) -> tuple[int, float]:
    """Writes a temporary file; returns the bytes and the seconds, including fsync."""
    path = folder / f".lockstep-check-{os.getpid()}-{time.monotonic_ns()}"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        begun, written = time.monotonic(), 0
        while written < most and time.monotonic() - begun < bound_s:
            written += os.write(handle, _BLOCK[: min(len(_BLOCK), most - written)])
            _flush(handle)
        return written, time.monotonic() - begun
    finally:
        os.close(handle)
        path.unlink(missing_ok=True)
