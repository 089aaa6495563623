"""Opens authenticated connections between the processes of a run; `frames` describes what travels over them.

When a connection opens, both sides prove by HMAC-SHA256 over two nonces that they know the run's token, which is never
sent. The connecting side identifies itself (run, generation, name) and is refused, with a reason, if its token, run or
generation is wrong. From token and handshake both derive the keys of the connection's frames (HKDF, RFC 5869). Other
programs that connect to the port (scanners, silent peers) are disconnected without effect on valid peers.

A token that begins with `tls:` puts all of this inside TLS 1.3; the certificate is part of what both sides prove, so
that nothing between them can end TLS itself. Otherwise data is authenticated, but not encrypted.
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
from typing import TYPE_CHECKING, Any

from lockstep.base.json_text import MalformedJson, parse_json
from lockstep.base.network import PortRange, listen
from lockstep.base.transport.frame_codes import SessionKeys
from lockstep.base.transport.frames import (
    MAX_FRAME,
    Connection,
    ConnectionClosed,
    FrameSocket,
    HandshakeRefused,
    PeerIdentity,
    RefusalCode,
    WireError,
    os_error_reason,
)
from lockstep.base.transport.run_token import check_token, uses_tls

if TYPE_CHECKING:
    from lockstep.base.transport.tls import ServerTls

HANDSHAKE_S = 10.0
"""A connecting peer that has not authenticated within this time is dropped."""

PROTOCOL = 2
"""The version of handshake and frames. Peers of other versions are refused."""

_NAME = b"LKSTEP"
_MAGIC = _NAME + bytes((PROTOCOL,)) + b"\n"
_NONCE = _MAC = 32
_HELLO_LIMIT = 4096
_HALF_OPEN_LIMIT = 256
_LENGTH = struct.Struct(">H")
_TOKEN_DIFFERS = "the token is not this run's"
_TOKEN_UNKNOWN = "the listener does not know this run's token"


@dataclass(slots=True)
class _HalfOpen:
    """A peer that has not authenticated yet."""

    socket: socket.socket
    nonce: bytes
    deadline: float
    data: bytearray
    greeted: bool = False
    """Whether it has got the nonce; with TLS only once TLS is open."""


class Listener:
    """Accepts authenticated connections of one run, in one thread.

    `highest_generation` is the highest generation among the peers so far and the listener itself; a peer of a lower
    generation is refused. `accept` runs handshakes concurrently, so a silent peer does not delay the others. `fileno`
    is readable when `accept(0)` has something to do.

    Raises:
        WeakToken: the token can be guessed.
        TlsUnavailable: the token asks for TLS, and this host cannot make a certificate.
        OSError: as `network.listen`.
    """

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
        check_token(token)
        self._tls = _server_tls() if uses_tls(token) else None
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
            sock.setblocking(False)
            secured = sock if self._tls is None else self._tls.accept(sock)
        except OSError:  # the peer has left already
            return
        if len(self._half_open) >= _HALF_OPEN_LIMIT:
            self._discard(min(self._half_open.values(), key=lambda peer: peer.deadline), close=True)
        peer = _HalfOpen(secured, secrets.token_bytes(_NONCE), time.monotonic() + self._handshake_s, bytearray())
        self._half_open[secured.fileno()] = peer
        self._selector.register(secured, selectors.EVENT_READ, peer)
        if self._tls is None:
            self._send_greeting(peer)

    def _send_greeting(self, peer: _HalfOpen) -> None:
        peer.greeted = self._send(peer, _MAGIC + peer.nonce)

    def _advance(self, peer: _HalfOpen) -> Connection | None:
        """Reads what the peer sent. Returns a connection once the hello is complete and valid."""
        if self._tls is not None and not peer.greeted:
            self._advance_tls(peer)
            return None
        try:
            data = peer.socket.recv(_HELLO_LIMIT + 64)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            if self._tls is not None and self._tls.blocked(error):
                return None
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

    def _advance_tls(self, peer: _HalfOpen) -> None:
        assert self._tls is not None
        try:
            opened = self._tls.handshake(peer.socket)
        except OSError:
            self._discard(peer, close=True)
            return
        if opened:
            self._send_greeting(peer)

    def _verify(self, peer: _HalfOpen, payload: bytes) -> Connection | None:
        nonce, proof, hello = payload[:_NONCE], payload[_NONCE : _NONCE + _MAC], payload[_NONCE + _MAC :]
        seed = peer.nonce + nonce + hello
        known = hmac.compare_digest(proof, _mac(self._token, b"dials", seed))
        identity = _parse_identity(hello) if known else None
        code, why = ("token", _TOKEN_DIFFERS) if not known else self._check_identity(identity, hello)
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
        from_dialler, to_dialler = _frame_keys(self._token, seed + reply)
        keys = SessionKeys(send=to_dialler, receive=from_dialler)
        return Connection(_frame_socket(peer.socket, self._tls is not None), identity, keys, self._max_frame)

    def _check_identity(self, identity: PeerIdentity | None, hello: bytes) -> tuple[RefusalCode | None, str]:
        if identity is None:
            return "protocol", "the hello is unreadable"
        seen = (_parse_object(hello) or {}).get("certificate", "")
        if seen != ("" if self._tls is None else self._tls.fingerprint):
            return (
                "certificate",
                "TLS ends at another process on the way, which could read everything",
            )
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
        HandshakeRefused: wrong token (of either side), other run, stale generation, another program or version at that
            port, or another certificate than the listener's.
        ConnectionClosed: nothing listens there, or the peer closed the connection during the handshake.
    """
    deadline = time.monotonic() + timeout_s
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ConnectionClosed(where, os_error_reason(error)) from None
    try:
        certificate = ""
        if uses_tls(token):
            sock, certificate = _connect_tls(sock, where)
        me = PeerIdentity(run, generation, name)
        peer, keys = _prove_identity(sock, where, token.encode(), me, certificate, deadline)
    except OSError as error:
        sock.close()
        if isinstance(error, WireError):
            raise
        raise ConnectionClosed(where, f"broke in the handshake: {os_error_reason(error)}") from None
    _set_tcp_options(sock)
    return Connection(_frame_socket(sock, uses_tls(token)), peer, keys, max_frame)


