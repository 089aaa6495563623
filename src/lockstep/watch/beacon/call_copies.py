"""Copies of the calls in a beacon's rings, as they are stored. An agent that passes calls on copies them faster
than it could decode them; the reader of a timeline decodes them."""

from collections.abc import Iterator, Mapping

from lockstep.watch.beacon.beacon_records import (
    CALL_STRUCT,
    CALL_WORDS,
    FLAG_UNSURE,
    LEFT_WORD,
    CallRecord,
    RecordReader,
)
from lockstep.watch.beacon.call_ring_reader import call_at, calls_written, decode_call, read_ring

CALL_BYTES = CALL_STRUCT.size


def copy_calls(reading: RecordReader, slot: int, newest: int) -> bytes:
    """The records of the newest calls on a communicator, oldest first, of which torn and overwritten ones are zero.
    `reading` has the fixed part of the beacon."""
    written = calls_written(reading, slot)
    first, ring, data = read_ring(reading, slot, written, newest)
    numbers, words = list(range(first, written + 1)), memoryview(data).cast("Q")
    fronts, backs = words[::CALL_WORDS].tolist(), words[CALL_WORDS - 1 :: CALL_WORDS].tolist()
    if ring.first == ring.second and fronts == numbers == backs:
        return data
    found = [ring.record(call_at(slot, number), CALL_STRUCT, number) for number in numbers]
    return b"".join(CALL_STRUCT.pack(each[0], *each[1], each[0]) if each else bytes(CALL_BYTES) for each in found)


def unreturned_calls(data: bytes) -> set[int]:
    """The numbers of the copied calls that have not returned."""
    words = memoryview(data).cast("Q")
    left = words[LEFT_WORD::CALL_WORDS].tolist()
    if 0 not in left:
        return set()
    numbers = words[::CALL_WORDS].tolist()
    return {number for number, at in zip(numbers, left, strict=True) if number and not at}


def text_numbers(data: bytes) -> set[int]:
    """The numbers of the texts of copied calls: labels, call sites and stages."""
    words = memoryview(data).cast("Q")
    about = set(words[CALL_WORDS - 3 :: CALL_WORDS].tolist())
    stages = set(words[CALL_WORDS - 2 :: CALL_WORDS].tolist())
    return {each & 0xFFFFFFFF for each in about} | {each >> 32 for each in about | stages}


def unpack_calls(data: bytes, texts: Mapping[int, str]) -> Iterator[CallRecord]:
    """Decodes copied calls, without torn and unsure ones.

    Args:
        texts: by number, for any number.

    Raises:
        struct.error: the data is not that of whole calls.
    """
    for number, *fields, back in CALL_STRUCT.iter_unpack(data):
        if number == back != 0 and not fields[7] & FLAG_UNSURE:
            yield decode_call(number, tuple(fields), texts)
