"""The controller's end of a call relay: one connection that carries those of all workers behind it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.base.transport.frames import BULK_BYTES, Buffer, Connection, WireError
from lockstep.cluster.rpc.open_calls import OpenCall, OpenCalls, RelayedArguments
from lockstep.cluster.rpc.relay_messages import (
    Arrived,
    CallResults,
    ChannelClosed,
    ChannelOpened,
    RelayAlive,
    RelayedAcks,
    RelayedCall,
    RelayedCalls,
    RelayedFrames,
    RelayedResults,
    RelayListens,
    pack_relayed,
    split_payloads,
    unpack_from_relay,
)
from lockstep.cluster.rpc.rpc_messages import pack_body
from lockstep.watch.agent.service_discovery import PeerHeartbeat, ServiceAddress

if TYPE_CHECKING:
    from lockstep.cluster.rpc.remote_worker import RemoteWorker

log = logging.getLogger(__name__)

RELAY_SILENT_S = 10.0
"""A relay that is silent for so long is killed: it reports once a second, and its workers can do without it."""

_CLOSED = None, None
"""In place of a connection, and its worker, that is closed here; the relay will learn it."""


@dataclass(frozen=True, slots=True)
class ExpectedRelay:
    """A call relay that may connect. Its functions are called in the server's thread."""

    calls: OpenCalls
    """Those of the workers that it serves."""
    listens: Callable[[ServiceAddress | None], None]
    """Called with the address at which workers can connect to it, and with None when they can do so no more."""
    silent: Callable[[], None]
    """Called when it has been silent for too long, and its connection is closed."""


