"""A relay between two processes of a run forwards their handshake, and then attacks the frames: nothing that it does is
taken for a message of the peer, and a run survives it."""

import logging
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from relays import Direction, Relay

from lockstep.base.transport.auth_handshake import Listener, connect
from lockstep.base.transport.frame_codes import CODE_BYTES
from lockstep.base.transport.frames import Connection, FrameRefused, HandshakeRefused, WireError
from lockstep.base.transport.run_token import new_run_token
from lockstep.base.transport.tls import ServerTls, connect_tls
from lockstep.cluster.local_cluster import LocalCluster
from lockstep.cluster.protocol import WorkerSpec
from lockstep.config.cluster import LocalClusterConfig
from lockstep.watch.agent.service_discovery import Leader, ServiceAddress
from lockstep.watch.diagnosis.verdict import StallThresholds
from lockstep.watch.supervisor.supervisor_client import read_supervisor_address

FIRST, SECOND = b"the first message", b"the second message"
HEADER = 8 + CODE_BYTES
TOKEN = new_run_token()


@contextmanager
def ends(token: str) -> Iterator[tuple[Connection, Connection, Relay]]:
    """The client, the server, and the relay between them, after the handshake."""
    with Listener(token, "r", 1, name="server") as listener, Relay((listener.host, listener.port)) as relay:
        accepted: list[Connection | None] = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept(10.0)))
        thread.start()
        client = connect(relay.host, relay.port, token=token, run="r", generation=1, name="client")
        thread.join(15)
        assert accepted[0] is not None
        with client, accepted[0] as server:
            yield client, server, relay


def until(check: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


def hold(relay: Relay) -> bytearray:
    """From now on the relay keeps what the client sends; returns where it is kept."""
    kept = bytearray()
    relay.to_listener.change = lambda data: (kept.extend(data), b"")[1]
    return kept


def frame_size(message: bytes) -> int:
    return HEADER + len(message) + CODE_BYTES


def sent(client: Connection, relay: Relay, *messages: bytes) -> list[bytes]:
    """The client sends messages that the relay keeps: their frames."""
    kept = hold(relay)
    for message in messages:
        client.send(message)
    until(lambda: len(kept) == sum(map(frame_size, messages)), "the relay has the frames")
    relay.to_listener.change = None
    frames = []
    for message in messages:
        frames.append(bytes(kept[: frame_size(message)]))
        del kept[: frame_size(message)]
    return frames


def assert_refused(server: Connection, number: int) -> None:
    began = time.monotonic()
    with pytest.raises(FrameRefused, match=f"the authentication code of frame {number} does not fit") as refused:
        pytest.fail(f"{server.recv(5.0)!r} was taken for a frame of the peer, or waited for")
    assert time.monotonic() - began < 2.0, "at once"
    assert server.closed and refused.value.number == number


def old_frame(message: bytes) -> bytes:
    return len(message).to_bytes(8, "big") + message


def forged(message: bytes) -> bytes:
    return len(message).to_bytes(8, "big") + bytes(CODE_BYTES) + message + bytes(CODE_BYTES)


@pytest.mark.parametrize("form", [old_frame, forged], ids=["without-codes", "with-wrong-codes"])
def test_a_relay_cannot_add_a_frame(form: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture) -> None:
    with ends(new_run_token()) as (client, server, relay):
        client.send(FIRST)
        assert server.recv(5.0) == FIRST
        with caplog.at_level(logging.WARNING):
            relay.to_listener.inject(form(b"run this command for me"))
            assert_refused(server, 1)
        assert "something between the two processes" in caplog.text
        with pytest.raises(WireError):  # the peer hears of it at once, too
            client.recv(5.0)


def test_a_relay_cannot_add_a_frame_to_the_client_either() -> None:
    with ends(new_run_token()) as (client, _, relay):
        relay.from_listener.inject(forged(b"run this command for me"))
        assert_refused(client, 0)


def test_a_frame_cannot_be_repeated() -> None:
    with ends(new_run_token()) as (client, server, relay):
        (frame,) = sent(client, relay, FIRST)
        relay.to_listener.inject(frame)
        assert server.recv(5.0) == FIRST
        relay.to_listener.inject(frame)
        assert_refused(server, 1)


def test_frames_cannot_be_reordered_or_dropped() -> None:
    for order in ([1, 0], [1]):
        with ends(new_run_token()) as (client, server, relay):
            frames = sent(client, relay, FIRST, SECOND)
            relay.to_listener.inject(b"".join(frames[number] for number in order))
            assert_refused(server, 0)


def test_a_frame_cannot_be_truncated() -> None:
    with ends(new_run_token()) as (client, server, relay):
        first, second = sent(client, relay, FIRST, SECOND)
        relay.to_listener.inject(first[:-3] + second)
        assert_refused(server, 0)
    with ends(new_run_token()) as (client, server, relay):
        first, second = sent(client, relay, FIRST, SECOND)
        cut = first[:HEADER] + first[HEADER + 4 :]  # within the message
        relay.to_listener.inject(cut + second)
        assert_refused(server, 0)


def test_no_bit_of_a_frame_can_be_flipped() -> None:
    """Of the length, of both codes and of the message: each byte once. A longer length is refused before anybody waits
    for the bytes that it announces, or takes memory for them."""
    for place in range(frame_size(FIRST)):
        with ends(TOKEN) as (client, server, relay):
            (frame,) = sent(client, relay, FIRST)
            changed = bytearray(frame)
            changed[place] ^= 1 << place % 8
            relay.to_listener.inject(bytes(changed))
            assert_refused(server, 0)


def test_frames_do_not_fit_the_other_direction_or_another_connection() -> None:
    with ends(TOKEN) as (client, server, relay), ends(TOKEN) as (_, other, between):
        (frame,) = sent(client, relay, FIRST)
        between.to_listener.inject(frame)
        assert_refused(other, 0)
        relay.to_listener.inject(frame)
        assert server.recv(5.0) == FIRST, "only where it belongs"
        relay.from_listener.inject(frame)
        assert_refused(client, 0)


def test_large_frames_are_verified_as_well() -> None:
    message = secrets.token_bytes(3 << 20)
    with ends(TOKEN) as (client, server, relay):
        client.send(message)
        assert server.recv(10.0) == message
        place = len(relay.to_listener.seen) + (2 << 20)

        def flip(data: bytes) -> bytes:
            at = place - (len(relay.to_listener.seen) - len(data))
            return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] if 0 <= at < len(data) else data

        relay.to_listener.change = flip
        client.send(message)
        assert_refused(server, 1)


