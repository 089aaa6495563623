"""The connections of a reward server: their number and their time without a request are bounded."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

from lockstep.base.limits import raise_descriptor_limit

HEADER_S = 10.0
"""Time for the header of a request, from the start of the connection or the previous answer."""
SPARE_DESCRIPTORS = 128
"""Descriptors for what is no connection: the model's files, libraries, threads' pipes."""


def possible_connections(wanted: int) -> int:
    """The number of connections that this process may have, at most `wanted`. Raises its limit of descriptors."""
    return max(1, min(wanted, raise_descriptor_limit() - SPARE_DESCRIPTORS))


class BoundedConnection(H11Protocol):
    """uvicorn waits for a request's header without end, and refuses others once there are too many connections. Here a
    connection is closed `HEADER_S` seconds after it began, or after its last answer, unless it has a whole header by
    then, and when its client has not read answers for so long; and one too many takes the place of that which has been
    without a request for longest."""

    _idle_since = 0.0
    _header_timer: asyncio.TimerHandle | None = None
    _reading_timer: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_header()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            others = (each for each in self.connections if each is not self and isinstance(each, BoundedConnection))
            if idle := [each for each in others if each._is_idle]:
                oldest = min(idle, key=lambda each: each._idle_since)
                self.connections.discard(oldest)
                oldest.transport.abort()

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
        super().connection_lost(exc)

    def _await_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._idle_since = self.loop.time()
        self._header_timer = self.loop.call_later(HEADER_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._is_idle:
            self.transport.abort()
