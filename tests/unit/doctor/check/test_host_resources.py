"""Limits: of real processes with real rlimits, real small tmpfs, and control groups of both versions as folders."""

import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.doctor.check.facts.host_facts import ClockSync, DiskSpace, ResourceLimits, ShmSpace
from lockstep.doctor.check.facts.host_requirements import HostRequirements
from lockstep.doctor.check.facts.host_resources import filesystem_of, gather_limits, gather_shm
from lockstep.doctor.check.facts.host_system import HostSystem
from lockstep.doctor.check.rules.limit_rules import GIB, MIB, format_size, judge_clock, judge_disk, judge_limits
from lockstep.doctor.output.findings import Finding

from .simulated_hosts import made

SHM = ShmSpace(16 * GIB, 15 * GIB)
FINE = ResourceLimits(SHM, None, 65536, 65536, None, 100, None, None, None, None, 64 * GIB, 0, 65530, "v2", None, 8)

CHILD = """
import json, resource, sys
from dataclasses import asdict
from lockstep.doctor.check.facts.host_resources import gather_limits
from lockstep.doctor.check.facts.host_system import HostSystem
for name, value in json.loads(sys.argv[1]).items():
    resource.setrlimit(getattr(resource, name), (value, value))
print(json.dumps(asdict(gather_limits(HostSystem()))))
"""


SHARED = HostRequirements(shared=True)


def _judged(
    limits: ResourceLimits, rdma: bool = False, needs: HostRequirements = SHARED, gpus: int = 0
) -> dict[str, Finding]:
    return {finding.id: finding for finding in judge_limits("a", limits, needs, rdma, gpus)}


def _child(**limits: int) -> ResourceLimits:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(limits)], capture_output=True, text=True, timeout=60, check=True
    )
    known = json.loads(done.stdout)
    shm = ShmSpace(**known.pop("shm")) if known["shm"] else None
    return ResourceLimits(shm, **{name: value for name, value in known.items() if name != "shm"})


def test_nothing_is_wrong_with_a_good_host() -> None:
    assert {finding.severity for finding in _judged(FINE, rdma=True).values()} == {"ok"}


def test_rlimits_of_a_real_process() -> None:
    limits = _child(RLIMIT_NOFILE=200, RLIMIT_MEMLOCK=65536)
    assert (limits.nofile, limits.memlock) == (200, 65536)
    assert _judged(limits)["nofile"].severity == "error"
    assert _judged(limits, rdma=True)["memlock"].severity == "error"
    assert "memlock=-1" in _judged(limits, rdma=True)["memlock"].fix
    assert _judged(limits, rdma=False)["memlock"].severity == "ok"


def test_a_limit_of_processes_that_is_nearly_reached() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if hard not in (-1, resource.RLIM_INFINITY) and hard < 400:
        pytest.skip("fewer processes are allowed here than the test gives")
    limits = _child(RLIMIT_NPROC=300)
    assert limits.nproc == 300 and limits.threads_of_user
    assert _judged(replace(limits, threads_of_user=200))["processes"].severity == "error"


def test_a_soft_limit_of_files_that_ray_raises_is_a_note() -> None:
    assert _judged(replace(FINE, nofile=1024, nofile_hard=1 << 20))["nofile"].severity == "note"
    assert _judged(replace(FINE, nofile=1024, nofile_hard=4096))["nofile"].severity == "warning"


@pytest.mark.parametrize(
    ("total", "free", "severity"),
    [
        (64 * MIB, 64 * MIB, "error"),
        (8 * GIB, 100 * MIB, "error"),
        (512 * MIB, 512 * MIB, "warning"),
        (8 * GIB, 7 * GIB, "ok"),
    ],
)
def test_shared_memory(total: int, free: int, severity: str) -> None:
    found = _judged(replace(FINE, shm=ShmSpace(total, free)))["shm-size"]
    assert found.severity == severity
    assert severity != "error" or "--shm-size" in found.fix or "ls" in found.fix


def test_little_shared_memory_is_a_warning_where_one_process_computes_on_the_cpu() -> None:
    little = replace(FINE, shm=ShmSpace(64 * MIB, 64 * MIB))
    assert _judged(little, needs=HostRequirements())["shm-size"].severity == "warning"
    assert _judged(little, needs=HostRequirements(), gpus=1)["shm-size"].severity == "error"


def test_a_real_tmpfs_of_docker_size(tmp_path: Path) -> None:
    (tmp_path / "dev/shm").mkdir(parents=True)
    script = (
        f"mount -t tmpfs -o size=64m,noexec tmpfs {tmp_path}/dev/shm && "
        f"truncate -s 2m {tmp_path}/dev/shm/nccl-AbCdEf && "
        f"dd if=/dev/zero of={tmp_path}/dev/shm/nccl-x bs=1M count=2 status=none && exec {sys.executable} -c '"
        "import json, sys; from pathlib import Path; from dataclasses import asdict; "
        "from lockstep.doctor.check.facts.host_resources import gather_shm; from "
        "lockstep.doctor.check.facts.host_system import HostSystem; "
        f'print(json.dumps(asdict(gather_shm(HostSystem(dev=Path("{tmp_path}/dev"))))))\''
    )
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("mounting is not allowed here")
    shm = ShmSpace(**json.loads(done.stdout))
    assert shm.total == 64 * MIB and shm.noexec and shm.kind == "tmpfs"
    assert shm.stale == 2 * MIB and shm.stale_names == ["nccl-AbCdEf", "nccl-x"]
    found = _judged(replace(FINE, shm=shm))
    assert found["shm-size"].severity == "error" and found["shm-noexec"].severity == "note"
    assert found["shm-stale"].severity == "note" and "nccl-x" in found["shm-stale"].seen


