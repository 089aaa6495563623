"""The part of a beacon that says what a process does on its communicators: a slot each, and a ring of its newest calls.

Writing a call is ten stores of eight bytes, without a lock: its number first and, behind all else, last. Texts
(signatures, call sites, stages) are kept once, in a table whose oldest rows are overwritten; a call refers to them by
number, and a reader that finds another number in the row knows that the text is lost.
"""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.watch.layout import Memory, Reading, Slot, clear, fit, text_of
from lockstep.watch.records import CallRecord, CommunicatorRecord

COMMUNICATORS = 32
CALLS = 256
TEXTS = 1024
FRESH = TEXTS // 2
"""A text that is older by so many is written anew when it is asked for."""
TURN = TEXTS // 4
"""After so many new texts, whoever keeps numbers of texts forgets them. So a text stays until at least so many newer
ones have been written after the last call that refers to it."""
NEWEST = 16
"""Calls that are looked at when a beacon is read; more are behind `read_calls`."""

P2P, ASYNC, FAILED, REFUSED, CLOSED, COUNTED, UNSURE = 1, 2, 4, 8, 16, 32, 64
NO_PEER = -1
SEPARATOR = "\x1f"
"""Between operation, dtype, root, module and shapes in the text of a call; the long part comes last."""

_ABOUT = struct.Struct("<QQQQiiQ64s64s32sQ")
# front identity members created_ns size rank loop_thread name description backend back
_COUNTS = struct.Struct("<QqqQQQ")  # front entered completed entered_ns completed_ns back
_CALL = struct.Struct("<QqQQQQIIIIQ")
# front seq issued entered_ns left_ns signature label site flags+peer context back
_TEXT = struct.Struct("<Q176sQ")  # front text back
CALL_WORDS = 9
SEQ, LEFT, WHERE = 1, 4, 7
"""Words of a call."""
_PEER_BITS = 8
"""Flags below, the peer's rank + 1 above."""

_STRIDE = 512
_COUNTS_AT = 256
_CALLS_AT = 384
_FLAGS_AT = 392
_BLIND_AT = 400
RING_BYTES = CALLS * _CALL.size
COMMUNICATORS_BYTES = COMMUNICATORS * _STRIDE
TAPE_BYTES = TEXTS * _TEXT.size + COMMUNICATORS * RING_BYTES


def texts_word(label: int, site: int) -> int:
    """The texts of a call as they lie in its record."""
    return label | site << 32


class Tape:
    """The writing end, of one process. `slots_at` and `tape_at` say where the two parts lie in the beacon."""

    def __init__(self, memory: Memory, slots_at: int, tape_at: int) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("B").cast("Q")
        """The whole file as 64-bit words: a store is one instruction, so it needs no frame."""
        self.slots_at, self.texts_at = slots_at, tape_at
        self.rings_at = tape_at + TEXTS * _TEXT.size
        self.lines: list[Line | None] = [None] * COMMUNICATORS
        self.calls = 0
        """Of closed communicators whose slot was used again."""
        self._lock = threading.Lock()
        self._texts: dict[str, int] = {}
        self.newest_text = 0
        """The number of the newest text."""
        self.on_turn: list[Callable[[], None]] = []
        """Of those who keep numbers of texts: see TURN."""
        self._stage = ""
        self.where: int | None = None
        """The stage as it lies in a record; None: `find_where` says it."""

    def text(self, value: str) -> int:
        """The number of a text, for `Line.enter`. To be kept no longer than to the next turn."""
        with self._lock:
            known = self._texts.get(value)
            if known is not None and self.fresh(known):
                return known
            self.newest_text += 1
            number = self.newest_text
            at = self.texts_at + (number % TEXTS) * _TEXT.size
            _TEXT.pack_into(self.memory, at, number, fit(value, 176), number)
            if len(self._texts) >= 2 * TEXTS:
                self._texts = {text: kept for text, kept in self._texts.items() if self.fresh(kept)}
            self._texts[value] = number
        if number % TURN == 0:
            self.where = None
            for forget in self.on_turn:
                forget()
        return number

    def stage(self, name: str) -> None:
        """The stage that calls are issued in from now on."""
        self._stage, self.where = name, None

    def find_where(self) -> int:
        """The present stage as it lies in a record."""
        stage = self._stage
        found = self.where = self.text(stage) << 32 if stage else 0
        if stage is not self._stage:
            self.where = None
        return found

    def fresh(self, number: int) -> bool:
        """Whether the text of that number will stay for a while."""
        return self.newest_text - number < FRESH

    def open_line(
        self,
        identity: int,
        members: int,
        name: str,
        description: str,
        backend: str,
        size: int,
        rank: int,
        loop: int = 0,
    ) -> "Line | None":  # fmt: skip
        """A slot for a communicator: a free one, else the one that was closed first; None when all are in use."""
        with self._lock:
            slot = self._free_slot()
            if slot is None:
                return None
            line = Line(self, slot)
            line.about = (
                identity, members, time.monotonic_ns(), size, rank, loop,
                fit(name, 64), fit(description, 64), fit(backend, 32),
            )  # fmt: skip
            line.write_about()
            self.lines[slot] = line
            return line

    def _free_slot(self) -> int | None:
        for slot, line in enumerate(self.lines):
            if line is None:
                return slot
        closed = [line for line in self.lines if line is not None and line.closed_ns]
        if not closed:
            return None
        oldest = min(closed, key=lambda line: line.closed_ns)
        self.calls += oldest.calls
        return oldest.slot

    def close(self) -> None:
        """Lets go of the mapping; lines may not be written any more."""
        self.words.release()


