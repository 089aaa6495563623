"""The controller's I/O thread among many connections."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection
from lockstep.cluster.cluster_node import ClusterNode
from lockstep.cluster.protocol import NodeInfo, WorkerSpec
from lockstep.cluster.rpc.remote_worker import RemoteWorker
from lockstep.cluster.rpc.rpc_messages import (
    AckMessage,
    CallMessage,
    ResultMessage,
    ResumeMessage,
    pack_message,
    unpack_to_worker,
)
from lockstep.cluster.rpc.rpc_server import RpcServer

TOKEN, RUN = "5f0c2b7be4a8913d6e7f20c1a9d84b36", "hub-test"
HOST = ClusterNode(NodeInfo("here", "127.0.0.1", Path("none")), Path("none"), Path("none"))


class Echo:
    """A service's signatures."""

    def say(self, text: str) -> str: ...  # type: ignore[empty-body]


class Peer:
    """The worker's end of a connection."""

    def __init__(self, hub: RpcServer, name: str) -> None:
        self.handle = RemoteWorker(
            WorkerSpec(name, "x", 0, "none:None"), HOST, RUN, hub.call_ids, 60, 60, hub.connection_changed
        )
        hub.add(self.handle)
        host, port = hub.address
        self.connection = auth_handshake.connect(host, port, token=TOKEN, run=RUN, generation=1, name=name)
        self.connection.send(*pack_message(ResumeMessage(0, 1)))

    def hear(self) -> tuple[Any, memoryview]:
        frame = self.connection.recv(10.0)
        assert frame is not None
        return unpack_to_worker(frame)


@pytest.fixture
def hub() -> Iterator[RpcServer]:
    made = RpcServer(TOKEN, RUN, 1, lambda: None)
    yield made
    made.close()


def until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_only_connections_with_pending_data_are_watched(hub: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    modified: list[int] = []
    modify = hub._selector.modify
    monkeypatch.setattr(hub._selector, "modify", lambda *given: (modified.append(1), modify(*given))[1])
    with ExitStack() as closing:
        peers = [Peer(hub, f"peer-{number}") for number in range(12)]
        for peer in peers:
            closing.callback(peer.connection.close)
        until(lambda: all(peer.handle.connection is not None for peer in peers))
        for peer in peers:
            peer.handle.submit(Echo.say, "short")
            assert isinstance(peer.hear()[0], CallMessage)
        assert modified == [], "nothing was left to write"
        large = "x" * (24 << 20)  # more than the buffers of both ends
        peers[0].handle.submit(Echo.say, large)
        until(lambda: modified == [1])
        call, payload = peers[0].hear()
        assert isinstance(call, CallMessage) and len(payload) > len(large)
        until(lambda: modified == [1, 1])


def test_results_are_acknowledged(hub: RpcServer) -> None:
    peer = Peer(hub, "peer-0")
    with peer.connection:
        until(lambda: peer.handle.connection is not None)
        pendings = [peer.handle.submit(Echo.say, text) for text in "ab"]
        calls = [peer.hear()[0] for _ in pendings]
        assert [call.arrived for call in calls] == [[], []]
        peer.connection.send(*pack_message(ResultMessage(calls[0].id), b"\0" * 16))
        until(pendings[0].done)
        third = peer.handle.submit(Echo.say, "c")
        told: list[int] = []
        while not told:  # by the call, unless the half second was over before
            message = peer.hear()[0]
            told += message.ids if isinstance(message, AckMessage) else message.arrived
        assert told == [calls[0].id] and not third.done()
        peer.connection.send(*pack_message(ResultMessage(calls[1].id), b"\0" * 16))
        while not isinstance(message := peer.hear()[0], AckMessage):
            assert isinstance(message, CallMessage)
        assert message.ids == [calls[1].id], "also without another call"


def test_a_broken_connection_is_replaced(hub: RpcServer) -> None:
    peer = Peer(hub, "peer-0")
    until(lambda: peer.handle.connection is not None)
    first = peer.handle.connection
    pending = peer.handle.submit(Echo.say, "a")
    peer.connection.close()
    until(lambda: peer.handle.connection is None and not hub._connections)
    again = auth_handshake.connect(*hub.address, token=TOKEN, run=RUN, generation=1, name="peer-0")
    with again:
        again.send(*pack_message(ResumeMessage(0, 1)))
        until(lambda: peer.handle.connection is not None)
        assert peer.handle.connection is not first
        frame = again.recv(10.0)
        assert frame is not None and isinstance(unpack_to_worker(frame)[0], CallMessage), "open calls are resent"
        assert not pending.done()
        assert len(hub._connections) == 1


def test_a_connection_may_have_the_descriptor_of_one_that_another_thread_has_just_closed(hub: RpcServer) -> None:
    with ExitStack() as closing:
        lower = os.open(os.devnull, os.O_RDONLY)  # for the socket of the second peer
        first = Peer(hub, "first")
        closing.callback(first.connection.close)
        until(lambda: first.handle.connection is not None)
        closed = first.handle.connection
        assert isinstance(closed, Connection)
        descriptor = closed.fileno()
        os.close(lower)
        closed.close()  # what a thread whose call cannot be sent does first
        second = Peer(hub, "second")
        closing.callback(second.connection.close)
        until(lambda: second.handle.connection is not None)
        assert isinstance(second.handle.connection, Connection)
        assert second.handle.connection.fileno() == descriptor
        assert first.handle.connection is None, "it is dropped"
        second.handle.submit(Echo.say, "short")
        assert isinstance(second.hear()[0], CallMessage)
