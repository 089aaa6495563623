"""What controller and worker say to each other: a small typed message, and a payload the codec made.

Calls have ids that grow by one per worker, and travel in that order over one connection. After a reconnect the
worker says which id it has received last; the controller sends again what comes after it. The worker keeps every
answer until the controller acknowledges it, with its next call or half a second later, and sends the kept ones again.
So a call runs exactly once, and its answer arrives, however often the connection breaks. The ids of a later controller
begin beyond all of an earlier one's, so that no answer is taken for that of another's call.
"""

import struct
from collections.abc import Callable, Sequence

import msgspec

from lockstep.cluster.codec import Payload
from lockstep.watch import wire

STARTED = 0
"""The id of the service's construction (and renewal), which is answered like a call."""

_LENGTH = struct.Struct("<I")
_ALIGN = 64


class Call(msgspec.Struct, tag=1, array_like=True):
    """Controller to worker; payload: the arguments."""

    id: int
    method: str
    concurrent: bool
    arrived: list[int] = []
    """These answers need not be kept, as in `Ack`."""


class Ack(msgspec.Struct, tag=2, array_like=True):
    """Controller to worker: these answers have arrived and need not be kept."""

    ids: list[int]


class Leave(msgspec.Struct, tag=3, array_like=True):
    """Controller to worker: finish the running call, close the service, end."""

    why: str


class Resume(msgspec.Struct, tag=4, array_like=True):
    """Worker to controller, first on every connection: the last id received."""

    received: int
    pid: int


class Result(msgspec.Struct, tag=5, array_like=True):
    """Worker to controller; payload: what the method returned."""

    id: int


class Failure(msgspec.Struct, tag=6, array_like=True):
    """Worker to controller: the exception that the method raised."""

    id: int
    kind: str
    message: str
    traceback: str
    code: str = ""
    """`lockstep.watch.errors.error_code` of the exception."""


class Pulse(msgspec.Struct, tag=7, array_like=True):
    """Worker to controller, about once a second while it has work: how far it is."""

    moves: int
    """`Beacon.moves`: changes with every progress counter and stage."""
    stage: str
    wait: str
    """The wait the worker's main thread is in, empty when it is in none."""


ToWorker = Call | Ack | Leave
ToController = Resume | Result | Failure | Pulse

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_controller = msgspec.msgpack.Decoder(ToController)


def before_first(generation: int) -> int:
    """The id before that of a controller's first call."""
    return generation << 32


def pack(message: ToWorker | ToController, payload: Payload | bytearray = b"") -> tuple[bytes, Payload | bytearray]:
    """The parts of a frame; the payload begins at a multiple of 64 bytes, so that its arrays are aligned."""
    body = _encoder.encode(message)
    end = _LENGTH.size + len(body)
    return _LENGTH.pack(len(body)) + body + bytes(-end % _ALIGN), payload


def post(
    connection: wire.Connection | None,
    parts: Sequence[bytes | bytearray | memoryview],
    lost: Callable[[wire.Connection, str], None],
    wake: Callable[[], None],
) -> None:
    """Queues a frame, if there is a connection, and writes what goes at once.

    Args:
        lost: is told of a connection that broke, and why.
        wake: rouses the thread that writes the rest, or dials again.
    """
    if connection is None:
        return
    try:
        connection.queue(*parts)
        if connection.flush():
            return
    except wire.WireError as error:
        lost(connection, str(error))
    wake()


def unpack_to_worker(frame: bytearray) -> tuple[ToWorker, memoryview]:
    """Raises ValueError (msgspec's included) for a frame that is none of ours."""
    body, payload = _split(frame)
    return _to_worker.decode(body), payload


def unpack_to_controller(frame: bytearray) -> tuple[ToController, memoryview]:
    """Raises ValueError (msgspec's included) for a frame that is none of ours."""
    body, payload = _split(frame)
    return _to_controller.decode(body), payload


def _split(frame: bytearray) -> tuple[memoryview, memoryview]:
    view = memoryview(frame)
    if len(view) < _LENGTH.size:
        raise ValueError("the frame is cut")
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    return view[_LENGTH.size : end], view[end + -end % _ALIGN :]
