"""Beacons: what a process does now, in shared memory, readable when the process itself can no longer answer.

A beacon is one small file of fixed layout, mapped into its writer, at `<base>/<run>/<name>.beacon` where base is
`$LOCKSTEP_BEACONS`, else `/dev/shm/lockstep`, else a folder in the temporary directory. Readers copy the file; they
need no help from the writer, which may be stopped, wedged or dead.

The records are those of `layout`; the communicators and calls those of `tape`.
"""

import contextlib
import mmap
import os
import re
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lockstep.watch import tape as tapes
from lockstep.watch.folders import base_dir, make_run_dir, new_run_id, run_dir
from lockstep.watch.layout import EMPTY, NUMBER, Reading, Slot, clear, fit, text_of
from lockstep.watch.procs import alive, process_state, start_ticks
from lockstep.watch.records import BeaconState, CallRecord, CommunicatorRecord, Counter, Event, WaitRecord

__all__ = [
    "Beacon",
    "BeaconState",
    "CallRecord",
    "CommunicatorRecord",
    "Counter",
    "Event",
    "WaitRecord",
    "alive",
    "base_dir",
    "close_beacon",
    "current",
    "make_run_dir",
    "new_run_id",
    "open_beacon",
    "process_state",
    "read_beacon",
    "read_beacons",
    "read_calls",
    "run_dir",
    "start_ticks",
]

MAGIC = b"LOCKSTEP"
VERSION = 3
COUNTERS = 24
WAITS = 16
EVENTS = 128

_HEADER = struct.Struct(
    "<8sIIIiQQd64s96s32s"
)  # magic version size pid rank start created_ns created_wall run name role
_STAGE = struct.Struct("<QQ96sQ")  # front since_ns stage back
_COUNTER = struct.Struct("<QqqQ40sQ")  # front value total updated_ns name back
_WAIT = struct.Struct(
    "<QQQQQ24s96s160s32sQ"
)  # front thread since_ns deadline_ns moved_ns kind whom why thread_name back
_EVENT = struct.Struct("<QQ24s72sQ")  # front at_ns kind text back

_BEAT_AT = 512
_STAGE_AT = 576
_COUNTERS_AT = 768
_WAITS_AT = _COUNTERS_AT + COUNTERS * 96
_COMMUNICATORS_AT = _WAITS_AT + WAITS * 384
_EVENTS_AT = _COMMUNICATORS_AT + tapes.COMMUNICATORS_BYTES
_TAPE_AT = _EVENTS_AT + EVENTS * 128
SIZE = _TAPE_AT
"""What a reader copies at once; the rings of calls behind it are read where they are needed."""
FILE_SIZE = SIZE + tapes.TAPE_BYTES

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}")


