"""The supervisor's connections to agents: it connects and reconnects in background threads, and delivers replies to
callbacks.

Reports of 2,000 hosts arrive twice a second. Most of a state report is base64; msgspec decodes JSON and base64 in one
pass.
"""

import contextlib
import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from lockstep.base.transport import auth_handshake
from lockstep.base.transport.frames import Connection, WireError
from lockstep.watch.agent.service_discovery import ServiceAddress


class _StateMessage(TypedDict, total=False):
    """The fields of a state report (`agent.report_messages.StateReport`, and `calm`, which the agent adds); other keys
    are ignored."""

    m: str
    host: Any
    number: Any
    processes: bytes
    members: bytes
    calls: bytes
    stages: Any
    notes: Any
    waits: Any
    about: Any
    sites: Any
    digests: bytes
    differences: Any
    moved: Any
    devices: Any
    timings: bytes
    timed: Any
    calm: Any


_state_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_StateMessage)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_STATE_PREFIX = b'{"m": "state"'


def parse_report(frame: bytes | bytearray) -> dict[str, Any]:
    """Parses a message; base64 fields of a state report become bytes.

    Raises:
        ValueError: the frame is not JSON.
    """
    try:
        message: dict[str, Any] = (_state_decoder if frame.startswith(_STATE_PREFIX) else _any_decoder).decode(frame)
    except msgspec.DecodeError:  # Python's JSON may contain NaN, which msgspec refuses
        message = json.loads(frame)
    return message


log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0
RECONNECT_AFTER_S = 0.3

ReplyHandler = Callable[[dict[str, Any] | None], None]
"""Receives the reply; None if none arrives in time or the agent answers with an error."""


@dataclass
class ClockOffset:
    """How far a host's monotonic clock is ahead of this host's, measured by requests and replies. As in NTP, the newest
    `window` samples are kept and the one with the shortest round trip is used, because it is the most exact."""

    window: int = 8
    samples: list[tuple[int, int]] = field(default_factory=list)
    """(round trip, offset) in nanoseconds."""

    def add(self, requested_ns: int, theirs_ns: int, replied_ns: int) -> None:
        """Adds a sample: the host's clock showed `theirs_ns` between this host's `requested_ns` and `replied_ns`."""
        trip = replied_ns - requested_ns
        if trip >= 0:
            self.samples = [*self.samples[1 - self.window :], (trip, theirs_ns - (requested_ns + replied_ns) // 2)]

    @property
    def known(self) -> bool:
        return bool(self.samples)

    @property
    def ns(self) -> int:
        """The offset in nanoseconds, exact to half of the round trip; 0 while unknown."""
        return min(self.samples)[1] if self.samples else 0


@dataclass
class _Request:
    on_reply: ReplyHandler
    deadline: float


class AgentConnection:
    """The connection to one agent. `on_connected` is called with each new connection, in the connecting thread."""

    def __init__(
        self,
        address: ServiceAddress,
        token: str,
        generation: int,
        on_connected: Callable[["AgentConnection", Connection], None],
    ) -> None:
        self.address, self.host, self.clock = address, "", ClockOffset()
        self.connection: Connection | None = None
        self.disconnected_since: float | None = time.monotonic()
        self.shut_down = False
        """True if the agent has announced its shutdown."""
        self.no_stall_until = 0.0
        """Until this time the latest report is valid, by which every process on the host makes progress or is idle."""
        self._token, self._generation, self._on_connected = token, generation, on_connected
        self._requests: dict[str, _Request] = {}
        self._prefix, self._numbers = secrets.token_hex(6), itertools.count(1)
        self._reconnect_needed = threading.Event()
        self._closed = False
        self._reconnect_needed.set()
        threading.Thread(target=self._connect, name=f"connects to {address.host}:{address.port}", daemon=True).start()

    def __str__(self) -> str:
        return self.host or f"{self.address.host}:{self.address.port}"

    def attach(self, connection: Connection) -> None:
        """Uses a connection that `on_connected` delivered."""
        self.connection, self.disconnected_since = connection, None

    def disconnect(self) -> None:
        """Closes a broken connection, reconnects in the background, and answers all open requests with None."""
        connection, self.connection = self.connection, None
        self.no_stall_until = 0.0
        if connection is not None:
            connection.close()
        self.disconnected_since = time.monotonic()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.on_reply(None)
        if not self.shut_down:
            self._reconnect_needed.set()

    def request(self, operation: str, on_reply: ReplyHandler, timeout_s: float, **arguments: Any) -> None:
        """Sends a request; `on_reply` is called once, by this or another method of this object."""
        if self.connection is None:
            on_reply(None)
            return
        number = f"{self._prefix}-{next(self._numbers)}"
        self._requests[number] = _Request(on_reply, time.monotonic() + timeout_s)
        try:
            self.connection.queue(json.dumps({"id": number, "op": operation, **arguments}).encode())
            self.connection.flush()
        except WireError:
            self.disconnect()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Receives the messages that have arrived: passes replies to their handlers and yields the other messages."""
        try:
            while self.connection is not None:
                frame = self.connection.recv(0)
                if frame is None:
                    break
                message = parse_report(frame)
                request = self._requests.pop(str(message.get("reply")), None)
                if request is not None:
                    request.on_reply(None if "error" in message else message)
                elif "reply" not in message:
                    yield message
        except (WireError, ValueError) as error:
            log.info("%s: %s", self, error)
            self.disconnect()

    def tick(self) -> None:
        """Answers overdue requests with None, and sends pending data."""
        now = time.monotonic()
        for number, request in list(self._requests.items()):
            if now >= request.deadline:
                del self._requests[number]
                request.on_reply(None)
        if self.connection is not None and self.connection.pending:
            with contextlib.suppress(WireError):
                self.connection.flush()

    def measure_clock(self) -> None:
        """Requests the host's clock and adds a sample to `clock`."""
        requested = time.monotonic_ns()

        def on_reply(reply: dict[str, Any] | None) -> None:
            if reply is not None:
                self.clock.add(requested, int(reply["monotonic_ns"]), time.monotonic_ns())

        self.request("clock", on_reply, 5.0)

    def close(self) -> None:
        """Closes the connection for good. Idempotent."""
        self._closed = True
        self._reconnect_needed.set()
        if self.connection is not None:
            self.connection.close()

    def _connect(self) -> None:
        while True:
            self._reconnect_needed.wait()
            if self._closed:
                return
            try:
                connection = auth_handshake.connect(
                    self.address.host, self.address.port, token=self._token, run=self.address.run,
                    generation=self._generation, name="supervisor", timeout_s=CONNECT_TIMEOUT_S, max_frame=64 << 20,
                )  # fmt: skip
            except WireError:
                time.sleep(RECONNECT_AFTER_S)
                continue
            self._reconnect_needed.clear()
            self._on_connected(self, connection)
