"""Reads the part of a beacon about communicators, which `call_ring` writes, from another process."""

from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.watch.beacon.beacon_records import (
    BLIND_AT,
    CALL_STRUCT,
    CALLS_AT,
    CALLS_PER_RING,
    COMMUNICATOR_STRIDE,
    COMMUNICATOR_STRUCT,
    COMMUNICATORS_AT,
    COUNTS_AT,
    COUNTS_STRUCT,
    FLAG_ASYNC,
    FLAG_CLOSED,
    FLAG_COUNTED,
    FLAG_DEVICE,
    FLAG_FAILED,
    FLAG_P2P,
    FLAG_REFUSED,
    FLAG_UNSURE,
    FLAGS_AT,
    MAX_TEXTS,
    PEER_SHIFT,
    RING_BYTES,
    RINGS_AT,
    SEPARATOR,
    TEXT_STRUCT,
    TEXTS_AT,
    USED_AT,
    CallRecord,
    CommunicatorRecord,
    RecordReader,
    decode_text,
)
from lockstep.watch.beacon.message_lanes import lane_records

NEWEST_CALLS = 16
"""The number of calls that are decoded whenever a beacon is read; `decode_calls` reads more."""


def used_slots(reading: RecordReader) -> int:
    """The number of slots that have been used."""
    return min(reading.number(USED_AT), (reading.complete - COMMUNICATORS_AT) // COMMUNICATOR_STRIDE)


def read_communicators(reading: RecordReader, newest: int = NEWEST_CALLS) -> tuple[CommunicatorRecord, ...]:
    """Decodes the communicators of a beacon, of which `reading` has the fixed part; then the messages between each two
    members, see `CommunicatorRecord.pair`. With `newest` 0, calls and messages are left out."""
    texts = TextTable(reading)
    found = (
        _decode_communicator(reading, COMMUNICATORS_AT + slot * COMMUNICATOR_STRIDE, slot, texts, newest)
        for slot in range(used_slots(reading))
    )
    communicators = tuple(each for each in found if each is not None)
    if not newest:
        return communicators
    return communicators + tuple(lane_records(reading, {each.slot: each for each in communicators}, texts))


def count_calls(reading: RecordReader) -> int:
    """The number of calls that were recorded on all communicators together."""
    slots = range(used_slots(reading))
    return sum(calls_written(reading, slot) for slot in slots)


def calls_written(reading: RecordReader, slot: int) -> int:
    """The number of calls on a communicator."""
    return reading.number(COMMUNICATORS_AT + slot * COMMUNICATOR_STRIDE + CALLS_AT)


def decode_calls(reading: RecordReader, slot: int, newest: int) -> tuple[CallRecord, ...]:
    """The newest calls on a communicator, oldest first, without torn, overwritten and unsure ones."""
    return tuple(_iter_calls(reading, TextTable(reading), slot, calls_written(reading, slot), newest))


class TextTable(dict[int, str]):
    """The texts of a beacon by number; each is read when it is needed, and is empty if it has been overwritten."""

    def __init__(self, reading: RecordReader) -> None:
        super().__init__({0: ""})
        self._descriptor = reading.descriptor

    def __missing__(self, number: int) -> str:
        at = TEXTS_AT + (number % MAX_TEXTS) * TEXT_STRUCT.size
        found = RecordReader(self._descriptor, at, TEXT_STRUCT.size).record(at, TEXT_STRUCT, number)
        text = self[number] = decode_text(found[1][0]) if found else ""
        return text


def call_at(slot: int, number: int) -> int:
    """Where the call with this number is stored."""
    return RINGS_AT + slot * RING_BYTES + (number - 1) % CALLS_PER_RING * CALL_STRUCT.size


def read_ring(reading: RecordReader, slot: int, written: int, newest: int) -> tuple[int, RecordReader, bytes]:
    """Copies the newest of `written` calls: the number of the first one, the copies, and the newer copy in order."""
    first = max(1, written - min(newest, CALLS_PER_RING) + 1)
    start, size = call_at(slot, first), (written - first + 1) * CALL_STRUCT.size
    ring_at = RINGS_AT + slot * RING_BYTES
    if start + size <= ring_at + RING_BYTES:
        ring = RecordReader(reading.descriptor, start, size)
        return first, ring, ring.second
    ring = RecordReader(reading.descriptor, ring_at, RING_BYTES)
    return first, ring, (ring.second[start - ring_at :] + ring.second)[:size]


def _iter_calls(
    reading: RecordReader, texts: Mapping[int, str], slot: int, written: int, newest: int
) -> Iterator[CallRecord]:
    if not newest:
        return
    first, ring, _ = read_ring(reading, slot, written, newest)
    for number in range(first, written + 1):
        found = ring.record(call_at(slot, number), CALL_STRUCT, number)
        if found is not None and not found[1][7] & FLAG_UNSURE:
            yield decode_call(*found, texts)
    reading.torn += ring.torn


def decode_call(number: int, fields: tuple[Any, ...], texts: Mapping[int, str]) -> CallRecord:
    """Decodes the fields of CALL_STRUCT between the numbers."""
    seq, issued, entered, left, signature, label, site, flags, context = fields
    operation, dtype, root_text, module, shapes = (*texts[label].split(SEPARATOR), "", "", "", "")[:5]
    root = int(root_text) if root_text.isascii() and root_text.isdigit() else None
    return CallRecord(
        number, seq, issued, signature, operation, shapes, dtype, root, texts[site],
        texts[context], module, entered, left, bool(flags & FLAG_P2P), bool(flags & FLAG_ASYNC),
        bool(flags & FLAG_FAILED),
        bool(flags & FLAG_REFUSED), (flags >> PEER_SHIFT) - 1 if flags >> PEER_SHIFT else None,
    )  # fmt: skip


def _decode_communicator(
    reading: RecordReader, at: int, slot: int, texts: Mapping[int, str], newest: int
) -> CommunicatorRecord | None:
    found = reading.record(at, COMMUNICATOR_STRUCT)
    if found is None:
        return None
    identity, members, created, size, rank, loop, name, description, backend = found[1]
    flags = reading.number(at + FLAGS_AT)
    counts = reading.record(at + COUNTS_AT, COUNTS_STRUCT)
    counted, number = bool(flags & FLAG_COUNTED), reading.number(at + CALLS_AT)
    calls = list(_iter_calls(reading, texts, slot, number, newest))
    collectives = [call for call in calls if not call.p2p]
    last = collectives[-1] if collectives else None
    merged = _merge_counts(collectives, counts[1] if counts else (-1, -1, -1, 0, 0), counted)
    completed = merged[2]
    if collectives and -1 < completed < collectives[0].seq - 1:  # the process is far ahead of its device
        calls = list(_iter_calls(reading, texts, slot, number, CALLS_PER_RING))
        collectives = [call for call in calls if not call.p2p]
    waiting = [call for call in calls if call.inside]
    unfinished = [call for call in collectives if not (call.failed or call.refused) and call.seq > completed > -1]
    if not waiting and counted:
        waiting = [call for call in unfinished if call.asynchronous]
    first = unfinished[0].entered_ns if unfinished and unfinished[0].seq == completed + 1 else 0
    return CommunicatorRecord(
        slot, decode_text(name), decode_text(description), decode_text(backend), size, rank, identity, members, created,
        loop, bool(flags & FLAG_CLOSED), bool(reading.number(at + BLIND_AT)), counted, *merged,
        counts[1][1] if counts else -1, first, bool(flags & FLAG_DEVICE),
        last.issued if last else 0, calls[-1] if calls else None,
        waiting[0] if waiting else None,
        unsure=number > (calls[-1].number if calls else 0),
    )  # fmt: skip


def _merge_counts(
    collectives: list[CallRecord], counts: tuple[int, int, int, int, int], counted: bool
) -> tuple[int, int, int, int]:
    """Merges entered and completed, with their times, from both sources."""
    entered, _, completed, entered_ns, completed_ns = counts
    lowest = 0 if counted else -1
    entered, completed = max(entered, lowest), max(completed, lowest)
    for call in collectives:
        if call.refused:
            continue
        if call.seq >= entered:
            entered, entered_ns = call.seq, call.entered_ns
        if call.left_ns and not call.failed and not call.asynchronous and call.seq >= completed:
            completed, completed_ns = call.seq, call.left_ns
    return entered, entered_ns, completed, completed_ns