class Line:
    """What one process does on one communicator; written by the thread that issues."""

    __slots__ = (
        "_about", "_at", "_counts", "about", "calls", "calls_word", "closed_ns", "memory", "ring", "slot", "tape",
        "words",
    )  # fmt: skip

    def __init__(self, tape: Tape, slot: int) -> None:
        self.slot, self.tape, self.memory, self.words = slot, tape, tape.memory, tape.words
        self._at = tape.slots_at + slot * _STRIDE
        self.ring = (tape.rings_at + slot * RING_BYTES) >> 3
        """The word at which its calls begin."""
        self.calls = 0
        self.calls_word = (self._at + _CALLS_AT) >> 3
        self.closed_ns = 0
        self.about: tuple[Any, ...] = ()
        for word in (_CALLS_AT, _FLAGS_AT, _BLIND_AT):
            self.words[(self._at + word) >> 3] = 0
        clear(self.memory, self._at + _COUNTS_AT, _COUNTS)
        self._about = Slot(self.memory, self._at, _ABOUT)
        self._counts = Slot(self.memory, self._at + _COUNTS_AT, _COUNTS)

    def write_about(self) -> None:
        self._about.write(*self.about)

    def loop_thread(self, native_id: int) -> None:
        """Says which of gloo's threads moves this communicator's bytes."""
        self.about = (*self.about[:5], native_id, *self.about[6:])
        self.write_about()

    def enter(
        self, seq: int, issued: int, signature: int, texts: int = 0, where: int = 0, flags: int = 0,
        peer: int = NO_PEER,
    ) -> int:  # fmt: skip
        """Notes that a call begins; returns the word that says when it left."""
        words, calls = self.words, self.calls
        at = self.ring + calls % CALLS * CALL_WORDS
        self.calls = calls = calls + 1
        words[at] = calls
        words[at + 1] = seq
        words[at + 2] = issued
        words[at + 3] = time.monotonic_ns()
        words[at + 4] = 0
        words[at + 5] = signature
        words[at + 6] = texts
        words[at + 7] = where | flags | (peer + 1) << _PEER_BITS
        words[at + 8] = calls
        words[self.calls_word] = calls
        return at + LEFT

    def leave(self, left: int, flag: int = 0) -> None:
        """`left` is what `enter` returned; `flag` says how it ended: ASYNC, FAILED or REFUSED."""
        if flag:
            self.words[left + WHERE - LEFT] |= flag
        self.words[left] = time.monotonic_ns()

    def call_at(self, number: int) -> int:
        """The word at which the record of that call begins."""
        return self.ring + (number - 1) % CALLS * CALL_WORDS

    def counted(self) -> None:
        """Says that c10d's counts are read for this communicator."""
        self.words[(self._at + _FLAGS_AT) >> 3] |= COUNTED

    def counts(self, entered: int, completed: int, entered_ns: int, completed_ns: int) -> None:
        """c10d's numbers, and when they changed, as far as was seen."""
        self._counts.write(entered, completed, entered_ns, completed_ns)

    def blind(self) -> None:
        self.words[(self._at + _BLIND_AT) >> 3] = 1

    def close(self) -> None:
        self.closed_ns = time.monotonic_ns()
        self.words[(self._at + _FLAGS_AT) >> 3] |= CLOSED


def clear_slots(memory: Memory, slots_at: int) -> None:
    """Frames the slots of a new file as empty; rings and texts need none."""
    for slot in range(COMMUNICATORS):
        clear(memory, slots_at + slot * _STRIDE, _ABOUT)


def read_communicators(reading: Reading, slots_at: int, tape_at: int) -> tuple[CommunicatorRecord, ...]:
    """The communicators of a beacon of which `reading` holds the fixed part."""
    texts = _Texts(reading, tape_at)
    found = (_communicator(reading, slots_at + slot * _STRIDE, slot, texts) for slot in range(COMMUNICATORS))
    return tuple(each for each in found if each is not None)


