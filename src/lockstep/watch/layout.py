"""Records of fixed layout in a mapped file, written by one process and read by others without locks.

Every record is framed by its write number, first and last (`front body back`), and written by one `pack_into`. A
record is valid when front equals back and two successive copies agree; this detects a copy made during a write as
well as a writer that died in the middle of one.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator
from typing import Any

NUMBER = struct.Struct("<Q")
EMPTY = 1
"""The write number of a record that has not been written yet; zero is a record in the middle of its writing."""

Memory = mmap.mmap | memoryview


def fit(text: str, size: int) -> bytes:
    raw = text.encode("utf-8", "replace")
    return raw if len(raw) <= size else raw[:size]


def text_of(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "ignore")


def clear(memory: Memory, at: int, layout: struct.Struct) -> None:
    """Frames a record as empty."""
    for end in (at, at + layout.size - NUMBER.size):
        NUMBER.pack_into(memory, end, EMPTY)


class Slot:
    """One record of the mapped file."""

    __slots__ = ("layout", "memory", "number", "offset")

    def __init__(self, memory: Memory, offset: int, layout: struct.Struct) -> None:
        self.memory, self.offset, self.layout, self.number = memory, offset, layout, EMPTY

    def write(self, *fields: object) -> None:
        self.number += 1
        self.layout.pack_into(self.memory, self.offset, self.number, *fields, self.number)


class Reading:
    """Two copies of a part of a file that begins at `start`, and the means to copy a record again that changed between
    them."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self.descriptor, self.start = descriptor, start
        self.first, self.second = os.pread(descriptor, size, start), os.pread(descriptor, size, start)
        self._patience = 20
        """Milliseconds that all records together may be waited for."""
        self.torn = 0

    @property
    def complete(self) -> int:
        """Bytes that both copies have."""
        return min(len(self.first), len(self.second))

    def number(self, offset: int) -> int:
        """A single number, which has no frame; its writer stores it at once."""
        return int.from_bytes(self.second[offset - self.start : offset - self.start + 8], "little")

    def record(self, offset: int, layout: struct.Struct, expected: int = 0) -> tuple[int, tuple[Any, ...]] | None:
        """Write number and fields of a record, None when it was never written or is torn.

        With `expected`, only the record of that write number counts; one that has been overwritten is None."""
        at = offset - self.start
        end = at + layout.size
        older, newer = self.first[at:end], self.second[at:end]
        tries = 0
        while True:
            front = newer[:8]
            if older == newer and front == newer[-8:]:  # all zero: `pack_into` clears before it writes
                number = int.from_bytes(front, "little")
                if number and expected:
                    return (number, layout.unpack(newer)[1:-1]) if number == expected else None
                if number:
                    return None if number == EMPTY else (number - EMPTY, layout.unpack(newer)[1:-1])
            tries += 1
            if tries > 20:  # a writer that lost its CPU in the middle gets it back; a stopped or dead one does not
                if self._patience == 0:
                    break
                self._patience -= 1
                time.sleep(1e-3)
            older, newer = newer, os.pread(self.descriptor, layout.size, offset)
        self.torn += 1
        return None

    def records(
        self, offset: int, stride: int, count: int, layout: struct.Struct
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        for i in range(count):
            found = self.record(offset + i * stride, layout)
            if found is not None:
                yield found
