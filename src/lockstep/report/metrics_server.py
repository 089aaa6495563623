"""A small HTTP server for metrics, in one thread, with limits on connections, requests and time."""

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lockstep.base import waits
from lockstep.base.network import listen
from lockstep.base.wait_state import WaitTimeout

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""When there are more, the oldest is closed: a scraper sends its request at once and is answered before that."""
REQUEST_S = 5.0
"""Time for a whole request and its answer, however many pieces they come in."""
HEADER_BYTES = 8192
ACCEPTS_PER_ROUND, PAUSE_S = 32, 0.01
"""Connections that are accepted at once, and the pause after so many."""
CLOSE_S = 5.0
_TICK_S = 0.5

Render = Callable[[str], tuple[bytes, str]]
"""Returns the metrics and their content type for the `Accept` header of a request."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection, which carries one request."""

    connection: socket.socket
    deadline: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None
    """What is left to send; None while the request is not complete."""


class MetricsServer:
    """Answers `GET /metrics`.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, render: Render) -> None:
        self._listening = listen(host, (port, port), backlog=MAX_CONNECTIONS)
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._render = render
        self._peers: dict[_Peer, None] = {}
        """In the order of their arrival."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="metrics server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        try:
            waits.join(self._thread, waits_for="metrics server", why="its last answer", timeout_s=CLOSE_S)
        except WaitTimeout:
            log.warning("the metrics server did not stop within %g s", CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select(_TICK_S):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._peers:  # may have been closed in this round
                        self._advance(key.data)
                now = time.monotonic()
                for peer in [peer for peer in self._peers if peer.deadline <= now]:
                    self._drop(peer)
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._selector.close()
            self._listening.close()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                connection, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:  # such as no descriptors
                log.debug("cannot accept a connection for metrics: %s", error)
                break
            if len(self._peers) >= MAX_CONNECTIONS:
                self._drop(next(iter(self._peers)))
            connection.setblocking(False)
            peer = _Peer(connection, time.monotonic() + REQUEST_S)
            self._peers[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._advance(peer)
        waits.sleep(PAUSE_S, why="many connections for metrics")

    def _advance(self, peer: _Peer) -> None:
        """Reads or sends as much as is possible now."""
        try:
            if peer.answer is None and not self._receive(peer):
                return
            assert peer.answer is not None
            peer.answer = peer.answer[peer.connection.send(peer.answer) :]
        except BlockingIOError:
            return
        except OSError:
            self._drop(peer)
            return
        if not peer.answer:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
            self._drop(peer)

    def _receive(self, peer: _Peer) -> bool:
        """Reads a part of the request; returns whether it is complete, and the answer is ready."""
        part = peer.connection.recv(HEADER_BYTES)
        if not part:
            raise ConnectionResetError("closed before the end of the request")
        peer.request += part
        head, end, _ = peer.request.partition(b"\r\n\r\n")
        if not end and len(peer.request) < HEADER_BYTES:
            return False
        peer.answer = memoryview(self._answer(bytes(head).decode("latin-1"), complete=bool(end)))
        self._selector.modify(peer.connection, selectors.EVENT_WRITE, peer)
        return True

    def _answer(self, head: str, complete: bool) -> bytes:
        line, *lines = head.split("\r\n")
        method, _, rest = line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if not complete or len(head) > HEADER_BYTES:
            return _response("431 Request Header Fields Too Large", b"the request is too large\n")
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"only GET\n")
        if path != "/metrics":
            return _response("404 Not Found", b"only /metrics\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (each.partition(":") for each in lines)}
        body, content_type = self._render(headers.get("accept", ""))
        return _response("200 OK", body, content_type, with_body=method == "GET")

    def _drop(self, peer: _Peer) -> None:
        if peer in self._peers:
            del self._peers[peer]
            self._selector.unregister(peer.connection)
            peer.connection.close()


def _response(
    status: str, body: bytes, content_type: str = "text/plain; charset=utf-8", with_body: bool = True
) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    return head.encode() + b"\r\n" + (body if with_body else b"")