def calls_of(reading: Reading, slots_at: int) -> int:
    """How many calls were noted on all communicators together."""
    return sum(reading.number(slots_at + slot * _STRIDE + _CALLS_AT) for slot in range(COMMUNICATORS))


def read_calls(reading: Reading, slots_at: int, tape_at: int, slot: int, newest: int) -> tuple[CallRecord, ...]:
    """The newest calls of a communicator, oldest first; torn, overwritten and unsure ones are left out."""
    written = reading.number(slots_at + slot * _STRIDE + _CALLS_AT)
    return tuple(_calls(reading, _Texts(reading, tape_at), slot, written, newest))


class _Texts:
    """The table of texts, read where needed."""

    def __init__(self, reading: Reading, tape_at: int) -> None:
        self.reading, self.at = reading, tape_at
        self.rings_at = tape_at + TEXTS * _TEXT.size
        self._known: dict[int, str] = {0: ""}

    def __getitem__(self, number: int) -> str:
        known = self._known.get(number)
        if known is None:
            at = self.at + (number % TEXTS) * _TEXT.size
            found = Reading(self.reading.descriptor, at, _TEXT.size).record(at, _TEXT, number)
            known = self._known[number] = text_of(found[1][0]) if found else ""
        return known


def _calls(reading: Reading, texts: _Texts, slot: int, written: int, newest: int) -> Iterator[CallRecord]:
    ring_at = texts.rings_at + slot * RING_BYTES
    first = max(1, written - min(newest, CALLS) + 1)
    low, high = (first - 1) % CALLS, (written - 1) % CALLS + 1
    if low >= high:
        low, high = 0, CALLS
    start = ring_at + low * _CALL.size
    ring = Reading(reading.descriptor, start, (high - low) * _CALL.size)
    for number in range(first, written + 1):
        found = ring.record(ring_at + ((number - 1) % CALLS) * _CALL.size, _CALL, number)
        if found is not None and not found[1][7] & UNSURE:
            yield _call(*found, texts)
    reading.torn += ring.torn


def _call(number: int, fields: tuple[Any, ...], texts: _Texts) -> CallRecord:
    seq, issued, entered, left, signature, label, site, flags, context = fields
    operation, dtype, root_text, module, shapes = (*texts[label].split(SEPARATOR), "", "", "", "")[:5]
    root = int(root_text) if root_text.isascii() and root_text.isdigit() else None
    return CallRecord(
        number, seq, issued, signature, operation, shapes, dtype, root, texts[site],
        texts[context], module, entered, left, bool(flags & P2P), bool(flags & ASYNC), bool(flags & FAILED),
        bool(flags & REFUSED), (flags >> _PEER_BITS) - 1 if flags >> _PEER_BITS else None,
    )  # fmt: skip


def _communicator(reading: Reading, at: int, slot: int, texts: _Texts) -> CommunicatorRecord | None:
    found = reading.record(at, _ABOUT)
    if found is None:
        return None
    identity, members, created, size, rank, loop, name, description, backend = found[1]
    flags = reading.number(at + _FLAGS_AT)
    counts = reading.record(at + _COUNTS_AT, _COUNTS)
    counted = bool(flags & COUNTED)
    calls = list(_calls(reading, texts, slot, reading.number(at + _CALLS_AT), NEWEST))
    collectives = [call for call in calls if not call.p2p]
    last = collectives[-1] if collectives else None
    merged = _merge(collectives, counts[1] if counts else (-1, -1, 0, 0), counted)
    waiting = [call for call in calls if call.inside]
    if not waiting and counted:
        waiting = [call for call in collectives if call.asynchronous and not call.failed and call.seq > merged[2]]
    return CommunicatorRecord(
        slot, text_of(name), text_of(description), text_of(backend), size, rank, identity, members, created, loop,
        bool(flags & CLOSED), bool(reading.number(at + _BLIND_AT)), counted, *merged,
        last.issued if last else 0, calls[-1] if calls else None,
        waiting[0] if waiting else None,
    )  # fmt: skip


def _merge(
    collectives: list[CallRecord], counts: tuple[int, int, int, int], counted: bool
) -> tuple[int, int, int, int]:
    """Entered and completed with their times, from both sources."""
    entered, completed, entered_ns, completed_ns = counts
    nothing = 0 if counted else -1
    entered, completed = max(entered, nothing), max(completed, nothing)
    for call in collectives:
        if call.refused:
            continue
        if call.seq >= entered:
            entered, entered_ns = call.seq, call.entered_ns
        if call.left_ns and not call.failed and not call.asynchronous and call.seq >= completed:
            completed, completed_ns = call.seq, call.left_ns
    return entered, entered_ns, completed, completed_ns
