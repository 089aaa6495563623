"""Framed, authenticated sockets between the processes of a run.

A frame is an 8-byte length and as many bytes. When a connection opens, both sides prove by HMAC-SHA256 over two
nonces that they know the run's token, which itself never travels; the dialling side says who it is (run,
generation, name) and is refused, with a reason, when its token, run or generation is wrong. Whatever else talks to
the port (scanners, garbage, peers that say nothing) loses its own connection and disturbs nobody.

The peers are authenticated, the bytes are not encrypted: bind to loopback or to a trusted network.
"""

import contextlib
import hashlib
import hmac
import json
import secrets
import select
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

MAX_FRAME = 4 << 30
"""Bytes of a frame, at most, unless told otherwise."""
HANDSHAKE_S = 10.0
"""A dialling peer proves itself within this time or is dropped."""
BULK = 64 << 10
"""Frames above this many bytes count into `Connection.bulk` as they move."""

_MAGIC = b"LKSTEP\x01\n"
_NONCE = _MAC = 32
_HELLO_LIMIT = 4096
_HALF_OPEN_LIMIT = 256
_LENGTH = struct.Struct(">Q")
_SHORT = struct.Struct(">H")

Buffer = bytes | bytearray | memoryview
Code = Literal["token", "run", "generation", "protocol"]


class WireError(ConnectionError):
    """A connection that cannot be used (any more): who is at its other end, and why."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"connection with {peer}: {why}")
        self.peer, self.why = peer, why


class ConnectionClosed(WireError):
    """The other side closed, or the connection broke."""


class SendTimeout(WireError):
    """The peer took no byte for too long; the connection is closed, because a frame may be cut."""


class FrameTooLarge(WireError):
    """A frame above the limit: refused before it is sent, or the connection is closed when one is announced."""


class Refused(WireError):
    """The handshake failed. `code` says at what: `token`, `run`, `generation` (stale) or `protocol`."""

    def __init__(self, peer: str, code: Code, why: str) -> None:
        super().__init__(peer, f"refused, {why}")
        self.code: Code = code


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is at the other end of a connection."""

    run: str
    generation: int
    name: str