def _server_tls() -> "ServerTls":
    from lockstep.base.transport.tls import ServerTls  # loads OpenSSL

    return ServerTls.create()


def _connect_tls(sock: socket.socket, where: str) -> tuple[socket.socket, str]:
    from lockstep.base.transport.tls import connect_tls

    return connect_tls(sock, where)


def _frame_socket(sock: socket.socket, tls: bool) -> FrameSocket:
    if not tls:
        return sock
    from lockstep.base.transport.tls import TlsSocket

    return TlsSocket(sock)


def _prove_identity(
    sock: socket.socket, where: str, token: bytes, me: PeerIdentity, certificate: str, deadline: float
) -> tuple[PeerIdentity, SessionKeys]:
    greeting = _recv_exactly(sock, len(_MAGIC), where, deadline)
    if greeting != _MAGIC:
        raise HandshakeRefused(where, "protocol", _other_program(greeting))
    challenge = _recv_exactly(sock, _NONCE, where, deadline)
    nonce = secrets.token_bytes(_NONCE)
    fields = {"run": me.run, "generation": me.generation, "name": me.name}
    hello = json.dumps(fields | ({"certificate": certificate} if certificate else {})).encode()
    seed = challenge + nonce + hello
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
    if not hmac.compare_digest(reply[:_MAC], _mac(token, b"listens", seed + reply[_MAC:])):
        refused = answer.get("code") == "token"  # no other reason is believed without the code
        raise HandshakeRefused(where, "token", _TOKEN_DIFFERS if refused else _TOKEN_UNKNOWN)
    if answer.get("code") is not None:
        raise HandshakeRefused(where, answer["code"], str(answer.get("why")))
    to_listener, from_listener = _frame_keys(token, seed + reply[_MAC:])
    peer = PeerIdentity(str(answer["run"]), int(answer["generation"]), str(answer["name"]))
    return peer, SessionKeys(send=to_listener, receive=from_listener)


def _other_program(greeting: bytes) -> str:
    """Why a listener that greets like this is refused."""
    if not greeting.startswith(_NAME) or not greeting.endswith(b"\n"):
        return "the listening program is not a process of a run"
    return (
        f"it speaks version {greeting[len(_NAME)]} of the protocol, this process speaks version {PROTOCOL}: start all "
        "processes of the run with the same version of Lockstep"
    )


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
        value = parse_json(data, "the hello")
    except MalformedJson:
        return None
    return value if isinstance(value, dict) else None


def _parse_identity(data: bytes) -> PeerIdentity | None:
    value = _parse_object(data) or {}
    run, generation, name = value.get("run"), value.get("generation"), value.get("name")
    if isinstance(run, str) and isinstance(generation, int) and isinstance(name, str):
        return PeerIdentity(run, generation, name)
    return None


def _frame_keys(token: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """The keys of the frames that the connecting side sends, and of those that it receives (HKDF, RFC 5869)."""
    secret = hmac.digest(hashlib.sha256(transcript).digest(), token, "sha256")
    to_listener, from_listener = (
        hmac.digest(secret, b"lockstep frames " + side + b"\x01", "sha256") for side in (b"dials", b"listens")
    )
    return to_listener, from_listener


def _mac(token: bytes, side: bytes, seed: bytes) -> bytes:
    return hmac.new(token, side + b"\0" + seed, hashlib.sha256).digest()


def _set_tcp_options(sock: socket.socket) -> None:
    """Makes small frames leave immediately, and a lost host noticed within about ten seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
