"""Determines from kernel counters whether a process and its descendants are active, or would be if they got a core.

Cheap counters are sampled first: CPU time and bytes of the process itself. If they do not grow, a closer look includes
the descendants: their CPU time and bytes; bytes over TCP sockets (by netlink, sock_diag(7) with INET_DIAG, as `ss -ti`
does, because Linux counts network bytes by socket, not by process); whether a thread waits for a core (a starved
process uses no CPU time); and whether one is in an uninterruptible wait while disks or network file systems transfer
data (a long fsync, page faults).

CPU time shows activity, but not that it leads anywhere: a busy loop uses as much as a compiler. A process moves if, as
it works, it or a descendant transfers data or touches new memory, as compilers and imports do and busy loops do not.
"""

import contextlib
import os
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from lockstep.watch.procfs import processes
from lockstep.watch.procfs.processes import TICK_S, ProcessUsage

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO = 2
_ESTABLISHED = 1
_NETLINK_HEADER = struct.Struct("=IHHII")
_DIAG_REQUEST = struct.Struct("=BBBxI48x")
_DIAG_MESSAGE = struct.Struct("=4B48x5I")
"""`inet_diag_msg`: family, state, timer, retrans, the socket's addresses, expires, rqueue, wqueue, uid, inode."""
_ATTRIBUTE = struct.Struct("=HH")
_BYTES = struct.Struct("=QQ")
_BYTES_AT = 120
"""Offset of `tcpi_bytes_acked` and `tcpi_bytes_received` in `tcp_info`, since Linux 4.1."""


def tcp_bytes_by_inode() -> dict[int, int]:
    """Bytes read from each established TCP socket of this network namespace, or sent and acknowledged, by inode.
    Excludes received bytes that have not been read, because they are the peer's activity."""
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(0.2)  # the kernel replies immediately or not at all
            for family in (socket.AF_INET, socket.AF_INET6):
                body = _DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 1 << _ESTABLISHED)
                header = _NETLINK_HEADER.pack(
                    _NETLINK_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, int(family), 0
                )
                netlink.send(header + body)
                while _parse_datagram(netlink.recv(1 << 17), found):
                    pass
    except (AttributeError, OSError):
        return {}
    return found


def _parse_datagram(data: bytes, found: dict[int, int]) -> bool:
    """Parses one datagram of the reply. Returns whether more follow."""
    at = 0
    while at + _NETLINK_HEADER.size <= len(data):
        length, kind, _, _, _ = _NETLINK_HEADER.unpack_from(data, at)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _NETLINK_HEADER.size:
            return False
        message = _DIAG_MESSAGE.unpack_from(data, at + _NETLINK_HEADER.size)
        unread, inode = message[5], message[8]
        attribute_at, end = at + _NETLINK_HEADER.size + _DIAG_MESSAGE.size, at + length
        while attribute_at + _ATTRIBUTE.size <= end:
            size, what = _ATTRIBUTE.unpack_from(data, attribute_at)
            if what == _INET_DIAG_INFO and size >= _ATTRIBUTE.size + _BYTES_AT + _BYTES.size:
                found[inode] = sum(_BYTES.unpack_from(data, attribute_at + _ATTRIBUTE.size + _BYTES_AT)) - unread
            attribute_at += max(4, (size + 3) & ~3)
        at += (length + 3) & ~3
    return True


def socket_inodes(pids: Iterable[int]) -> set[int]:
    """The inodes of the sockets that these processes have open."""
    found = set()
    for pid in pids:
        try:
            with os.scandir(f"/proc/{pid}/fd") as descriptors:
                for each in descriptors:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        facts = each.stat()
                        if stat.S_ISSOCK(facts.st_mode):
                            found.add(facts.st_ino)
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


T = TypeVar("T")

