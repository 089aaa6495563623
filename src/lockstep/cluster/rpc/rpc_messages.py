"""What controller and worker exchange: a worker starts with a manifest, then both send small typed messages with
payloads.

Calls have ids that grow by one per worker and travel in that order over one connection. After a reconnect the
worker reports the last id it received, and the controller resends the calls after it. The worker keeps every result
until the controller acknowledges it, with its next call or half a second later, and resends the kept ones. So a
call runs exactly once and its result arrives, however often the connection breaks. A later controller's ids start
beyond all ids of earlier ones, so that no result is mistaken for that of another call.
"""

import hashlib
import hmac
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from lockstep.base.json_text import parse_json, read_json
from lockstep.base.transport.frames import Buffer, WireError
from lockstep.cluster.protocol import WorkerSpec
from lockstep.cluster.rpc.codec import Payload

MANIFEST_VARIABLE = "LOCKSTEP_WORKER"
"""The variable that names a worker's manifest file."""

_SESSION_VARIABLES = (
    "_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "WINDOWID", "TMUX", "TMUX_PANE", "STY", "WINDOW",
    "DISPLAY", "XAUTHORITY", "PS1", "LS_COLORS", "HISTFILE",
)  # fmt: skip
_SESSION_PREFIXES = ("SSH_", "XDG_", "DBUS_", "TERM_", "VSCODE_", "VTE_", "GPG_")
"""Variables of a terminal session: a run may be resumed from another terminal."""


class WorkerManifest(msgspec.Struct, frozen=True):
    """What a worker is started with."""

    name: str
    role: str
    rank: int
    service: str
    arguments: dict[str, Any]
    run: str
    generation: int
    """Generation of the controller that started the worker."""
    fingerprint: str = msgspec.field(default="", name="fitness")
    """See `worker_fingerprint`; empty if no later controller may adopt the worker."""

    def text(self) -> str:
        """The content of the worker's file. Raises TypeError for arguments that are not JSON-like."""
        try:
            return json.dumps(msgspec.to_builtins(self), allow_nan=True)
        except (TypeError, ValueError) as error:
            raise TypeError(f"arguments of worker {self.name!r} are not JSON-like: {error}") from None

    @staticmethod
    def read(path: Path) -> "WorkerManifest":
        """Reads a manifest. Raises OSError, ValueError (including msgspec's errors)."""
        return msgspec.convert(read_json(path), type=WorkerManifest)

    @staticmethod
    def of(text: str | None) -> "WorkerManifest | None":
        """Parses a manifest; None if the text is missing or unreadable."""
        try:
            return None if text is None else msgspec.convert(parse_json(text, "a manifest"), type=WorkerManifest)
        except ValueError:
            return None

    @property
    def spec(self) -> WorkerSpec:
        """The worker's spec without environment and preload, which only `worker_fingerprint` contains."""
        return WorkerSpec(
            self.name, self.role, self.rank, self.service, self.arguments, adoptable=bool(self.fingerprint)
        )


def worker_fingerprint(spec: WorkerSpec, environment: Mapping[str, str], token: str, python: str, folder: Path) -> str:
    """A digest that is equal for two specs if one process can serve both: same role, rank, service, arguments,
    interpreter, folder and environment; the name may differ. It is keyed with the token because environments contain
    secrets."""
    relevant = {
        name: value
        for name, value in environment.items()
        if name not in _SESSION_VARIABLES and not name.startswith(_SESSION_PREFIXES)
    }
    parts = spec.role, spec.rank, spec.service, spec.arguments, spec.preload, relevant, python, str(folder)
    return hmac.new(token.encode(), json.dumps(parts, sort_keys=True).encode(), hashlib.sha256).hexdigest()


START_CALL_ID = 0
"""The call id of the service's construction (and renewal), whose result is sent like that of a call."""

_LENGTH = struct.Struct("<I")
ALIGN = 64
"""Payloads begin at a multiple of so many bytes."""
PADDING = tuple(bytes(size) for size in range(ALIGN))


class CallMessage(msgspec.Struct, tag=1, array_like=True):
    """Controller to worker; payload: the arguments."""

    id: int
    method: str
    concurrent: bool
    arrived: list[int] = []
    """Ids of results that have arrived, so that the worker need not keep them, as in `AckMessage`."""