class CallRelayLink:
    """The connection to a call relay. Any thread may send.

    Args:
        changed: called when the connection has data left to write, or is closed.
    """

    def __init__(
        self, connection: Connection, changed: Callable[[Connection], None], expected: ExpectedRelay
    ) -> None:  # fmt: skip
        self.connection, self._changed, self.expected = connection, changed, expected
        self.channels: dict[int, tuple[RelayedConnection, RemoteWorker]] = {}
        """The connections of workers, by channel."""
        self._calls = expected.calls
        self._called: list[int] = []
        """The channels of the last calls."""
        self._arrived: Arrived = [], [], []
        """Results that are not acknowledged yet. Added by the server's thread, and taken by any, with the lock."""
        self._arrived_lock = threading.Lock()
        self.heartbeat = PeerHeartbeat(RELAY_SILENT_S)
        self._transferred = 0
        """Bytes of large frames when the heartbeat was last checked."""
        self._written = 0
        """Bytes that had been written on the connection when the workers' transfers were last counted."""
        self._large: deque[tuple[int, int, Sequence[int]]] = deque()
        """The large frames that were not written completely then: where each begins and ends, and its channels."""

    def is_silent(self) -> bool:
        """Whether the relay has sent nothing for too long, not even a part of a large frame. Called twice a second."""
        self._count_transfers()
        if self.connection.bulk_bytes != self._transferred:
            self._transferred = self.connection.bulk_bytes
            self.heartbeat.received()
        self.heartbeat.tick()
        return self.heartbeat.too_long

    def _count_transfers(self) -> None:
        """Counts what was written of large frames for the workers to which these frames go, and for no others."""
        written = self.connection.written_bytes
        for _ in range(len(self._large)):  # other threads may add some
            begin, end, channels = frame = self._large.popleft()
            moved = max(0, min(written, end) - max(self._written, begin))
            for channel in channels:
                if channel in self.channels:
                    self.channels[channel][0].written += moved
            if written < end:
                self._large.append(frame)
        self._written = written

    def open(self, channel: int, worker: "RemoteWorker") -> None:
        """Adds the connection of a worker. Raises ValueError if the worker is not one of those that the relay serves:
        its node had another relay before."""
        if worker.node.calls is not self._calls:
            raise ValueError(f"{worker.name} has another call relay than {self.connection.peer.name}")
        self.channels[channel] = RelayedConnection(self, channel), worker

    def handle_frame(self, frame: bytearray, accept: Callable[["CallRelayLink", int, str], None]) -> None:
        """Handles a frame of the relay. `accept` is called with the channel and the name of a worker that has
        connected. Raises ValueError if the frame is malformed."""
        message, payload = unpack_from_relay(frame)
        match message:
            case CallResults(id=number, sizes=sizes):
                self._settle_call(number, split_payloads(payload, sizes))
            case RelayedResults(channels=channels, ids=ids, sizes=sizes):
                self._settle_some(channels, ids, split_payloads(payload, sizes))
            case RelayedFrames(channels=channels, sizes=sizes):
                for number, part in zip(channels, split_payloads(payload, sizes), strict=True):
                    connection, worker = self.channels.get(number, _CLOSED)
                    if worker is not None and connection is not None:
                        _handle_part(worker, connection, part)
            case RelayListens(address=address):
                self.expected.listens(address)
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

    def _settle_call(self, number: int, payloads: list[memoryview]) -> None:
        """Hands the results of all its workers to a call, and acknowledges them with the next message."""
        call = self._calls.take_all(number, self)
        if call is not None:
            workers = call.workers
            if len(payloads) == 1:
                payloads *= len(workers)
            if len(payloads) != len(workers):
                raise ValueError(f"{len(payloads)} results of {len(workers)} workers in a relayed frame")
            if call.left is not None:  # some have connected anew meanwhile, and answered again
                missing = [each for each in zip(workers, payloads, strict=True) if each[0] in call.left]
                workers, payloads = [worker for worker, _ in missing], [payload for _, payload in missing]
            _settle(call, workers, payloads, time.monotonic())
        with self._arrived_lock:
            self._arrived[0].append(number)

    def _settle_some(self, channels: list[int], ids: list[int], payloads: list[memoryview]) -> None:
        """Hands over results of several calls, or of some of the workers that got one, and acknowledges them with the
        next message."""
        if not len(channels) == len(ids) == len(payloads) or not ids:
            raise ValueError(f"{len(channels)} channels, {len(ids)} ids and {len(payloads)} results in a relayed frame")
        now, begin = time.monotonic(), 0
        while begin < len(ids):  # results of a call follow each other
            number, end = ids[begin], begin + 1
            while end < len(ids) and ids[end] == number:
                end += 1
            part = slice(begin, end)
            workers = [self.channels.get(channel, _CLOSED)[1] for channel in channels[part]]
            self._settle_part(number, workers, payloads[part], now)
            begin = end
        with self._arrived_lock:
            self._arrived[1].extend(channels)
            self._arrived[2].extend(ids)

    def _settle_part(
        self, number: int, workers: "Sequence[RemoteWorker | None]", payloads: Sequence[memoryview], now: float
    ) -> None:
        """Hands over results of one call, except those of workers whose connections are closed."""
        call, waiting = self._calls.take_some(number, workers)
        if call is not None and len(waiting) == len(workers):  # as usual
            _settle(call, waiting, payloads, now)
            return
        for worker, payload in zip(workers, payloads, strict=True):
            if call is not None and worker in waiting:
                waiting.remove(worker)
                _settle(call, (worker,), (payload,), now)
            elif worker is not None:
                worker.settle_unknown(number, payload)

    def send_calls(self, calls: Sequence[tuple[OpenCall, RelayedArguments]]) -> None:
        """Sends calls to their workers, in one message if all are calls of the same channels. If the connection is
        closed, they are sent again when the workers have connected anew."""
        channels = calls[0][0].channels
        try:
            if len(calls) == 1 or all(call.channels is channels for call, _ in calls):
                self._queue_calls(channels, calls)
            else:  # the arguments of some need several messages
                for each in calls:
                    self._queue_calls(each[0].channels, [each])
            self.flush()
        except WireError:
            return

    def _queue_calls(self, channels: list[int], calls: Sequence[tuple[OpenCall, RelayedArguments]]) -> None:
        relayed: list[RelayedCall] = []
        payload: list[Buffer] = []
        for call, own in calls:
            signature = call.signature
            relayed.append(RelayedCall(call.number, signature.name, signature.concurrent, own.sizes, own.pieces))
            payload += own.payload
        same = [] if channels == self._called else channels
        arrived = self._take_arrived()
        try:
            self.queue(channels, pack_body(RelayedCalls(same, relayed, arrived)), *payload)
        except WireError:
            self._put_back(arrived)
            raise
        self._called = channels

    def queue(self, channels: Sequence[int], *parts: Buffer) -> None:
        """Queues a frame for the workers of these channels. Raises FrameTooLarge, ConnectionClosed."""
        begin, end = self.connection.queue(*parts)
        if end - begin > BULK_BYTES:
            self._large.append((begin, end, channels))

    def acknowledge(self) -> None:
        """Acknowledges the results that no call has acknowledged yet."""
        if any(self._arrived):
            arrived = self._take_arrived()
            try:
                self.queue((), *pack_relayed(RelayedAcks(arrived)))
                self.flush()
            except WireError:  # then the workers send them again
                self._put_back(arrived)

    def _take_arrived(self) -> Arrived:
        with self._arrived_lock:
            arrived, self._arrived = self._arrived, ([], [], [])
        return arrived

    def _put_back(self, arrived: Arrived) -> None:
        """Leaves acknowledgements to the next frame, because the one with them was refused."""
        with self._arrived_lock:
            for earlier, later in zip(arrived, self._arrived, strict=True):
                earlier.extend(later)
            self._arrived = arrived

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
        self.moved = self.written = 0
        """Bytes of large frames between the relay and the worker, and those for the worker that were written to the
        relay."""

    @property
    def bulk_bytes(self) -> int:
        """Grows while a large frame is being transferred: to or from this worker, or for it to the relay. Frames of
        other workers do not count."""
        return self.moved + self.written

    def queue(self, *parts: Buffer) -> None:
        """Queues a frame. Raises FrameTooLarge, ConnectionClosed."""
        size = sum(memoryview(part).nbytes for part in parts)
        self.link.queue((self.channel,), pack_body(RelayedFrames([self.channel], [size])), *parts)

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
            self.link.queue((), *pack_relayed(ChannelClosed(self.channel)))
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
