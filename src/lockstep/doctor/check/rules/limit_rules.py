"""Judges resource limits, disks and the clock of one host. Pure."""

from collections.abc import Iterator

from lockstep.base.text import count_noun
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

SHM_FIX = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm"


def format_size(count: float) -> str:
    """Formats a number of bytes, such as `1.5 GiB`."""
    for unit, of in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if count >= of:
            return f"{count / of:.3g} {unit}" if count / of < 1000 else f"{count / of:.0f} {unit}"
    return f"{count:.0f} bytes"


def judge_limits(
    host: str, limits: ResourceLimits, needs: HostRequirements, rdma: bool, gpus: int
) -> Iterator[Finding]:
    """Judges shared memory, CPUs, memory maps and resource limits.

    Args:
        rdma: whether the host has InfiniBand or RoCE adapters, which lock registered memory.
        gpus: number of GPUs of the host.
    """
    if limits.shm is None:
        yield Finding("shm", "unchecked", host, "/dev/shm does not exist")
    else:
        yield from _judge_shm(host, limits.shm, needs.shared or gpus > 0)
    yield _judge_memlock(host, limits, rdma)
    yield _judge_nofile(host, limits)
    yield _judge_processes(host, limits)
    yield _judge_memory(host, limits)
    if limits.cpus is not None and limits.cpus < limits.cpus_host:
        seen = f"this process may use the time of {limits.cpus:g} of {limits.cpus_host} CPUs"
        why = "libraries start as many threads as the host has CPUs, and all of them are throttled"
        yield Finding("cpus", "note", host, seen, why, f"export OMP_NUM_THREADS={max(1, int(limits.cpus))}")
    if limits.map_count is not None and limits.map_count < 65530:
        seen = f"a process may have at most {limits.map_count} memory maps (vm.max_map_count)"
        why = "CUDA and large models need more; mmap then fails with 'Cannot allocate memory'"
        yield Finding("map-count", "warning", host, seen, why, "sysctl -w vm.max_map_count=262144")


def _judge_shm(host: str, shm: ShmSpace, needed: bool) -> Iterator[Finding]:
    severity_if_small: Severity = "error" if needed else "warning"
    seen = f"/dev/shm has {format_size(shm.free)} free of {format_size(shm.total)}"
    why = (
        "ranks on one host, data loader workers and vLLM exchange data there; without space they fail with a bus error"
    )
    if shm.total <= 64 * MIB:
        seen += ", which is docker's default"
        yield Finding("shm-size", severity_if_small, host, seen, why, SHM_FIX, SHM_SOURCE)
    elif shm.free < 128 * MIB:
        fix = "remove stale segments" if shm.stale else "find what fills it: ls -lS /dev/shm"
        yield Finding("shm-size", severity_if_small, host, seen, why, fix, SHM_SOURCE)
    elif shm.free < GIB:
        yield Finding("shm-size", "warning", host, seen, why, SHM_FIX, SHM_SOURCE)
    else:
        yield Finding("shm-size", "ok", host, seen)
    if shm.noexec:
        why = "libraries that load code from there fail with 'failed to map segment'"
        yield Finding("shm-noexec", "note", host, "/dev/shm is mounted noexec", why)
    if shm.stale >= MIB:
        names = ", ".join(shm.stale_names[:3]) + (" and more" if len(shm.stale_names) > 3 else "")
        seen = f"{format_size(shm.stale)} in /dev/shm are not used by any visible process: {names}"
        why = "segments of killed jobs remain until /dev/shm is full"
        severity: Severity = "warning" if shm.stale > shm.total // 4 else "note"
        fix = "if no other job runs on this host, remove them from /dev/shm"
        yield Finding("shm-stale", severity, host, seen, why, fix)


def _judge_memlock(host: str, limits: ResourceLimits, rdma: bool) -> Finding:
    if limits.memlock is None:
        return Finding("memlock", "ok", host, "locked memory is unlimited")
    seen = f"{format_size(limits.memlock)} of memory may be locked (ulimit -l)"
    if not rdma:
        return Finding("memlock", "ok", host, f"{seen}; this host has no RDMA adapter that needs more")
    why = "InfiniBand and RoCE lock the memory they send from: ibv_reg_mr fails with 'Cannot allocate memory'"
    fix = "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd, also for Slurm: LimitMEMLOCK=infinity)"
    severity: Severity = "error" if limits.memlock < 64 * MIB else "warning"
    return Finding("memlock", severity, host, seen, why, fix, MEMLOCK_SOURCE)


def _judge_nofile(host: str, limits: ResourceLimits) -> Finding:
    if limits.nofile is None:
        return Finding("nofile", "ok", host, "open files are unlimited")
    seen = f"a process may open {limits.nofile} files (ulimit -n)"
    if limits.nofile >= 8192:
        return Finding("nofile", "ok", host, seen)
    hard = limits.nofile_hard
    why = "every peer, worker and data file needs some; connections then fail with 'Too many open files'"
    fix = "ulimit -n 65536" if hard is None or hard >= 65536 else f"ulimit -n {hard}, and raise the hard limit"
    raised = hard is None or hard >= 8192
    severity: Severity = "error" if limits.nofile < 256 and not raised else "note" if raised else "warning"
    return Finding("nofile", severity, host, seen, why, fix, NOFILE_SOURCE)


