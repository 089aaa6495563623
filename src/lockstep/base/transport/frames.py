"""Sends and receives frames over an authenticated connection, which `auth_handshake` opens.

A frame is an 8-byte length, a 16-byte authentication code of it, that many bytes, and a 16-byte code of everything. The
codes are BLAKE2b with a key that only the two ends of this connection have, one for each direction, over the frame's
number, its length and its content (of a large frame over the content's SHA-256, which processors compute faster). So a
relay that let the handshake pass cannot change, add, repeat, drop or reorder frames: the first frame that differs from
what the peer sent next closes the connection.
"""

import contextlib
import hashlib
import hmac
import logging
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Literal, Protocol

from lockstep.base.errors import PicklableError
from lockstep.base.transport.frame_codes import CODE_BYTES, FrameCodes, SessionKeys, content_hash

log = logging.getLogger(__name__)

MAX_FRAME = 4 << 30
"""The default limit of a frame, in bytes."""
BULK_BYTES = 64 << 10
"""The bytes of frames above this size are counted in `Connection.bulk_bytes` while they are transferred."""

READ_AHEAD = 32 << 10
"""Bytes read at a time when fewer are needed."""
JOINED_BYTES = 32 << 10
"""A frame below this size is written as one buffer."""

_LENGTH = struct.Struct(">Q")

Buffer = bytes | bytearray | memoryview
RefusalCode = Literal["token", "run", "generation", "protocol", "certificate"]


class WireError(PicklableError, ConnectionError):
    """A connection cannot be used, or no longer. Fields: the peer, and why."""

    error_code = "connection"

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"connection with {peer}: {why}")
        self.peer, self.why = peer, why


class ConnectionClosed(WireError):
    """The peer closed the connection, or the connection broke."""


class SendTimeout(WireError):
    """The peer has received no byte for too long. The connection is closed, because a frame may be incomplete."""


class FrameTooLarge(WireError):
    """A frame is larger than the limit. It is not sent; if the peer announces one, the connection is closed."""


class FrameRefused(WireError):
    """A frame is not what the peer sent next: it was changed, added, repeated or reordered on the way, or frames before
    it are missing. The connection is closed. `number` counts the frames of this direction from 0."""

    def __init__(self, peer: str, number: int, part: str) -> None:
        super().__init__(
            peer,
            f"the authentication code of frame {number} does not fit its {part}: something between the two processes "
            "changed, added, repeated or dropped data; the connection is closed",
        )
        self.number, self.part = number, part


