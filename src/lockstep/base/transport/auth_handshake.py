"""Opens authenticated connections between the processes of a run; `frames` describes what travels over them.

When a connection opens, both sides prove by HMAC-SHA256 over two nonces that they know the run's token, which is never
sent. The connecting side identifies itself (run, generation, name) and is refused, with a reason, if its token, run or
generation is wrong. Other programs that connect to the port (scanners, silent peers) are disconnected without effect
on valid peers.

Peers are authenticated, but data is not encrypted: bind to loopback or to a trusted network.
"""

import hashlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lockstep.base.network import PortRange, listen
from lockstep.base.transport.frames import (
    MAX_FRAME,
    Connection,
    ConnectionClosed,
    HandshakeRefused,
    PeerIdentity,
    RefusalCode,
    WireError,
    os_error_reason,
)

HANDSHAKE_S = 10.0
"""A connecting peer that has not authenticated within this time is dropped."""

_MAGIC = b"LKSTEP\x01\n"
_NONCE = _MAC = 32
_HELLO_LIMIT = 4096
_HALF_OPEN_LIMIT = 256
_LENGTH = struct.Struct(">H")


@dataclass(slots=True)
class _HalfOpen:
    """A peer that has not authenticated yet."""

    socket: socket.socket
    nonce: bytes
    deadline: float
    data: bytearray


