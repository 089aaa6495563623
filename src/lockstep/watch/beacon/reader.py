"""Reads the beacons of one process or of a run, once or repeatedly, without cooperation of the writers."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.base.folders import open_own_file, run_shm_dir
from lockstep.base.wait_state import WaitRecord
from lockstep.watch.beacon import call_ring_reader
from lockstep.watch.beacon.beacon_records import (
    BEAT_AT,
    CALLS_PER_RING,
    COMMUNICATOR_STRIDE,
    COMMUNICATORS_AT,
    COUNTER_STRUCT,
    COUNTERS_AT,
    EVENT_STRUCT,
    EVENTS_AT,
    FIXED_SIZE,
    HEADER_STRUCT,
    MAGIC,
    MAX_COMMUNICATORS,
    MAX_COUNTERS,
    MAX_EVENTS,
    MAX_WAITS,
    STAGE_AT,
    STAGE_STRUCT,
    UNRECORDED_AT,
    USED_AT,
    VERSION,
    WAIT_STRUCT,
    WAITS_AT,
    BeaconEvent,
    BeaconSpan,
    BeaconState,
    CallRecord,
    ProgressCounter,
    RecordReader,
    decode_text,
)
from lockstep.watch.beacon.call_copies import copy_calls
from lockstep.watch.beacon.call_ring_reader import NEWEST_CALLS
from lockstep.watch.beacon.span_ring import read_spans, spans_written


def read_beacons(run: str, events: bool = True) -> list[BeaconState]:
    """All readable beacons of a run, ordered by name. Other and incomplete files are left out."""
    folder = run_shm_dir(run)
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".beacon")
    except OSError:  # the run has not begun, or has just ended
        return []
    states = (read_beacon(path, events) for path in paths)
    return [state for state in states if state is not None]


def other_versions(run: str) -> set[int]:
    """The versions of a run's beacons that are not read, because another Lockstep wrote them."""
    found: set[int] = set()
    for path in run_shm_dir(run).glob("*.beacon"):
        try:
            with os.fdopen(open_own_file(path), "rb") as file:
                head = file.read(len(MAGIC) + 4)
        except OSError:
            continue
        if head.startswith(MAGIC) and len(head) == len(MAGIC) + 4:
            found.add(int.from_bytes(head[len(MAGIC) :], "little"))
    return found - {VERSION}


def read_beacon(path: Path, events: bool = True) -> BeaconState | None:
    """Reads one beacon; None if the file is missing, too short, or not a beacon of this version. Reading without events
    takes a third of the time."""
    with _open_beacon_file(path) as reading:
        return (
            None
            if reading is None
            else _decode_beacon(path, HEADER_STRUCT.unpack_from(reading.second), reading, events)
        )


def read_calls(path: Path, slot: int, newest: int = CALLS_PER_RING) -> tuple[CallRecord, ...]:
    """The newest calls (at most 256) on the communicator in this slot, oldest first."""
    with _open_beacon_file(path) as reading:
        return () if reading is None else call_ring_reader.decode_calls(reading, slot, newest)


class OpenedBeacon:
    """A beacon of which the fixed part has been read, and whose rings are read from the same file."""

    def __init__(self, path: Path, reading: RecordReader) -> None:
        self._reading = reading
        self.state = _decode_beacon(path, HEADER_STRUCT.unpack_from(reading.second), reading, False, newest_calls=0)
        """Without events, and without calls and messages."""
        self.texts = call_ring_reader.TextTable(reading)
        """The texts of calls by number."""
        self.spans_written = spans_written(reading)
        """The number of spans that the process has recorded."""

    def spans(self, after: int) -> list[BeaconSpan]:
        """The spans after this number, oldest first."""
        return list(read_spans(self._reading, after))

    def calls_written(self, slot: int) -> int:
        """The number of calls that were made on the communicator in this slot."""
        return call_ring_reader.calls_written(self._reading, slot)

    def copy_calls(self, slot: int, newest: int) -> bytes:
        """The newest calls on the communicator in this slot, oldest first, as they are stored (`call_copies`)."""
        return copy_calls(self._reading, slot, newest)


@contextlib.contextmanager
def opened_beacon(path: Path) -> Iterator[OpenedBeacon | None]:
    """Opens a beacon for reading its rings; yields None if there is none, as `read_beacon`."""
    with _open_beacon_file(path) as reading:
        yield None if reading is None else OpenedBeacon(path, reading)