BUSY_CPU_SHARE = 0.06
"""A process that uses more of a core than this is active; polling and heartbeats in other threads than a stuck one use
less."""
ACTIVE_BYTES = 32 << 10
"""A process that reads and writes more bytes per second is active; log lines and monitoring need less."""
ACTIVE_SOCKET_BYTES = 1 << 10
"""A process with a TCP socket that transfers more bytes per second is active; heartbeats need less, streamed answers
more."""
RUNNABLE_SAMPLES = 4
"""A process with a runnable thread in this many consecutive samples is active. Polling threads are runnable in
fewer."""
RUNNABLE_SHARE = 0.3
"""A thread that ran or waited for a core for more than this share of the time between two samples is active. A thread
that polls ten times a second, on a core with five busy loops, reaches 0.2."""
SAMPLE_S = 0.5
"""The usual time between two samples. If a sample is late, short work in between still counts as activity."""
DISK_WAIT_SAMPLES = 2
"""A process with a thread in an uninterruptible wait in this many consecutive samples, while disks or network file
systems transfer data, is active."""
TRANSFER_WINDOW_S = 10.0
"""Whether disks and network file systems transfer data is decided by their bytes in this many seconds. A disk with a
quota of 1 MiB/s completes two writes of 4 MiB and then nothing for eight seconds."""
TRANSFER_READ_S = 1.0
"""Seconds between two readings of the counters of disks and network file systems."""
NEW_PAGES = 100
"""A process that works and touches more new pages of memory per second moves. A compiler of C++ touches a thousand, a
busy loop none, a loop with a background thread that logs a few."""


@dataclass(slots=True)
class HostCounters:
    """Counters of the whole host, which are read at most once per sample: `begin_sample` comes first."""

    read_transfers: Callable[[], tuple[int, int]] = processes.transferred_bytes
    """Returns the bytes that the disks and the network file systems of this host have transferred so far."""
    _transfers: deque[tuple[int, int, int]] = field(default_factory=deque)
    """Time and bytes of each reading within `TRANSFER_WINDOW_S`, and of the one before it."""
    _sockets: dict[int, int] | None = None

    def begin_sample(self, now: int) -> None:
        """Begins a new sample at `now`, in nanoseconds."""
        self._sockets = None
        if not self._transfers or now - self._transfers[-1][0] >= TRANSFER_READ_S * 1e9:
            self._transfers.append((now, *self.read_transfers()))
            while len(self._transfers) > 1 and now - self._transfers[1][0] >= TRANSFER_WINDOW_S * 1e9:
                self._transfers.popleft()

    def file_systems_transfer(self) -> bool:
        """Whether the disks or the network file systems have transferred data in the last `TRANSFER_WINDOW_S`; also
        True until they have been observed for that long."""
        nanoseconds, disks, network_files = (
            last - first for first, last in zip(self._transfers[0], self._transfers[-1], strict=True)
        )
        seconds = nanoseconds / 1e9
        return (
            seconds < TRANSFER_WINDOW_S
            or disks > ACTIVE_BYTES * seconds
            or network_files > ACTIVE_SOCKET_BYTES * seconds
        )

    def sockets(self) -> dict[int, int]:
        """Transferred bytes of TCP sockets, by inode."""
        if self._sockets is None:
            self._sockets = tcp_bytes_by_inode()
        return self._sockets


