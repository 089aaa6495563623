"""The control block of a store: which buffer holds which version, readable at any moment.

A commit record lies in one of two slots, each with its own checksum; a new one goes over the older slot. A reader
takes the newest valid one, so it sees the old version or the new one and never something between, wherever the
writer was killed.
"""

import mmap
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from lockstep.weights.errors import NoStore

_MAGIC = b"LOCKSTEPW1"
_HEADER = struct.Struct("<16s64sI")  # magic, plan digest, writers
_RECORD = struct.Struct("<QQqI")  # sequence, generation, version, buffer
_CLAIM = struct.Struct("<Q")
_CRC = struct.Struct("<I")
_CLAIM_AT, _RECORDS_AT, _SIZE = 128, (192, 256), 4096


@dataclass(frozen=True, slots=True)
class Commit:
    """A version that can be read."""

    sequence: int
    generation: int
    version: int
    buffer: int
    """0 or 1."""


class Control:
    """The mapped control file of a store."""

    def __init__(self, path: Path, writable: bool) -> None:
        """Raises NoStore where there is none."""
        self.path = path
        try:
            with path.open("r+b" if writable else "rb") as file:
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                self._memory = mmap.mmap(file.fileno(), _SIZE, access=access)
        except (FileNotFoundError, ValueError) as error:
            raise NoStore(path.parent, f"no store of weights here ({error})") from error
        header = self._read(0, _HEADER)
        if header is None or header[0].rstrip(b"\0") != _MAGIC:
            raise NoStore(path.parent, "its control block is damaged or of another version of Lockstep")
        self.digest = header[1].decode("ascii")
        self.writers = int(header[2])

    @staticmethod
    def create(path: Path, digest: str, writers: int) -> None:
        """Writes a fresh control file, visible only when whole."""
        block = bytearray(_SIZE)
        body = _HEADER.pack(_MAGIC, digest.encode("ascii"), writers)
        block[: len(body) + _CRC.size] = body + _CRC.pack(zlib.crc32(body))
        scratch = path.with_name(path.name + ".new")
        scratch.write_bytes(block)
        scratch.replace(path)

    @property
    def generation(self) -> int:
        """The one in charge, 0 before the first."""
        found = self._read(_CLAIM_AT, _CLAIM)
        return int(found[0]) if found else 0

    def claim(self, generation: int) -> None:
        self._write(_CLAIM_AT, _CLAIM.pack(generation))

    def newest(self) -> Commit | None:
        """The version that is current."""
        found = [Commit(*map(int, record)) for at in _RECORDS_AT if (record := self._read(at, _RECORD))]
        return max(found, key=lambda commit: commit.sequence, default=None)

    def commit(self, generation: int, version: int, buffer: int) -> None:
        last = self.newest()
        sequence = last.sequence + 1 if last else 1
        self._write(_RECORDS_AT[sequence % 2], _RECORD.pack(sequence, generation, version, buffer))

    def _read(self, at: int, layout: struct.Struct) -> tuple[bytes, ...] | None:
        """The record at that place, None where it is empty or half-written."""
        raw = self._memory[at : at + layout.size + _CRC.size]
        body = raw[: layout.size]
        if not any(raw) or _CRC.unpack(raw[layout.size :])[0] != zlib.crc32(body):
            return None
        return layout.unpack(body)

    def _write(self, at: int, body: bytes) -> None:
        self._memory[at : at + len(body) + _CRC.size] = body + _CRC.pack(zlib.crc32(body))

    def close(self) -> None:
        self._memory.close()