class BeaconReader:
    """Reads the beacons of a run repeatedly, without their events. An unchanged beacon is not decoded again."""

    def __init__(self, run: str) -> None:
        self._folder = run_shm_dir(run)
        self._decoded: dict[Path, tuple[bytes, BeaconState]] = {}

    def read(self) -> list[BeaconState]:
        """All readable beacons, ordered by name."""
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.suffix == ".beacon")
        except OSError:
            return []
        for removed in self._decoded.keys() - set(paths):
            del self._decoded[removed]
        states = (self._read_one(path) for path in paths)
        return [state for state in states if state is not None]

    def _read_one(self, path: Path) -> BeaconState | None:
        with _open_beacon_file(path) as reading:
            if reading is None:
                return None
            known, beat_end = self._decoded.get(path), BEAT_AT + 8
            data = reading.second
            if known is not None and data[:BEAT_AT] == known[0][:BEAT_AT] and data[beat_end:] == known[0][beat_end:]:
                return replace(known[1], beat_ns=reading.number(BEAT_AT))
            state = _decode_beacon(path, HEADER_STRUCT.unpack_from(data), reading, with_events=False)
            if state.torn:
                self._decoded.pop(path, None)
            else:
                self._decoded[path] = data, state
            return state


@contextlib.contextmanager
def _open_beacon_file(path: Path) -> Iterator[RecordReader | None]:
    """Opens a beacon and copies its fixed part; yields None if the file is not a beacon of this version, or
    not of this user."""
    try:
        descriptor = open_own_file(path)
    except OSError:
        yield None
        return
    try:
        yield _read_checked(descriptor)
    finally:
        os.close(descriptor)


def _read_checked(descriptor: int) -> RecordReader | None:
    try:
        used = min(int.from_bytes(os.pread(descriptor, 8, USED_AT), "little"), MAX_COMMUNICATORS)
        wanted = COMMUNICATORS_AT + used * COMMUNICATOR_STRIDE
        reading = RecordReader(descriptor, 0, wanted)
    except OSError:
        return None
    if reading.complete != wanted or reading.first[:8] != MAGIC:
        return None
    _, version, size, *_ = HEADER_STRUCT.unpack_from(reading.second)
    return reading if (version, size) == (VERSION, FIXED_SIZE) else None


def _decode_beacon(
    path: Path, header: tuple[Any, ...], reading: RecordReader, with_events: bool, newest_calls: int = NEWEST_CALLS
) -> BeaconState:
    progress_count = 0
    stage, stage_since = "", 0
    for number, (since, name) in reading.records(STAGE_AT, 0, 1, STAGE_STRUCT):
        progress_count, stage, stage_since = progress_count + number, decode_text(name), since
    counters = {}
    for number, (value, total, updated, name) in reading.records(COUNTERS_AT, 96, MAX_COUNTERS, COUNTER_STRUCT):
        progress_count += number
        counters[decode_text(name)] = ProgressCounter(value, None if total == -1 else total, updated)
    waits = [
        WaitRecord(
            decode_text(kind),
            decode_text(waits_for),
            decode_text(why),
            since,
            deadline or None,
            moved,
            thread,
            decode_text(thread_name),
        )
        for _, (thread, since, deadline, moved, kind, waits_for, why, thread_name) in reading.records(
            WAITS_AT, 384, MAX_WAITS, WAIT_STRUCT
        )
        if since
    ]
    events = [
        BeaconEvent(number, at, decode_text(kind), decode_text(text))
        for number, (at, kind, text) in reading.records(EVENTS_AT, 128, MAX_EVENTS if with_events else 0, EVENT_STRUCT)
    ]
    communicators = call_ring_reader.read_communicators(reading, newest_calls)
    progress_count += call_ring_reader.count_calls(reading)
    _, _, _, pid, rank, start, created_ns, created_wall, run, name, role, parent = header
    return BeaconState(
        path, decode_text(run), decode_text(name), decode_text(role), rank, pid, start, created_ns, created_wall,
        reading.number(BEAT_AT), stage, stage_since, counters,
        tuple(sorted(waits, key=lambda wait: wait.display_order(pid))),
        tuple(sorted(events, key=lambda event: event.number)), communicators, progress_count,
        reading.number(UNRECORDED_AT), reading.torn, decode_text(parent),
    )  # fmt: skip
