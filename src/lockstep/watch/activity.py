"""Whether a process does anything, or would if it were let: by what the kernel counts of it and of all it started.

Looked at again and again, cheap things first: the CPU time and bytes of the process itself; then of everybody below it,
what goes over its sockets, whether a thread waits for a core (a starved process uses none), and whether one is in an
uninterruptible wait while the disks move (a long fsync, page faults).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from lockstep.watch import procs, sockets
from lockstep.watch.procs import TICK_S, Usage

T = TypeVar("T")

BUSY = 0.06
"""A process that uses more of a core than this does something; what polls and beats beside a stuck thread uses less."""
MOVED_BYTES = 32 << 10
"""Read and written in a second: less is a line in a log, or a watcher's own."""
SENT_BYTES = 1 << 10
"""Taken from one TCP socket, or sent over it, in a second: less is a heartbeat; an answer that is streamed is more."""
RUNNABLE_LOOKS = 4
"""Looks in a row at which some thread wants a core. What polls is caught at it now and then, and not so often."""
WANTED = 0.3
"""Of the time between two looks, what one thread ran or waited for a core: then it had work. What polls ten times a
second on a core with five busy loops comes to 0.2."""
LOOK_S = 0.5
"""Between two looks as a rule: who looks later was held up itself, and short work in between counts all the same."""
DISK_LOOKS = 2
"""The same of uninterruptible waits."""


@dataclass(slots=True)
class Host:
    """What concerns all processes of the host, read at most once per look and only when somebody asks."""

    _disks: int | None = None
    _sockets: dict[int, int] | None = None

    def disks(self) -> int:
        """Bytes that the block devices have read and written."""
        if self._disks is None:
            self._disks = procs.disk_bytes()
        return self._disks

    def sockets(self) -> dict[int, int]:
        """Bytes by inode of the socket."""
        if self._sockets is None:
            self._sockets = sockets.moved_bytes()
        return self._sockets


@dataclass(slots=True)
class Activity:
    """One process; the counters as of the last look at which each was read."""

    pid: int
    _own: Usage | None = None
    _own_ns: int = 0
    _below: dict[int, Usage] = field(default_factory=dict)
    _sent: dict[int, int] = field(default_factory=dict)
    _wanted: dict[int, int] = field(default_factory=dict)
    _disks: int = 0
    _deep_ns: int = 0
    """When it and all below it were looked at for the last time; 0 where that is too long ago to compare with."""
    _runnable: int = 0
    _in_disk: int = 0

    def rest(self, usage: Usage, now: int) -> None:
        """It moves by what it says of itself; nobody needs to look any closer."""
        self._own, self._own_ns, self._deep_ns = usage, now, 0

    def seen(self, usage: Usage, now: int, host: Host, closer: bool = True) -> bool:
        """Whether it has done anything since the last look; the first look at somebody says yes. Without `closer`,
        what costs a look at others and at single threads is left out."""
        before, since, self._own, self._own_ns = self._own, self._own_ns, usage, now
        works = before is None or _works(before, usage, (now - since) / 1e9)
        if works or not closer:
            self._deep_ns = 0
            return works
        return self._deep(now, host)

    def _deep(self, now: int, host: Host) -> bool:
        """All checks, as each keeps what the next look is compared with."""
        below = {pid: used for pid in procs.descendants(self.pid) if (used := procs.usage(pid, moved=True))}
        known = host.sockets()
        sent = {inode: known[inode] for inode in sockets.inodes([self.pid, *below]) if inode in known}
        runnable, in_disk = _states([self.pid, *below])
        wanted = {int(tid): procs.wanted_ns(pid, tid) for pid in (self.pid, *below) for tid in procs.threads(pid)}
        disks = host.disks() if in_disk else self._disks
        seconds = (now - self._deep_ns) / 1e9 if self._deep_ns else 0.0
        self._runnable = self._runnable + 1 if runnable else 0
        self._in_disk = self._in_disk + 1 if in_disk else 0
        found = self._runnable >= RUNNABLE_LOOKS
        if seconds:
            found |= sum(_grown(self._below, below, lambda used: used.cpu_s)) > BUSY * seconds + TICK_S
            found |= sum(_grown(self._below, below, lambda used: used.moved or 0)) > MOVED_BYTES * seconds
            found |= max(_grown(self._wanted, wanted, float), default=0.0) > WANTED * min(seconds, LOOK_S) * 1e9
            found |= max(_grown(self._sent, sent, float), default=0.0) > SENT_BYTES * seconds
            found |= self._in_disk >= DISK_LOOKS and disks - self._disks > MOVED_BYTES * seconds
        self._below, self._sent, self._wanted, self._disks, self._deep_ns = below, sent, wanted, disks, now
        return found


def _works(before: Usage, now: Usage, seconds: float) -> bool:
    if now.cpu_s - before.cpu_s > BUSY * seconds + TICK_S:
        return True
    if before.moved is None or now.moved is None:
        return False
    return now.moved - before.moved > MOVED_BYTES * seconds


def _grown(before: dict[int, T], now: dict[int, T], value: Callable[[T], float]) -> list[float]:
    """By how much each has become more; those that are new count whole, those that have gone do not."""
    return [value(each) - (value(before[key]) if key in before else 0.0) for key, each in now.items()]


def _states(pids: list[int]) -> tuple[bool, bool]:
    """Whether some thread of these wants a core, and whether one is in an uninterruptible wait. A frozen process (a
    paused container) looks as if it were, and waits for nothing."""
    runnable = in_disk = False
    for pid in pids:
        letters = {procs.thread_state(pid, tid) for tid in procs.threads(pid)}
        runnable |= "R" in letters
        in_disk |= "D" in letters and not procs.frozen(pid)
    return runnable, in_disk
