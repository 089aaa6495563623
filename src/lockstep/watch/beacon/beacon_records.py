"""The records of a beacon: their decoded contents, and how a process writes them to a file from which others read them
without locks.

Every record in the file begins and ends with its write number (`front body back`) and is written by one `pack_into`. A
record is valid when front equals back and two successive copies agree. This detects a copy made during a write, and a
writer that died in the middle of one.
"""

import hashlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.base.wait_state import WaitRecord


@dataclass(frozen=True, slots=True)
class ProgressCounter:
    """A progress counter. `updated_ns` is the time of the last change on the monotonic clock."""

    value: int
    total: int | None
    updated_ns: int


@dataclass(frozen=True, slots=True)
class BeaconEvent:
    """An event that a process has recorded. `number` counts the events of the process from 1."""

    number: int
    at_ns: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class BeaconSpan:
    """Something that a process did. Times are nanoseconds of the host's monotonic clock."""

    number: int
    """Counts the spans of the process from 1."""
    kind: int
    """A `span_ring.SpanKind`, or a number that a later version writes."""
    name: str
    """At most 80 bytes."""
    began_ns: int
    ended_ns: int
    amount: int = 0
    """Tokens of a request, or bytes of weights; 0 if unknown."""
    thread: str = ""
    """The thread that waited; empty for other kinds."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call on a communicator, issued from Python. Times are nanoseconds of the host's monotonic clock."""

    number: int
    """Counts all calls of this member on this communicator from 1, including point-to-point calls."""
    seq: int
    """The sequence number of the collective on the communicator, which also counts collectives issued from C++; for a
    point-to-point call, that of the last collective before the call."""
    issued: int
    """The number of collectives that this member has issued from Python on the communicator, including this one. The
    calls of members are compared by this number."""
    signature: int
    """64-bit digest of operation, shapes, dtype and root; equal for calls that match."""
    operation: str
    """Empty if the text has been overwritten; the signature remains."""
    shapes: str
    dtype: str
    root: int | None
    site: str
    """`/path/file.py:31 in function`: the innermost frame outside torch and Lockstep; empty if unknown."""
    stage: str
    """The stage in which the call was issued."""
    module: str
    """The module whose parameters FSDP2 gathers or reduces, such as `layers.3`; empty for other calls."""
    entered_ns: int
    left_ns: int
    """When the call returned to Python (an asynchronous call returns once it is issued); 0 before that."""
    p2p: bool = False
    asynchronous: bool = False
    failed: bool = False
    """Whether the call ended with an exception of the backend."""
    refused: bool = False
    """Whether the call was refused: it did not match the call of a peer, and never reached the backend."""
    peer: int | None = None
    """The peer's rank in the communicator, for a point-to-point call; None for a receive from any source."""

    @property
    def inside(self) -> bool:
        """Whether the call has not returned yet."""
        return self.left_ns == 0

    @property
    def where(self) -> str:
        """The call site with the name of the file instead of its path."""
        return self.site.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class MessageLane:
    """The messages from one member of a communicator to another."""

    of: int
    """The identity of the communicator."""
    sender: int
    receiver: int
    """Ranks in that communicator."""
    inside: bool
    """Whether a thread of the process is inside a send or receive of these, or waits for its handle."""


@dataclass(frozen=True, slots=True)
class CommunicatorRecord:
    """A communicator as one of its members reports it.

    Two sources are merged: the calls issued from Python, which are exact and up to date, and c10d's counts, which
    include collectives issued from C++ and are about 50 ms old. -1 means unknown; 0 means that certainly no collective
    was entered.
    """

    slot: int
    name: str
    """c10d's name, which is a number per process, so different communicators may have equal names: see `identity`."""
    description: str
    backend: str
    size: int
    rank: int
    """The rank of this process in the communicator."""
    identity: int
    """Equal for all members of a communicator, even if they created it with different member lists."""
    members: int
    """Digest of the members' global ranks."""
    created_ns: int
    loop_thread: int
    """Native id of gloo's thread for this communicator, 0 if unknown; see `watch.recorder.abort`."""
    closed: bool
    """Whether the communicator was destroyed."""
    blind: bool
    """Whether the counts may miss calls, so that a missing call proves nothing: there were receives from any source, or
    point-to-point calls together with collectives from C++."""
    counted: bool
    """Whether c10d's counts are read for the communicator, so that `entered` includes collectives issued from C++."""
    entered: int
    entered_ns: int
    completed: int
    completed_ns: int
    started: int
    """The last collective (of a pair: message) that the device has started; -1 if c10d does not report it."""
    pending_ns: int
    """When the oldest unfinished operation was issued; 0 if there is none or the time is unknown."""
    on_device: bool
    """Whether operations run on a device after their calls have returned (NCCL), so that a returned call proves only
    that the operation was issued."""
    issued: int
    """The number of collectives issued from Python."""
    newest: CallRecord | None
    """The newest call issued from Python."""
    inside: CallRecord | None
    """The call that this member is in, or an asynchronous call that c10d has not completed."""
    pair: MessageLane | None = None
    """For the messages from one member to another, which form a communicator of two members: the i-th send is paired
    with the i-th receive. Its rank 0 is the sender. None for all other communicators."""
    unsure: bool = False
    """Whether there are calls after `newest` whose numbers are uncertain, or whose records are incomplete."""

    @property
    def blocked(self) -> bool | None:
        """Whether a thread of the process waits in the oldest unfinished operation; None if unknown."""
        if self.pair is not None and not self.on_device:
            return self.pair.inside
        inside = self.inside
        return True if inside is not None and not (inside.asynchronous or inside.p2p) else None

    @property
    def label(self) -> str:
        """The description of the communicator if it has one, else its name."""
        return self.description if self.description not in ("", "undefined") else self.name


