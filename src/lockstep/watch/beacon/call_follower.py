"""Follows the calls of a process on its communicators: reads each call of a ring once, between two of which at most the
ring's size may have been made.

A call is read when its sequence number is final: the recorder asks c10d for it at least every `SETTLED_CALLS` calls, or
when no call follows (`CommunicatorMember.verify`), and marks calls whose number was wrong.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lockstep.watch.beacon.beacon_records import (
    CALL_STRUCT,
    CALLS_AT,
    CALLS_PER_RING,
    COMMUNICATOR_STRIDE,
    COMMUNICATORS_AT,
    FLAG_ASYNC,
    FLAG_FAILED,
    FLAG_P2P,
    FLAG_REFUSED,
    FLAG_UNSURE,
    RING_BYTES,
    RINGS_AT,
    SETTLED_CALLS,
)

SETTLED_NS = 1_000_000_000
"""The number of a call is final, too, when it has been the newest one for so long, while the recorder's thread was
running."""


class FollowedCall(NamedTuple):
    """A collective in the order of a member's calls; the fields are those of `CallRecord`."""

    number: int
    seq: int
    issued: int
    signature: int


class CallTimes(NamedTuple):
    """When a member entered and left a collective."""

    issued: int
    signature: int
    entered_ns: int
    left_ns: int
    """0 if it has not left."""
    asynchronous: bool


@dataclass(slots=True)
class CallFollower:
    """Follows the calls on the communicator in one slot of a beacon."""

    slot: int
    next_number: int = 1
    times: list[CallTimes] = field(default_factory=list)
    """Those of the calls that the last `read` returned, in the same order."""
    failed: bool = False
    """Whether a call failed or was refused: from then on, the numbers of members may differ."""

    def read(self, descriptor: int, beat_ns: int) -> list[FollowedCall]:
        """The collectives since the last read whose numbers are final, without those that were overwritten since then
        and those of uncertain number. `beat_ns` is the last heartbeat of the recorder's thread."""
        self.times = []
        written = self._written(descriptor)
        if self.failed or written < self.next_number:
            return []
        first = max(self.next_number, written - CALLS_PER_RING + 1)
        chunks = list(_read_ring(descriptor, self.slot, first, written))
        oldest = self._written(descriptor) - CALLS_PER_RING + 2  # the call before may just have been overwritten
        found: list[FollowedCall] = []
        number = first - 1
        for chunk in chunks:
            for front, seq, issued, entered, left, signature, _, _, flags, _, back in CALL_STRUCT.iter_unpack(chunk):
                number += 1
                settled = written - number >= SETTLED_CALLS or beat_ns - entered >= SETTLED_NS
                if not settled:
                    return found
                self.next_number = number + 1
                if number < oldest or not front == back == number or flags & (FLAG_P2P | FLAG_UNSURE):
                    continue
                if flags & (FLAG_FAILED | FLAG_REFUSED):
                    self.failed = True
                    return found
                found.append(FollowedCall(number, seq, issued, signature))
                self.times.append(CallTimes(issued, signature, entered, left, bool(flags & FLAG_ASYNC)))
        return found

    def _written(self, descriptor: int) -> int:
        at = COMMUNICATORS_AT + self.slot * COMMUNICATOR_STRIDE + CALLS_AT
        return int.from_bytes(os.pread(descriptor, 8, at), "little")


def _read_ring(descriptor: int, slot: int, first: int, last: int) -> Iterator[bytes]:
    """The records of calls `first` to `last`, at most a ring of them, in one or two pieces."""
    ring_at = RINGS_AT + slot * RING_BYTES
    low, count = (first - 1) % CALLS_PER_RING, last - first + 1
    head = min(count, CALLS_PER_RING - low)
    yield os.pread(descriptor, head * CALL_STRUCT.size, ring_at + low * CALL_STRUCT.size)
    if count > head:
        yield os.pread(descriptor, (count - head) * CALL_STRUCT.size, ring_at)
