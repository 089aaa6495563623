"""Disks and clocks: a real small tmpfs, a folder that may not be written, answers of chronyc and timedatectl."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.doctor.check.facts.host_facts import ClockSync, DiskSpace
from lockstep.doctor.check.facts.host_resources import CLOCK_FROM_KERNEL, gather_clock, gather_disk
from lockstep.doctor.check.facts.host_system import CommandResult, HostSystem, SourceUnavailable
from lockstep.doctor.check.rules.limit_rules import MIB, judge_clock, judge_disk

from .simulated_hosts import made

CHRONY = ("chronyc", "-c", "tracking")
SYSTEMD = ("timedatectl", "show", "-p", "NTPSynchronized", "--value")


def test_a_folder_that_is_yet_to_be_made_is_judged_by_where_it_will_be(tmp_path: Path) -> None:
    disk = gather_disk(HostSystem(), tmp_path / "runs/sort", "the run's folder", 4 * MIB)
    assert disk.written == 4 * MIB and disk.took_s > 0 and not disk.problem
    assert list(tmp_path.iterdir()) == []


def test_writing_ends_at_its_bound(tmp_path: Path) -> None:
    begun = time.monotonic()
    disk = gather_disk(HostSystem(), tmp_path, "x", 1 << 40, 0.2)
    assert time.monotonic() - begun < 5 and 0 < disk.written < 1 << 40


def test_a_full_tmpfs_and_a_read_only_one(tmp_path: Path) -> None:
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/a && mount -t tmpfs -o ro tmpfs {tmp_path}/b && "
        f"dd if=/dev/zero of={tmp_path}/a/x bs=64k count=16 status=none; exec {sys.executable} -c '"
        "import json; from pathlib import Path; from dataclasses import asdict; "
        "from lockstep.doctor.check.facts.host_resources import gather_disk; from "
        "lockstep.doctor.check.facts.host_system import HostSystem; "
        f'print(json.dumps([asdict(gather_disk(HostSystem(), Path("{tmp_path}") / name, "x")) for name in "ab"]))\''
    )
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    for name in "ab":
        (tmp_path / name).mkdir()
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60)
    if "Operation not permitted" in done.stderr or "permission denied" in done.stderr.lower():
        pytest.skip("mounting is not allowed here")
    full, locked = (DiskSpace(**each) for each in json.loads(done.stdout))
    assert full.filesystem == "tmpfs" and full.free == 0
    assert {each.id: each.severity for each in judge_disk("a", full)}["disk-space"] == "error"
    assert locked.read_only
    (found,) = judge_disk("a", locked)
    assert found.id == "disk-write" and found.severity == "error" and "read-only" in found.seen


def test_chrony_reports_the_offset(tmp_path: Path) -> None:
    fields = "A9FEA97B,169.254.169.123,4,1762856465.0,-0.000012345,0.000001,0.000002,-1.2,0.0,0.03,0.0004,0.0001,16.2"
    said = f"{fields},Normal\n"
    clock = gather_clock(made(tmp_path, {}, {CHRONY: said}))
    assert clock.synchronised and clock.offset_s == pytest.approx(-0.000012345) and clock.said_by == "chronyc"
    lost = said.replace("Normal", "Not synchronised").replace("A9FEA97B", "00000000")
    assert gather_clock(made(tmp_path, {}, {CHRONY: lost})).synchronised is False


def test_systemd_is_queried_without_chrony(tmp_path: Path) -> None:
    clock = gather_clock(made(tmp_path, {}, {SYSTEMD: "yes\n"}))
    assert clock.synchronised and clock.offset_s is None
    broken = {
        CHRONY: CommandResult(1, "506 Cannot talk to daemon\n", ""),
        SYSTEMD: CommandResult(1, "", "System has not been booted\n"),
    }
    with pytest.raises(SourceUnavailable, match=r"506 Cannot talk.*System has not been booted"):
        gather_clock(made(tmp_path, {}, broken))


def test_the_kernel_is_queried_last(tmp_path: Path) -> None:
    clock = gather_clock(made(tmp_path, {"proc/self/": ""}))
    assert clock.said_by == CLOCK_FROM_KERNEL and clock.synchronised is not None and clock.offset_s is None
    assert judge_clock("a", ClockSync(False, None, CLOCK_FROM_KERNEL), True).severity == "note"
    assert judge_clock("a", ClockSync(True, None, CLOCK_FROM_KERNEL), True).severity == "ok"
