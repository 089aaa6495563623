"""Frames, the handshake, and other programs that connect to the port."""

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.base.transport.auth_handshake import Listener, connect
from lockstep.base.transport.frame_codes import CODE_BYTES, SessionKeys
from lockstep.base.transport.frames import (
    BULK_BYTES,
    Connection,
    ConnectionClosed,
    FrameRefused,
    FrameTooLarge,
    HandshakeRefused,
    PeerIdentity,
    SendTimeout,
)
from lockstep.base.transport.run_token import WeakToken

TOKEN = "5f0c2b7be4a8913d6e7f20c1a9d84b36"

pytestmark = pytest.mark.usefixtures("token")
plain_only = pytest.mark.parametrize("token", [TOKEN], indirect=True, ids=["plain"])


@pytest.fixture(params=[TOKEN, f"tls:{TOKEN}"], ids=["plain", "tls"])
def token(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test without and with TLS."""
    monkeypatch.setattr(f"{__name__}.TOKEN", request.param)


def dial(listener: Listener, **changes: object) -> Connection:
    arguments: dict = {"token": TOKEN, "run": "r", "generation": 1, "name": "client", "timeout_s": 5.0} | changes
    return connect("127.0.0.1", listener.port, **arguments)


@contextmanager
def accepting(listener: Listener, timeout_s: float = 5.0) -> Iterator[list[Connection | None]]:
    accepted: list[Connection | None] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(timeout_s)))
    thread.start()
    yield accepted
    thread.join(timeout_s + 5)
    assert not thread.is_alive()


@contextmanager
def pair(**changes: object) -> Iterator[tuple[Connection, Connection]]:
    with Listener(TOKEN, "r", 1, name="server", **changes) as listener:
        with accepting(listener) as accepted:
            client = dial(listener)
        assert accepted[0] is not None
        with client, accepted[0] as server:
            yield client, server


def test_both_sides_know_each_other() -> None:
    with pair() as (client, server):
        assert (server.peer.name, server.peer.run, server.peer.generation) == ("client", "r", 1)
        assert client.peer.name == "server"


def test_frames_arrive_whole_and_in_order() -> None:
    with pair() as (client, server):
        frames = [b"", b"x", b"ab" * 5000, bytes(range(256)) * 40]
        for frame in frames:
            client.send(frame[:3], frame[3:])
        assert [server.recv(2) for _ in frames] == frames
        assert server.recv(0) is None


def test_all_frames_that_have_arrived_are_read_at_once() -> None:
    sizes = (0, 1, 4087, 4088, 4089, 70_000, 3)
    with pair() as (client, server):
        for size in sizes:
            client.send(b"z" * size)
        heard: list[int] = []
        while len(heard) < len(sizes):
            select.select([server], [], [], 5.0)
            heard += [len(frame) for frame in server.frames()]
        assert heard == list(sizes) and list(server.frames()) == []
        client.send(b"last")
        client.close()
        select.select([server], [], [], 5.0)
        assert list(server.frames()) == [b"last"]
        with pytest.raises(ConnectionClosed):
            list(server.frames())


def test_bytes_read_ahead_go_to_the_next_reader() -> None:
    with pair() as (client, server):
        client.queue(b"one")
        client.queue(b"two")
        assert client.flush()
        select.select([server], [], [], 5.0)
        assert next(server.frames()) == b"one"
        assert server.recv(0) == b"two"


def test_a_part_may_be_empty() -> None:
    """As for an exception with a long traceback, whose payload is empty."""
    with pair() as (here, there):
        for size in (1, 5000):
            here.queue(b"x" * size, b"", b"")
            assert here.flush() and not here.pending
            assert there.recv(5.0) == b"x" * size


def test_a_large_frame_crosses_while_the_other_reads_in_pieces() -> None:
    with pair() as (client, server):
        data = os.urandom(1 << 20) * 16
        thread = threading.Thread(target=client.send, args=(data,))
        thread.start()
        got = None
        while got is None:
            got = server.recv(0.001)
        thread.join(5)
        assert bytes(got) == data
        assert client.bulk_bytes > len(data) - BULK_BYTES  # what the last call sends may be less than counts
        assert server.bulk_bytes >= len(data)


def test_threads_may_send_at_once() -> None:
    with pair() as (client, server):
        frames = {bytes([i]) * (200_000 + i) for i in range(8)}
        threads = [threading.Thread(target=client.send, args=(frame,)) for frame in frames]
        for thread in threads:
            thread.start()
        assert {bytes(server.recv(5) or b"") for _ in frames} == frames
        for thread in threads:
            thread.join(5)


def test_sending_to_a_peer_that_does_not_read_is_bounded() -> None:
    with pair() as (client, _server):
        began = time.monotonic()
        with pytest.raises(SendTimeout):
            client.send(bytes(64 << 20), timeout_s=0.3)
        assert time.monotonic() - began < 3
        assert client.closed


def test_queue_and_flush_never_block() -> None:
    with pair() as (client, server):
        client.queue(bytes(32 << 20))
        began = time.monotonic()
        assert not client.flush()
        assert client.pending
        assert time.monotonic() - began < 1
        got = None
        while got is None:
            got = server.recv(0.001)
            client.flush()
        assert len(got) == 32 << 20
        assert not client.pending


def test_limits_hold_on_both_sides() -> None:
    with pair(max_frame=1000) as (client, server):
        with pytest.raises(FrameTooLarge):
            server.send(bytes(1001))
        client.send(bytes(1001))
        with pytest.raises(FrameTooLarge):
            server.recv(2)
        with pytest.raises(ConnectionClosed):
            client.recv(2)


def test_a_closed_peer_is_an_error_not_a_wait() -> None:
    with pair() as (client, server):
        server.close()
        with pytest.raises(ConnectionClosed):
            client.recv(5)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"token": "another"}, "token"), ({"run": "other"}, "run"), ({"generation": 0}, "generation")],
)
def test_unknown_peers_are_refused_with_the_reason(changes: dict, code: str) -> None:
    if "token" in changes:
        changes = {"token": TOKEN.replace("5", "6")}
    with Listener(TOKEN, "r", 1) as listener, accepting(listener, 0.5) as accepted:
        with pytest.raises(HandshakeRefused) as refusal:
            dial(listener, **changes)
        assert refusal.value.code == code
        assert TOKEN not in str(refusal.value)
    assert accepted == [None]


def test_a_newer_generation_makes_the_older_stale() -> None:
    with Listener(TOKEN, "r", 1) as listener:
        with accepting(listener) as accepted:
            newer = dial(listener, generation=2)
        assert accepted[0] is not None
        with accepting(listener, 0.5), pytest.raises(HandshakeRefused, match="generation 1 is stale, 2"):
            dial(listener)
        assert listener.highest_generation == 2
        newer.close()


@plain_only
def test_a_listener_without_the_token_is_refused_by_the_client() -> None:
    """An impostor on the port accepts every client, but cannot prove that it knows the token."""
    impostor = socket.create_server(("127.0.0.1", 0))

    def play() -> None:
        peer, _ = impostor.accept()
        peer.sendall(b"LKSTEP\x02\n" + bytes(32))
        peer.recv(4096)
        reply = json.dumps({"code": None, "run": "r", "generation": 1, "name": "server"}).encode()
        peer.sendall((32 + len(reply)).to_bytes(2, "big") + bytes(32) + reply)
        time.sleep(0.5)
        peer.close()

    thread = threading.Thread(target=play)
    thread.start()
    with pytest.raises(HandshakeRefused, match="does not know this run's token"):
        connect("127.0.0.1", impostor.getsockname()[1], token=TOKEN, run="r", generation=1, name="c", timeout_s=3)
    thread.join(5)
    impostor.close()


def test_the_token_is_never_sent() -> None:
    seen = bytearray()
    with Listener(TOKEN, "r", 1) as listener, socket.create_server(("127.0.0.1", 0)) as proxy:

        def relay() -> None:
            inner, _ = proxy.accept()
            outer = socket.create_connection(("127.0.0.1", listener.port))
            ends = {inner: outer, outer: inner}
            while True:
                ready, _, _ = select.select(list(ends), [], [], 2)
                for end in ready:
                    data = end.recv(65536)
                    if not data:
                        return
                    seen.extend(data)
                    ends[end].sendall(data)
                if not ready:
                    return

        thread = threading.Thread(target=relay)
        thread.start()
        with accepting(listener) as accepted:
            client = connect(
                "127.0.0.1", proxy.getsockname()[1], token=TOKEN, run="r", generation=1, name="c", timeout_s=5
            )
        assert accepted[0] is not None
        client.close()
        thread.join(5)
    assert len(seen) > 100
    assert TOKEN.encode() not in seen


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 5000, b"LKSTEP\x02\n\xff\xff", b"LKSTEP\x02\n\x00\x01x", b""],
)
def test_garbage_loses_its_own_connection_only(garbage: bytes) -> None:
    with Listener(TOKEN, "r", 1, handshake_s=0.3) as listener:
        stranger = socket.create_connection(("127.0.0.1", listener.port))
        stranger.sendall(garbage)
        with accepting(listener) as accepted:
            client = dial(listener)
        server = accepted[0]
        assert server is not None
        assert listener.accept(0.5) is None
        stranger.settimeout(2)
        with pytest.raises((ConnectionError, EOFError)):  # the greeting, then the end
            while True:
                if not stranger.recv(100):
                    raise EOFError
        client.send(b"still here")
        assert server.recv(2) == b"still here"
        client.close()
        server.close()


@plain_only
def test_silent_peers_are_dropped_and_bounded_in_number() -> None:
    with Listener(TOKEN, "r", 1, handshake_s=30) as listener:
        strangers = []
        for _ in range(300):
            strangers.append(socket.create_connection(("127.0.0.1", listener.port)))
            listener.accept(0)
        assert len(listener._half_open) <= 256
        with accepting(listener) as accepted:
            dial(listener).close()
        assert accepted[0] is not None
        for stranger in strangers:
            stranger.close()


@plain_only
def test_dialling_a_port_without_a_listener_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(ConnectionClosed, match="refused"):
        connect("127.0.0.1", port, token=TOKEN, run="r", generation=1, name="c", timeout_s=2)


def test_a_listener_can_stand_in_a_selector() -> None:
    with Listener(TOKEN, "r", 1) as listener:
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        assert not poller.poll(0)
        thread = threading.Thread(target=lambda: dial(listener).close())
        thread.start()
        connection = None
        while connection is None and poller.poll(3000):
            connection = listener.accept(0)
        assert connection is not None
        thread.join(5)


@plain_only
@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"LKSTEP\x01\n" + bytes(32), "it speaks version 1 of the protocol, this process speaks version 2"),
        (b"LKSTEP\x03\n" + bytes(32), "it speaks version 3 of the protocol, this process speaks version 2"),
        (b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n", "is not a process of a run"),
    ],
    ids=["earlier", "later", "stranger"],
)
def test_a_listener_of_another_version_is_refused_with_both_versions(greeting: bytes, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        thread = threading.Thread(target=lambda: other.accept()[0].sendall(greeting))
        thread.start()
        with pytest.raises(HandshakeRefused, match=why) as refused:
            connect("127.0.0.1", other.getsockname()[1], token=TOKEN, run="r", generation=1, name="c", timeout_s=3)
        thread.join(5)
    assert refused.value.code == "protocol" and not refused.value.proven


def test_a_listener_refuses_a_token_that_can_be_guessed() -> None:
    with pytest.raises(WeakToken, match="can be guessed"):
        Listener(TOKEN[:8], "r", 1)


class Wire:
    """Two connections over buffers, in place of sockets: `deliver` moves bytes as it says."""

    def __init__(self) -> None:
        self.passed, self.arrived = bytearray(), bytearray()

    def fileno(self) -> int:
        return -1

    def setblocking(self, flag: bool) -> None: ...
    def shutdown(self, how: int) -> None: ...
    def close(self) -> None: ...

    def sendmsg(self, buffers: list[memoryview]) -> int:
        self.passed += b"".join(buffers)
        return sum(len(each) for each in buffers)

    def recv(self, size: int) -> bytes:
        if not self.arrived:
            raise BlockingIOError
        taken = bytes(self.arrived[:size])
        del self.arrived[:size]
        return taken

    def recv_into(self, buffer: memoryview) -> int:
        taken = self.recv(len(buffer))
        buffer[: len(taken)] = taken
        return len(taken)


def wired() -> tuple[Connection, Wire, Connection, Wire]:
    near, far = Wire(), Wire()
    peer, keys = PeerIdentity("r", 1, "p"), (b"a" * 32, b"b" * 32)
    return (
        Connection(near, peer, SessionKeys(*keys), 1 << 20), near,
        Connection(far, peer, SessionKeys(*keys[::-1]), 1 << 20), far,
    )  # fmt: skip


@plain_only
@given(messages=st.lists(st.binary(max_size=200) | st.integers(0, 70_000).map(bytes), max_size=6), data=st.data())
def test_any_frames_arrive_as_they_were_sent_in_any_pieces(messages: list[bytes], data: st.DataObject) -> None:
    client, near, server, far = wired()
    for message in messages:
        at = data.draw(st.integers(0, len(message)))
        client.queue(message[:at], message[at:])
    assert client.flush()
    got = []
    while near.passed:
        count = data.draw(st.integers(1, len(near.passed)))
        far.arrived += near.passed[:count]
        del near.passed[:count]
        got += [bytes(frame) for frame in server.frames()]
    got += [bytes(frame) for frame in server.frames()]
    assert got == messages


@plain_only
@given(messages=st.lists(st.binary(max_size=40), min_size=1, max_size=4), data=st.data())
def test_any_change_of_what_was_sent_is_refused(messages: list[bytes], data: st.DataObject) -> None:
    """Whatever is removed, added or changed: frames before that place arrive, none after it, and none that was not
    sent."""
    client, near, server, far = wired()
    for message in messages:
        client.queue(message)
    client.flush()
    stream = bytes(near.passed)
    start = data.draw(st.integers(0, len(stream)))
    end = data.draw(st.integers(start, len(stream)))
    changed = stream[:start] + data.draw(st.binary(max_size=60) | st.just(stream[end:])) + stream[end:]
    far.arrived += changed
    got = []
    with contextlib.suppress(FrameRefused):
        for _ in range(20):
            if (frame := server.recv(0)) is None:
                break
            got.append(bytes(frame))
    assert got == messages[: len(got)], "nothing but what was sent, in that order"
    whole = 0
    for index, message in enumerate(messages):
        whole += 8 + CODE_BYTES + len(message) + CODE_BYTES
        assert (index < len(got)) == (changed[:whole] == stream[:whole])
