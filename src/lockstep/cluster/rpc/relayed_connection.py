"""The controller's end of a call relay: one connection that carries those of all workers of a node."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lockstep.base.transport.frames import Buffer, Connection, WireError
from lockstep.cluster.rpc.open_calls import OpenCall
from lockstep.cluster.rpc.relay_messages import (
    ChannelClosed,
    ChannelOpened,
    RelayAlive,
    RelayedAcks,
    RelayedCalls,
    RelayedFrames,
    RelayedResults,
    pack_relayed,
    split_payloads,
    unpack_from_relay,
)
from lockstep.cluster.rpc.rpc_messages import pack_body
from lockstep.watch.agent.service_discovery import PeerHeartbeat

if TYPE_CHECKING:
    from lockstep.cluster.rpc.remote_worker import RemoteWorker

log = logging.getLogger(__name__)

RELAY_SILENT_S = 10.0
"""A relay that is silent for so long is killed: it reports once a second, and its workers can do without it."""


_CLOSED = None, None
"""In place of a connection, and its worker, that is closed here; the relay will learn it."""


class CallRelayLink:
    """The connection to a call relay. Any thread may send.

    Args:
        changed: called when the connection has data left to write, or is closed.
    """

    def __init__(self, connection: Connection, changed: Callable[[Connection], None]) -> None:
        self.connection, self._changed = connection, changed
        self.channels: dict[int, tuple[RelayedConnection, RemoteWorker]] = {}
        """The connections of workers, by channel."""
        self._arrived: list[tuple[list[int], list[int]]] = []
        """Channels and ids of results that are not acknowledged yet, as they came."""
        self.heartbeat = PeerHeartbeat(RELAY_SILENT_S)
        self._transferred = 0
        """Bytes of large frames when the heartbeat was last checked."""

    def is_silent(self) -> bool:
        """Whether the relay has sent nothing for too long, not even a part of a large frame. Called twice a second."""
        if self.connection.bulk_bytes != self._transferred:
            self._transferred = self.connection.bulk_bytes
            self.heartbeat.received()
        self.heartbeat.tick()
        return self.heartbeat.too_long

    def open(self, channel: int, worker: "RemoteWorker") -> None:
        """Adds the connection of a worker."""
        self.channels[channel] = RelayedConnection(self, channel), worker

    def handle_frame(self, frame: bytearray, accept: Callable[["CallRelayLink", int, str], None]) -> None:
        """Handles a frame of the relay. `accept` is called with the channel and the name of a worker that has
        connected. Raises ValueError if the frame is malformed."""
        message, payload = unpack_from_relay(frame)
        match message:
            case RelayedResults(channels=channels, ids=ids, sizes=sizes):
                self._settle_calls(channels, ids, split_payloads(payload, sizes))
            case RelayedFrames(channels=channels, sizes=sizes):
                for number, part in zip(channels, split_payloads(payload, sizes), strict=True):
                    connection, worker = self.channels.get(number, _CLOSED)
                    if worker is not None and connection is not None:
                        _handle_part(worker, connection, part)
            case ChannelOpened(channel=number, name=name):
                accept(self, number, name)
            case ChannelClosed(channel=number):
                connection, worker = self.channels.get(number, _CLOSED)
                if worker is not None and connection is not None:
                    worker.connection_lost(connection)
            case RelayAlive(moved=moved):
                for number, count in moved:
                    if number in self.channels:
                        self.channels[number][0].moved = count

    def _settle_calls(self, channels: list[int], ids: list[int], payloads: list[memoryview]) -> None:
        """Hands results to the calls that wait for them, and acknowledges them with the next message."""
        if not len(channels) == len(ids) == len(payloads) or not ids:
            raise ValueError(f"{len(channels)} channels, {len(ids)} ids and {len(payloads)} results in a relayed frame")
        now = time.monotonic()
        call = None
        if ids.count(ids[0]) == len(ids) and channels[0] in self.channels:
            call = self.channels[channels[0]][1].node.calls.take_complete(ids[0], channels, self)
        if call is not None:
            workers = call.workers
            if channels != call.channels:  # the channel of a worker may be closed here already
                by_channel = dict(zip(call.channels, workers, strict=True))
                workers = [by_channel[channel] for channel in channels]
            _settle(call, workers, payloads, now)
        else:
            self._settle_some(channels, ids, payloads, now)
        self._arrived.append((channels, ids))

    def _settle_some(self, channels: list[int], ids: list[int], payloads: list[memoryview], now: float) -> None:
        """Hands over results of several calls, or of some of the workers that got one."""
        settled: dict[OpenCall, tuple[list[RemoteWorker], list[memoryview]]] = {}
        for channel, number, payload in zip(channels, ids, payloads, strict=True):
            worker = self.channels.get(channel, _CLOSED)[1]
            if worker is None:
                continue
            call = worker.node.calls.take(number, worker)
            if call is None:
                worker.settle_unknown(number, payload)
                continue
            of_call = settled.get(call)
            if of_call is None:
                of_call = settled[call] = [], []
            of_call[0].append(worker)
            of_call[1].append(payload)
        for call, (workers, of_workers) in settled.items():
            _settle(call, workers, of_workers, now)

    def send_calls(self, call: OpenCall) -> None:
        """Sends a call to the workers of this relay that get it.

        Raises:
            WireError: the connection is closed; nothing more is sent over it.
        """
        signature = call.signature
        for part, payloads, bounds in call.arguments.messages(call.workers):
            arrived, self._arrived = self._arrived, []
            message = RelayedCalls(
                list(call.channels[part]), call.number, signature.name, signature.concurrent,
                list(map(len, payloads)), arrived,
                bounds,
            )  # fmt: skip
            self.connection.queue(*pack_relayed(message, payloads))
        self.flush()

    def acknowledge(self) -> None:
        """Acknowledges the results that no call has acknowledged yet."""
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            with contextlib.suppress(WireError):  # then the workers send them again
                self.connection.queue(*pack_relayed(RelayedAcks(arrived)))
                self.flush()

    def flush(self) -> None:
        """Writes as much as possible now, and leaves the rest to the thread of the server. Raises WireError."""
        try:
            if not self.connection.flush():
                self._changed(self.connection)
        except WireError:
            self._changed(self.connection)
            raise


class RelayedConnection:
    """A worker's connection through a relay, with the methods of `Connection` that the controller uses."""

    pending = False
    """The link writes what is left."""

    def __init__(self, link: CallRelayLink, channel: int) -> None:
        self.link, self.channel = link, channel
        self.closed = False
        self.moved = 0
        """Bytes of large frames between the relay and the worker."""

    @property
    def bulk_bytes(self) -> int:
        """Grows while a large frame is being transferred: to or from this worker, or before it to the relay."""
        return self.moved + (self.link.connection.bulk_bytes if self.link.connection.pending else 0)

    def queue(self, *parts: Buffer) -> None:
        """Queues a frame. Raises FrameTooLarge, ConnectionClosed."""
        size = sum(memoryview(part).nbytes for part in parts)
        self.link.connection.queue(pack_body(RelayedFrames([self.channel], [size])), *parts)

    def flush(self) -> bool:
        """Writes as much as possible; the link writes the rest. Raises ConnectionClosed."""
        self.link.flush()
        return True

    def close(self) -> None:
        """Makes the relay close the worker's connection. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.link.channels.pop(self.channel, None)
        if self.link.connection.closed:
            return
        try:
            self.link.connection.queue(*pack_relayed(ChannelClosed(self.channel)))
            self.link.flush()
        except WireError:  # then the relay has closed it as well
            return


def _settle(call: OpenCall, workers: "Sequence[RemoteWorker]", payloads: Sequence[memoryview], now: float) -> None:
    """Hands the results of some workers to what waits for them."""
    if not call.group.concurrent:  # concurrent calls run in the I/O thread
        for worker in workers:
            worker.progress_count += 1
            worker.last_progress_at = now
    call.group.settle(workers, payloads, now)


def _handle_part(worker: "RemoteWorker", connection: RelayedConnection, frame: memoryview) -> None:
    """Handles a frame of a worker. A malformed one ends its connection, and not those of the other workers."""
    try:
        worker.handle_frame(connection, frame)
    except ValueError as error:
        log.debug("%s: %s", worker.name, error)
        worker.connection_lost(connection)
