"""The part of a beacon about messages between two members of a communicator.

A send to a peer and the peer's receive are a collective of these two: the i-th send from a to b is paired with the i-th
receive of b from a. A *lane* counts the sends to one peer, or the receives from it. It consists of nine words, each
written by one store.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.watch.beacon.beacon_records import (
    LANE_STRIDE,
    LANES_AT,
    MAX_LANES,
    CallRecord,
    CommunicatorRecord,
    MessageLane,
    RecordReader,
    digest64,
)

_WORDS = LANE_STRIDE // 8
_ABOUT, _ISSUED, _COMPLETED, _PENDING_NS, _ISSUED_NS, _COMPLETED_NS, _SITE, _INSIDE, _STARTED = range(_WORDS)
"""About: slot + 1 (16 bits), sends or receives (1), the peer's rank in the communicator (20 bits from bit 20), the
peer's global rank (24 bits from bit 40). Site: the text's number (32 bits), this process's global rank. Started: the
last message that the device has started, plus 1; 0 if that is unknown, as it is after each completion."""
OPERATION = "send/recv"
SIGNATURE = digest64(OPERATION)
"""All messages of a lane have one signature: the sizes of a send and its receive are not compared."""


class Lane:
    """Writes the messages between this process and one peer in one direction. Only one thread at a time may use it."""

    __slots__ = ("_at", "_issued_ns", "_words")

    def __init__(self, words: memoryview, index: int) -> None:
        self._words, self._at = words, (LANES_AT + index * LANE_STRIDE) >> 3
        self._issued_ns: deque[int] = deque()
        """When each unfinished message was issued."""

    def open(self, slot: int, sends: bool, peer: int, global_peer: int, own: int) -> None:
        self._issued_ns.clear()
        for word in range(1, _WORDS):
            self._words[self._at + word] = 0
        self._words[self._at + _SITE] = own << 32
        self._words[self._at + _ABOUT] = (slot + 1) | sends << 16 | peer << 20 | global_peer << 40

    def issue(self, at_ns: int, site: int) -> None:
        """Records that a message was issued. `site` is the number of the text with its call site."""
        words, at = self._words, self._at
        self._issued_ns.append(at_ns)
        words[at + _ISSUED] += 1
        words[at + _ISSUED_NS] = at_ns
        if len(self._issued_ns) == 1:
            words[at + _PENDING_NS] = at_ns
            words[at + _SITE] = site | words[at + _SITE] >> 32 << 32

    def complete(self) -> None:
        """Records that the oldest unfinished message has completed."""
        words, at = self._words, self._at
        if self._issued_ns:
            self._issued_ns.popleft()
        words[at + _STARTED] = 0
        words[at + _COMPLETED_NS] = time.monotonic_ns()
        words[at + _COMPLETED] += 1
        words[at + _PENDING_NS] = self._issued_ns[0] if self._issued_ns else 0

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of messages issued and completed."""
        return self._words[self._at + _ISSUED], self._words[self._at + _COMPLETED]

    def start(self, number: int) -> None:
        """Records the last message that the device has started; it remains known until the next completion."""
        self._words[self._at + _STARTED] = number + 1

    def inside(self, change: int) -> None:
        """Counts the threads that are inside a call of this lane, or wait for its handle."""
        self._words[self._at + _INSIDE] = max(0, self._words[self._at + _INSIDE] + change)


class LaneWriter:
    """The lanes of this process."""

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._lanes: dict[tuple[int, bool, int], tuple[int, Lane]] = {}
        self._free = list(range(MAX_LANES - 1, -1, -1))

    def lane(self, slot: int, sends: bool, peer: int, global_peer: int, own: int) -> Lane | None:
        """The lane for messages to or from a peer on the communicator in this slot; None if there is no room.

        Args:
            peer: its rank in the communicator.
            global_peer: its rank in the job.
            own: the rank of this process in the job.
        """
        known = self._lanes.get((slot, sends, peer))
        if known is None:
            if not self._free:
                return None
            index = self._free.pop()
            known = self._lanes[slot, sends, peer] = index, Lane(self._words, index)
            known[1].open(slot, sends, peer, global_peer, own)
        return known[1]

    def clear(self, slot: int) -> None:
        """Releases the lanes of a slot that another communicator will use."""
        for key in [key for key in self._lanes if key[0] == slot]:
            index, _ = self._lanes.pop(key)
            self._words[(LANES_AT + index * LANE_STRIDE) >> 3] = 0
            self._free.append(index)


def lane_records(
    reading: RecordReader, communicators: Mapping[int, CommunicatorRecord], texts: Any
) -> Iterator[CommunicatorRecord]:
    """Decodes the lanes, each as a communicator of two members. `communicators` are those of the beacon by slot."""
    for index in range(MAX_LANES):
        at = LANES_AT + index * LANE_STRIDE
        of = communicators.get((reading.number(at) & 0xFFFF) - 1)
        if of is not None:  # most lanes are unused
            yield _decode_lane([reading.number(at + 8 * word) for word in range(_WORDS)], of, texts)


def _decode_lane(words: list[int], of: CommunicatorRecord, texts: Any) -> CommunicatorRecord:
    about, site = words[_ABOUT], texts[words[_SITE] & 0xFFFFFFFF]
    sends, peer, ends = bool(about >> 16 & 1), about >> 20 & 0xFFFFF, (words[_SITE] >> 32, about >> 40)
    pair = MessageLane(of.identity, *((of.rank, peer) if sends else (peer, of.rank)), inside=bool(words[_INSIDE]))
    first, last = ends if sends else ends[::-1]
    issued, completed = words[_ISSUED], min(words[_COMPLETED], words[_ISSUED])
    pending = completed < issued
    call = CallRecord(
        issued, completed + 1 if pending else issued, issued, SIGNATURE, OPERATION, "", "", None, site, "", "",
        words[_PENDING_NS] or words[_ISSUED_NS], 0 if pending else words[_COMPLETED_NS], True, of.on_device, peer=peer,
    )  # fmt: skip
    return CommunicatorRecord(
        of.slot, f"{of.label} {first}->{last}", "", of.backend, 2, 0 if sends else 1,
        digest64(f"{of.identity:016x} {pair.sender}>{pair.receiver}"), 0, of.created_ns, of.loop_thread, of.closed,
        of.blind, True, issued, words[_ISSUED_NS], completed, words[_COMPLETED_NS], words[_STARTED] - 1,
        words[_PENDING_NS] if pending else 0, of.on_device, issued, call if issued else None, call if pending else None,
        pair,
    )  # fmt: skip
