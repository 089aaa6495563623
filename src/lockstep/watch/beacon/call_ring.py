"""The part of a beacon about communicators: a slot per communicator, and a ring of its newest calls.

A call is written by one `pack_into` without a lock; the number of the call is written first, and again last. When it
has returned, the time is stored in its word.
Texts (signatures, call sites, stages) are stored once, in a table whose oldest rows are overwritten. A call refers to
its texts by number; if a reader finds another number in the row, the text is lost.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.watch.beacon.beacon_records import (
    BLIND_AT,
    CALL_ENTRY_STRUCT,
    CALL_WORDS,
    CALLS_AT,
    CALLS_PER_RING,
    COMMUNICATOR_STRIDE,
    COMMUNICATOR_STRUCT,
    COMMUNICATORS_AT,
    COUNTS_AT,
    COUNTS_STRUCT,
    ENTERED_WORD,
    FLAG_ASYNC,
    FLAG_CLOSED,
    FLAG_COUNTED,
    FLAG_DEVICE,
    FLAG_FAILED,
    FLAG_REFUSED,
    FLAGS_AT,
    LEFT_WORD,
    MAX_COMMUNICATORS,
    MAX_TEXTS,
    NO_PEER,
    PEER_SHIFT,
    RING_BYTES,
    RINGS_AT,
    TEXT_STRUCT,
    TEXTS_AT,
    UNRECORDED_AT,
    USED_AT,
    WHERE_WORD,
    MappedMemory,
    RecordSlot,
    clear_record,
    encode_text,
)
from lockstep.watch.beacon.message_lanes import LaneWriter

FRESH_TEXTS = MAX_TEXTS // 2
"""A text that a call needs is written again if at least this many newer texts have been written."""
TEXT_TURNOVER = MAX_TEXTS // 4
"""Caches of text numbers are cleared whenever this many texts have been written. So a text remains until at least this
many newer texts have been written after the last call that refers to it."""


def pack_text_numbers(label: int, site: int) -> int:
    """Packs the text numbers of a call into one word of its record."""
    return label | site << 32


class CallRings:
    """Writes the slots, texts and rings of one process."""

    def __init__(self, memory: MappedMemory) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("B").cast("Q")
        """The whole file as 64-bit words. Storing a word is one instruction, so it needs no write numbers."""
        self.slots: list[CommunicatorSlot | None] = [None] * MAX_COMMUNICATORS
        self.lanes = LaneWriter(self.words)
        self.calls = 0
        """The number of calls on closed communicators whose slots were reused."""
        self._lock = threading.Lock()
        self._texts: dict[str, int] = {}
        self.newest_text = 0
        """The number of the newest text."""
        self.on_turnover: list[Callable[[], None]] = []
        """Callbacks that clear caches of text numbers, see TEXT_TURNOVER."""
        self._stage = ""
        self.packed_stage: int | None = None
        """The stage as it is stored in a record; None if `pack_stage` has to compute it."""

    def text(self, value: str) -> int:
        """The number of a text, for `CommunicatorSlot.enter`. It is valid until the next turnover."""
        with self._lock:
            known = self._texts.get(value)
            if known is not None and self.fresh(known):
                return known
            self.newest_text += 1
            number = self.newest_text
            at = TEXTS_AT + (number % MAX_TEXTS) * TEXT_STRUCT.size
            TEXT_STRUCT.pack_into(self.memory, at, number, encode_text(value, 176), number)
            if len(self._texts) >= 2 * MAX_TEXTS:
                self._texts = {text: kept for text, kept in self._texts.items() if self.fresh(kept)}
            self._texts[value] = number
        if number % TEXT_TURNOVER == 0:
            self.packed_stage = None
            for clear_cache in self.on_turnover:
                clear_cache()
        return number

    def stage(self, name: str) -> None:
        """Sets the stage of the following calls."""
        self._stage, self.packed_stage = name, None

    def pack_stage(self) -> int:
        """The current stage as it is stored in a record."""
        stage = self._stage
        packed = self.packed_stage = self.text(stage) << 32 if stage else 0
        if stage is not self._stage:
            self.packed_stage = None
        return packed

    def fresh(self, number: int) -> bool:
        """Whether the text with this number will remain for a while."""
        return self.newest_text - number < FRESH_TEXTS

    def open_slot(
        self,
        identity: int,
        members: int,
        name: str,
        description: str,
        backend: str,
        size: int,
        rank: int,
        loop_thread: int = 0,
        on_device: bool = False,
    ) -> "CommunicatorSlot | None":  # fmt: skip
        """A slot for a communicator: an unused one, else the one that was closed first; None if all are in use, which
        the beacon counts. For `on_device` see `CommunicatorRecord`."""
        with self._lock:
            index = self._free_slot()
            if index is None:
                self.words[UNRECORDED_AT >> 3] += 1
                return None
            self.lanes.clear(index)
            slot = CommunicatorSlot(self, index)
            slot.description = (
                identity, members, time.monotonic_ns(), size, rank, loop_thread,
                encode_text(name, 64), encode_text(description, 64), encode_text(backend, 32),
            )  # fmt: skip
            slot.write_description()
            if on_device:
                slot.mark_on_device()
            self.slots[index] = slot
            self.words[USED_AT >> 3] = max(self.words[USED_AT >> 3], index + 1)
            return slot

    def _free_slot(self) -> int | None:
        for index, slot in enumerate(self.slots):
            if slot is None:
                return index
        closed = [slot for slot in self.slots if slot is not None and slot.closed_ns]
        if not closed:
            return None
        oldest = min(closed, key=lambda slot: slot.closed_ns)
        self.calls += oldest.calls
        return oldest.index

    def close(self) -> None:
        """Releases the mapping. After that, slots must not be written."""
        self.words.release()


class CommunicatorSlot:
    """Writes the calls of one process on one communicator, in the thread that issues them."""

    __slots__ = (
        "_at",
        "_counts_record",
        "_description_record",
        "calls",
        "calls_word",
        "closed_ns",
        "description",
        "index",
        "memory",
        "ring",
        "rings",
        "words",
    )  # fmt: skip

    def __init__(self, rings: CallRings, index: int) -> None:
        self.index, self.rings, self.memory, self.words = index, rings, rings.memory, rings.words
        self._at = COMMUNICATORS_AT + index * COMMUNICATOR_STRIDE
        self.ring = (RINGS_AT + index * RING_BYTES) >> 3
        """The word at which the ring of calls begins."""
        self.calls = 0
        self.calls_word = (self._at + CALLS_AT) >> 3
        self.closed_ns = 0
        self.description: tuple[Any, ...] = ()
        """The fields of COMMUNICATOR_STRUCT."""
        for word in (CALLS_AT, FLAGS_AT, BLIND_AT):
            self.words[(self._at + word) >> 3] = 0
        clear_record(self.memory, self._at + COUNTS_AT, COUNTS_STRUCT)
        self._description_record = RecordSlot(self.memory, self._at, COMMUNICATOR_STRUCT)
        self._counts_record = RecordSlot(self.memory, self._at + COUNTS_AT, COUNTS_STRUCT)

    def write_description(self) -> None:
        self._description_record.write(*self.description)

    @property
    def identity(self) -> int:
        """The identity of the communicator, see `CommunicatorRecord`."""
        return int(self.description[0])

    @property
    def loop_thread(self) -> int:
        """Native id of gloo's thread for the communicator; 0 if unknown."""
        return int(self.description[5])

    @property
    def backend(self) -> str:
        return str(self.description[8].decode())

    def enter(
        self, seq: int, issued: int, signature: int, texts: int = 0, stage: int = 0, flags: int = 0,
        peer: int = NO_PEER,
    ) -> int:  # fmt: skip
        """Records that a call begins. Returns the index of the word for the time when it returns."""
        calls = self.calls
        at = self.ring + calls % CALLS_PER_RING * CALL_WORDS
        self.calls = calls = calls + 1
        CALL_ENTRY_STRUCT.pack_into(
            self.memory, at << 3, calls, seq, issued, time.monotonic_ns(), signature, texts,
            stage | flags | (peer + 1) << PEER_SHIFT, calls,
        )  # fmt: skip
        self.words[self.calls_word] = calls
        return at + LEFT_WORD

    def leave(self, left: int, flag: int = 0) -> None:
        """Records that a call has returned. `left` is the result of `enter`; `flag` is 0, FLAG_ASYNC, FLAG_FAILED or
        FLAG_REFUSED."""
        if flag:
            self.words[left + WHERE_WORD - LEFT_WORD] |= flag
        self.words[left] = time.monotonic_ns()

    def blocked_ns(self, after: int) -> int:
        """How long the calls after this number blocked their threads, in nanoseconds: those that are still in the ring,
        without asynchronous, failed and unfinished ones."""
        words, total = self.words, 0
        for number in range(max(after, self.calls - CALLS_PER_RING) + 1, self.calls + 1):
            at = self.call_at(number)
            left = words[at + LEFT_WORD]
            if left and not words[at + WHERE_WORD] & (FLAG_ASYNC | FLAG_FAILED | FLAG_REFUSED):
                total += left - words[at + ENTERED_WORD]
        return total

    def call_at(self, number: int) -> int:
        """The word at which the record of the call with this number begins."""
        return self.ring + (number - 1) % CALLS_PER_RING * CALL_WORDS

    def mark_counted(self) -> None:
        """Records that c10d's counts are read for this communicator."""
        self.words[(self._at + FLAGS_AT) >> 3] |= FLAG_COUNTED

    def mark_on_device(self) -> None:
        """Records that operations run after their calls, see `CommunicatorRecord.on_device`."""
        self.words[(self._at + FLAGS_AT) >> 3] |= FLAG_DEVICE

    def write_counts(self, entered: int, completed: int, entered_ns: int, completed_ns: int, started: int = -1) -> None:
        """Sets c10d's counts, and when a change of them was first observed."""
        self._counts_record.write(entered, started, completed, entered_ns, completed_ns)

    def mark_blind(self) -> None:
        """Records that the counts may miss calls, see `CommunicatorRecord.blind`."""
        self.words[(self._at + BLIND_AT) >> 3] = 1

    def close(self) -> None:
        self.closed_ns = time.monotonic_ns()
        self.words[(self._at + FLAGS_AT) >> 3] |= FLAG_CLOSED