class Connection:
    """One authenticated connection. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, peer: Hello, max_frame: int = MAX_FRAME) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.max_frame = max_frame
        self.bulk = 0
        """Bytes of large frames moved so far, in both directions: moves while a frame is under way."""
        self._socket = sock
        self._closed = False
        self._sending = threading.Lock()
        self._outbox: deque[memoryview] = deque()
        self._header = bytearray(_LENGTH.size)
        self._body: bytearray | None = None
        self._filled = 0

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        """For selectors; -1 once closed."""
        return self._socket.fileno()

    def queue(self, *parts: Buffer) -> None:
        """Adds a frame, the concatenation of `parts`, to what `flush` writes. The buffers must not change until
        they are written.

        Raises:
            FrameTooLarge: and nothing is queued.
            ConnectionClosed: the connection is closed already.
        """
        views = [memoryview(part).cast("B") for part in parts]
        size = sum(view.nbytes for view in views)
        if size > self.max_frame:
            raise FrameTooLarge(self.peer.name, f"a frame of {size} bytes is above the limit of {self.max_frame}")
        if self._closed:
            raise ConnectionClosed(self.peer.name, "is closed")
        header = memoryview(_LENGTH.pack(size))
        self._outbox.extend((memoryview(b"".join((header, *views))),) if size < 4096 else (header, *views))

    def flush(self) -> bool:
        """Writes what the socket takes now; whether everything queued is written.

        Raises:
            ConnectionClosed: the peer is gone.
        """
        with self._sending:
            return self._write()

    @property
    def pending(self) -> bool:
        """Whether `flush` has something left to write."""
        return bool(self._outbox)

    def send(self, *parts: Buffer, timeout_s: float = 30.0) -> None:
        """Sends one frame; waits while the peer takes bytes, at most `timeout_s` without one.

        Raises:
            SendTimeout: the peer (stopped?) took nothing for `timeout_s`; the connection is closed.
            ConnectionClosed: the peer is gone.
            FrameTooLarge: nothing was sent.
        """
        if not self._sending.acquire(timeout=timeout_s):
            raise SendTimeout(self.peer.name, f"another frame has been on its way for {timeout_s:g} s")
        try:
            self.queue(*parts)
            while not self._write():
                if not _ready(self._socket, select.POLLOUT, timeout_s):
                    self.close()
                    raise SendTimeout(self.peer.name, f"took no byte for {timeout_s:g} s")
        finally:
            self._sending.release()

    def recv(self, timeout_s: float) -> bytearray | None:
        """The next frame, or None when it is not complete within `timeout_s` (0: only what is here already).

        Raises:
            ConnectionClosed: the peer closed, or the connection broke.
            FrameTooLarge: the peer announced a frame above the limit; the connection is closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self._read()
            if frame is not None:
                return frame
            left = deadline - time.monotonic()
            if left <= 0 or not _ready(self._socket, select.POLLIN, left):
                return None

    def close(self) -> None:
        """Closes both directions; wakes whoever waits on it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> bool:
        while self._outbox:
            views = [self._outbox[i] for i in range(min(len(self._outbox), 16))]
            try:
                sent = self._socket.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self.close()
                raise ConnectionClosed(self.peer.name, _reason(error)) from None
            if sent >= BULK or views[0].nbytes >= BULK:
                self.bulk += sent
            while sent:
                first = self._outbox[0]
                if sent < first.nbytes:
                    self._outbox[0] = first[sent:]
                    break
                sent -= first.nbytes
                self._outbox.popleft()
        return True

    def _read(self) -> bytearray | None:
        """Goes on with the frame under way; returns it when it is complete."""
        if self._body is None:
            if not self._fill(self._header):
                return None
            (size,) = _LENGTH.unpack(self._header)
            if size > self.max_frame:
                self.close()
                raise FrameTooLarge(self.peer.name, f"announced {size} bytes, the limit is {self.max_frame}")
            self._body, self._filled = bytearray(size), 0
        if not self._fill(self._body):
            return None
        body, self._body, self._filled = self._body, None, 0
        return body

    def _fill(self, buffer: bytearray) -> bool:
        view = memoryview(buffer)
        while self._filled < len(buffer):
            try:
                got = self._socket.recv_into(view[self._filled :])
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self.close()
                raise ConnectionClosed(self.peer.name, _reason(error)) from None
            if got == 0:
                self.close()
                raise ConnectionClosed(self.peer.name, "the peer closed it")
            self._filled += got
            if len(buffer) > BULK:
                self.bulk += got
        return True


@dataclass(slots=True)
class _HalfOpen:
    """A peer that has not proved itself yet."""

    socket: socket.socket
    nonce: bytes
    deadline: float
    data: bytearray


class Listener:
    """Accepts authenticated connections of one run. One thread accepts.

    `highest` is the highest generation seen, its own included; a peer of a smaller one is refused. Handshakes run
    interleaved inside `accept`, so a silent peer delays nobody. `fileno` is readable when `accept(0)` has work.
    """

    def __init__(
        self,
        token: str,
        run: str,
        generation: int,
        name: str = "listener",
        host: str = "127.0.0.1",
        port: int = 0,
        max_frame: int = MAX_FRAME,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self._socket.setblocking(False)
        self._me = Hello(run, generation, name)
        self._token = token.encode()
        self._max_frame, self._handshake_s = max_frame, handshake_s
        self._half_open: dict[int, _HalfOpen] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, None)
        self._closed = False
        self.highest = generation
        address = self._socket.getsockname()
        self.host: str = address[0]
        self.port: int = address[1]

    def fileno(self) -> int:
        return self._selector.fileno()

    def accept(self, timeout_s: float) -> Connection | None:
        """The next peer that proved itself, or None after `timeout_s` (0: only what is ready now)."""
        deadline = time.monotonic() + timeout_s
        while not self._closed:
            soonest = min([deadline, *(peer.deadline for peer in self._half_open.values())])
            for key, _ in self._selector.select(max(0.0, soonest - time.monotonic())):
                if key.data is None:
                    self._welcome()
                elif (connection := self._advance(key.data)) is not None:
                    return connection
            self._drop_late()
            if time.monotonic() >= deadline:
                return None
        return None

    def close(self) -> None:
        """Closes the port and the peers that are not accepted yet. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for peer in list(self._half_open.values()):
            self._forget(peer, close=True)
        self._selector.close()
        self._socket.close()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _welcome(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:
            return
        sock.setblocking(False)
        if len(self._half_open) >= _HALF_OPEN_LIMIT:
            self._forget(min(self._half_open.values(), key=lambda peer: peer.deadline), close=True)
        peer = _HalfOpen(sock, secrets.token_bytes(_NONCE), time.monotonic() + self._handshake_s, bytearray())
        self._half_open[sock.fileno()] = peer
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._say(peer, _MAGIC + peer.nonce)

    def _advance(self, peer: _HalfOpen) -> Connection | None:
        """Reads what the peer sent; a connection when its hello is complete and good."""
        try:
            data = peer.socket.recv(_HELLO_LIMIT + 64)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        peer.data += data
        start = len(_MAGIC) + _SHORT.size
        garbage = not _MAGIC.startswith(peer.data[: len(_MAGIC)])
        if not data or garbage or len(peer.data) > _HELLO_LIMIT:
            self._forget(peer, close=True)
            return None
        if len(peer.data) < start:
            return None
        (size,) = _SHORT.unpack_from(peer.data, len(_MAGIC))
        if not _NONCE + _MAC < size <= _HELLO_LIMIT - start or len(peer.data) > start + size:
            self._forget(peer, close=True)
            return None
        return self._judge(peer, bytes(peer.data[start:])) if len(peer.data) == start + size else None

    def _judge(self, peer: _HalfOpen, payload: bytes) -> Connection | None:
        nonce, proof, hello = payload[:_NONCE], payload[_NONCE : _NONCE + _MAC], payload[_NONCE + _MAC :]
        seed = peer.nonce + nonce + hello
        known = hmac.compare_digest(proof, _mac(self._token, b"dials", seed))
        who = _parse_hello(hello) if known else None
        code, why = ("token", "the token is not this run's") if not known else self._objection(who)
        reply = json.dumps(
            {"code": code, "why": why, "run": self._me.run, "generation": self.highest, "name": self._me.name}
            if known
            else {"code": code, "why": why}
        ).encode()
        mac = _mac(self._token, b"listens", seed + reply) if known else bytes(_MAC)
        said = self._say(peer, _SHORT.pack(_MAC + len(reply)) + mac + reply)
        self._forget(peer, close=code is not None or not said)
        if code is not None or who is None or not said:
            return None
        self.highest = max(self.highest, who.generation)
        _tune(peer.socket)
        return Connection(peer.socket, who, self._max_frame)

    def _objection(self, who: Hello | None) -> tuple[Code | None, str]:
        if who is None:
            return "protocol", "the hello cannot be read"
        if who.run != self._me.run:
            return "run", f"this is run {self._me.run!r}, not {who.run!r}"
        if who.generation < self.highest:
            return "generation", f"generation {who.generation} is stale, {self.highest} has been seen"
        return None, ""

    def _say(self, peer: _HalfOpen, data: bytes) -> bool:
        """A few hundred bytes into an empty socket buffer: all or the peer is dropped by its deadline."""
        try:
            return peer.socket.send(data) == len(data)
        except OSError:
            return False

    def _drop_late(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._half_open.values() if peer.deadline <= now]:
            self._forget(peer, close=True)

    def _forget(self, peer: _HalfOpen, close: bool) -> None:
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
    """Dials a `Listener` and proves both sides, within `timeout_s` altogether.

    Raises:
        Refused: wrong token (of either side), other run, stale generation, or no listener of ours at that port.
        ConnectionClosed: nobody listens, or it closed during the handshake.
    """
    deadline = time.monotonic() + timeout_s
    where = f"{host}:{port}"
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise ConnectionClosed(where, _reason(error)) from None
    try:
        peer = _introduce(sock, where, token.encode(), Hello(run, generation, name), deadline)
    except OSError as error:
        sock.close()
        if isinstance(error, WireError):
            raise
        raise ConnectionClosed(where, f"broke in the handshake: {_reason(error)}") from None
    _tune(sock)
    return Connection(sock, peer, max_frame)


def _introduce(sock: socket.socket, where: str, token: bytes, me: Hello, deadline: float) -> Hello:
    greeting = _exactly(sock, len(_MAGIC) + _NONCE, where, deadline)
    if greeting[: len(_MAGIC)] != _MAGIC:
        raise Refused(where, "protocol", "what listens there is not a process of a run (of this version)")
    nonce = secrets.token_bytes(_NONCE)
    hello = json.dumps({"run": me.run, "generation": me.generation, "name": me.name}).encode()
    seed = greeting[len(_MAGIC) :] + nonce + hello
    payload = nonce + _mac(token, b"dials", seed) + hello
    if len(payload) > _HELLO_LIMIT - 16:
        raise ValueError(f"run and name are {len(hello)} bytes together, too long for a hello")
    sock.settimeout(max(0.01, deadline - time.monotonic()))
    sock.sendall(_MAGIC + _SHORT.pack(len(payload)) + payload)
    (size,) = _SHORT.unpack(_exactly(sock, _SHORT.size, where, deadline))
    reply = _exactly(sock, size, where, deadline)
    answer = _parse(reply[_MAC:])
    if answer is None:
        raise Refused(where, "protocol", "the answer to the hello cannot be read")
    if answer.get("code") is not None:
        raise Refused(where, answer["code"], str(answer.get("why")))
    if not hmac.compare_digest(reply[:_MAC], _mac(token, b"listens", seed + reply[_MAC:])):
        raise Refused(where, "token", "the listener does not know this run's token")
    return Hello(str(answer["run"]), int(answer["generation"]), str(answer["name"]))


def _exactly(sock: socket.socket, size: int, where: str, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionClosed(where, "the peer closed it in the handshake")
        data += part
    return bytes(data)


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _parse_hello(data: bytes) -> Hello | None:
    value = _parse(data) or {}
    run, generation, name = value.get("run"), value.get("generation"), value.get("name")
    if isinstance(run, str) and isinstance(generation, int) and isinstance(name, str):
        return Hello(run, generation, name)
    return None


def _mac(token: bytes, side: bytes, seed: bytes) -> bytes:
    return hmac.new(token, side + b"\0" + seed, hashlib.sha256).digest()


def _ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Whether the socket can go on within the time (errors count: the next call reports them)."""
    if sock.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(max(0, int(timeout_s * 1000) + 1)))


def _tune(sock: socket.socket) -> None:
    """Small frames leave at once; a host that vanished is noticed in about ten seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
