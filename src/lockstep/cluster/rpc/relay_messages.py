"""What the controller and the call relay of a node exchange: the frames of many workers, several in one.

A *channel* is the connection of one worker to the relay. It has a number that the relay never uses again, so that a
frame for a worker's previous connection is not mistaken for one of its next. Calls and results, of which there are
thousands, travel as columns without their own headers; everything else travels as the frames that a direct connection
would carry.
"""

from collections.abc import Iterator, Sequence

import msgspec

from lockstep.base.transport.frames import Buffer
from lockstep.cluster.rpc.rpc_messages import ALIGN, pack_body, split_frame

RELAY_FILE = "call-relay.json"
"""The relay's address, in the run's shared memory on its node: a `ServiceAddress`."""
SAME = -1
"""In place of the size of a small payload that equals the one before it and is not sent again: ranks answer alike."""
MAX_BATCH_BYTES = 32 << 20
"""Larger payloads travel in several messages, so that none is held back by many others for long."""


class RelayedCalls(msgspec.Struct, tag=1, array_like=True):
    """Controller to relay: one call of each of these channels. Payload: the arguments of each, or one for all. With
    `bounds`: what all have in common, and columns of which each gets a piece."""

    channels: list[int]
    id: int
    """Of all these calls: ids are unique for each worker only."""
    method: str
    concurrent: bool
    sizes: list[int]
    arrived: list[tuple[list[int], list[int]]]
    """As in `RelayedAcks`."""
    bounds: bytes = b""
    """int64 `[columns, channels + 1]`: where the piece of each channel begins in each column, in bytes, and the last
    ends, counted from any place before the column."""


class RelayedFrames(msgspec.Struct, tag=2, array_like=True):
    """In both directions: frames of these channels, which are the payload."""

    channels: list[int]
    sizes: list[int]


class RelayedResults(msgspec.Struct, tag=3, array_like=True):
    """Relay to controller: results of these channels. Payload: what each method returned."""

    channels: list[int]
    ids: list[int]
    sizes: list[int]
    """Of each result, or `SAME`."""


class ChannelOpened(msgspec.Struct, tag=4, array_like=True):
    """Relay to controller: a worker has connected."""

    channel: int
    name: str


class ChannelClosed(msgspec.Struct, tag=5, array_like=True):
    """In both directions: the connection of this channel is closed, or has to be."""

    channel: int


class RelayedAcks(msgspec.Struct, tag=7, array_like=True):
    """Controller to relay: results that have arrived, as columns of channels and ids, so that they need not be kept."""

    arrived: list[tuple[list[int], list[int]]]


class RelayAlive(msgspec.Struct, tag=6, array_like=True):
    """Relay to controller, once a second."""

    moved: list[tuple[int, int]]
    """Channels whose `bulk_bytes` have changed, and their values."""


ToRelay = RelayedCalls | RelayedFrames | RelayedAcks | ChannelClosed
FromRelay = RelayedFrames | RelayedResults | ChannelOpened | ChannelClosed | RelayAlive

_to_relay = msgspec.msgpack.Decoder(ToRelay)
_from_relay = msgspec.msgpack.Decoder(FromRelay)
_PADDING = tuple(bytes(size) for size in range(ALIGN))


def pack_relayed(message: ToRelay | FromRelay, payloads: Sequence[Buffer] = ()) -> list[Buffer]:
    """Returns the parts of a frame. Each payload begins at a multiple of 64 bytes."""
    parts: list[Buffer] = [pack_body(message)]
    for payload in payloads:
        parts.append(payload)
        if padding := -len(payload) % ALIGN:
            parts.append(_PADDING[padding])
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


def cut_columns(columns: Sequence[memoryview], bounds: bytes, channels: int) -> Iterator[list[memoryview]]:
    """The pieces of each channel, one of each column. Raises ValueError for bounds outside of a column."""
    edges = memoryview(bounds).cast("q")
    if len(edges) != len(columns) * (channels + 1):
        raise ValueError(f"{len(edges)} bounds of {len(columns)} columns and {channels} channels")
    by_column = [edges[at : at + channels + 1].tolist() for at in range(0, len(edges), channels + 1)]
    for column, own in zip(columns, by_column, strict=True):
        if own[-1] - own[0] != len(column) or own != sorted(own):
            raise ValueError("the bounds of a relayed call are not those of its columns")
    cut = [(column, own, own[0]) for column, own in zip(columns, by_column, strict=True)]
    for number in range(channels):
        yield [column[own[number] - begin : own[number + 1] - begin] for column, own, begin in cut]


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