@dataclass(slots=True)
class ProcessActivity:
    """The activity of one process. Each counter has its value from the last sample that read it."""

    pid: int
    moves: bool = False
    """Whether, in the last sample, the process or a descendant transferred data or touched new memory as it worked."""
    _own: ProcessUsage | None = None
    _own_ns: int = 0
    _below: dict[int, ProcessUsage] = field(default_factory=dict)
    _sent: dict[int, int] = field(default_factory=dict)
    _runnable_ns: dict[int, int] = field(default_factory=dict)
    _closer_ns: int = 0
    """When the last closer look was; 0 if there is none to compare with."""
    _runnable: int = 0
    _in_disk: int = 0

    def skip(self, usage: ProcessUsage, now: int) -> None:
        """Stores the usage of a process that makes progress, whose activity need not be determined."""
        self._own, self._own_ns, self._closer_ns, self.moves = usage, now, 0, False

    def sample(self, usage: ProcessUsage, now: int, host: HostCounters, closer: bool = True) -> bool:
        """Returns whether the process was active since the last sample; True for the first sample. Without `closer`,
        descendants and single threads are not checked."""
        before, since, self._own, self._own_ns = self._own, self._own_ns, usage, now
        seconds = (now - since) / 1e9
        transfers = before is not None and _transferred(before, usage) > ACTIVE_BYTES * seconds
        active = before is None or transfers or usage.cpu_s - before.cpu_s > BUSY_CPU_SHARE * seconds + TICK_S
        if active or not closer:
            self._closer_ns = 0
            new_pages = before is not None and usage.faults - before.faults > NEW_PAGES * seconds
            self.moves = active and (transfers or new_pages)
            return active
        return self._look_closer(now, host)

    def _look_closer(self, now: int, host: HostCounters) -> bool:
        """Runs all checks, also after one has succeeded, because each stores values for the next sample."""
        below = {
            pid: used
            for pid in processes.descendant_pids(self.pid)
            if (used := processes.process_usage(pid, with_bytes=True))
        }
        known = host.sockets()
        sent = {inode: known[inode] for inode in socket_inodes([self.pid, *below]) if inode in known}
        runnable, in_disk = _thread_states([self.pid, *below])
        runnable_ns = {
            int(tid): processes.runnable_ns(pid, tid) for pid in (self.pid, *below) for tid in processes.thread_ids(pid)
        }
        seconds = (now - self._closer_ns) / 1e9 if self._closer_ns else 0.0
        self._runnable = self._runnable + 1 if runnable else 0
        self._in_disk = self._in_disk + 1 if in_disk else 0
        works, transfers, new_pages = self._runnable >= RUNNABLE_SAMPLES, False, False
        if seconds:
            works |= sum(_increases(self._below, below, lambda used: used.cpu_s)) > BUSY_CPU_SHARE * seconds + TICK_S
            works |= (
                max(_increases(self._runnable_ns, runnable_ns, float), default=0.0)
                > RUNNABLE_SHARE * min(seconds, SAMPLE_S) * 1e9
            )
            new_pages = sum(_increases(self._below, below, lambda used: used.faults)) > NEW_PAGES * seconds
            transfers = sum(_increases(self._below, below, lambda used: used.total_bytes or 0)) > ACTIVE_BYTES * seconds
            transfers |= max(_increases(self._sent, sent, float), default=0.0) > ACTIVE_SOCKET_BYTES * seconds
            transfers |= self._in_disk >= DISK_WAIT_SAMPLES and host.file_systems_transfer()
        self._below, self._sent, self._runnable_ns, self._closer_ns = below, sent, runnable_ns, now
        self.moves = transfers or (works and new_pages)
        return works or transfers


def _transferred(before: ProcessUsage, now: ProcessUsage) -> int:
    """Bytes transferred between two samples; 0 if they are not counted."""
    if before.total_bytes is None or now.total_bytes is None:
        return 0
    return now.total_bytes - before.total_bytes


def _increases(before: dict[int, T], now: dict[int, T], value: Callable[[T], float]) -> list[float]:
    """Returns the growth of each counter. A new counter has grown from 0; a vanished one is left out."""
    return [value(each) - (value(before[key]) if key in before else 0.0) for key, each in now.items()]


def _thread_states(pids: list[int]) -> tuple[bool, bool]:
    """Whether a thread of these processes is runnable, and whether one is in an uninterruptible wait. A frozen process
    (a paused container) has the state of such a wait, but is left out."""
    runnable = in_disk = False
    for pid in pids:
        letters = {processes.thread_state(pid, tid) for tid in processes.thread_ids(pid)}
        runnable |= "R" in letters
        in_disk |= "D" in letters and not processes.is_frozen(pid)
    return runnable, in_disk
