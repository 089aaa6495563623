"""Judges resource limits, disks and the clock of one host. Pure."""

from collections.abc import Iterator

from lockstep.doctor.check.facts.host_facts import ClockSync, DiskSpace, ResourceLimits, ShmSpace
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.facts.host_resources import CLOCK_FROM_KERNEL
from lockstep.doctor.output.findings import Finding, Severity

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

SHM_SOURCE = (
    "https://docs.nvidia.com/deeplearning/nccl/archives/nccl_2262/user-guide/docs/troubleshooting.html#shared-memory"
)
MEMLOCK_SOURCE = "https://docs.nvidia.com/deeplearning/nccl/archives/nccl_2262/user-guide/docs/troubleshooting.html"
NOFILE_SOURCE = "https://docs.ray.io/en/latest/cluster/vms/user-guides/large-cluster-best-practices.html"

_SHM_FIX = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"


def format_size(count: float) -> str:
    """`1.5 GiB`."""
    for unit, of in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= of:
            return f"{count / of:.3g} {unit}" if count / of < 1000 else f"{count / of:.0f} {unit}"
    return f"{count:.0f} bytes"


def judge_limits(
    host: str, limits: ResourceLimits, needs: HostRequirements, rdma: bool, gpus: int
) -> Iterator[Finding]:
    """All of them.

    Args:
        rdma: whether the host has InfiniBand or RoCE adapters, which register memory by locking it.
        gpus: how many the host has.
    """
    if limits.shm is None:
        yield Finding("shm", "unchecked", host, "there is no /dev/shm here")
    else:
        yield from _shm(host, limits.shm, needs.shared or gpus > 0)
    yield _memlock(host, limits, rdma)
    yield _nofile(host, limits)
    yield _processes(host, limits)
    yield _memory(host, limits)
    if limits.cpus is not None and limits.cpus < limits.cpus_host:
        said = f"{limits.cpus:g} of {limits.cpus_host} CPUs' time may be used here"
        why = "libraries start as many threads as the host has CPUs, and are throttled together"
        yield Finding("cpus", "note", host, said, why, f"export OMP_NUM_THREADS={max(1, int(limits.cpus))}")
    if limits.map_count is not None and limits.map_count < 65530:
        said = f"a process may have {limits.map_count} memory maps (vm.max_map_count)"
        why = "CUDA and large models map more, and then mmap fails with 'Cannot allocate memory'"
        yield Finding("map-count", "warning", host, said, why, "sysctl -w vm.max_map_count=262144")


def _shm(host: str, shm: ShmSpace, used: bool) -> Iterator[Finding]:
    little: Severity = "error" if used else "warning"
    said = f"/dev/shm has {format_size(shm.free)} free of {format_size(shm.total)}"
    why = "ranks of one host, data loader workers and vLLM exchange data there; what does not fit ends in a bus error"
    if shm.total <= 64 * MIB:
        said += ", as docker gives when it is not asked for more"
        yield Finding("shm-size", little, host, said, why, _SHM_FIX, SHM_SOURCE)
    elif shm.free < 128 * MIB:
        fix = "remove what was left there" if shm.stale else "find who fills it: ls -lS /dev/shm"
        yield Finding("shm-size", little, host, said, why, fix, SHM_SOURCE)
    elif shm.free < GIB:
        yield Finding("shm-size", "warning", host, said, why, _SHM_FIX, SHM_SOURCE)
    else:
        yield Finding("shm-size", "ok", host, said)
    if shm.noexec:
        why = "libraries that load code from there fail with 'failed to map segment'"
        yield Finding("shm-noexec", "note", host, "/dev/shm is mounted noexec", why)
    if shm.stale >= MIB:
        names = ", ".join(shm.stale_names[:3]) + (" and more" if len(shm.stale_names) > 3 else "")
        said = f"{format_size(shm.stale)} in /dev/shm belong to no process that this user can see: {names}"
        why = "jobs that were killed leave their segments behind, until there is no room"
        severity: Severity = "warning" if shm.stale > shm.total // 4 else "note"
        fix = "when no other job runs on this host: remove them from /dev/shm"
        yield Finding("shm-stale", severity, host, said, why, fix)


def _memlock(host: str, limits: ResourceLimits, rdma: bool) -> Finding:
    if limits.memlock is None:
        return Finding("memlock", "ok", host, "memory may be locked without limit")
    said = f"{format_size(limits.memlock)} of memory may be locked (ulimit -l)"
    if not rdma:
        return Finding("memlock", "ok", host, f"{said}; this host has no RDMA adapter that needs more")
    why = "InfiniBand and RoCE lock the memory that they send from: ibv_reg_mr fails with 'Cannot allocate memory'"
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd, also for Slurm: LimitMEMLOCK=infinity)"
    severity: Severity = "error" if limits.memlock < 64 * MIB else "warning"
    return Finding("memlock", severity, host, said, why, fix, MEMLOCK_SOURCE)


def _nofile(host: str, limits: ResourceLimits) -> Finding:
    if limits.nofile is None:
        return Finding("nofile", "ok", host, "files may be opened without limit")
    said = f"a process may open {limits.nofile} files (ulimit -n)"
    if limits.nofile >= 8192:
        return Finding("nofile", "ok", host, said)
    hard = limits.nofile_hard
    why = "every peer, worker and data file takes some; connections then fail with 'Too many open files'"
    fix = "ulimit -n 65536" if hard is None or hard >= 65536 else f"ulimit -n {hard}, and raise the hard limit"
    raised = hard is None or hard >= 8192
    severity: Severity = "error" if limits.nofile < 256 and not raised else "note" if raised else "warning"
    return Finding("nofile", severity, host, said, why, fix, NOFILE_SOURCE)