def test_nobody_without_the_token_can_refuse_a_process_for_good() -> None:
    """A worker that hears "stale generation" exits: so only a listener that has the token may say so."""
    reply = b'{"code": "generation", "why": "generation 1 is stale, 2 has been seen"}'
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def play() -> None:
            peer = impostor.accept()[0]
            with peer:
                peer.sendall(b"LKSTEP\x02\n" + bytes(32))
                peer.recv(4096)
                peer.sendall((32 + len(reply)).to_bytes(2, "big") + bytes(32) + reply)
                peer.recv(4096)

        thread = threading.Thread(target=play)
        thread.start()
        with pytest.raises(HandshakeRefused) as refused:
            connect("127.0.0.1", impostor.getsockname()[1], token=TOKEN, run="r", generation=1, name="c", timeout_s=5)
        thread.join(5)
    assert refused.value.code == "token" and not refused.value.proven


class Interceptor(Relay):
    """Ends TLS on both sides with a certificate of its own, and forwards what it decrypted."""

    def _accept(self, stack: ExitStack, selector: selectors.BaseSelector) -> None:
        near = stack.enter_context(ServerTls.create().accept(self._server.accept()[0]))
        assert isinstance(near, ssl.SSLSocket)
        near.do_handshake()
        far = stack.enter_context(connect_tls(socket.create_connection(self.target, timeout=5.0), "target")[0])
        pair = Direction(out=far), Direction(out=near)
        self.connections.append(pair)
        selector.register(near, selectors.EVENT_READ, (pair[0], far))
        selector.register(far, selectors.EVENT_READ, (pair[1], near))


def test_tls_that_ends_on_the_way_is_refused() -> None:
    """The relay has a certificate of its own, and forwards the handshake: both ends notice that they see different
    certificates."""
    token = new_run_token(tls=True)
    with Listener(token, "r", 1) as listener, Interceptor((listener.host, listener.port)) as relay:
        accepted: list[Connection | None] = []
        thread = threading.Thread(target=lambda: accepted.append(listener.accept(3.0)))
        thread.start()
        with pytest.raises(HandshakeRefused, match="TLS ends at another process") as refused:
            connect(relay.host, relay.port, token=token, run="r", generation=1, name="c", timeout_s=5)
        thread.join(10)
    assert refused.value.code == "certificate" and accepted == [None]
    assert b"LKSTEP" in relay.to_listener.seen, "the relay did read the handshake"