def test_open_segments_are_not_stale(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    held, left = tmp_path / "shm/nccl-held", tmp_path / "shm/nccl-left"
    left.write_bytes(bytes(MIB))
    with held.open("wb") as handle:
        handle.write(bytes(MIB))
        handle.flush()
        shm = gather_shm(HostSystem(dev=tmp_path))
    assert shm is not None and shm.stale_names == ["nccl-left"]


def test_too_many_processes_to_look_through_say_nothing_of_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm/nccl-left").write_bytes(bytes(MIB))
    monkeypatch.setattr("lockstep.doctor.check.facts.host_resources.SEGMENT_SCAN_S", -1.0)
    shm = gather_shm(HostSystem(dev=tmp_path))
    assert shm is not None and shm.stale == 0 and shm.stale_names == []


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job/step"
    system = made(tmp_path, {
        "proc/self/cgroup": "0::/job/step\n",
        f"{group}/memory.max": "max", f"{group}/memory.current": "1000",
        "sys/fs/cgroup/job/memory.max": str(4 * GIB), "sys/fs/cgroup/job/memory.current": str(4 * GIB - 100 * MIB),
        "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {50 * MIB}\n",
        f"{group}/pids.max": "512", f"{group}/pids.current": "500",
        f"{group}/cpu.max": "max 100000", "sys/fs/cgroup/job/cpu.max": "150000 100000",
    })  # fmt: skip
    limits = replace(gather_limits(system), memory_host=64 * GIB, cpus_host=8)
    assert (limits.cgroup, limits.memory_limit, limits.memory_used) == ("v2", 4 * GIB, 4 * GIB - 150 * MIB)
    assert (limits.pids_max, limits.pids_used, limits.cpus) == (512, 500, 1.5)
    found = _judged(limits)
    assert found["memory"].severity == found["processes"].severity == "error"
    assert "pids-limit" in found["processes"].fix and found["cpus"].fix == "export OMP_NUM_THREADS=1"


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    system = made(tmp_path, {
        "proc/self/cgroup": "5:memory:/docker/abc\n4:pids:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
        # In a container the group's own folder is the root, though its path is the host's.
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}\n",
        "sys/fs/cgroup/pids/pids.max": "max",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    })  # fmt: skip
    limits = gather_limits(system)
    assert (limits.cgroup, limits.memory_limit, limits.memory_used) == ("v1", 8 * GIB, GIB)
    assert limits.pids_max is None and limits.cpus is None


def test_endless_limits_of_version_1_are_none(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "5:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert gather_limits(made(tmp_path, files)).memory_limit is None


def test_no_shared_memory_is_unchecked(tmp_path: Path) -> None:
    assert gather_shm(made(tmp_path, {})) is None
    found = next(judge_limits("a", replace(FINE, shm=None), HostRequirements(), False, 0))
    assert found.severity == "unchecked"


def test_mounts_with_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    (tmp_path / "mounts").write_text(
        f"/dev/sda1 / ext4 rw 0 0\nserver:/x {str(folder).replace(' ', chr(92) + '040')} nfs4 rw 0 0\n"
    )
    assert filesystem_of(tmp_path, folder / "runs") == ("nfs4", "server:/x")
    assert filesystem_of(tmp_path, tmp_path) == ("ext4", "/dev/sda1")


def test_sizes_in_words() -> None:
    assert [format_size(n) for n in (0, 2048, 64 * MIB, 1.5 * GIB, 1 << 41)] == [
        "0 bytes",
        "2 KiB",
        "64 MiB",
        "1.5 GiB",
        "2 TiB",
    ]


def test_disks_and_clocks() -> None:
    disk = DiskSpace("/runs", "the run's folder", "ext4", 1000 * GIB, 500 * GIB, 10**6, False, 64 * MIB, 0.1)
    assert {each.severity for each in judge_disk("a", disk)} == {"ok"}
    slow = {each.id: each for each in judge_disk("a", replace(disk, took_s=32.0, filesystem="nfs4"))}
    assert slow["disk-speed"].severity == "warning" and "5.6 h" in slow["disk-speed"].why
    full = {each.id: each for each in judge_disk("a", replace(disk, free=100 * MIB, files_free=3))}
    assert full["disk-space"].severity == "error" and full["disk-files"].severity == "warning"
    assert judge_clock("a", ClockSync(True, 0.0001, "chronyc"), True).severity == "ok"
    assert judge_clock("a", ClockSync(True, -2.0, "chronyc"), False).severity == "warning"
    assert judge_clock("a", ClockSync(False, None, "timedatectl"), True).severity == "warning"
    assert judge_clock("a", ClockSync(False, None, "timedatectl"), False).severity == "note"


def test_this_host_has_a_finding_for_each_part() -> None:
    limits = gather_limits(HostSystem())
    assert limits.memory_host > 0 and limits.cpus_host == os.cpu_count()
    assert {"memlock", "nofile", "processes", "memory"} <= set(_judged(limits))
