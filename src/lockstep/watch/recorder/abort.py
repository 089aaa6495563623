"""Aborts communicators, which releases the ranks that are blocked in their collectives, and detects dead links.

`CommunicatorAborter.abort` makes every call that is blocked in a communicator fail immediately:

- gloo's abort function returns without effect. But each communicator of gloo has a thread that sleeps in
  `epoll_wait`, and the sockets in that epoll are exactly the sockets of the communicator. Once these are shut down,
  the blocked call ends with "Connection closed by peer" within milliseconds, and the process continues. The rank
  itself can shut them down; if it holds the GIL or is stopped, another process of the same user can (pidfd_getfd,
  Linux 5.6). A receive from any source is not released; it ends when its timeout expires.
- NCCL has `_abort_process_group`, which only the rank itself can call.

If one rank shuts down its sockets, only the ranks that wait for this rank are released; so all members have to be
aborted. `release_ranks` does that from the monitoring process for the ranks of this host.
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

from lockstep.watch.beacon.beacon_records import BeaconState, CommunicatorRecord
from lockstep.watch.recorder import commands

GLOO_THREAD_NAME = "gloo_tcp_loop"
"""The name of gloo's threads; older versions of gloo do not name them."""
_EPOLL_CALLS = {"22", "232", "281", "441"}
"""Numbers of epoll_wait, epoll_pwait and epoll_pwait2 on x86-64 and arm64."""
_PIDFD_GETFD = 438
_SYSCALL_WAIT_S = 0.05


def gloo_epolls(pid: int | None = None, threads: Iterable[int] | None = None) -> dict[int, int]:
    """For each of gloo's threads, by native id, the descriptor of the epoll that the thread waits in.

    `threads` restricts the result to some threads; None means all threads with gloo's name. Threads that stay on the
    CPU for 50 ms are omitted.
    """
    found: dict[int, int] = {}
    until = time.monotonic() + _SYSCALL_WAIT_S
    waiting = gloo_threads(pid) if threads is None else set(threads)
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


def list_threads() -> set[int]:
    """Native ids of the threads of this process."""
    return {int(task.name) for task in _tasks(None)}


def find_gloo_thread(threads: Iterable[int]) -> int:
    """The thread among these threads of this process that belongs to a gloo communicator; 0 if none or several do."""
    candidates = set(threads)
    named = candidates & gloo_threads()
    found = named or set(gloo_epolls(None, candidates))
    return found.pop() if len(found) == 1 else 0


def gloo_threads(pid: int | None = None) -> set[int]:
    """Native ids of the threads of a process (None: this one) that have gloo's thread name."""
    found = set()
    for task in _tasks(pid):
        with contextlib.suppress(OSError):
            if (task / "comm").read_text().strip() == GLOO_THREAD_NAME:
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
    """The epoll that a thread waits in; None while the thread is on the CPU, -1 if it waits in something else."""
    try:
        words = (_proc(pid) / "task" / str(thread) / "syscall").read_text().split()
    except OSError:
        return -1
    if words[0] == "running":
        return None
    return int(words[1], 16) if words[0] in _EPOLL_CALLS else -1


def epoll_sockets(pid: int | None, epoll: int) -> list[int]:
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
def duplicated_sockets(pid: int | None, descriptors: Iterable[int]) -> Iterator[list[socket.socket]]:
    """Duplicates the sockets of a process, except listening ones; closing the duplicates does not affect the process.

    Raises:
        PermissionError: the process may not be inspected.
        ProcessLookupError: the process is gone.
    """
    pidfd = None if pid is None else os.pidfd_open(pid)
    duplicates: list[socket.socket] = []
    try:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile
                each = socket.socket(fileno=_duplicate(pidfd, descriptor))
                duplicates.append(each)
                if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    duplicates.pop().close()  # gloo ends the process if its listener fails
        yield duplicates
    finally:
        for each in duplicates:
            each.close()
        if pidfd is not None:
            os.close(pidfd)


def _duplicate(pidfd: int | None, descriptor: int) -> int:
    if pidfd is None:
        return os.dup(descriptor)
    libc = ctypes.CDLL(None, use_errno=True)
    duplicate: int = libc.syscall(_PIDFD_GETFD, pidfd, descriptor, 0)
    if duplicate < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return duplicate