class HandshakeRefused(WireError):
    """The handshake failed. `code` is the check that failed: `token`, `run`, `generation` (stale), `protocol` (another
    program or version) or `certificate` (TLS ends at another process)."""

    def __init__(self, peer: str, code: RefusalCode, why: str) -> None:
        super().__init__(peer, f"refused, {why}")
        self.code: RefusalCode = code

    @property
    def proven(self) -> bool:
        """Whether the refusing side proved that it has the run's token. Anybody can refuse for other reasons, so that
        these must end nothing but the attempt."""
        return self.code in ("run", "generation", "certificate")


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The process at the other end of a connection."""

    run: str
    generation: int
    name: str


class FrameSocket(Protocol):
    """What a connection needs of its non-blocking socket: that of TCP, or `tls.TlsSocket`."""

    def fileno(self) -> int: ...
    def setblocking(self, flag: bool, /) -> None: ...
    def sendmsg(self, buffers: list[Buffer], /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class Connection:
    """One authenticated connection. Any thread may send; one thread receives."""

    def __init__(self, sock: FrameSocket, peer: PeerIdentity, keys: SessionKeys, max_frame: int = MAX_FRAME) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.max_frame = max_frame
        self.bulk_bytes = 0
        """Bytes of large frames transferred so far, in both directions; grows while a frame is being transferred."""
        self.written_bytes = 0
        """All bytes written so far."""
        self._queued_bytes = 0
        self._socket = sock
        self._closed = False
        self._sending = threading.Lock()
        self._queueing = threading.Lock()
        """Held for a moment, so that frames leave in the order of their numbers."""
        self._outbox: deque[Buffer] = deque()
        self._sent_codes, self._received_codes = FrameCodes(keys.send), FrameCodes(keys.receive)
        self._header = bytearray(_LENGTH.size + CODE_BYTES)
        self._body: bytearray | None = None
        """The content of the frame in progress, and its code."""
        self._code = hashlib.blake2b()
        self._content = content_hash(self._code, 0)
        """The hashes of the frame in progress."""
        self._filled = self._hashed = 0
        self._ahead = memoryview(b"")
        """Bytes that were read from the socket and not consumed yet."""
        self._drained = False
        """Whether the last read emptied the socket."""

    @property
    def closed(self) -> bool:
        return self._closed

    def fileno(self) -> int:
        """Returns the socket's descriptor, for selectors; -1 after closing."""
        return self._socket.fileno()

    def queue(self, *parts: Buffer) -> tuple[int, int]:
        """Queues a frame, the concatenation of `parts`, for `flush`. Buffers must not change until they are written.
        Returns the values that `written_bytes` has when everything before it is written, and when all of it is.

        Raises:
            FrameTooLarge: nothing was queued.
            ConnectionClosed: the connection is closed.
        """
        size = sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in parts])
        if size > self.max_frame:
            raise FrameTooLarge(self.peer.name, f"a frame of {size} bytes is above the limit of {self.max_frame}")
        if self._closed:
            raise ConnectionClosed(self.peer.name, "the connection is closed")
        small = size < JOINED_BYTES
        if small:
            parts = (b"".join(parts),)
        else:  # without empty views, which would never count as sent
            parts = tuple([view for part in parts if (view := memoryview(part).cast("B")).nbytes])
        with self._queueing:
            of_length, code = self._sent_codes.of_frame(size, parts)
            frame = (_LENGTH.pack(size), of_length, *parts, code)
            self._outbox += (b"".join(frame),) if small else frame
            begin, self._queued_bytes = self._queued_bytes, self._queued_bytes + _LENGTH.size + size + 2 * CODE_BYTES
            return begin, self._queued_bytes

    def flush(self) -> bool:
        """Writes as much as the socket accepts without blocking. Returns whether everything is written.

        Raises:
            ConnectionClosed: the peer closed, or the connection broke.
        """
        with self._sending:
            return self._write()

    @property
    def pending(self) -> bool:
        """Whether `flush` has something left to write."""
        return bool(self._outbox)

    def send(self, *parts: Buffer, timeout_s: float = 30.0) -> None:
        """Sends one frame. Waits while the peer receives bytes.

        Raises:
            SendTimeout: the peer has received nothing for `timeout_s`; the connection is closed.
            ConnectionClosed: the peer closed, or the connection broke.
            FrameTooLarge: nothing was sent.
        """
        if not self._sending.acquire(timeout=timeout_s):
            raise SendTimeout(self.peer.name, f"another frame has been in transfer for {timeout_s:g} s")
        try:
            self.queue(*parts)
            while not self._write():
                if not _ready(self._socket, select.POLLOUT, timeout_s):
                    self.close()
                    raise SendTimeout(self.peer.name, f"received no byte for {timeout_s:g} s")
        finally:
            self._sending.release()

    def recv(self, timeout_s: float) -> bytearray | None:
        """The next frame, or None if it is not complete within `timeout_s` (0: only what has arrived already).

        Raises:
            ConnectionClosed: the peer closed, or the connection broke.
            FrameRefused: the frame is not what the peer sent; the connection is closed.
            FrameTooLarge: the peer announced a frame above the limit; the connection is closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            frame = self._read()
            if frame is not None:
                return frame
            left = deadline - time.monotonic()
            if left <= 0 or not _ready(self._socket, select.POLLIN, left):
                return None

    def frames(self) -> Iterator[bytearray]:
        """Frames that have arrived; the last ones may be left for the next call. Raises the same errors as `recv`."""
        self._drained = False
        while (frame := self._read()) is not None:
            yield frame
            if self._drained and not self._ahead:
                return

    def close(self) -> None:
        """Closes both directions and wakes threads that wait on the connection. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _write(self) -> bool:
        while self._outbox:
            views = list(islice(self._outbox, 16))
            try:
                sent = self._socket.sendmsg(views)
            except (BlockingIOError, InterruptedError):
                return False
            except OSError as error:
                self.close()
                raise ConnectionClosed(self.peer.name, os_error_reason(error)) from None
            self.written_bytes += sent
            if sent >= BULK_BYTES or len(views[0]) >= BULK_BYTES:
                self.bulk_bytes += sent
            for view in views:
                if sent < len(view):
                    self._outbox[0] = memoryview(view)[sent:]
                    break
                sent -= len(view)
                self._outbox.popleft()
        return True

    def _read(self) -> bytearray | None:
        """Continues the frame in progress; returns it when it is complete and verified."""
        if self._body is None:
            if not self._filled:
                if not self._ahead and not self._receive(memoryview(self._header)):
                    return None
                if (frame := self._read_ahead()) is not None:
                    return frame
            if not self._fill(self._header):
                return None
            size = self._begin(self._header)
            self._body, self._filled, self._hashed = bytearray(size + CODE_BYTES), 0, 0
        complete = self._fill(self._body)
        self._hash_arrived(self._body)
        if not complete:
            return None
        body, self._body, self._filled = self._body, None, 0
        self._verify(body[-CODE_BYTES:])
        del body[-CODE_BYTES:]
        return body

    def _read_ahead(self) -> bytearray | None:
        """The next frame if all of it has been read ahead, as small ones usually are."""
        ahead, start = self._ahead, len(self._header)
        if len(ahead) < start:
            return None
        size: int = _LENGTH.unpack_from(ahead)[0]
        end = start + size
        if len(ahead) < end + CODE_BYTES or size > self.max_frame:
            return None
        content = ahead[start:end]
        of_length, code = self._received_codes.of_frame(size, (content,))
        if not hmac.compare_digest(ahead[_LENGTH.size : start], of_length):
            raise self._refuse("length")
        if not hmac.compare_digest(ahead[end : end + CODE_BYTES], code):
            raise self._refuse("content")
        self._ahead = ahead[end + CODE_BYTES :]
        return bytearray(content)

    def _begin(self, header: bytearray | memoryview) -> int:
        """Verifies the length of a frame before memory is taken for it, and returns it."""
        size: int = _LENGTH.unpack_from(header)[0]
        self._code = self._received_codes.next(size)
        if not hmac.compare_digest(header[_LENGTH.size : _LENGTH.size + CODE_BYTES], self._code.digest()):
            raise self._refuse("length")
        if size > self.max_frame:
            self.close()
            raise FrameTooLarge(self.peer.name, f"announced {size} bytes, the limit is {self.max_frame}")
        self._content = content_hash(self._code, size)
        return size

    def _verify(self, code: bytearray | memoryview) -> None:
        """Verifies the code of a frame whose content has been hashed."""
        if self._content is not self._code:
            self._code.update(self._content.digest())
        if not hmac.compare_digest(code, self._code.digest()):
            raise self._refuse("content")

    def _hash_arrived(self, body: bytearray) -> None:
        """Hashes what has arrived of the content while the rest is on the way."""
        end = min(self._filled, len(body) - CODE_BYTES)
        if end > self._hashed:
            with memoryview(body) as view:
                self._content.update(view[self._hashed : end])
            self._hashed = end

    def _refuse(self, part: str) -> FrameRefused:
        """Closes the connection because of a frame that the peer did not send."""
        self.close()
        self._filled, self._ahead = 0, memoryview(b"")
        refused = FrameRefused(self.peer.name, self._received_codes.number - 1, part)
        log.warning("%s", refused)
        return refused

    def _fill(self, buffer: bytearray) -> bool:
        view = memoryview(buffer)
        while self._filled < len(buffer):
            rest, before = view[self._filled :], self._filled
            if not self._ahead and not self._receive(rest):
                return False
            if self._ahead:
                part = self._ahead[: len(rest)]
                rest[: len(part)] = part
                self._filled, self._ahead = self._filled + len(part), self._ahead[len(part) :]
            if len(buffer) > BULK_BYTES:
                self.bulk_bytes += self._filled - before
        return True

    def _receive(self, rest: memoryview) -> bool:
        """Reads into `rest` if that is long, else reads ahead of it. Returns whether anything was read."""
        try:
            if len(rest) >= READ_AHEAD:
                received = self._socket.recv_into(rest)
                self._filled += received
                self._drained = received < len(rest)
            else:
                self._ahead = memoryview(self._socket.recv(READ_AHEAD))
                received = len(self._ahead)
                self._drained = received < READ_AHEAD
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close()
            raise ConnectionClosed(self.peer.name, os_error_reason(error)) from None
        if received == 0:
            self.close()
            raise ConnectionClosed(self.peer.name, "the peer closed it")
        return True


def _ready(sock: FrameSocket, event: int, timeout_s: float) -> bool:
    """Whether the socket becomes ready in time; also true after an error, which the next call reports."""
    if sock.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(sock, event)
    return bool(poller.poll(max(0, int(timeout_s * 1000) + 1)))


def os_error_reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
