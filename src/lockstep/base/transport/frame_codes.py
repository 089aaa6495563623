"""The authentication codes of frames, see `frames`."""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

CODE_BYTES = 16
"""Bytes of an authentication code."""
KEY_BYTES = 32
LARGE_BYTES = 1 << 10
"""From this size on, the code of a frame covers the SHA-256 of its content."""

_NUMBER_AND_LENGTH = struct.Struct(">QQ")


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """The keys of one connection, as one end uses them; `KEY_BYTES` each."""

    send: bytes
    receive: bytes


class FrameCodes:
    """The authentication codes of one direction. Frames are numbered from 0, so that each fits in one place only."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=CODE_BYTES)
        self.number = 0
        """The number of the next frame."""

    def next(self, size: int) -> "hashlib.blake2b":
        """The hash of the next frame. Its digest is the code of the length, and that of everything once it is updated
        with the content; see `content_hash`."""
        code = self._keyed.copy()
        code.update(_NUMBER_AND_LENGTH.pack(self.number, size))
        self.number += 1
        return code

    def of_frame(self, size: int, parts: "Iterable[bytes | bytearray | memoryview]") -> tuple[bytes, bytes]:
        """The codes of the next frame, all of which is known: that of its length, and that of everything."""
        code = self.next(size)
        of_length = code.digest()
        content = content_hash(code, size)
        for part in parts:
            content.update(part)
        if content is not code:
            code.update(content.digest())
        return of_length, code.digest()


def content_hash(code: "hashlib.blake2b", size: int) -> "hashlib.blake2b | hashlib._Hash":
    """The hash that takes the content of a frame: that of the code, or of a large frame one of its own, with whose
    digest the code is updated at the end."""
    return code if size < LARGE_BYTES else hashlib.sha256()