def _judge_processes(host: str, limits: ResourceLimits) -> Finding:
    """Judges the limit on threads: the user's or the control group's, whichever leaves fewer."""
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
        return Finding("processes", "ok", host, "processes and threads are unlimited")
    rest, seen, fix = min(left)
    why = (
        "a rank with CUDA, NCCL and OpenBLAS has hundreds of threads; "
        "starting more fails with 'Resource temporarily unavailable'"
    )
    if rest < 256:
        return Finding("processes", "error", host, seen, why, fix)
    return Finding("processes", "warning" if rest < 2048 else "ok", host, seen, why, fix if rest < 2048 else "")


def _judge_memory(host: str, limits: ResourceLimits) -> Finding:
    limit, used = limits.memory_limit, limits.memory_used or 0
    if limit is None or limit >= limits.memory_host:
        seen = f"{format_size(limits.memory_host)} of memory, without a control group limit"
        return Finding("memory", "ok", host, seen)
    seen = f"the control group ({limits.cgroup}) uses {format_size(used)} of its limit of {format_size(limit)}"
    why = f"the kernel kills processes above the limit, although the host has {format_size(limits.memory_host)}"
    fix = "raise the memory limit of the container or job"
    left = limit - used
    if left < GIB:
        return Finding("memory", "error", host, seen, why, fix)
    return Finding("memory", "warning" if left < limit // 10 else "ok", host, seen, why)


def judge_disk(host: str, disk: DiskSpace) -> Iterator[Finding]:
    """Judges space, free inodes and write speed of a folder."""
    what = f"{disk.purpose} ({disk.path}{', ' + disk.filesystem if disk.filesystem else ''})"
    if disk.problem:
        why = "the run cannot save its results"
        fix = "set folder to one that this user can write to"
        yield Finding("disk-write", "error", host, f"{what} cannot be written: {disk.problem}", why, fix)
        return
    seen = f"{what} has {format_size(disk.free)} free of {format_size(disk.total)}"
    why = "a checkpoint holds weights and optimizer states; Ray stops spilling objects to a disk that is 95% full"
    full = disk.free < disk.total // 20
    if disk.free < GIB:
        yield Finding("disk-space", "error", host, seen, why, "free space, or set folder to another disk")
    elif disk.free < 10 * GIB or full:
        yield Finding("disk-space", "warning", host, seen, why, "free space, or set folder to another disk")
    else:
        yield Finding("disk-space", "ok", host, seen)
    if disk.files_free is not None and disk.files_free < 10_000 and disk.total:
        seen = f"{what} has room for only {count_noun(disk.files_free, 'more file')}"
        yield Finding("disk-files", "warning", host, seen, "'No space left on device' occurs despite free bytes")
    if disk.filesystem == "tmpfs":
        seen, why = f"{what} is in memory", "it uses memory of the run, and is lost on reboot"
        yield Finding("disk-kind", "warning", host, seen, why, "set folder to a disk")
    if disk.written and disk.took_s:
        yield _judge_write_speed(host, what, disk.written, disk.took_s)


def _judge_write_speed(host: str, what: str, written: int, took_s: float) -> Finding:
    rate = written / took_s
    seen = f"{what} accepts {format_size(rate)}/s ({format_size(written)} written and flushed in {took_s:.2f} s)"
    if rate >= 50 * MIB:
        return Finding("disk-speed", "ok", host, seen)
    hours = 42e9 / rate / 3600
    why = f"a checkpoint of a model with 3 billion parameters (42 GB) would take {hours:.1f} h while ranks wait"
    return Finding("disk-speed", "warning", host, seen, why, "set folder to a faster disk")


def judge_clock(host: str, clock: ClockSync, several: bool) -> Finding:
    """Judges whether the clock is synchronised."""
    why = "logs of several hosts cannot be ordered, and tokens and leases expire early or late"
    fix = "systemctl enable --now chronyd (or systemd-timesyncd)"
    offset = "" if clock.offset_s is None else f", off by {abs(clock.offset_s) * 1000:.3g} ms"
    seen = f"{'synchronised' if clock.synchronised else 'not synchronised'}{offset} (according to {clock.said_by})"
    if clock.offset_s is not None and abs(clock.offset_s) > 0.5:
        return Finding("clock", "warning", host, f"the clock is {seen}", why, "chronyc makestep")
    if clock.synchronised:
        return Finding("clock", "ok", host, f"the clock is {seen}")
    if clock.said_by == CLOCK_FROM_KERNEL:
        why += "; whether a hypervisor steers the clock is not visible here"
        several = False
    return Finding("clock", "warning" if several else "note", host, f"the clock is {seen}", why, fix)