class AckMessage(msgspec.Struct, tag=2, array_like=True):
    """Controller to worker: these results have arrived and need not be kept."""

    ids: list[int]


class LeaveMessage(msgspec.Struct, tag=3, array_like=True):
    """Controller to worker: finish the running call, close the service, exit."""

    why: str


class ResumeMessage(msgspec.Struct, tag=4, array_like=True):
    """Worker to controller, first on every connection: the last call id that the worker received."""

    received: int
    pid: int


class ResultMessage(msgspec.Struct, tag=5, array_like=True):
    """Worker to controller; payload: what the method returned."""

    id: int
    patience_s: float = 0.0
    """How long a relay may keep the result for those of other workers that have the same method to answer."""


class FailureMessage(msgspec.Struct, tag=6, array_like=True):
    """Worker to controller: the exception that the method raised."""

    id: int
    kind: str
    message: str
    traceback: str
    code: str = ""
    """`lockstep.base.errors.error_code` of the exception."""


class HeartbeatMessage(msgspec.Struct, tag=7, array_like=True):
    """Worker to controller, about once a second while it has work: its progress."""

    progress_count: int
    """`Beacon.progress_count`: grows with every progress counter and stage."""
    stage: str
    wait: str
    """What the worker's main thread waits for; empty if it does not wait."""


ToWorker = CallMessage | AckMessage | LeaveMessage
ToController = ResumeMessage | ResultMessage | FailureMessage | HeartbeatMessage

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_to_controller = msgspec.msgpack.Decoder(ToController)


def call_id_base(generation: int) -> int:
    """The number after which the call ids of a controller begin."""
    return generation << 32


def pack_message(
    message: ToWorker | ToController, payload: Payload | bytearray = b""
) -> tuple[bytes, Payload | bytearray]:
    """Returns the parts of a frame. The payload begins at a multiple of 64 bytes, so that its arrays are aligned."""
    return pack_body(message), payload


def pack_body(message: msgspec.Struct) -> bytes:
    """The part of a frame before the payload."""
    body = _encoder.encode(message)
    return b"".join((_LENGTH.pack(len(body)), body, PADDING[-(_LENGTH.size + len(body)) % ALIGN]))


class WorkerConnection(Protocol):
    """What both ends need of their connection: `frames.Connection`, or the controller's one through a relay."""

    @property
    def closed(self) -> bool: ...
    @property
    def pending(self) -> bool: ...
    @property
    def bulk_bytes(self) -> int: ...
    def queue(self, *parts: Buffer) -> object: ...
    def flush(self) -> bool: ...
    def close(self) -> None: ...


C = TypeVar("C", bound=WorkerConnection)


def queue_message(
    connection: C | None,
    parts: Sequence[Buffer],
    lost: Callable[[C, str], None],
    wake: Callable[[], None],
) -> None:
    """Queues a frame, if there is a connection, and writes as much as possible immediately.

    Args:
        lost: called with a connection that broke, and the reason.
        wake: wakes the thread that writes the rest or reconnects.
    """
    if connection is None:
        return
    try:
        connection.queue(*parts)
        if connection.flush():
            return
    except WireError as error:
        lost(connection, str(error))
    wake()


def unpack_to_worker(frame: bytearray) -> tuple[ToWorker, memoryview]:
    """Decodes a frame. Raises ValueError (including msgspec's errors) if it is malformed."""
    body, payload = split_frame(frame)
    return _to_worker.decode(body), payload


def unpack_to_controller(frame: bytearray | memoryview) -> tuple[ToController, memoryview]:
    """Decodes a frame. Raises ValueError (including msgspec's errors) if it is malformed."""
    body, payload = split_frame(frame)
    return _to_controller.decode(body), payload


def split_frame(frame: bytearray | memoryview) -> tuple[memoryview, memoryview]:
    """The encoded message and the payload of a frame. Raises ValueError if it is truncated."""
    view = memoryview(frame)
    if len(view) < _LENGTH.size:
        raise ValueError("the frame is truncated")
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    return view[_LENGTH.size : end], view[end + -end % ALIGN :]
