"""Writes the beacon of this process: a small file in shared memory that shows what the process is doing.

A beacon has a fixed layout and is mapped into its writer. Its path is `<base>/<run>/<name>.beacon`, where base is
`$LOCKSTEP_BEACONS`, else `/dev/shm/lockstep-UID`, else a folder in the temporary directory. Readers copy the file; they
need no cooperation of the writer, which may be stopped, hung or dead. An open beacon holds the run's folder (see
`base.folders.hold_folder`).
"""

import contextlib
import mmap
import os
import re
import secrets
import threading
import time
from pathlib import Path

from lockstep.base.folders import create_file, hold_folder, make_run_shm_dir
from lockstep.base.wait_state import WaitRecord, show_waits_on
from lockstep.watch.beacon import call_ring
from lockstep.watch.beacon.beacon_records import (
    BEAT_AT,
    COUNTER_STRUCT,
    COUNTERS_AT,
    EMPTY,
    EVENT_STRUCT,
    EVENTS_AT,
    FILE_SIZE,
    FIXED_SIZE,
    HEADER_STRUCT,
    MAGIC,
    MAX_COUNTERS,
    MAX_EVENTS,
    MAX_WAITS,
    STAGE_AT,
    STAGE_STRUCT,
    UINT64,
    VERSION,
    WAIT_STRUCT,
    WAITS_AT,
    RecordSlot,
    clear_record,
    encode_text,
)
from lockstep.watch.beacon.span_ring import SpanKind, SpanWriter
from lockstep.watch.procfs.processes import start_ticks

_BEACON_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,94}")


class Beacon:
    """Writes a beacon. All methods may be called from any thread and take about a microsecond."""

    def __init__(self, path: Path, memory: mmap.mmap, hold: int | None = None) -> None:
        self.path = path
        self._hold = hold
        self._inode = path.stat().st_ino
        self._memory = memory
        self._lock = threading.RLock()  # reentrant: a signal handler may write while its thread writes
        self._stage = RecordSlot(memory, STAGE_AT, STAGE_STRUCT)
        self._counters: dict[str, tuple[RecordSlot, int, int | None]] = {}
        self._waits = [RecordSlot(memory, WAITS_AT + 384 * i, WAIT_STRUCT) for i in range(MAX_WAITS)]
        self._free = list(range(MAX_WAITS - 1, -1, -1))
        self._waiting: dict[int, WaitRecord] = {}
        self._events = 0
        self._spans = SpanWriter(memory)
        self._progress_count = 0
        self.stage_name = ""
        """The current stage."""
        self._stage_since = self._unit_since = 0
        """When the stage and the current unit of work began."""
        self._call_rings: call_ring.CallRings | None = None
        self._open = True

    @property
    def progress_count(self) -> int:
        """The progress of this process as one number, which grows with every change of a counter or of the stage."""
        return self._progress_count

    def call_rings(self) -> call_ring.CallRings | None:
        """The rings in which calls on communicators are recorded; None if the beacon is closed."""
        with self._lock:
            if self._open and self._call_rings is None:
                self._call_rings = call_ring.CallRings(self._memory)
                self._call_rings.stage(self.stage_name)
            return self._call_rings

    def stage(self, name: str) -> None:
        """Sets the current stage."""
        with self._lock:
            before, self.stage_name = self.stage_name, name
            if self._call_rings is not None:
                self._call_rings.stage(name)
            if self._open:
                self._progress_count += 1
                now = time.monotonic_ns()
                if before:
                    self._spans.write(SpanKind.STAGE, before, self._stage_since, now)
                self._stage_since = self._unit_since = now
                self._stage.write(now, encode_text(name, 96))

    def progress(self, counter: str, value: int, total: int | None = None) -> None:
        """Sets a counter. Counters after the 24th only increase `progress_count`."""
        with self._lock:
            known = self._counters.get(counter)
            if known is not None and known[1] == value and known[2] == total:
                return
            self._progress_count += 1
            if known is None:
                used = len(self._counters)
                if used >= MAX_COUNTERS or not self._open:
                    return
                slot = RecordSlot(self._memory, COUNTERS_AT + 96 * used, COUNTER_STRUCT)
            else:
                slot = known[0]
            self._counters[counter] = (slot, value, total)
            if self._open:
                slot.write(value, -1 if total is None else total, time.monotonic_ns(), encode_text(counter, 40))

    def add(self, counter: str, n: int = 1) -> None:
        """Adds to a counter, which starts at 0; keeps its total."""
        with self._lock:
            known = self._counters.get(counter)
            if known is None:
                self.progress(counter, n)
            else:
                self.progress(counter, known[1] + n, known[2])

    def finish_unit(self, counter: str, done: int, total: int) -> None:
        """Sets a counter of units of work that follow each other, and records the newest one: it began with the stage,
        or when the unit before it was finished."""
        self.progress(counter, done, total)
        with self._lock:
            if self._open:
                now = time.monotonic_ns()
                self._spans.write(SpanKind.UNIT, f"{counter} {done}/{total}", self._unit_since, now)
                self._unit_since = now

    def span(self, kind: SpanKind, name: str, began_ns: int, amount: int = 0) -> None:
        """Appends what the process has done from `began_ns` (monotonic clock) until now to the ring of the last 1,024
        spans. `amount` is in tokens or bytes."""
        with self._lock:
            if self._open:
                self._spans.write(kind, name, began_ns, time.monotonic_ns(), amount)

    def record_wait(self, wait: WaitRecord) -> None:
        """Appends a wait that has just ended to the spans."""
        with self._lock:
            if self._open:
                name = f"{wait.waits_for} ({wait.kind}): {wait.why}"
                self._spans.write(SpanKind.WAIT, name, wait.since_ns, time.monotonic_ns(), 0, wait.thread_name)

    def beat(self) -> None:
        """Writes a heartbeat. A background thread calls this, so that readers can distinguish a frozen process from a
        busy one."""
        with self._lock:
            if self._open:
                UINT64.pack_into(self._memory, BEAT_AT, time.monotonic_ns())

    def event(self, kind: str, text: str = "") -> None:
        """Appends an event to the ring of the last 128 events."""
        with self._lock:
            if self._open:
                self._events += 1
                at = EVENTS_AT + 128 * ((self._events - 1) % MAX_EVENTS)
                number = self._events + EMPTY
                EVENT_STRUCT.pack_into(
                    self._memory, at, number, time.monotonic_ns(), encode_text(kind, 24), encode_text(text, 72), number
                )

    def take_wait_slot(self) -> int | None:
        """Reserves a slot for the waits of a thread; None if 16 threads wait already."""
        with self._lock:
            return self._free.pop() if self._free and self._open else None

    def innermost_wait(self, thread: int) -> WaitRecord | None:
        """The innermost wait that a thread (native id) of this process is in. Reads no file, because reading would make
        a stuck process look active."""
        with self._lock:
            found = [wait for wait in self._waiting.values() if wait.thread == thread]
        return max(found, key=lambda wait: wait.since_ns, default=None)

    def write_wait(self, slot: int, wait: WaitRecord) -> None:
        """Shows a wait in a reserved slot."""
        with self._lock:
            self._waiting[slot] = wait
            if self._open:
                self._waits[slot].write(
                    wait.thread, wait.since_ns, wait.deadline_ns or 0, wait.moved_ns,
                    encode_text(wait.kind, 24), encode_text(wait.waits_for, 96), encode_text(wait.why, 160),
                    encode_text(wait.thread_name, 32),
                )  # fmt: skip

    def free_wait_slot(self, slot: int) -> None:
        """Clears a slot and releases it."""
        with self._lock:
            self._waiting.pop(slot, None)
            if self._open:
                self._waits[slot].write(0, 0, 0, 0, b"", b"", b"", b"")
            self._free.append(slot)

    def close(self, remove: bool = False) -> None:
        """Unmaps the file, and removes it if requested; otherwise it remains as evidence. Later writes do nothing."""
        with self._lock:
            if self._open:
                self._open = False
                if self._call_rings is not None:
                    self._call_rings.close()
                    self._call_rings = None
                self._memory.close()
                if self._hold is not None:
                    os.close(self._hold)
            if remove and self._is_ours():
                self.path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # only the last process can remove the run's folder
                    self.path.parent.rmdir()

    def _is_ours(self) -> bool:
        """Whether the path still has the file of this beacon, and not of a later process of the same name."""
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False


