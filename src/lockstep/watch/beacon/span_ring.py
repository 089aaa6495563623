"""The ring of a beacon with what its process has finished doing: stages, waits, micro-batches, requests, weight sync.

A span is written once, when it ends, by one `pack_into`; what has not ended yet is in the records of the stage and of
the waits. The ring keeps the newest `MAX_SPANS`, and readers notice how many they have missed.
"""

from collections.abc import Iterator
from enum import IntEnum

from lockstep.watch.beacon.beacon_records import (
    MAX_SPANS,
    SPAN_STRUCT,
    SPANS_AT,
    SPANS_WRITTEN_AT,
    UINT64,
    BeaconSpan,
    MappedMemory,
    RecordReader,
    decode_text,
    encode_text,
)


class SpanKind(IntEnum):
    """What a process did. The numbers are stored, so they never change."""

    STAGE = 1
    WAIT = 2
    UNIT = 3
    """One of successive units of work, such as a micro-batch."""
    REQUEST = 4
    """A request of an engine, from its submission to its completion; requests overlap."""
    WEIGHTS = 5
    """Weights were sent or received."""


class SpanWriter:
    """Writes the spans of one process. The caller holds the lock of the beacon."""

    def __init__(self, memory: MappedMemory) -> None:
        self._memory, self._written = memory, 0

    def write(self, kind: int, name: str, began_ns: int, ended_ns: int, amount: int = 0, thread: str = "") -> None:
        self._written = number = self._written + 1
        SPAN_STRUCT.pack_into(
            self._memory, SPANS_AT + (number - 1) % MAX_SPANS * SPAN_STRUCT.size, number, began_ns, ended_ns, kind,
            amount, encode_text(name, 80), encode_text(thread, 32), number,
        )  # fmt: skip
        UINT64.pack_into(self._memory, SPANS_WRITTEN_AT, number)


def spans_written(reading: RecordReader) -> int:
    """The number of spans that the process has recorded, of which `reading` has the fixed part."""
    return reading.number(SPANS_WRITTEN_AT)


def read_spans(reading: RecordReader, after: int = 0, newest: int = MAX_SPANS) -> Iterator[BeaconSpan]:
    """The spans after number `after`, at most the newest ones, oldest first, without torn and overwritten ones."""
    written = spans_written(reading)
    first = max(after + 1, written - min(newest, MAX_SPANS) + 1, 1)
    low, high = (first - 1) % MAX_SPANS, (written - 1) % MAX_SPANS + 1
    if first > written:
        return
    if low >= high:
        low, high = 0, MAX_SPANS
    size = SPAN_STRUCT.size
    ring = RecordReader(reading.descriptor, SPANS_AT + low * size, (high - low) * size)
    for number in range(first, written + 1):
        found = ring.record(SPANS_AT + (number - 1) % MAX_SPANS * size, SPAN_STRUCT, number)
        if found is not None:
            began, ended, kind, amount, name, thread = found[1]
            yield BeaconSpan(number, kind, decode_text(name), began, ended, amount, decode_text(thread))
