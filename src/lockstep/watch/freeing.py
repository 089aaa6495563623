"""Getting ranks out of a collective that will never end, and noticing links that are dead.

Two backends behind one interface: `free(communicator)` makes every call that is blocked in it fail now.

- gloo has no way to do that (its abort returns and changes nothing), but each of its communicators moves its bytes in
  a thread of its own that sleeps in `epoll_wait`; the sockets in that epoll are the communicator's, exactly. Shut down,
  the blocked call ends with "Connection closed by peer" within milliseconds and the process lives on. This works from
  inside and, for a rank that holds the GIL or is stopped, from another process of the same user
  (pidfd_getfd, Linux 5.6). A receive from any source is not freed by it: it ends at its own timeout.
- NCCL: `_abort_process_group`, from inside only.

One rank that breaks its own sockets frees those who happen to wait for it; all members have to be freed.
"""

import contextlib
import ctypes
import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

LOOP = "gloo_tcp_loop"
"""Name of gloo's threads; older versions give them none."""
_EPOLL_CALLS = {"22", "232", "281", "441"}
"""Numbers of epoll_wait, epoll_pwait and epoll_pwait2 on x86-64 and arm64."""
_PIDFD_GETFD = 438
_LOOK_S = 0.05


def loops(pid: int | None = None, threads: Iterable[int] | None = None) -> dict[int, int]:
    """The descriptor of the epoll that each of gloo's threads waits in, by native id. `threads`: which ones; None for
    all that have the name. A thread that stays on the CPU for 50 ms is left out."""
    found: dict[int, int] = {}
    until = time.monotonic() + _LOOK_S
    waiting = named_threads(pid) if threads is None else set(threads)
    while waiting:
        for thread in list(waiting):
            epoll = _epoll_of(pid, thread)
            if epoll is not None:
                waiting.discard(thread)
                if epoll >= 0:
                    found[thread] = epoll
        if not waiting or time.monotonic() >= until:
            break
        time.sleep(1e-3)
    return found


def all_threads() -> set[int]:
    """Native ids of the threads of this process."""
    return {int(task.name) for task in _tasks(None)}


def loop_among(threads: Iterable[int]) -> int:
    """The one of these threads of this process that is a gloo communicator's, 0 when that cannot be told."""
    candidates = set(threads)
    named = candidates & named_threads()
    found = named or set(loops(None, candidates))
    return found.pop() if len(found) == 1 else 0


def named_threads(pid: int | None = None) -> set[int]:
    """Native ids of the threads of a process (None: this one) that have the name of gloo's."""
    found = set()
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == LOOP:
                found.add(int(task.name))
    return found


def _tasks(pid: int | None) -> list[Path]:
    try:
        return list((_proc(pid) / "task").iterdir())
    except OSError:
        return []


def _proc(pid: int | None) -> Path:
    return Path("/proc") / ("self" if pid is None else str(pid))


def _epoll_of(pid: int | None, thread: int) -> int | None:
    """The epoll that a thread waits in; None when it is on the CPU just now, -1 when it waits in something else."""
    try:
        words = (_proc(pid) / "task" / str(thread) / "syscall").read_text().split()
    except OSError:
        return -1
    if words[0] == "running":
        return None
    return int(words[1], 16) if words[0] in _EPOLL_CALLS else -1


def sockets_of(pid: int | None, epoll: int) -> list[int]:
    """The descriptors of sockets that an epoll watches."""
    try:
        lines = (_proc(pid) / "fdinfo" / str(epoll)).read_text().splitlines()
    except OSError:
        return []
    watched = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
    return [each for each in watched if _is_socket(pid, each)]


def _is_socket(pid: int | None, descriptor: int) -> bool:
    try:
        return str((_proc(pid) / "fd" / str(descriptor)).readlink()).startswith("socket:")
    except OSError:
        return False


@contextlib.contextmanager
def borrowed(pid: int | None, descriptors: Iterable[int]) -> Iterator[list[socket.socket]]:
    """Our own descriptors of a process's sockets, listening ones left out; closing them changes nothing for the owner.

    Raises PermissionError when the process may not be looked into, ProcessLookupError when it is gone."""
    pidfd = None if pid is None else os.pidfd_open(pid)
    taken: list[socket.socket] = []
    try:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile
                each = socket.socket(fileno=_duplicate(pidfd, descriptor))
                taken.append(each)
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    taken.pop().close()  # gloo ends the process when its listener fails
        yield taken
    finally:
        for each in taken:
            each.close()
        if pidfd is not None:
            os.close(pidfd)


def _duplicate(pidfd: int | None, descriptor: int) -> int:
    if pidfd is None:
        return os.dup(descriptor)
    libc = ctypes.CDLL(None, use_errno=True)
    taken: int = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if taken < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return taken


def break_gloo(pid: int | None = None, threads: Iterable[int] | None = None) -> int:
    """Shuts down the sockets of gloo communicators; returns how many.

    Args:
        pid: of another process of this host, None for this one.
        threads: native ids of the communicators' threads (`CommunicatorRecord.loop_thread`); None for all of them.
    """
    broken = 0
    with _sockets(pid, threads) as taken:
        for each in taken:
            with contextlib.suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def watch_links(pid: int | None = None, threads: Iterable[int] | None = None) -> int:
    """Makes gloo's sockets notice a dead link in about five seconds (it sets no keepalive itself); returns how many."""
    watched = 0
    with _sockets(pid, threads) as taken:
        for each in taken:
            with contextlib.suppress(OSError):  # not TCP
                each.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in (
                    ("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5000),
                ):  # fmt: skip
                    each.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
                watched += 1
    return watched


@contextlib.contextmanager
def _sockets(pid: int | None, threads: Iterable[int] | None) -> Iterator[list[socket.socket]]:
    epolls = loops(pid, threads).values()
    with borrowed(pid, [each for epoll in epolls for each in sockets_of(pid, epoll)]) as taken:
        yield taken


class Freer(Protocol):
    """Ends what is blocked in a communicator of this process."""

    def free(self) -> int:
        """Returns how many connections (or communicators) were broken."""
        ...


class GlooFreer:
    """`thread`: the communicator's own, 0 for all of gloo's in this process."""

    def __init__(self, thread: int = 0) -> None:
        self._thread = thread

    def free(self) -> int:
        return break_gloo(None, [self._thread] if self._thread else None)


class NcclFreer:
    """Aborts an NCCL communicator. Torch asks for TORCH_NCCL_ASYNC_ERROR_HANDLING=0 with it; otherwise its own
    watchdog may end the process first. Of the model that used it nothing may be used afterwards."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def free(self) -> int:
        sys.modules["torch.distributed.distributed_c10d"]._abort_process_group(self._group)
        return 1


def freers(backend: str, group: Any, loop_thread: int) -> list[Freer]:
    """What frees those who are blocked in a communicator of this backend, `gloo`, `nccl` or `cpu:gloo,cuda:nccl`."""
    found: list[Freer] = []
    if "gloo" in backend:
        found.append(GlooFreer(loop_thread))
    if "nccl" in backend:
        found.append(NcclFreer(group))
    return found
