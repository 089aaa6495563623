"""Counters of processes and mounts in /proc."""

import mmap
import os
import subprocess
import time

from lockstep.watch.procfs import processes

MOUNTS = """device rootfs mounted on / with fstype rootfs
device store:/data mounted on /data with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=1048576,wsize=1048576,namlen=255,acregmin=3,hard,proto=tcp
\tage:\t180
\tbytes:\t4096 0 0 0 {read} 0 1 0
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 799 0 1 0 24 21 21 0 21 0 2 0 0
\tper-op statistics
\t        NULL: 1 1 0 44 24 0 0 0 0
\t        READ: {reads} {reads} 0 {asked} {read} 0 3 3 0
\t      LOOKUP: 7 7 0 1484 1904 0 2 2 0

device proc mounted on /proc with fstype proc
"""


def test_bytes_of_answered_requests_are_those_of_all_operations() -> None:
    idle = processes.answered_bytes(MOUNTS.format(reads=0, asked=0, read=0))
    assert idle == 44 + 24 + 1484 + 1904
    assert processes.answered_bytes(MOUNTS.format(reads=3, asked=600, read=9000)) == idle + 9600
    assert processes.answered_bytes("device proc mounted on /proc with fstype proc\n") == 0
    assert min(processes.transferred_bytes()) >= 0


def test_touching_memory_is_counted_in_pages() -> None:
    before = processes.process_usage(os.getpid())
    with mmap.mmap(-1, 64 << 20) as new:  # an allocator may return memory that has been touched
        for at in range(0, len(new), mmap.PAGESIZE):
            new[at] = 1
    after = processes.process_usage(os.getpid())
    assert before is not None and after is not None
    pages = after.faults - before.faults
    assert pages >= 8, "huge pages of 2 MiB make it 32, small ones 16384"


def test_the_environment_is_that_of_the_start() -> None:
    with subprocess.Popen(["sleep", "60"], env={"A": "b=c", "EMPTY": ""}) as child:
        try:
            end = time.monotonic() + 10.0
            while not (found := processes.environment(child.pid)) and time.monotonic() < end:
                time.sleep(0.01)  # exec ends for the parent before the kernel shows the new environment
            assert found == {"A": "b=c", "EMPTY": ""}
        finally:
            child.kill()
    assert processes.environment(child.pid) == {}
