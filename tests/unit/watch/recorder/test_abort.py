"""Finds the sockets that a thread waits for, and shuts them down, in this process and in another."""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lockstep.watch.recorder import abort

PR_SET_NAME = 15


class Loop:
    """A thread like gloo's, which sleeps in `epoll_wait` on a listener and on one end of a connection."""

    def __init__(self, name: bytes = b"") -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.far = socket.create_connection(self.listener.getsockname())
        self.near, _ = self.listener.accept()
        self._wake, self._woken = os.pipe()
        self._epoll = select.epoll()
        for each in (self.listener.fileno(), self.near.fileno()):
            self._epoll.register(each, select.EPOLLIN)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.modify(self.near.fileno(), 0)  # the test's thread ignores its events
        self._name, self._started = name, threading.Event()
        self.native = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(10)
        until = time.monotonic() + 30
        while not abort.gloo_epolls(None, [self.native]):  # on a busy machine it begins later, and then waits for good
            assert time.monotonic() < until
            time.sleep(0.001)

    def _run(self) -> None:
        self.native = threading.get_native_id()
        if self._name:
            ctypes.CDLL(None).prctl(PR_SET_NAME, self._name, 0, 0, 0)
        self._started.set()
        while self._wake not in [ready for ready, _ in self._epoll.poll()]:
            pass

    def broken(self) -> bool:
        """Whether the far end sees that the connection is shut down."""
        return bool(select.select([self.far], [], [], 0)[0]) and self.far.recv(1) == b""

    def end(self) -> None:
        os.write(self._woken, b"x")
        self._thread.join(10)
        self._epoll.close()
        for each in (self.listener, self.far, self.near):
            each.close()
        os.close(self._wake)
        os.close(self._woken)


@contextmanager
def loop(name: bytes = b"") -> Iterator[Loop]:
    made = Loop(name)
    try:
        yield made
    finally:
        made.end()


def test_only_the_given_communicator_is_aborted() -> None:
    with loop() as one, loop() as other:
        assert abort.abort_gloo(None, [one.native]) == 1
        assert one.broken() and not other.broken()
        socket.create_connection(one.listener.getsockname(), 5).close()  # gloo ends the process if its listener fails


def test_all_communicators_are_found_by_thread_name() -> None:
    earlier = abort.gloo_threads()  # of communicators that earlier tests of this process left
    with loop(b"gloo_tcp_loop") as one, loop(b"gloo_tcp_loop") as two, loop() as other:
        assert abort.gloo_threads() - earlier == {one.native, two.native}
        assert abort.abort_gloo() >= 2
        assert one.broken() and two.broken() and not other.broken()


def test_the_thread_of_a_new_communicator_is_found() -> None:
    before = abort.list_threads()
    with loop() as unnamed:
        idle = threading.Event()
        sleeper = threading.Thread(target=idle.wait, args=(30,))
        sleeper.start()
        assert abort.find_gloo_thread(abort.list_threads() - before) == unnamed.native
        with loop(b"gloo_tcp_loop") as named:
            assert abort.find_gloo_thread(abort.list_threads() - before) == named.native
        with loop():
            assert abort.find_gloo_thread(abort.list_threads() - before) == 0  # two candidates
        idle.set()
        sleeper.join(10)


def test_the_communicator_of_a_stopped_process_is_aborted_from_outside() -> None:
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        remote = Loop()
        theirs.sendall(f"{remote.native} {remote.far.fileno()}".encode())
        remote.far.settimeout(60)
        theirs.sendall(b"E" if remote.far.recv(1) == b"" else b"?")
        os._exit(0)
    try:
        ours.settimeout(60)
        native, _ = ours.recv(100).split()
        os.kill(child, signal.SIGSTOP)
        assert abort.abort_gloo(child, [int(native)]) == 1
        os.kill(child, signal.SIGCONT)
        assert ours.recv(1) == b"E"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_dead_process_has_no_sockets_to_abort() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert abort.gloo_epolls(child) == {}
    with pytest.raises(ProcessLookupError):
        abort.abort_gloo(child)


def test_keepalive_is_enabled() -> None:
    with loop() as one:
        assert abort.enable_keepalive(None, [one.native]) == 1
        assert one.near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert one.near.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 5000
        assert one.listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_every_backend_of_a_communicator_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[object] = []
    fake = types.SimpleNamespace(_abort_process_group=aborted.append)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", fake)  # type: ignore[arg-type]
    group = object()
    assert [type(each) for each in abort.aborters_for("cpu:gloo,cuda:gloo", group, 7)] == [abort.GlooAborter]
    both = abort.aborters_for("cpu:gloo,cuda:nccl", group, 7)
    assert [type(each) for each in both] == [abort.GlooAborter, abort.NcclAborter]
    assert abort.aborters_for("nccl", group, 0)[0].abort() == 1 and aborted == [group]
    assert abort.aborters_for("mpi", group, 0) == []
