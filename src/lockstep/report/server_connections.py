"""The connections of an HTTP server: their number and their time without a request are bounded."""

import asyncio
import socket
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.base.limits import raise_descriptor_limit

HEADER_S = 10.0
"""Time for the header of a request, from the start of the connection or the previous answer."""
ACCEPTED_AT_ONCE = 64
"""Connections that are accepted in one turn of the event loop. One too many is closed three turns later."""
SPARE_DESCRIPTORS = 128 + 4 * ACCEPTED_AT_ONCE
"""Descriptors for what is no connection (the model's files, libraries, threads' pipes), and for connections that are
about to be closed."""
QUEUE = 2048
"""Connections that wait in the kernel to be accepted."""


def possible_connections(wanted: int) -> int:
    """The number of connections that this process may have, at most `wanted`. Raises its limit of descriptors."""
    return max(1, min(wanted, raise_descriptor_limit() - SPARE_DESCRIPTORS))


class BoundedConnection(H11Protocol):
    """uvicorn waits for a request's header without end, and refuses others once there are too many connections. Here a
    connection is closed `HEADER_S` seconds after it began, or after its last answer, unless it has a whole header by
    then, and when its client has not read answers for so long; and one too many takes the place of that which has been
    without a request for longest. Each server has a class of its own (`connection_type`)."""

    _waiting: ClassVar[dict["BoundedConnection", None]]
    """Those without a request, in the order in which they began to wait; some have got one since."""
    _header_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_header()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self._close_oldest()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_idle:  # else the next request had arrived already
            self._await_header()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_timer = self.loop.call_later(HEADER_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_timer is not None:
            self._reading_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._reading_timer):
            if timer is not None:
                timer.cancel()
        self._waiting.pop(self, None)
        super().connection_lost(exc)

    def _await_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._waiting.pop(self, None)
        self._waiting[self] = None
        self._header_timer = self.loop.call_later(HEADER_S, self._close_if_idle)

    def _close_oldest(self) -> None:
        """Closes another connection, that which has been without a request for longest. It takes the same time whatever
        their number: else a client that only connects could keep the server busy."""
        while (oldest := next(iter(self._waiting))) is not self:
            del self._waiting[oldest]
            if oldest._is_idle:
                self.connections.discard(oldest)
                oldest.transport.abort()
                return

    def _close_if_idle(self) -> None:
        if self._is_idle:
            self.transport.abort()


class QueueingServer(uvicorn.Server):
    """uvicorn has one number for the connections that wait in the kernel and those that are accepted at once. Where the
    latter need more descriptors than there are, asyncio logs as many errors, and answers nobody meanwhile."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(QUEUE)


def connection_type() -> type[BoundedConnection]:
    """The protocol of one server's connections."""

    class Connection(BoundedConnection):
        _waiting: ClassVar[dict[BoundedConnection, None]] = {}

    return Connection


def bounded_config(
    app: Any, connections: int, header_bytes: int, shutdown_s: int, *, starts_app: bool = True
) -> uvicorn.Config:
    """The settings of a server whose connections are bounded.

    Args:
        app: the ASGI callable.
        connections: how many there may be.
        header_bytes: the size of a request's header, at most.
        shutdown_s: how long requests in progress may take once the server ends.
        starts_app: whether the application has code for its start and end.
    """
    return uvicorn.Config(
        app,
        http=connection_type(),
        ws="none",
        lifespan="auto" if starts_app else "off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=ACCEPTED_AT_ONCE,
        limit_concurrency=connections,
        timeout_graceful_shutdown=shutdown_s,
        h11_max_incomplete_event_size=header_bytes,
    )
