"""The supervisor's connections to agents: dialled in the background, as often as needed; replies come by callbacks.
Reports of 2,000 hosts twice a second are decoded by msgspec, which turns the records of a state (most of its bytes)
from text into bytes in one go.
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
    """All that a state may hold (`messages`, and what the agent adds); other keys are left out."""

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
    gaps: Any
    calm: Any


_state_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_StateMessage)
_any_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
_STATE_PREFIX = b'{"m": "state"'


def parse_report(frame: bytes | bytearray) -> dict[str, Any]:
    """The message in a frame; the records of a state as bytes.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        message: dict[str, Any] = (_state_decoder if frame.startswith(_STATE_PREFIX) else _any_decoder).decode(frame)
    except msgspec.DecodeError:  # JSON as Python writes it has NaN, too
        message = json.loads(frame)
    return message


log = logging.getLogger(__name__)

DIAL_S = 2.0
REDIAL_S = 0.3

ReplyHandler = Callable[[dict[str, Any] | None], None]
"""Receives the reply; None when there is none in time or the agent refused."""


@dataclass
class ClockOffset:
    """How far a host's monotonic clock is ahead of this host's, from requests and replies. The shorter the round trip,
    the more exact: of each window the shortest counts (as in NTP)."""

    window: int = 8
    samples: list[tuple[int, int]] = field(default_factory=list)
    """(round trip, offset) in nanoseconds."""

    def add(self, requested_ns: int, theirs_ns: int, replied_ns: int) -> None:
        trip = replied_ns - requested_ns
        if trip >= 0:
            self.samples = [*self.samples[1 - self.window :], (trip, theirs_ns - (requested_ns + replied_ns) // 2)]

    @property
    def known(self) -> bool:
        return bool(self.samples)

    @property
    def ns(self) -> int:
        """0 while unknown; off by at most half of the round trip."""
        return min(self.samples)[1] if self.samples else 0


@dataclass
class _Request:
    answered: ReplyHandler
    deadline: float


class AgentConnection:
    """One agent. `up` is called in the dialling thread with every new connection."""

    def __init__(
        self, address: ServiceAddress, token: str, generation: int, up: Callable[["AgentConnection", Connection], None]
    ) -> None:
        self.address, self.host, self.clock = address, "", ClockOffset()
        self.connection: Connection | None = None
        self.down_since: float | None = time.monotonic()
        self.left = False
        """The agent has announced that it leaves."""
        self.calm_until = 0.0
        """Until then every process on its host counts as making progress or having nothing to do, by a recent
        report."""
        self._token, self._generation, self._up = token, generation, up
        self._requests: dict[str, _Request] = {}
        self._prefix, self._numbers = secrets.token_hex(6), itertools.count(1)
        self._wanted = threading.Event()
        self._closed = False
        self._wanted.set()
        threading.Thread(target=self._dial, name=f"dials {address.host}:{address.port}", daemon=True).start()

    def __str__(self) -> str:
        return self.host or f"{self.address.host}:{self.address.port}"

    def attach(self, connection: Connection) -> None:
        self.connection, self.down_since = connection, None

    def lost(self) -> None:
        """The connection broke: it is dialled again. Requests under way have no answer."""
        connection, self.connection = self.connection, None
        self.calm_until = 0.0
        if connection is not None:
            connection.close()
        self.down_since = time.monotonic()
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.answered(None)
        if not self.left:
            self._wanted.set()

    def request(self, operation: str, answered: ReplyHandler, timeout_s: float, **arguments: Any) -> None:
        """Sends a request; `answered` is called once, from `messages`, `tick` or here."""
        if self.connection is None:
            answered(None)
            return
        number = f"{self._prefix}-{next(self._numbers)}"
        self._requests[number] = _Request(answered, time.monotonic() + timeout_s)
        try:
            self.connection.queue(json.dumps({"id": number, "op": operation, **arguments}).encode())
            self.connection.flush()
        except WireError:
            self.lost()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Reads what has arrived: replies go to their requests, other messages to the caller."""
        try:
            while self.connection is not None:
                frame = self.connection.recv(0)
                if frame is None:
                    break
                message = parse_report(frame)
                request = self._requests.pop(str(message.get("reply")), None)
                if request is not None:
                    request.answered(None if "error" in message else message)
                elif "reply" not in message:
                    yield message
        except (WireError, ValueError) as error:
            log.info("%s: %s", self, error)
            self.lost()

    def tick(self) -> None:
        """Gives up overdue requests; writes what is left to write."""
        now = time.monotonic()
        for number, request in list(self._requests.items()):
            if now >= request.deadline:
                del self._requests[number]
                request.answered(None)
        if self.connection is not None and self.connection.pending:
            with contextlib.suppress(WireError):
                self.connection.flush()

    def set_clock(self) -> None:
        """Requests the host's clock."""
        requested = time.monotonic_ns()

        def answered(reply: dict[str, Any] | None) -> None:
            if reply is not None:
                self.clock.add(requested, int(reply["monotonic_ns"]), time.monotonic_ns())

        self.request("clock", answered, 5.0)

    def close(self) -> None:
        """Idempotent."""
        self._closed = True
        self._wanted.set()
        if self.connection is not None:
            self.connection.close()

    def _dial(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed:
                return
            try:
                connection = auth_handshake.connect(
                    self.address.host, self.address.port, token=self._token, run=self.address.run,
                    generation=self._generation, name="supervisor", timeout_s=DIAL_S, max_frame=64 << 20,
                )  # fmt: skip
            except WireError:
                time.sleep(REDIAL_S)
                continue
            self._wanted.clear()
            self._up(self, connection)