class Beacon:
    """The writing end; all methods may be called from any thread and cost about a microsecond."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.path = path
        self._inode = path.stat().st_ino
        self._memory = memory
        self._lock = threading.RLock()  # reentrant: a signal handler may write while its thread writes
        self._stage = Slot(memory, _STAGE_AT, _STAGE)
        self._counters: dict[str, tuple[Slot, int, int | None]] = {}
        self._waits = [Slot(memory, _WAITS_AT + 384 * i, _WAIT) for i in range(WAITS)]
        self._free = list(range(WAITS - 1, -1, -1))
        self._waiting: dict[int, WaitRecord] = {}
        self._events = 0
        self._moves = 0
        self.stage_name = ""
        """What `stage` was told last."""
        self._tape: tapes.Tape | None = None
        self._open = True

    @property
    def moves(self) -> int:
        """Grows with every change of a counter or of the stage: the progress of this process in one number."""
        return self._moves

    def tape(self) -> tapes.Tape | None:
        """Where calls on communicators are noted; None when the beacon is closed."""
        with self._lock:
            if self._open and self._tape is None:
                self._tape = tapes.Tape(self._memory, _COMMUNICATORS_AT, _TAPE_AT)
                self._tape.stage(self.stage_name)
            return self._tape

    def stage(self, name: str) -> None:
        with self._lock:
            self.stage_name = name
            if self._tape is not None:
                self._tape.stage(name)
            if self._open:
                self._moves += 1
                self._stage.write(time.monotonic_ns(), fit(name, 96))

    def progress(self, counter: str, value: int, total: int | None = None) -> None:
        """Sets a counter. Counters beyond the 24th are counted in `moves` only."""
        with self._lock:
            known = self._counters.get(counter)
            if known is not None and known[1] == value and known[2] == total:
                return
            self._moves += 1
            if known is None:
                used = len(self._counters)
                if used >= COUNTERS or not self._open:
                    return
                slot = Slot(self._memory, _COUNTERS_AT + 96 * used, _COUNTER)
            else:
                slot = known[0]
            self._counters[counter] = (slot, value, total)
            if self._open:
                slot.write(value, -1 if total is None else total, time.monotonic_ns(), fit(counter, 40))

    def add(self, counter: str, n: int = 1) -> None:
        """Adds to a counter (from 0); keeps its total."""
        with self._lock:
            known = self._counters.get(counter)
            if known is None:
                self.progress(counter, n)
            else:
                self.progress(counter, known[1] + n, known[2])

    def beat(self) -> None:
        """A sign of life by a background thread: tells a frozen process from one that is busy elsewhere."""
        with self._lock:
            if self._open:
                NUMBER.pack_into(self._memory, _BEAT_AT, time.monotonic_ns())

    def event(self, kind: str, text: str = "") -> None:
        """Appends to the ring of the last 128 events."""
        with self._lock:
            if self._open:
                self._events += 1
                at = _EVENTS_AT + 128 * ((self._events - 1) % EVENTS)
                number = self._events + EMPTY
                _EVENT.pack_into(self._memory, at, number, time.monotonic_ns(), fit(kind, 24), fit(text, 72), number)

    def take_wait_slot(self) -> int | None:
        """A free wait slot, None when 16 threads wait already. For `watch.waits`."""
        with self._lock:
            return self._free.pop() if self._free and self._open else None

    def waiting(self, thread: int) -> WaitRecord | None:
        """The innermost wait that a thread (native id) of this process is in. Reads no file: who moves bytes beside a
        thread that is stuck looks as if it did something."""
        with self._lock:
            found = [wait for wait in self._waiting.values() if wait.thread == thread]
        return max(found, key=lambda wait: wait.since_ns, default=None)

    def write_wait(self, slot: int, wait: WaitRecord) -> None:
        with self._lock:
            self._waiting[slot] = wait
            if self._open:
                self._waits[slot].write(
                    wait.thread, wait.since_ns, wait.deadline_ns or 0, wait.moved_ns,
                    fit(wait.kind, 24), fit(wait.whom, 96), fit(wait.why, 160), fit(wait.thread_name, 32),
                )  # fmt: skip

    def free_wait_slot(self, slot: int) -> None:
        with self._lock:
            self._waiting.pop(slot, None)
            if self._open:
                self._waits[slot].write(0, 0, 0, 0, b"", b"", b"", b"")
            self._free.append(slot)

    def close(self, remove: bool = False) -> None:
        """Unmaps the file; the file stays as evidence unless `remove`. Later writes do nothing."""
        with self._lock:
            if self._open:
                self._open = False
                if self._tape is not None:
                    self._tape.close()
                    self._tape = None
                self._memory.close()
            if remove and self._is_ours():
                self.path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # whoever is late, and the last, takes the run's folder along
                    self.path.parent.rmdir()

    def _is_ours(self) -> bool:
        """Whether the file is still this one: a successor of the same name puts its own in its place."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False


class _NoBeacon(Beacon):
    """Before `open_beacon`: counts moves, writes nowhere."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), mmap.mmap(-1, mmap.PAGESIZE))
        self.close()

    def close(self, remove: bool = False) -> None:
        super().close()


_current: Beacon = _NoBeacon()


def current() -> Beacon:
    """The process's beacon; one that writes nowhere before `open_beacon`."""
    return _current


def open_beacon(run: str, name: str, role: str, rank: int) -> Beacon:
    """Creates this process's beacon; from here on `current()` is it. An older file of that name is replaced."""
    global _current
    if not _NAME.fullmatch(name):
        raise ValueError(f"beacon name {name!r}: expected up to 95 letters, digits, '.', '_' or '-'")
    folder = make_run_dir(run)
    path, draft = folder / f"{name}.beacon", folder / f".{name}.{os.getpid()}.{secrets.token_hex(3)}"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, FILE_SIZE)  # sparse: what is never written costs nothing
        memory = mmap.mmap(descriptor, FILE_SIZE)
    finally:
        os.close(descriptor)
    _clear(memory)
    pid = os.getpid()
    _HEADER.pack_into(
        memory, 0, MAGIC, VERSION, SIZE, pid, rank, start_ticks(pid) or 0, time.monotonic_ns(), time.time(),
        fit(run, 64), fit(name, 96), fit(role, 32),
    )  # fmt: skip
    draft.rename(path)
    previous, _current = _current, Beacon(path, memory)
    previous.close()
    return _current


def _clear(memory: mmap.mmap) -> None:
    """Frames all records of a new file as empty."""
    ring = [(_COUNTERS_AT, 96, COUNTERS, _COUNTER), (_WAITS_AT, 384, WAITS, _WAIT), (_EVENTS_AT, 128, EVENTS, _EVENT)]
    for start, stride, count, layout in [(_STAGE_AT, 0, 1, _STAGE), *ring]:
        for at in range(start, start + max(stride, 1) * count, max(stride, 1)):
            clear(memory, at, layout)
    tapes.clear_slots(memory, _COMMUNICATORS_AT)


def close_beacon(remove: bool = False) -> None:
    """Closes the process's beacon; `current()` is one that writes nowhere again."""
    global _current
    previous, _current = _current, _NoBeacon()
    previous.close(remove)


