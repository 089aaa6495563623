"""Leases on a buffer: the kernel's file locks, which vanish with the process that held them."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lockstep.watch import waits

T = TypeVar("T")

FENCE_TIMEOUT_S = 300.0
"""How long a writer waits for readers of the buffer it wants: an engine reads for as long as a copy takes."""


class Lease:
    """A shared (reader) or exclusive (nobody reads) lock on a file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path, exclusive: bool = False) -> "Lease | None":
        """None where somebody holds one that excludes ours. Never waits."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        os.close(self._descriptor)


def holders(path: Path) -> list[int]:
    """Pids of this host that hold a lease on the file, as far as /proc tells."""
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return []
    # Numbers of inodes alone say nothing: in each tmpfs they count from one on.
    file = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = set()
    for line in lines:
        fields = line.split()
        # "1: FLOCK ADVISORY READ 1234 00:1a:42 0 EOF"; a waiting one has "->" in second place.
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == file:
            found.add(int(fields[4]))
    return sorted(found)


def exclusively(path: Path, whom: str, why: str) -> Lease:
    """Waits for an exclusive lease, naming who holds one."""
    lease = Lease.take(path, exclusive=True)
    if lease is not None:
        return lease
    pids = ", ".join(map(str, holders(path))) or "unknown"
    return patiently(lambda: Lease.take(path, exclusive=True), f"{whom} (pid {pids})", why)


def patiently(attempt: Callable[[], T | None], whom: str, why: str) -> T:
    """The first answer of `attempt` that is not None; raises WaitTimeout."""
    return waits.poll(attempt, kind="lease", whom=whom, why=why, timeout_s=FENCE_TIMEOUT_S, every_s=0.002)
