"""The part of a call relay that needs no sockets: hands calls out to the workers behind it, and gathers their results.

The controller sends one message for a call of all these workers, and gets one with all their results. Nothing is kept
here beyond that moment: workers keep results until the controller has acknowledged them, and the controller keeps calls
until they are answered. So a relay may end at any time; its workers then connect to the controller themselves.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lockstep.base.transport.frames import Buffer, WireError
from lockstep.cluster.rpc.codec import INLINE_BYTES
from lockstep.cluster.rpc.relay_messages import (
    MAX_BATCH_BYTES,
    SAME,
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
    cut_batches,
    cut_columns,
    pack_relayed,
    split_payloads,
    unpack_to_relay,
)
from lockstep.cluster.rpc.rpc_messages import (
    AckMessage,
    CallMessage,
    FailureMessage,
    HeartbeatMessage,
    ResultMessage,
    pack_body,
    pack_message,
    unpack_to_controller,
)
from lockstep.watch.agent.service_discovery import ServiceAddress

DELAY_S = 0.02
"""How long a result waits for those of the other workers that got the same call, and a heartbeat for theirs."""


class WorkerEnd(Protocol):
    """The connection of a worker."""

    bulk_bytes: int

    def queue(self, *parts: Buffer) -> object: ...
    def flush(self) -> bool: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Batch:
    """A call of several workers."""

    method: str
    channels: list[int]
    left: int
    """How many of them have not answered."""
    results: dict[int, memoryview]
    """By channel, what was not sent yet."""


@dataclass(slots=True)
class _Channel:
    """A worker's connection."""

    connection: WorkerEnd
    open: dict[int, _Batch]
    """The batch of each call that is not answered, by its id."""
    reported: int = 0
    """The connection's `bulk_bytes` when they were last reported."""