def _forget_in_child() -> None:
    # A forked child shares the parent's mapping: it must not write over the parent's records.
    global _current
    _current = _NoBeacon()


os.register_at_fork(after_in_child=_forget_in_child)


def read_beacons(run: str, events: bool = True) -> list[BeaconState]:
    """All readable beacons of a run, by name. Files that are no beacons, or not yet, are left out."""
    folder = run_dir(run)
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".beacon")
    except OSError:  # not there (yet), or just removed at the run's end
        return []
    states = (read_beacon(path, events) for path in paths)
    return [state for state in states if state is not None]


def read_beacon(path: Path, events: bool = True) -> BeaconState | None:
    """One beacon, None when the file is missing, too short, or no beacon of this version. Without its events it is
    read in a third of the time."""
    with _opened(path) as reading:
        return None if reading is None else _decode(path, _HEADER.unpack_from(reading.second), reading, events)


def read_calls(path: Path, slot: int, newest: int = tapes.CALLS) -> tuple[CallRecord, ...]:
    """The newest calls (256 at most) of the communicator in that slot, oldest first."""
    with _opened(path) as reading:
        return () if reading is None else tapes.read_calls(reading, _COMMUNICATORS_AT, _TAPE_AT, slot, newest)


class Reader:
    """Reads the beacons of a run again and again, without their events. One that nobody has written to since costs a
    comparison."""

    def __init__(self, run: str) -> None:
        self._folder = run_dir(run)
        self._kept: dict[Path, tuple[bytes, BeaconState]] = {}

    def read(self) -> list[BeaconState]:
        """All readable beacons, by name."""
        try:
            paths = sorted(path for path in self._folder.iterdir() if path.suffix == ".beacon")
        except OSError:
            return []
        for gone in self._kept.keys() - set(paths):
            del self._kept[gone]
        states = (self._one(path) for path in paths)
        return [state for state in states if state is not None]

    def _one(self, path: Path) -> BeaconState | None:
        with _opened(path) as reading:
            if reading is None:
                return None
            kept, beat_end = self._kept.get(path), _BEAT_AT + 8
            data = reading.second
            if kept is not None and data[:_BEAT_AT] == kept[0][:_BEAT_AT] and data[beat_end:] == kept[0][beat_end:]:
                return replace(kept[1], beat_ns=reading.number(_BEAT_AT))
            state = _decode(path, _HEADER.unpack_from(data), reading, with_events=False)
            if state.torn:
                self._kept.pop(path, None)
            else:
                self._kept[path] = data, state
            return state


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Reading | None]:
    """Copies of the part of a beacon that is read at once; None when it is no beacon of this version."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield _checked(descriptor)
    finally:
        os.close(descriptor)


def _checked(descriptor: int) -> Reading | None:
    try:
        reading = Reading(descriptor, 0, SIZE)
    except OSError:
        return None
    if reading.complete != SIZE or reading.first[:8] != MAGIC:
        return None
    _, version, size, *_ = _HEADER.unpack_from(reading.second)
    return reading if (version, size) == (VERSION, SIZE) else None


def _decode(path: Path, header: tuple, reading: Reading, with_events: bool) -> BeaconState:  # type: ignore[type-arg]
    moves = 0
    stage, stage_since = "", 0
    for number, (since, name) in reading.records(_STAGE_AT, 0, 1, _STAGE):
        moves, stage, stage_since = moves + number, text_of(name), since
    counters = {}
    for number, (value, total, updated, name) in reading.records(_COUNTERS_AT, 96, COUNTERS, _COUNTER):
        moves += number
        counters[text_of(name)] = Counter(value, None if total == -1 else total, updated)
    waits = [
        WaitRecord(
            text_of(kind), text_of(whom), text_of(why), since, deadline or None, moved, thread, text_of(thread_name)
        )
        for _, (thread, since, deadline, moved, kind, whom, why, thread_name) in reading.records(
            _WAITS_AT, 384, WAITS, _WAIT
        )
        if since
    ]
    events = [
        Event(number, at, text_of(kind), text_of(text))
        for number, (at, kind, text) in reading.records(_EVENTS_AT, 128, EVENTS if with_events else 0, _EVENT)
    ]
    communicators = tapes.read_communicators(reading, _COMMUNICATORS_AT, _TAPE_AT)
    moves += tapes.calls_of(reading, _COMMUNICATORS_AT)
    _, _, _, pid, rank, start, created_ns, created_wall, run, name, role = header
    return BeaconState(
        path, text_of(run), text_of(name), text_of(role), rank, pid, start, created_ns, created_wall,
        reading.number(_BEAT_AT), stage, stage_since, counters,
        tuple(sorted(waits, key=lambda wait: wait.since_ns)),
        tuple(sorted(events, key=lambda event: event.number)), communicators, moves, reading.torn,
    )  # fmt: skip