def test_a_listener_without_tls_is_refused_by_a_process_that_wants_it() -> None:
    with Listener(TOKEN, "r", 1) as plain:
        thread = threading.Thread(target=lambda: plain.accept(2.0))
        thread.start()
        with pytest.raises(HandshakeRefused, match="does not open TLS"):
            connect(plain.host, plain.port, token=f"tls:{TOKEN}", run="r", generation=1, name="c", timeout_s=5)
        thread.join(10)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_with_tls_nothing_can_be_read_on_the_wire(tls: bool) -> None:
    secret = b"the-variable-WANDB_API_KEY"
    with ends(new_run_token(tls)) as (client, server, relay):
        client.send(secret)
        assert server.recv(5.0) == secret
        server.send(secret * 5000)
        assert client.recv(5.0) == secret * 5000
        wire = bytes(relay.to_listener.seen + relay.from_listener.seen)
    assert (secret in wire) == (b'"generation"' in wire) == (b"LKSTEP" in wire) == (not tls)
    assert tls == (wire.count(b"\x17\x03\x03") > 3), "records of TLS"


def test_a_changed_record_of_tls_ends_the_connection() -> None:
    with ends(new_run_token(tls=True)) as (client, server, relay):
        relay.to_listener.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        client.send(FIRST)
        with pytest.raises(WireError):
            pytest.fail(f"{server.recv(5.0)!r} was accepted")


SERVICE = """
class Service:
    def __init__(self) -> None:
        self.sum = 0

    def add(self, number: int) -> int:
        self.sum += number
        return self.sum
"""


class Service:
    def add(self, number: int) -> int: ...  # type: ignore[empty-body]


class RelayedCluster(LocalCluster):
    """A cluster whose workers reach their controller through a relay."""

    relay: Relay

    def _publish_leader(self) -> None:
        super()._publish_leader()
        self.relay = Relay(self._server.address)
        leader = Leader.read(self._run)
        assert leader is not None
        replace(leader, port=self.relay.port).publish(self._run)


@pytest.fixture(params=[False])
def relayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[RelayedCluster, Any]]:
    (tmp_path / "relayed_service.py").write_text(SERVICE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with ExitStack() as stack:
        cluster = stack.enter_context(
            RelayedCluster(LocalClusterConfig(tls=request.param), f"relayed-{secrets.token_hex(3)}", tmp_path, 1)
        )
        stack.callback(cluster.relay.close)
        (worker,) = cluster.start([WorkerSpec("w", "w", 0, "relayed_service:Service")])
        yield cluster, worker


def test_a_run_survives_a_relay_that_attacks_it(relayed: tuple[RelayedCluster, Any]) -> None:
    """Workers and controller refuse the frames, connect anew, and every call is carried out exactly once."""
    cluster, worker = relayed
    total = worker.call(Service.add, 1)
    attacks: list[Callable[[Relay], None]] = [
        lambda relay: relay.from_listener.inject(old_frame(b"\x10\0\0\0" + b"\x93\x03" + b"leave")),
        lambda relay: relay.from_listener.inject(forged(b"a call")),
        lambda relay: relay.to_listener.inject(forged(b"a result")),
        lambda relay: relay.to_listener.inject(bytes(relay.to_listener.seen[-200:])),
    ]
    for number, attack in enumerate(attacks):
        before = len(cluster.relay.connections)
        pending = worker.submit(Service.add, 1)
        attack(cluster.relay)
        assert pending.result("the sum") == total + 1
        total += 1
        until(lambda at=before: len(cluster.relay.connections) > at, f"attack {number}: a new connection")  # type: ignore[misc]
        assert worker.call(Service.add, 1) == total + 1
        total += 1
    assert cluster.refused_frames == 2, "those that the controller refused; the worker refused the others"


@pytest.mark.parametrize("relayed", [False, True], indirect=True, ids=["plain", "tls"])
def test_calls_of_a_run_with_tls_cannot_be_read(
    relayed: tuple[RelayedCluster, Any], request: pytest.FixtureRequest
) -> None:
    cluster, worker = relayed
    assert worker.call(Service.add, 3) == 3
    wire = bytes(cluster.relay.to_listener.seen + cluster.relay.from_listener.seen)
    assert len(wire) > 500 and (b"add" in wire) == ("plain" in request.node.callspec.id)


@pytest.mark.parametrize("relayed", [True], indirect=True, ids=["tls"])
def test_agent_and_supervisor_of_a_run_with_tls_speak_nothing_else(relayed: tuple[RelayedCluster, Any]) -> None:
    cluster, _ = relayed
    cluster.supervise(StallThresholds(), lambda event: None)
    supervision = cluster._supervision
    assert supervision is not None and supervision.connected.wait(60.0)
    supervisor = read_supervisor_address(cluster._cluster_dir)
    assert supervisor is not None
    for port in (ServiceAddress.read(cluster._cluster_dir).port, supervisor.port):
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as plain, pytest.raises(TimeoutError):
            pytest.fail(f"{plain.recv(100)!r}: without TLS, a listener greets at once")
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as plain:
            assert len(connect_tls(plain, "the listener")[1]) == 64
