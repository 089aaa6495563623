"""What the kernel allows this process: shared memory, locked memory, files, processes, control groups."""

import os
import resource
import time
from pathlib import Path

import psutil

from lockstep.doctor.check.facts import Limits, SharedMemory
from lockstep.doctor.check.system import System, entries, number_of, text_of

SEGMENTS = ("nccl-", "torch_", "psm_", "sem.mp-", "cuda.shm", "plasma", "vllm", "ray")
"""Beginnings of names in /dev/shm that NCCL, torch, Python, CUDA, Ray and vLLM give to their segments."""
SEGMENTS_S = 1.5
"""A host may have thousands of processes with thousands of mappings each."""
_ENDLESS = 1 << 60
"""Control groups of version 1 write no limit as a number near 2^63."""


def gather_limits(system: System) -> Limits:
    """Of this process and its control group."""
    version, limit, used = _memory(system)
    pids_max, pids_used = _pids(system)
    soft, hard = (_limit(each) for each in resource.getrlimit(resource.RLIMIT_NOFILE))
    swap = psutil.swap_memory().total
    return Limits(
        gather_shm(system),
        _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        soft,
        hard,
        _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        _threads_of_user(system.proc),
        pids_max,
        pids_used,
        limit,
        used,
        psutil.virtual_memory().total,
        swap,
        number_of(system.proc / "sys/vm/max_map_count"),
        version,
        _cpus(system),
        os.cpu_count() or 0,
    )


def _limit(value: int) -> int | None:
    return None if value in (resource.RLIM_INFINITY, -1) else value


def gather_shm(system: System) -> SharedMemory | None:
    """/dev/shm; None where there is none."""
    folder = system.dev / "shm"
    if not folder.is_dir():
        return None
    room = os.statvfs(folder)
    stale = [path for path in entries(folder) if path.name.startswith(SEGMENTS) and _is_ours(path)]
    opened = _open_segments(system.proc, folder, time.monotonic() + SEGMENTS_S) if stale else set()
    left = [path for path in stale if path.name not in opened] if opened is not None else []
    return SharedMemory(
        room.f_blocks * room.f_frsize,
        room.f_bavail * room.f_frsize,
        filesystem_of(system.proc, folder)[0] or "tmpfs",
        bool(room.f_flag & os.ST_NOEXEC),
        sum(_size(path) for path in left),
        [path.name for path in left[:20]],
    )


def _is_ours(path: Path) -> bool:
    """Who has open what belongs to other users is not to be seen, except for root."""
    try:
        return os.getuid() in (0, path.lstat().st_uid)
    except OSError:
        return False


def _size(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _open_segments(proc: Path, folder: Path, until: float) -> set[str] | None:
    """Names of files of the folder that some process has open or mapped, as far as this user may see; None where that
    takes too long."""
    prefix = f"{folder}/"
    found = set()
    for process in entries(proc):
        if not process.name.isdigit():
            continue
        if time.monotonic() > until:
            return None
        for line in (text_of(process / "maps") or "").splitlines():
            at = line.find(prefix)
            if at >= 0:
                found.add(line[at + len(prefix) :].removesuffix(" (deleted)"))
        for handle in entries(process / "fd"):
            try:
                target = str(handle.readlink())
            except OSError:
                continue
            if target.startswith(prefix):
                found.add(target[len(prefix) :].removesuffix(" (deleted)"))
    return found


def filesystem_of(proc: Path, folder: Path) -> tuple[str, str]:
    """Kind and source of the mount that a folder is in: `ext4`, `/dev/sda1`; empty where that is not known."""
    try:
        real = folder.resolve()
    except OSError:
        return "", ""
    best = ("", "", "")
    for line in (text_of(proc / "mounts") or "").splitlines():
        parts = line.split()
        if len(parts) < 3:
            continue
        point = parts[1].replace("\\040", " ")
        inside = str(real) == point or str(real).startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, parts[2], parts[0])
    return best[1], best[2]


def _threads_of_user(proc: Path) -> int | None:
    """Threads of this user, which the limit of processes counts; None where they cannot be seen."""
    user, total = str(os.getuid()), 0
    for process in entries(proc):
        if not process.name.isdigit():
            continue
        status = text_of(process / "status")
        fields = dict(line.split(":", 1) for line in (status or "").splitlines() if ":" in line)
        if fields.get("Uid", "").split()[:1] == [user] and fields.get("Threads", "").strip().isdigit():
            total += int(fields["Threads"])
    return total or None


def _groups(system: System) -> dict[str, str]:
    """By controller, the path of this process's group; version 2's is under the empty name."""
    found = {}
    for line in (text_of(system.proc / "self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _up(root: Path, path: str) -> list[Path]:
    """The group's folder and those above it: the least limit of all counts. In a container the path may be the host's,
    and its folder the root."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _least(folders: list[Path], name: str) -> tuple[int | None, Path | None]:
    """The least limit, and the folder that sets it."""
    least: tuple[int | None, Path | None] = (None, None)
    for folder in folders:
        value = number_of(folder / name)
        if value is not None and value < _ENDLESS and (least[0] is None or value < least[0]):
            least = value, folder
    return least


def _controller(system: System, name: str) -> tuple[str, list[Path]]:
    """Version and folders of a controller."""
    groups, root = _groups(system), system.sys / "fs/cgroup"
    if name in groups and (root / name).is_dir():
        return "v1", _up(root / name, groups[name])
    if "" in groups:
        unified = root / "unified" if (root / "unified").is_dir() else root
        return "v2", _up(unified, groups[""])
    return "", []


def _memory(system: System) -> tuple[str, int | None, int | None]:
    """Version, limit and use, less what the page cache could give back."""
    version, folders = _controller(system, "memory")
    if version == "v1":
        limit, where = _least(folders, "memory.limit_in_bytes")
        names = "memory.usage_in_bytes", "total_inactive_file"
    else:
        limit, where = _least(folders, "memory.max")
        names = "memory.current", "inactive_file"
    if where is None:
        return version, None, None
    used = number_of(where / names[0])
    stat = dict(line.split()[:2] for line in (text_of(where / "memory.stat") or "").splitlines() if " " in line)
    cache = int(told) if (told := stat.get(names[1], "0")).isdecimal() else 0
    return version, limit, None if used is None else max(0, used - cache)


def _pids(system: System) -> tuple[int | None, int | None]:
    _, folders = _controller(system, "pids")
    limit, where = _least(folders, "pids.max")
    return (None, None) if where is None else (limit, number_of(where / "pids.current"))


def _cpus(system: System) -> float | None:
    """CPUs' worth of time that the group may use; None is no limit."""
    version, folders = _controller(system, "cpu")
    found = []
    for folder in folders:
        if version == "v1":
            quota, period = number_of(folder / "cpu.cfs_quota_us"), number_of(folder / "cpu.cfs_period_us")
        else:
            words = (text_of(folder / "cpu.max") or "max").split()
            quota = int(words[0]) if words[0].isdigit() else None
            period = int(words[1]) if len(words) > 1 and words[1].isdigit() else 100_000
        if quota is not None and quota > 0 and period:
            found.append(quota / period)
    return min(found, default=None)