class CallRelay:
    """Carries messages between workers and the controller. Not thread-safe.

    Args:
        send: queues a frame, given as parts, for the controller.
    """

    def __init__(self, send: Callable[[Sequence[Buffer]], object]) -> None:
        self._send_up = send
        self._numbers = itertools.count(1)
        self._channels: dict[int, _Channel] = {}
        self._owed: Counter[str] = Counter()
        """How many calls of batches are not answered, by method."""
        self._called: list[int] = []
        """The channels of the last calls."""
        self._waiting: dict[int, _Batch] = {}
        """Calls of which results were not sent yet, by id."""
        self._answered_calls: dict[int, list[int]] = {}
        """The channels of each call whose results were sent together and are not acknowledged, by id."""
        self._results: list[tuple[int, int, memoryview]] = []
        """Channel, id and payload of other results that were not sent yet."""
        self._frames: list[tuple[int, bytearray]] = []
        self._bytes = 0
        self.due = float("inf")
        """Monotonic time at which `flush` must be called."""
        self.blocked: set[int] = set()
        """Channels whose connections have data left to write."""

    def listens(self, address: ServiceAddress) -> None:
        """Tells the controller where workers can connect."""
        self._send_up(pack_relayed(RelayListens(address)))

    def open(self, name: str, connection: WorkerEnd) -> int:
        """Adds the connection of a worker and returns its channel."""
        channel = next(self._numbers)
        self._channels[channel] = _Channel(connection, {})
        self._send_up(pack_relayed(ChannelOpened(channel, name)))
        return channel

    def close(self, channel: int) -> None:
        """Closes a worker's connection and reports it, unless that was done."""
        closed = self._channels.pop(channel, None)
        self.blocked.discard(channel)
        if closed is None:
            return
        closed.connection.close()
        for number in list(closed.open):
            self._answered(closed, number)
        self.flush()  # what it has sent, and what waited for it
        self._send_up(pack_relayed(ChannelClosed(channel)))

    def close_all(self) -> None:
        """Closes all connections: the controller is not reachable."""
        for channel in self._channels.values():
            channel.connection.close()
        self._channels.clear()
        self.blocked.clear()

    def from_controller(self, frame: bytearray) -> None:
        """Handles a frame of the controller. Raises ValueError if it is malformed."""
        message, payload = unpack_to_relay(frame)
        match message:
            case RelayedCalls():
                self._hand_out(message, payload)
            case RelayedFrames(channels=channels, sizes=sizes):
                for channel, each in zip(channels, split_payloads(payload, sizes), strict=True):
                    self._send_down(channel, (each,))
            case RelayedAcks(arrived=arrived):
                self._acknowledge(self._by_channel(arrived))
            case ChannelClosed(channel=channel):
                self.close(channel)

    def from_worker(self, channel: int, frame: bytearray) -> None:
        """Handles a frame of a worker. Raises ValueError if it is malformed."""
        message, payload = unpack_to_controller(frame)
        self._bytes += len(frame)
        match message:
            case ResultMessage(id=number, patience_s=patience_s):
                batch = self._answered(self._channels.get(channel), number)
                if batch is None:
                    self._results.append((channel, number, payload))
                else:
                    batch.results[channel] = payload
                    self._waiting[number] = batch
                self._deliver(self._delay_s(batch, patience_s))
            case FailureMessage(id=number):
                self._answered(self._channels.get(channel), number)
                self._frames.append((channel, frame))
                self._deliver(0.0)
            case HeartbeatMessage():
                self._frames.append((channel, frame))
                self._deliver(DELAY_S)
            case _:
                self._frames.append((channel, frame))
                self._deliver(0.0)

    def flush(self) -> None:
        """Sends what has arrived from workers."""
        results, self._results = self._results, []
        waiting, self._waiting = self._waiting, {}
        frames, self._frames = self._frames, []
        self.due, self._bytes = float("inf"), 0
        alone = len(waiting) == 1 and not results
        for number, batch in waiting.items():
            answers, batch.results = batch.results, {}
            if not (alone and self._send_together(number, batch.channels, answers)):
                results += [(channel, number, payload) for channel, payload in answers.items()]
        for part in cut_batches([len(payload) for _, _, payload in results]):
            channels, ids, payloads = map(list, zip(*results[part], strict=True))
            sizes, different = _without_repetitions(payloads)
            self._send_up(pack_relayed(RelayedResults(channels, ids, sizes), different))
        for part in cut_batches([len(frame) for _, frame in frames]):
            channels, bodies = map(list, zip(*frames[part], strict=True))
            self._send_up(pack_relayed(RelayedFrames(channels, list(map(len, bodies))), bodies))

    def _send_together(self, number: int, channels: list[int], answers: Mapping[int, memoryview]) -> bool:
        """Sends the results of all channels of a call as one, if they are there and not too large."""
        if len(answers) < len(channels) or sum(map(len, answers.values())) > MAX_BATCH_BYTES:
            return False
        sizes, different = _without_repetitions([answers[channel] for channel in channels])
        if len(different) == 1:
            del sizes[1:]
        self._answered_calls[number] = channels
        self._send_up(pack_relayed(CallResults(number, sizes), different))
        return True

    def report(self) -> None:
        """Tells the controller that this relay is alive, and which transfers have made progress."""
        moved = []
        for number, channel in self._channels.items():
            if channel.connection.bulk_bytes != channel.reported:
                channel.reported = channel.connection.bulk_bytes
                moved.append((number, channel.reported))
        self._send_up(pack_relayed(RelayAlive(moved)))

    def write(self, channel: int) -> None:
        """Writes what is left for a worker whose connection accepts data."""
        self._send_down(channel, None)

    def _hand_out(self, message: RelayedCalls, payload: memoryview) -> None:
        channels = self._called = message.channels or self._called
        if not channels:
            raise ValueError("calls of no channels")
        arrived = self._by_channel(message.arrived)
        payloads = split_payloads(payload, [size for call in message.calls for size in call.sizes])
        for call in message.calls:
            own, payloads = payloads[: len(call.sizes)], payloads[len(call.sizes) :]
            if call.pieces:
                head, columns = own
                arguments = [[head, *pieces] for pieces in cut_columns(columns, call.pieces, len(channels))]
            else:
                arguments = [[each] for each in own] * (len(channels) if len(own) == 1 else 1)
            self._call(call, channels, arguments, arrived)
        self._acknowledge(arrived)

    def _call(
        self, call: RelayedCall, channels: list[int], arguments: Sequence[Sequence[Buffer]],
        arrived: dict[int, list[int]],
    ) -> None:  # fmt: skip
        """Sends a call to its workers, with the ids of their results that have arrived."""
        batch = _Batch(call.method, channels, len(channels), {})
        self._owed[call.method] += len(channels)
        for channel, each in zip(channels, arguments, strict=True):
            if channel in self._channels:
                self._channels[channel].open[call.id] = batch
                to_worker = CallMessage(call.id, call.method, call.concurrent, arrived.pop(channel, []))
                self._send_down(channel, (pack_body(to_worker), *each))
            else:
                batch.left -= 1
                self._owed[call.method] -= 1

    def _by_channel(self, arrived: Arrived) -> dict[int, list[int]]:
        """The ids of results that have arrived, of each channel."""
        calls, channels, ids = arrived
        found: dict[int, list[int]] = {}
        for number in calls:
            for channel in self._answered_calls.pop(number, ()):
                found.setdefault(channel, []).append(number)
        for channel, number in zip(channels, ids, strict=True):
            found.setdefault(channel, []).append(number)
        return found

    def _acknowledge(self, arrived: Mapping[int, list[int]]) -> None:
        for channel, ids in arrived.items():
            self._send_down(channel, pack_message(AckMessage(ids)))

    def _send_down(self, channel: int, parts: Sequence[Buffer] | None) -> None:
        to = self._channels.get(channel)
        if to is None:  # the controller will learn, or has learnt, that it is closed
            return
        try:
            if parts is not None:
                to.connection.queue(*parts)
            (self.blocked.discard if to.connection.flush() else self.blocked.add)(channel)
        except WireError:
            self.close(channel)

    def _answered(self, channel: _Channel | None, number: int) -> _Batch | None:
        """Records that a worker owes no answer to a call any more. Returns the call's batch, if it has one."""
        batch = None if channel is None else channel.open.pop(number, None)
        if batch is not None:
            batch.left -= 1
            self._owed[batch.method] -= 1
        return batch

    def _delay_s(self, batch: _Batch | None, patience_s: float) -> float:
        """How long a result waits for others: a moment while some of the same call are missing, and if it has more
        patience, as long as other workers have any call of the method to answer."""
        if batch is None:
            return 0.0
        if patience_s > DELAY_S:
            return patience_s if self._owed[batch.method] else 0.0
        return DELAY_S if batch.left else 0.0

    def _deliver(self, delay_s: float) -> None:
        if delay_s == 0.0 or self._bytes > MAX_BATCH_BYTES:
            self.flush()
        else:
            self.due = min(self.due, time.monotonic() + delay_s)


def _without_repetitions(payloads: Sequence[memoryview]) -> tuple[list[int], list[memoryview]]:
    """The sizes of payloads, `SAME` for a small one that equals the one before it; and the other payloads. Those with
    arrays that decoding does not copy stay apart, because their receivers may change them."""
    sizes: list[int] = []
    different: list[memoryview] = []
    for payload in payloads:
        if different and len(payload) < INLINE_BYTES and payload == different[-1]:
            sizes.append(SAME)
        else:
            sizes.append(len(payload))
            different.append(payload)
    return sizes, different