@dataclass(frozen=True, slots=True)
class BeaconState:
    """The contents of a beacon at the time of reading."""

    path: Path
    run: str
    name: str
    role: str
    rank: int
    pid: int
    start_ticks: int
    created_ns: int
    created_wall: float
    beat_ns: int
    """When a background thread last wrote a heartbeat; 0 if the process writes none."""
    stage: str
    stage_since_ns: int
    counters: dict[str, ProgressCounter] = field(default_factory=dict)
    waits: tuple[WaitRecord, ...] = ()
    """The one to show first (`WaitRecord.display_order`)."""
    events: tuple[BeaconEvent, ...] = ()
    communicators: tuple[CommunicatorRecord, ...] = ()
    progress_count: int = 0
    """Grows with every change of a counter or of the stage, and with every call on a communicator."""
    unrecorded: int = 0
    """The number of communicators for which the beacon has no room."""
    torn: int = 0
    """The number of records that could not be read, because the writer died or was stopped while writing them."""
    parent: str = ""
    """The name of the process of the job that this process is a part of: a nested worker (an engine's) of a rank; empty
    for the processes of the job themselves."""


UINT64 = struct.Struct("<Q")
EMPTY = 1
"""The write number of a record that has never been written; zero is a record that is being written."""

MappedMemory = mmap.mmap | memoryview