class _NullBeacon(Beacon):
    """Replaces the beacon before `open_beacon`: counts progress, but writes nowhere."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull), mmap.mmap(-1, mmap.PAGESIZE))
        self.close()

    def close(self, remove: bool = False) -> None:
        super().close()


_current: Beacon = _NullBeacon()


def current_beacon() -> Beacon:
    """The beacon of this process; before `open_beacon`, one that writes nowhere."""
    return _current


def open_beacon(run: str, name: str, role: str, rank: int, parent: str = "") -> Beacon:
    """Creates the beacon of this process, which `current_beacon()` returns from then on. Replaces an older file of that
    name. `parent` is the name of the process of the job that this process is a part of."""
    global _current
    if not _BEACON_NAME.fullmatch(name):
        raise ValueError(f"beacon name {name!r}: expected up to 95 letters, digits, '.', '_' or '-'")
    folder = make_run_shm_dir(run)
    path, draft = folder / f"{name}.beacon", folder / f".{name}.{os.getpid()}.{secrets.token_hex(3)}"
    descriptor = create_file(draft, os.O_RDWR)
    try:
        os.ftruncate(descriptor, FILE_SIZE)  # sparse: unwritten parts cost nothing
        memory = mmap.mmap(descriptor, FILE_SIZE)
    finally:
        os.close(descriptor)
    _clear_records(memory)
    pid = os.getpid()
    HEADER_STRUCT.pack_into(
        memory, 0, MAGIC, VERSION, FIXED_SIZE, pid, rank, start_ticks(pid) or 0, time.monotonic_ns(), time.time(),
        encode_text(run, 64), encode_text(name, 96), encode_text(role, 32), encode_text(parent, 96),
    )  # fmt: skip
    draft.rename(path)
    previous, _current = _current, Beacon(path, memory, hold_folder(folder))
    previous.close()
    return _current


def _clear_records(memory: mmap.mmap) -> None:
    """Marks all records of a new file as empty."""
    tables = [
        (COUNTERS_AT, 96, MAX_COUNTERS, COUNTER_STRUCT),
        (WAITS_AT, 384, MAX_WAITS, WAIT_STRUCT),
        (EVENTS_AT, 128, MAX_EVENTS, EVENT_STRUCT),
    ]
    for start, stride, count, layout in [(STAGE_AT, 0, 1, STAGE_STRUCT), *tables]:
        for at in range(start, start + max(stride, 1) * count, max(stride, 1)):
            clear_record(memory, at, layout)


def close_beacon(remove: bool = False) -> None:
    """Closes the beacon of this process. From then on `current_beacon()` returns one that writes nowhere."""
    global _current
    previous, _current = _current, _NullBeacon()
    previous.close(remove)


def _forget_in_child() -> None:
    # A forked child shares the parent's mapping, and must not overwrite the parent's records.
    global _current
    _current = _NullBeacon()


os.register_at_fork(after_in_child=_forget_in_child)
show_waits_on(current_beacon)