def _processes(host: str, limits: ResourceLimits) -> Finding:
    """Whichever of the user's limit and the control group's leaves less."""
    left: list[tuple[int, str, str]] = []
    if limits.nproc is not None:
        used = limits.threads_of_user or 1
        fix = "ulimit -u unlimited (or nproc in /etc/security/limits.conf)"
        left.append((limits.nproc - used, f"{used} of this user's {limits.nproc} threads (ulimit -u) are in use", fix))
    if limits.pids_max is not None:
        used = limits.pids_used or 0
        fix = (
            "raise the control group's pids.max (docker: --pids-limit -1; Kubernetes: podPidsLimit; systemd: TasksMax)"
        )
        left.append(
            (limits.pids_max - used, f"{used} of the control group's {limits.pids_max} threads are in use", fix)
        )
    if not left:
        return Finding("processes", "ok", host, "processes and threads may be started without limit")
    rest, said, fix = min(left)
    why = "a rank with CUDA, NCCL and OpenBLAS has hundreds of threads; then 'Resource temporarily unavailable'"
    if rest < 256:
        return Finding("processes", "error", host, said, why, fix)
    return Finding("processes", "warning" if rest < 2048 else "ok", host, said, why, fix if rest < 2048 else "")


def _memory(host: str, limits: ResourceLimits) -> Finding:
    limit, used = limits.memory_limit, limits.memory_used or 0
    if limit is None or limit >= limits.memory_host:
        said = f"{format_size(limits.memory_host)} of memory, which no control group limits"
        return Finding("memory", "ok", host, said)
    said = f"{format_size(used)} of the {format_size(limit)} that the control group ({limits.cgroup}) allows are in use"
    why = f"the kernel kills whoever goes over it, though the host has {format_size(limits.memory_host)}"
    fix = "raise the memory limit of the container or job"
    left = limit - used
    if left < GIB:
        return Finding("memory", "error", host, said, why, fix)
    return Finding("memory", "warning" if left < limit // 10 else "ok", host, said, why)


def judge_disk(host: str, disk: DiskSpace) -> Iterator[Finding]:
    """Space, files and speed of one folder."""
    what = f"{disk.purpose} ({disk.path}{', ' + disk.filesystem if disk.filesystem else ''})"
    if disk.problem:
        why = "the run cannot keep what it does"
        fix = "set folder to one that this user can write to"
        yield Finding("disk-write", "error", host, f"{what} cannot be written: {disk.problem}", why, fix)
        return
    said = f"{what} has {format_size(disk.free)} free of {format_size(disk.total)}"
    why = "a checkpoint takes the weights and more for the optimizer; Ray's objects do not spill to a disk 95% full"
    full = disk.free < disk.total // 20
    if disk.free < GIB:
        yield Finding("disk-space", "error", host, said, why, "make room, or set folder to another disk")
    elif disk.free < 10 * GIB or full:
        yield Finding("disk-space", "warning", host, said, why, "make room, or set folder to another disk")
    else:
        yield Finding("disk-space", "ok", host, said)
    if disk.files_free is not None and disk.files_free < 10_000 and disk.total:
        said = f"{what} has room for {disk.files_free} more files"
        yield Finding("disk-files", "warning", host, said, "'No space left on device' comes with free bytes as well")
    if disk.filesystem == "tmpfs":
        said, why = f"{what} is in memory", "it takes memory from the run, and is gone when the host restarts"
        yield Finding("disk-kind", "warning", host, said, why, "set folder to a disk")
    if disk.written and disk.took_s:
        yield _speed(host, what, disk.written, disk.took_s)


def _speed(host: str, what: str, written: int, took_s: float) -> Finding:
    rate = written / took_s
    said = f"{what} takes {format_size(rate)}/s ({format_size(written)} written and flushed in {took_s:.2f} s)"
    if rate >= 50 * MIB:
        return Finding("disk-speed", "ok", host, said)
    hours = 42e9 / rate / 3600
    why = f"a checkpoint of a model with 3 billion parameters (42 GB) would take {hours:.1f} h while ranks wait"
    return Finding("disk-speed", "warning", host, said, why, "set folder to a faster disk")


def judge_clock(host: str, clock: ClockSync, several: bool) -> Finding:
    """Whether the host's time is that of others."""
    why = "logs of several hosts cannot be put in order, and tokens and leases expire early or late"
    fix = "systemctl enable --now chronyd (or systemd-timesyncd)"
    offset = "" if clock.offset_s is None else f", off by {abs(clock.offset_s) * 1000:.3g} ms"
    said = f"{'synchronised' if clock.synchronised else 'not synchronised'}{offset} ({clock.said_by} says)"
    if clock.offset_s is not None and abs(clock.offset_s) > 0.5:
        return Finding("clock", "warning", host, f"the clock is {said}", why, "chronyc makestep")
    if clock.synchronised:
        return Finding("clock", "ok", host, f"the clock is {said}")
    if clock.said_by == CLOCK_FROM_KERNEL:
        why += "; whoever steers it from outside a virtual machine is not seen here"
        several = False
    return Finding("clock", "warning" if several else "note", host, f"the clock is {said}", why, fix)
