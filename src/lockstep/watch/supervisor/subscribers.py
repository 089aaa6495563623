"""The supervisor's subscribers: their connections, their requests, and the frames sent to them.

`verdict_frame` builds the frames about verdicts. The supervisor never waits for a subscriber: it queues what a
connection cannot send at once, and drops a connection that fails. A late subscriber also gets earlier frames.
"""

import json
import logging
import os
import selectors
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.base.secrets import redact, secret_values
from lockstep.base.transport.auth_handshake import Listener
from lockstep.base.transport.frames import Connection, WireError
from lockstep.watch.supervisor import incident
from lockstep.watch.supervisor.verdict_tracker import VerdictUpdate

log = logging.getLogger(__name__)

REMEMBERED_FRAMES = 512
"""The number of frames kept for late subscribers."""

RequestHandler = Callable[[Connection, dict[str, Any]], dict[str, Any]]
"""Answers a request; raises ValueError, KeyError or TypeError if the request is invalid."""


def verdict_frame(
    update: VerdictUpdate, path: Path | None, done: str = "", known: Collection[str] = ()
) -> dict[str, Any]:
    """The frame that subscribers get about a verdict, with secrets hidden, because a verdict quotes errors and logs.

    Args:
        path: The incident's folder, if there is one.
        done: What Lockstep did about the stall.
        known: Secrets in addition to those in this process's environment.
    """
    frame = {
        "number": update.number,
        "change": str(update.change),
        "level": str(update.verdict.level),
        "verdict": update.verdict.json(),
        "since_s": update.at - update.since,
        "wall": time.time(),
        "incident": None if path is None else str(path),
        "headline": incident.verdict_headline(update.verdict),
        "who": [incident.culprit_name(each) for each in update.verdict.culprits],
        "done": done,
    }
    hidden: dict[str, Any] = redact(frame, (*known, *secret_values(os.environ)))
    return hidden


class Subscribers:
    """All connections to the supervisor, and which of them are subscribed.

    Args:
        selector: the supervisor's selector; the data of each registered file is a callable that handles its events.
        operations: the handlers of requests, by `op`.
    """

    def __init__(
        self, listener: Listener, selector: selectors.BaseSelector, operations: Mapping[str, RequestHandler]
    ) -> None:
        self._listener, self._selector, self._operations = listener, selector, operations
        self._subscribed: dict[Connection, bool] = {}
        self.frames: list[dict[str, Any]] = []
        """The newest frames."""
        selector.register(listener, selectors.EVENT_READ, self._accept)

    @property
    def any(self) -> bool:
        """Whether there are subscribers."""
        return any(self._subscribed.values())

    def subscribe(self, connection: Connection, after: int) -> None:
        """Subscribes a connection, and sends it the kept frames after number `after`."""
        self._subscribed[connection] = True
        for frame in self.frames:
            if frame["told"] > after:
                self._send(connection, frame)

    def publish(self, content: Mapping[str, Any]) -> None:
        """Sends a frame with the next number to all subscribers."""
        frame = {"told": self.frames[-1]["told"] + 1 if self.frames else 1, **content}
        self.frames = [*self.frames[1 - REMEMBERED_FRAMES :], frame]
        for connection, subscribed in list(self._subscribed.items()):
            if subscribed:
                self._send(connection, frame)

    def close(self) -> None:
        """Sends pending frames as far as possible, and closes all connections."""
        for connection in list(self._subscribed):
            with suppress(WireError):
                connection.flush()
            connection.close()
        self._listener.close()

    def _accept(self) -> None:
        while (connection := self._listener.accept(0)) is not None:
            self._subscribed[connection] = False
            self._selector.register(connection, selectors.EVENT_READ, lambda c=connection: self._serve(c))

    def _serve(self, connection: Connection) -> None:
        try:
            while connection in self._subscribed and (frame := connection.recv(0)) is not None:
                message = json.loads(frame)
                operation = self._operations.get(message["op"])
                reply = {"error": "unknown operation"} if operation is None else operation(connection, message)
                self._send(connection, {"reply": message["id"], **reply})
        except (WireError, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, WireError):
                log.warning("%s sent an invalid request: %r", connection.peer.name, error)
            self._drop(connection)

    def _send(self, connection: Connection, message: Mapping[str, Any]) -> None:
        try:
            connection.queue(json.dumps(message).encode())
            connection.flush()
        except WireError:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if self._subscribed.pop(connection, None) is not None:
            unregister(self._selector, connection)
            connection.close()


def unregister(selector: selectors.BaseSelector, connection: Connection) -> None:
    """Removes the connection from the selector; it may be closed already."""
    with suppress(KeyError, ValueError, OSError):
        selector.unregister(connection)
