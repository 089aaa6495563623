"""Samples when the members of communicators on this host entered and left their collectives, for the supervisor, which
compares the members (`communication.arrival_totals`).

Which calls are sampled is decided by a hash of a call's number, so all hosts choose the same ones. Of many calls only
one in 2**shift is sampled: that of a host with a larger shift is among those of a host with a smaller one. Each sampled
call stands for 2**shift calls.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lockstep.watch.beacon.beacon_records import CallRecord, CommunicatorRecord
from lockstep.watch.beacon.call_follower import CallTimes
from lockstep.watch.communication.call_sizes import call_bytes

TIMING_RECORD = struct.Struct("<IiIqQQqBB")
"""Fields: communicator (index in the roster), incarnation, rank in the communicator, number of the call, signature,
when it was entered (host's monotonic clock, ns), how long it took (ns; -1 if it did not block, or has not ended),
shift, flags."""
ASYNCHRONOUS, ON_DEVICE = 1, 2
"""Flags: the call only issues its operation; operations of the communicator run after their calls."""
MOST_CALLS = 64
"""Sampled calls of a member in one report, in communicators of up to 16 members."""
MOST_ENTRIES = 1024
"""Members times calls in one report of all hosts together."""
_HASH = 2654435761  # Knuth's multiplicative hash
KEPT_DESCRIPTIONS = 2048


def is_sampled(issued: int, shift: int) -> bool:
    """Whether a call belongs to the sample of one in 2**shift calls."""
    return not shift or (issued * _HASH & 0xFFFFFFFF) >> (32 - shift) == 0


def sampling_shift(calls: int, size: int) -> int:
    """The shift for so many new calls on a communicator of this size."""
    most = max(1, min(MOST_CALLS, MOST_ENTRIES // max(size, 1)))
    return max(0, (-(-calls // most) - 1).bit_length())


@dataclass(slots=True)
class CallTimings:
    """The sampled calls since the last report."""

    wanted: bool = False
    """Whether a supervisor sums them up."""
    _rows: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """The identity of a communicator, and the fields of a record without the communicator."""
    _known: dict[int, tuple[str, int | None]] = field(default_factory=dict)
    """Operation and bytes, by signature."""
    _described: set[int] = field(default_factory=set)
    """Signatures that all supervisors know."""

    def forget(self) -> None:
        """Describes all signatures again, for a new supervisor."""
        self._described.clear()

    def describe(self, call: CallRecord) -> None:
        """Notes what a signature means."""
        if self.wanted and call.operation and call.signature not in self._known:
            if len(self._known) >= KEPT_DESCRIPTIONS:
                self._known.clear()
                self._described.clear()
            nbytes = call_bytes(call.operation, call.shapes, call.dtype, call.module)
            self._known[call.signature] = call.operation, nbytes

    def add(self, record: CommunicatorRecord, incarnation: int, calls: list[CallTimes]) -> None:
        """Samples new calls of a member."""
        if not self.wanted:
            return
        if record.newest is not None:
            self.describe(record.newest)
        shift = sampling_shift(len(calls), record.size)
        for call in calls:
            if not is_sampled(call.issued, shift):
                continue
            flags = ASYNCHRONOUS * call.asynchronous | ON_DEVICE * record.on_device
            took = -1 if flags or not call.left_ns else call.left_ns - call.entered_ns
            fields = incarnation, record.rank, call.issued, call.signature, call.entered_ns, took, shift, flags
            self._rows.append((record.identity, fields))

    def take(self, numbers: Mapping[int, int]) -> tuple[bytes, dict[int, tuple[str, int | None]]]:
        """Returns the records since the last time, and the meaning of signatures that supervisors do not know.

        Args:
            numbers: the index of each communicator in the roster, by identity.
        """
        rows, self._rows = self._rows, []
        packed = b"".join(
            TIMING_RECORD.pack(numbers[identity], *fields) for identity, fields in rows if identity in numbers
        )
        return packed, self._describe_new(fields[3] for _, fields in rows)

    def _describe_new(self, signatures: Iterable[int]) -> dict[int, tuple[str, int | None]]:
        new = {each: self._known[each] for each in signatures if each in self._known and each not in self._described}
        self._described |= new.keys()
        return new