def abort_gloo(pid: int | None = None, threads: Iterable[int] | None = None) -> int:
    """Shuts down the sockets of gloo communicators; returns the number of sockets.

    Args:
        pid: the id of another process of this host; None means this process.
        threads: native ids of the communicators' threads (`CommunicatorRecord.loop_thread`); None means all.
    """
    broken = 0
    with _gloo_sockets(pid, threads) as taken:
        for each in taken:
            with contextlib.suppress(OSError):  # closed already
                each.shutdown(socket.SHUT_RDWR)
                broken += 1
    return broken


def enable_keepalive(pid: int | None = None, threads: Iterable[int] | None = None) -> int:
    """Makes gloo's sockets detect a dead link in about five seconds (gloo sets no keepalive); returns the number of
    sockets."""
    watched = 0
    with _gloo_sockets(pid, threads) as taken:
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
def _gloo_sockets(pid: int | None, threads: Iterable[int] | None) -> Iterator[list[socket.socket]]:
    epolls = gloo_epolls(pid, threads).values()
    with duplicated_sockets(pid, [each for epoll in epolls for each in epoll_sockets(pid, epoll)]) as taken:
        yield taken


class CommunicatorAborter(Protocol):
    """Aborts the calls that are blocked in a communicator of this process."""

    def abort(self) -> int:
        """Aborts the communicator; returns the number of broken connections (NCCL: of communicators)."""
        ...


class GlooAborter:
    """Aborts the gloo communicator of a thread, given by its native id; 0 means all gloo communicators of this
    process."""

    def __init__(self, thread: int = 0) -> None:
        self._thread = thread

    def abort(self) -> int:
        return abort_gloo(None, [self._thread] if self._thread else None)


class NcclAborter:
    """Aborts an NCCL communicator. This needs TORCH_NCCL_ASYNC_ERROR_HANDLING=0, because otherwise torch's watchdog
    may end the process first. A model that used the communicator must not be used afterwards."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def abort(self) -> int:
        sys.modules["torch.distributed.distributed_c10d"]._abort_process_group(self._group)
        return 1


def aborters_for(backend: str, group: Any, loop_thread: int) -> list[CommunicatorAborter]:
    """The aborters of a communicator with this backend: `gloo`, `nccl` or `cpu:gloo,cuda:nccl`."""
    found: list[CommunicatorAborter] = []
    if "gloo" in backend:
        found.append(GlooAborter(loop_thread))
    if "nccl" in backend:
        found.append(NcclAborter(group))
    return found


def release_ranks(
    run: str, ranks: Iterable[BeaconState], text: str, verdict: dict[str, Any] | None = None
) -> dict[str, int]:
    """Releases ranks of this host from the collectives that they are blocked in; the blocked calls raise
    CollectiveStalled with `text`.

    The ranks first get the verdict. Then this process shuts down the connections of the communicators that they are
    blocked in, which needs no cooperation of the ranks. A rank that may not be inspected, or that uses NCCL, gets a
    command to abort its communicators. The members on other hosts have to be released as well, because aborting a
    member releases only the ranks that wait for it.

    Args:
        verdict: the verdict in its JSON form.

    Returns:
        The number of connections that this process has broken, by beacon name, for ranks inside a collective.
    """
    states = {state.name: state for state in ranks}
    commands.send_command(run, "verdict", states, text=text, verdict=verdict or {}, freed=True)
    return {name: _abort_communicators(run, state) for name, state in states.items() if _open_communicators(state)}


def announce_verdict(run: str, names: Iterable[str], text: str, verdict: dict[str, Any] | None = None) -> None:
    """Sends ranks the verdict on a collective that fails without an abort, for example because a member died."""
    commands.send_command(run, "verdict", names, text=text, verdict=verdict or {}, freed=False)


def _open_communicators(state: BeaconState) -> list[CommunicatorRecord]:
    return [each for each in state.communicators if not each.closed and each.entered > each.completed]


def _abort_communicators(run: str, state: BeaconState) -> int:
    open_records = _open_communicators(state)
    threads = [each.loop_thread for each in open_records if each.loop_thread]
    left_to_rank = [each for each in open_records if "nccl" in each.backend or not each.loop_thread]
    broken = 0
    try:
        broken = abort_gloo(state.pid, threads) if threads else 0
    except PermissionError:
        left_to_rank = open_records
    except ProcessLookupError:
        return 0
    for identity in {each.identity if each.pair is None else each.pair.of for each in left_to_rank}:
        commands.send_command(run, "free", [state.name], communicator=f"{identity:016x}")
    return broken