def digest64(text: str) -> int:
    """A 64-bit digest of a text, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


def encode_text(text: str, size: int) -> bytes:
    raw = text.encode("utf-8", "replace")
    return raw if len(raw) <= size else raw[:size]


def decode_text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "ignore")


def clear_record(memory: MappedMemory, at: int, layout: struct.Struct) -> None:
    """Marks a record as empty."""
    for end in (at, at + layout.size - UINT64.size):
        UINT64.pack_into(memory, end, EMPTY)


class RecordSlot:
    """Writes one record of the mapped file."""

    __slots__ = ("layout", "memory", "number", "offset")

    def __init__(self, memory: MappedMemory, offset: int, layout: struct.Struct) -> None:
        self.memory, self.offset, self.layout, self.number = memory, offset, layout, EMPTY

    def write(self, *fields: object) -> None:
        self.number += 1
        self.layout.pack_into(self.memory, self.offset, self.number, *fields, self.number)


class RecordReader:
    """Reads records from two copies of a part of a file that begins at `start`. A record that changed between the
    copies is copied again."""

    def __init__(self, descriptor: int, start: int, size: int) -> None:
        self.descriptor, self.start = descriptor, start
        self.first, self.second = os.pread(descriptor, size, start), os.pread(descriptor, size, start)
        self._patience = 20
        """Milliseconds that remain for waiting until records are complete, for all records together."""
        self.torn = 0
        """The number of records that could not be read."""

    @property
    def complete(self) -> int:
        """The number of bytes that both copies have."""
        return min(len(self.first), len(self.second))

    def number(self, offset: int) -> int:
        """Reads a single number, which its writer stores in one step, without write numbers around it."""
        return int.from_bytes(self.second[offset - self.start : offset - self.start + 8], "little")

    def record(self, offset: int, layout: struct.Struct, expected: int = 0) -> tuple[int, tuple[Any, ...]] | None:
        """Reads the write number and the fields of a record; None if it was never written or is torn. With `expected`,
        also None if the record has another write number, because it has been overwritten."""
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
            if tries > 20:  # the writer may have lost its CPU while writing, or it is stopped or dead
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
        """Reads the valid records of a table."""
        for i in range(count):
            found = self.record(offset + i * stride, layout)
            if found is not None:
                yield found


MAX_COMMUNICATORS = 256
MAX_LANES = 128
"""Pairs of a peer and a direction, over all communicators of a process."""
CALLS_PER_RING = 256
SETTLED_CALLS = 8
"""The sequence number of a call is final when so many calls have followed it: the recorder asks c10d as often."""
MAX_TEXTS = 1024

FLAG_P2P, FLAG_ASYNC, FLAG_FAILED, FLAG_REFUSED, FLAG_CLOSED, FLAG_COUNTED, FLAG_UNSURE = 1, 2, 4, 8, 16, 32, 64
FLAG_DEVICE = 128
"""In the flags of a communicator: `CommunicatorRecord.on_device`."""
NO_PEER = -1
SEPARATOR = "\x1f"
"""Separates operation, dtype, root, module and shapes in the text of a call; the longest part is the last one."""

COMMUNICATOR_STRUCT = struct.Struct("<QQQQiiQ64s64s32sQ")
# front identity members created_ns size rank loop_thread name description backend back
COUNTS_STRUCT = struct.Struct("<QqqqQQQ")  # front entered started completed entered_ns completed_ns back
CALL_STRUCT = struct.Struct("<QqQQQQIIIIQ")
# front seq issued entered_ns left_ns signature label site flags+peer context back
CALL_ENTRY_STRUCT = struct.Struct("<QqQQ8xQQQQ")
"""The same record as the writer packs it when the call begins: left_ns is 0, label and site are one word, and so are
flags+peer and context."""
TEXT_STRUCT = struct.Struct("<Q176sQ")  # front text back
CALL_WORDS = 9
SEQ_WORD, ENTERED_WORD, LEFT_WORD, WHERE_WORD = 1, 3, 4, 7
"""Positions of 64-bit words in the record of a call."""
PEER_SHIFT = 8
"""The word `flags+peer` has the flags in the lower bits, and the peer's rank + 1 above."""

COMMUNICATOR_STRIDE = 512
COUNTS_AT = 256
CALLS_AT = 384
FLAGS_AT = 392
BLIND_AT = 400
RING_BYTES = CALLS_PER_RING * CALL_STRUCT.size
LANE_STRIDE = 72


MAGIC = b"LOCKSTEP"
VERSION = 7
MAX_COUNTERS = 24
MAX_WAITS = 16
MAX_EVENTS = 128
MAX_SPANS = 1024

HEADER_STRUCT = struct.Struct(
    "<8sIIIiQQd64s96s32s96s"
)  # magic version size pid rank start created_ns created_wall run name role parent
STAGE_STRUCT = struct.Struct("<QQ96sQ")  # front since_ns stage back
COUNTER_STRUCT = struct.Struct("<QqqQ40sQ")  # front value total updated_ns name back
WAIT_STRUCT = struct.Struct(
    "<QQQQQ24s96s160s32sQ"
)  # front thread since_ns deadline_ns moved_ns kind waits_for why thread_name back
EVENT_STRUCT = struct.Struct("<QQ24s72sQ")  # front at_ns kind text back
SPAN_STRUCT = struct.Struct("<QQQQq80s32sQ")  # front began_ns ended_ns kind amount name thread back

BEAT_AT = 512
USED_AT, UNRECORDED_AT = 520, 528
"""The number of communicators with a slot, and of those for which there was none."""
SPANS_WRITTEN_AT = 536
STAGE_AT = 576
COUNTERS_AT = 768
WAITS_AT = COUNTERS_AT + MAX_COUNTERS * 96
EVENTS_AT = WAITS_AT + MAX_WAITS * 384
LANES_AT = EVENTS_AT + MAX_EVENTS * 128
COMMUNICATORS_AT = LANES_AT + MAX_LANES * LANE_STRIDE
FIXED_SIZE = COMMUNICATORS_AT + MAX_COMMUNICATORS * COMMUNICATOR_STRIDE
"""The size of the part that readers copy as a whole, without its unused slots; the texts, and the rings of calls and of
spans, which come after this part, are read only when needed."""
TEXTS_AT = FIXED_SIZE
RINGS_AT = TEXTS_AT + MAX_TEXTS * TEXT_STRUCT.size
SPANS_AT = RINGS_AT + MAX_COMMUNICATORS * RING_BYTES
FILE_SIZE = SPANS_AT + MAX_SPANS * SPAN_STRUCT.size