class Listener:
    """Accepts authenticated connections of one run, in one thread.

    `highest_generation` is the highest generation among the peers so far and the listener itself; a peer of a lower
    generation is refused. `accept` runs handshakes concurrently, so a silent peer does not delay the others. `fileno`
    is readable when `accept(0)` has something to do."""

    def __init__(
        self,
        token: str,
        run: str,
        generation: int,
        name: str = "listener",
        host: str = "127.0.0.1",
        ports: PortRange | None = None,
        max_frame: int = MAX_FRAME,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self._socket = listen(host, ports)
        self._socket.setblocking(False)
        self._me = PeerIdentity(run, generation, name)
        self._token = token.encode()
        self._max_frame, self._handshake_s = max_frame, handshake_s
        self._half_open: dict[int, _HalfOpen] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        self._closed = False
        self.highest_generation = generation
        address = self._socket.getsockname()
        self.host: str = address[0]
        self.port: int = address[1]

    def fileno(self) -> int:
        return self._selector.fileno()

    def accept(self, timeout_s: float) -> Connection | None:
        """The next authenticated connection, or None after `timeout_s` (0: only one that is ready now)."""
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            soonest = min([deadline, *(peer.deadline for peer in self._half_open.values())])
            for key, _ in self._selector.select(max(0.0, soonest - time.monotonic())):
                if key.data is None:
                    self._greet()
                elif (connection := self._advance(key.data)) is not None:
                    return connection
            self._drop_expired()
            if time.monotonic() >= deadline:
                return None
        return None

    def close(self) -> None:
        """Closes the port and the peers that are not accepted yet. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._half_open.values()):
            self._discard(peer, close=True)
        self._selector.close()
        self._socket.close()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _greet(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        sock.setblocking(False)
        if len(self._half_open) >= _HALF_OPEN_LIMIT:
            self._discard(min(self._half_open.values(), key=lambda peer: peer.deadline), close=True)
        peer = _HalfOpen(sock, secrets.token_bytes(_NONCE), time.monotonic() + self._handshake_s, bytearray())
        self._half_open[sock.fileno()] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._send(peer, _MAGIC + peer.nonce)

    def _advance(self, peer: _HalfOpen) -> Connection | None:
        """Reads what the peer sent. Returns a connection once the hello is complete and valid."""
        try:
            data = peer.socket.recv(_HELLO_LIMIT + 64)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        peer.data += data
        start = len(_MAGIC) + _LENGTH.size
        garbage = not _MAGIC.startswith(peer.data[: len(_MAGIC)])
        if not data or garbage or len(peer.data) > _HELLO_LIMIT:
            self._discard(peer, close=True)
            return None
        if len(peer.data) < start:
            return None
        (size,) = _LENGTH.unpack_from(peer.data, len(_MAGIC))
        if not _NONCE + _MAC < size <= _HELLO_LIMIT - start or len(peer.data) > start + size:
            self._discard(peer, close=True)
            return None
        return self._verify(peer, bytes(peer.data[start:])) if len(peer.data) == start + size else None

    def _verify(self, peer: _HalfOpen, payload: bytes) -> Connection | None:
        nonce, proof, hello = payload[:_NONCE], payload[_NONCE : _NONCE + _MAC], payload[_NONCE + _MAC :]
        seed = peer.nonce + nonce + hello
        known = hmac.compare_digest(proof, _mac(self._token, b"dials", seed))
        identity = _parse_identity(hello) if known else None
        code, why = ("token", "the token is not this run's") if not known else self._check_identity(identity)
        fields: dict[str, Any] = {"code": code, "why": why}
        if known:
            fields |= {"run": self._me.run, "generation": self.highest_generation, "name": self._me.name}
        reply = json.dumps(fields).encode()
        mac = _mac(self._token, b"listens", seed + reply) if known else bytes(_MAC)
        sent = self._send(peer, _LENGTH.pack(_MAC + len(reply)) + mac + reply)
        self._discard(peer, close=code is not None or not sent)
        if code is not None or identity is None or not sent:
            return None
        self.highest_generation = max(self.highest_generation, identity.generation)
        _set_tcp_options(peer.socket)
        return Connection(peer.socket, identity, self._max_frame)

    def _check_identity(self, identity: PeerIdentity | None) -> tuple[RefusalCode | None, str]:
        if identity is None:
            return "protocol", "the hello is unreadable"
        if identity.run != self._me.run:
            return "run", f"this is run {self._me.run!r}, not {identity.run!r}"
        if identity.generation < self.highest_generation:
            return "generation", f"generation {identity.generation} is stale, {self.highest_generation} has been seen"
        return None, ""

    def _send(self, peer: _HalfOpen, data: bytes) -> bool:
        """Sends a few hundred bytes, which fit an empty socket buffer; returns whether all were sent."""
        try:
            return peer.socket.send(data) == len(data)
        except OSError:
            return False

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._half_open.values() if peer.deadline <= now]:
            self._discard(peer, close=True)

    def _discard(self, peer: _HalfOpen, close: bool) -> None:
        if self._half_open.pop(peer.socket.fileno(), None) is not None:
            self._selector.unregister(peer.socket)
        if close:
            peer.socket.close()


def connect(
    host: str,
    port: int,
    *,
    token: str,
    run: str,
    generation: int,
    name: str,
    timeout_s: float = HANDSHAKE_S,
    max_frame: int = MAX_FRAME,
) -> Connection:
    """Connects to a `Listener` and authenticates both sides, within `timeout_s` in total.

    Raises:
        HandshakeRefused: wrong token (of either side), other run, stale generation, or another program at that port.
        ConnectionClosed: nothing listens there, or the peer closed the connection during the handshake.
    """
    deadline = time.monotonic() + timeout_s
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ConnectionClosed(where, os_error_reason(error)) from None
    try:
        peer = _prove_identity(sock, where, token.encode(), PeerIdentity(run, generation, name), deadline)
    except OSError as error:
        sock.close()
        if isinstance(error, WireError):
            raise
        raise ConnectionClosed(where, f"broke in the handshake: {os_error_reason(error)}") from None
    _set_tcp_options(sock)
    return Connection(sock, peer, max_frame)


def _prove_identity(sock: socket.socket, where: str, token: bytes, me: PeerIdentity, deadline: float) -> PeerIdentity:
    greeting = _recv_exactly(sock, len(_MAGIC) + _NONCE, where, deadline)
    if greeting[: len(_MAGIC)] != _MAGIC:
        raise HandshakeRefused(
            where, "protocol", "the listening program is not a process of a run, or has another version"
        )
    nonce = secrets.token_bytes(_NONCE)
    hello = json.dumps({"run": me.run, "generation": me.generation, "name": me.name}).encode()
    seed = greeting[len(_MAGIC) :] + nonce + hello
    payload = nonce + _mac(token, b"dials", seed) + hello
    if len(payload) > _HELLO_LIMIT - 16:
        raise ValueError(f"run and name are {len(hello)} bytes together, too long for a hello")
    sock.settimeout(max(0.01, deadline - time.monotonic()))
    sock.sendall(_MAGIC + _LENGTH.pack(len(payload)) + payload)
    (size,) = _LENGTH.unpack(_recv_exactly(sock, _LENGTH.size, where, deadline))
    reply = _recv_exactly(sock, size, where, deadline)
    answer = _parse_object(reply[_MAC:])
    if answer is None:
        raise HandshakeRefused(where, "protocol", "the answer to the hello is unreadable")
    if answer.get("code") is not None:
        raise HandshakeRefused(where, answer["code"], str(answer.get("why")))
    if not hmac.compare_digest(reply[:_MAC], _mac(token, b"listens", seed + reply[_MAC:])):
        raise HandshakeRefused(where, "token", "the listener does not know this run's token")
    return PeerIdentity(str(answer["run"]), int(answer["generation"]), str(answer["name"]))


def _recv_exactly(sock: socket.socket, size: int, where: str, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionClosed(where, "the peer closed it in the handshake")
        data += part
    return bytes(data)


def _parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _parse_identity(data: bytes) -> PeerIdentity | None:
    value = _parse_object(data) or {}
    run, generation, name = value.get("run"), value.get("generation"), value.get("name")
    if isinstance(run, str) and isinstance(generation, int) and isinstance(name, str):
        return PeerIdentity(run, generation, name)
    return None


def _mac(token: bytes, side: bytes, seed: bytes) -> bytes:
    return hmac.new(token, side + b"\0" + seed, hashlib.sha256).digest()


def _set_tcp_options(sock: socket.socket) -> None:
    """Makes small frames leave immediately, and a lost host noticed within about ten seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
