"""What the controller and a call relay exchange: the frames of many workers, several in one.

A *channel* is the connection of one worker to the relay. It has a number that the relay never uses again, so that a
frame for a worker's previous connection is not mistaken for one of its next. Calls and results, of which there are
thousands, travel as columns without their own headers; everything else travels as the frames that a direct connection
would carry.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import add

import msgspec

from lockstep.base.transport.frames import Buffer
from lockstep.cluster.rpc.rpc_messages import ALIGN, PADDING, pack_body, split_frame
from lockstep.watch.agent.service_discovery import ServiceAddress

SAME = -1
"""In place of the size of a small payload that equals the one before it and is not sent again: ranks answer alike."""
MAX_BATCH_BYTES = 32 << 20
"""Larger payloads travel in several messages, so that none is held back by many others for long."""

Arrived = tuple[list[int], list[int], list[int]]
"""Results that have arrived, so that their workers need not keep them: the ids of calls whose results came as one
`CallResults`; and channels with the ids of other results."""


class RelayedCall(msgspec.Struct, array_like=True):
    """One call of several channels. Payload: the arguments of each, or one for all. With `pieces`: what all have in
    common, and then columns, without gaps, of which each channel gets a piece."""

    id: int
    """The same for all channels: ids are unique for each worker only."""
    method: str
    concurrent: bool
    sizes: list[int]
    """Of the parts of the payload."""
    pieces: bytes = b""
    """uint32 `[channels, columns]`: the bytes of each piece."""


class RelayedCalls(msgspec.Struct, tag=1, array_like=True):
    """Controller to relay: calls of each of these channels, in this order. Payload: those of the calls."""

    channels: list[int]
    """Empty: the same as in the message of calls before this one, as usual."""
    calls: list[RelayedCall]
    arrived: Arrived


class RelayedFrames(msgspec.Struct, tag=2, array_like=True):
    """In both directions: frames of these channels, which are the payload."""

    channels: list[int]
    sizes: list[int]


class CallResults(msgspec.Struct, tag=8, array_like=True):
    """Relay to controller: what all channels of a call have answered, in the order of the call. Payload: what each
    method returned."""

    id: int
    sizes: list[int]
    """Of each result, or `SAME`; a single size if all results are equal."""


class RelayedResults(msgspec.Struct, tag=3, array_like=True):
    """Relay to controller: results of these channels. Payload: what each method returned."""

    channels: list[int]
    ids: list[int]
    sizes: list[int]
    """Of each result, or `SAME`."""


class RelayListens(msgspec.Struct, tag=9, array_like=True):
    """Relay to controller, first: where workers may connect to it."""

    address: ServiceAddress


class ChannelOpened(msgspec.Struct, tag=4, array_like=True):
    """Relay to controller: a worker has connected."""

    channel: int
    name: str


class ChannelClosed(msgspec.Struct, tag=5, array_like=True):
    """In both directions: the connection of this channel is closed, or has to be."""

    channel: int


class RelayedAcks(msgspec.Struct, tag=7, array_like=True):
    """Controller to relay: results that have arrived, and that no call has acknowledged."""

    arrived: Arrived


class RelayAlive(msgspec.Struct, tag=6, array_like=True):
    """Relay to controller, once a second."""

    moved: list[tuple[int, int]]
    """Channels whose `bulk_bytes` have changed, and their values."""


ToRelay = RelayedCalls | RelayedFrames | RelayedAcks | ChannelClosed
FromRelay = RelayListens | RelayedFrames | CallResults | RelayedResults | ChannelOpened | ChannelClosed | RelayAlive

_to_relay = msgspec.msgpack.Decoder(ToRelay)
_from_relay = msgspec.msgpack.Decoder(FromRelay)


def pack_relayed(message: ToRelay | FromRelay, payloads: Sequence[Buffer] = ()) -> list[Buffer]:
    """Returns the parts of a frame. Each payload begins at a multiple of 64 bytes."""
    return [pack_body(message), *padded(payloads)]


def padded(payloads: Sequence[Buffer]) -> list[Buffer]:
    """Payloads and what follows each, so that the next one begins at a multiple of 64 bytes."""
    parts: list[Buffer] = []
    for payload in payloads:
        parts.append(payload)
        if padding := -len(payload) % ALIGN:
            parts.append(PADDING[padding])
    return parts


def unpack_to_relay(frame: bytearray) -> tuple[ToRelay, memoryview]:
    """Decodes a frame. Raises ValueError (including msgspec's errors) if it is malformed."""
    body, payload = split_frame(frame)
    return _to_relay.decode(body), payload


def unpack_from_relay(frame: bytearray) -> tuple[FromRelay, memoryview]:
    """Decodes a frame. Raises ValueError (including msgspec's errors) if it is malformed."""
    body, payload = split_frame(frame)
    return _from_relay.decode(body), payload


def split_payloads(payload: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """The payloads of a frame, some of which may be `SAME` as the one before. Raises ValueError if it is too short."""
    at, left = 0, len(payload)
    if len(sizes) == 1 and 0 <= sizes[0] <= left:  # as equal results of all workers
        return [payload[: sizes[0]]]
    payloads: list[memoryview] = []
    for size in sizes:
        if size == SAME and payloads:
            payloads.append(payloads[-1])
            continue
        if not 0 <= size <= left - at:
            raise ValueError("a relayed frame is truncated")
        payloads.append(payload[at : at + size])
        at += size + -size % ALIGN
    return payloads


def cut_columns(columns: memoryview, pieces: bytes, channels: int) -> Iterator[list[memoryview]]:
    """The pieces of each channel, one of each column. Raises ValueError unless they make up the columns."""
    count, rest = divmod(len(pieces), 4 * channels)
    sizes = [] if rest else memoryview(pieces).cast("I").tolist()
    if rest or sum(sizes) != len(columns):
        raise ValueError(f"the pieces of {channels} channels do not make up columns of {len(columns)} bytes")
    places = list(accumulate((sum(sizes[column::count]) for column in range(count - 1)), initial=0))
    for row in range(0, len(sizes), count):
        own = sizes[row : row + count]
        yield [columns[place : place + size] for place, size in zip(places, own, strict=True)]
        places = list(map(add, places, own))


def cut_batches(sizes: Sequence[int]) -> Iterator[slice]:
    """Cuts payloads of these sizes into batches of about `MAX_BATCH_BYTES`; each has at least one."""
    if sum(sizes) <= MAX_BATCH_BYTES:  # as usual
        if sizes:
            yield slice(0, len(sizes))
        return
    begin = total = 0
    for number, size in enumerate(sizes):
        if total and total + size > MAX_BATCH_BYTES:
            yield slice(begin, number)
            begin, total = number, 0
        total += size
    if begin < len(sizes):
        yield slice(begin, len(sizes))
