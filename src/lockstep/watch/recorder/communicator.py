"""Records and numbers the calls of this process on one communicator, and compares them with the calls of its peers.

c10d's sequence number also counts calls that are no collectives (point-to-point calls with gloo). `SequenceOffsets`
subtracts these, so that all members have equal numbers.
"""

import os
from collections.abc import Iterable, Sequence
from time import monotonic_ns, time
from typing import Any, NamedTuple

from lockstep.base.errors import CollectiveRefused
from lockstep.base.folders import run_shm_dir
from lockstep.watch.beacon.beacon_records import (
    CALLS_PER_RING,
    ENTERED_WORD,
    FLAG_ASYNC,
    FLAG_FAILED,
    FLAG_P2P,
    FLAG_REFUSED,
    FLAG_UNSURE,
    LEFT_WORD,
    NO_PEER,
    SEQ_WORD,
    SETTLED_CALLS,
    WHERE_WORD,
    CallRecord,
)
from lockstep.watch.beacon.call_ring import CommunicatorSlot
from lockstep.watch.beacon.reader import read_calls
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.recorder.collective_order import OrderCheck
from lockstep.watch.recorder.transfers import Message, Transfer, TransferTracker


class SequenceOffsets:
    """Subtracts the calls that c10d's sequence number counts although they are no collectives."""

    def __init__(self) -> None:
        self.total = 0
        self._steps: list[tuple[int, int]] = []
        self._forgotten = 0
        self._before: int | None = None
        """The backend's number before the call that is in progress and no collective."""

    def begin(self, before: int) -> None:
        """Records that a call begins that may be no collective, at this number of the backend."""
        self._before = before

    def skip(self, after: int, count: int) -> None:
        """Records that the call has ended, that the backend's number is now `after`, and that it has counted `count`
        calls too many."""
        if count:
            self.total += count
            self._steps.append((after, self.total))
            if len(self._steps) > 256:
                self._forgotten = self._steps[127][1]
                del self._steps[:128]
        self._before = None

    def _without_current(self, number: int) -> int:
        before = self._before
        return number if before is None else min(number, before)

    def newest(self, number: int) -> int:
        """Converts the current sequence number of the backend to one that counts collectives only."""
        before = self._before
        return (number if before is None or number < before else before) - self.total

    def to_collective(self, number: int) -> int:
        """Converts a sequence number of the backend to one that counts collectives only."""
        number = self._without_current(number)
        for after, total in reversed(self._steps):
            if number >= after:
                return number - total
        return number - self._forgotten


NOT_REPORTED = -2
"""In place of a count: c10d does not report it."""
HOST_BLOCKING = frozenset({"gloo", "mpi", "fake"})
"""Backends whose calls return when their data is there. With all others, a call returns when it is issued."""


def host_blocking_devices(backends: str) -> frozenset[str] | None:
    """The types of devices for whose tensors a call blocks the host, given c10d's backends of a communicator
    (`cpu:gloo,cuda:nccl`, or one name for all devices); None for all devices."""
    pairs = [each.rpartition(":") for each in backends.lower().split(",")]
    if all(backend in HOST_BLOCKING for _, _, backend in pairs):
        return None
    return frozenset(device for device, _, backend in pairs if device and backend in HOST_BLOCKING)


class CollectiveCounts(NamedTuple):
    """c10d's numbers of the last collectives of a communicator. -1 means that there is none yet, `NOT_REPORTED` that
    c10d does not report the number."""

    entered: int
    completed: int
    started: int = NOT_REPORTED


CallKey = tuple[int, int, int]
"""A call's signature, the texts word of its record, and the signature with the call site for the order check."""
SEQUENCE_CHECK_INTERVAL = SETTLED_CALLS
STEADY_CALLS = 256
"""After this many consecutive calls with the expected number, c10d is queried only every `SEQUENCE_CHECK_INTERVAL`
calls."""
NEVER_STEADY = -(1 << 62)
"""A count of steady calls that never reaches `STEADY_CALLS`."""


class CommunicatorMember:
    """The membership of this process in one communicator. Only one thread at a time issues calls on it.

    The sequence number of a call is c10d's, which calls from C++ advance too. While all calls come from Python, it is
    the number of issued calls plus a constant (`lead`), and c10d is queried only now and then, because a query takes
    half as much time as all other recording. Once a call from C++ is detected, the calls since the last query are
    marked unsure, and from then on c10d is queried for every call.
    """

    __slots__ = (
        "blocking_devices", "counted", "group", "issued", "keepalive_rounds", "label", "lead", "name", "next_query",
        "offsets", "order_check", "polled_counts", "polled_issued", "queried", "rank", "ranks", "run", "sequence",
        "sequence_reported", "slot", "starts_reported", "steady", "sure", "transfers", "written_counts",
    )  # fmt: skip

    def __init__(self, group: Any, slot: CommunicatorSlot, name: str, label: str, ranks: list[int], rank: int) -> None:
        self.group, self.slot, self.name, self.label = group, slot, name, label
        self.ranks, self.rank = ranks, rank
        self.order_check: OrderCheck | None = None
        self.run = ""
        self.issued = self.lead = self.steady = self.polled_issued = 0
        self.queried = self.next_query = self.sure = 0
        """The issued call of the last query, the issued call that needs the next query, and the newest call whose
        number is certain."""
        self.offsets = SequenceOffsets()
        self.polled_counts = CollectiveCounts(-1, -1)
        """c10d's counts at the last poll."""
        self.written_counts = (-1, -1, 0, 0, -1)
        """The counts and times in the beacon."""
        self.blocking_devices = host_blocking_devices(slot.backend)
        """See `host_blocking_devices`."""
        self.starts_reported = not self.blocks_host and os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1"
        """Whether c10d reports which collective the device has started."""
        self.transfers = TransferTracker(slot, ranks, self.global_rank, self.blocks_host)
        self.counted = False
        self.keepalive_rounds = 0
        self.sequence = group._get_sequence_number_for_group
        self.sequence_reported = len({each.rpartition(":")[2] for each in slot.backend.lower().split(",")}) == 1
        """Whether c10d numbers all collectives, those from C++ included. Then number 0 proves that there were none. Of
        several backends, c10d reports the number of one."""
        try:
            self.sequence()
        except (RuntimeError, NotImplementedError):
            self.sequence, self.sequence_reported = lambda: self.issued, False

    @property
    def blocks_host(self) -> bool:
        """Whether every call returns only when its data is there."""
        return self.blocking_devices is None

    def has_returned(self, tensor: Any) -> bool:
        """Whether a call with this tensor (or list of tensors, or None) has completed when it has returned."""
        if self.blocking_devices is None:
            return True
        tensor = tensor[0] if isinstance(tensor, list | tuple) and tensor else tensor
        device = getattr(tensor, "device", None)
        return device is not None and device.type in self.blocking_devices

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank] if self.rank < len(self.ranks) else self.rank

    def enter(self, key: CallKey) -> int:
        """Records that a collective begins. Returns the position for `CommunicatorSlot.leave`.

        Raises:
            CollectiveRefused: another member on this host has entered a different call as the same collective.
        """
        self.issued, slot = self.issued + 1, self.slot
        left = slot.enter(self.sequence_number(self.issued), self.issued, key[0], key[1], slot.rings.pack_stage())
        if self.order_check is not None:
            other = self.order_check.enter(self.issued, key[2])
            if other is not None:
                self.refuse(other, left)
        return left

    # --- sequence numbers

    @property
    def collectives(self) -> int:
        """How many collectives c10d has counted."""
        return self.offsets.newest(self.sequence())

    def sequence_number(self, issued: int) -> int:
        """The sequence number of the call that begins now."""
        return issued + self.lead if issued < self.next_query else self.query_sequence(issued)

    def query_sequence(self, issued: int) -> int:
        """The sequence number that c10d gives to the call that begins now."""
        seq = max(0, self.collectives + 1)
        if seq - issued == self.lead:
            self.steady += issued - self.queried
        else:
            self._mark_unsure(seq - issued, self.slot.calls)
        self.queried, self.sure = issued, self.slot.calls + 1
        self.next_query = issued + (SEQUENCE_CHECK_INTERVAL if self.steady >= STEADY_CALLS else 1)
        return seq

    def _mark_unsure(self, lead: int, newest: int) -> None:
        """Marks the calls from the last query to number `newest` as unsure."""
        slot = self.slot
        for number in range(max(self.sure + 1, slot.calls - CALLS_PER_RING + 1), newest + 1):
            slot.words[slot.call_at(number) + WHERE_WORD] |= FLAG_UNSURE
        self.lead, self.next_query = lead, 0
        self.steady = NEVER_STEADY if self.queried else 0
        if self.queried and self.transfers.used:  # the numbers may be those of messages
            slot.mark_blind()

    def resynchronize(self) -> None:
        """Queries c10d, after a call that c10d may have counted several times or not at all."""
        self.lead = self.collectives - self.issued
        self.queried, self.sure, self.next_query = self.issued, self.slot.calls, 0

    def verify(self) -> None:
        """Checks the sequence number of the newest call, if no call was issued since the last poll. The recorder's
        thread calls this."""
        issued, slot = self.issued, self.slot
        if issued != self.polled_issued or issued <= self.queried or issued >= self.next_query:
            self.polled_issued = issued
            return
        newest = slot.calls
        at = slot.call_at(newest)
        inside = slot.words[at + LEFT_WORD] == 0
        lead = self.collectives - issued
        if issued != self.issued or inside != (slot.words[at + LEFT_WORD] == 0):
            return
        if inside and lead < self.lead:  # the call has not reached the backend yet
            return
        if lead != self.lead:
            self._mark_unsure(lead, newest - inside)
            if inside:
                slot.words[at + SEQ_WORD] = issued + lead
        self.queried, self.sure = issued, newest

    def refuse(self, other: int, left: int) -> None:
        """Raises CollectiveRefused: the member in this column of the order check has entered a different call."""
        self.slot.leave(left, FLAG_REFUSED)
        refusal = self._refusal(self.issued, other)
        self.issued -= 1
        raise refusal

    def enter_p2p(self, key: CallKey, messages: Sequence[Message]) -> tuple[int, Transfer]:
        """Records that a point-to-point call begins. Returns the position for `CommunicatorSlot.leave`, and the
        messages for `TransferTracker.returned`."""
        if self.steady < 0:
            self.slot.mark_blind()
        peer = messages[0].peer if len(messages) == 1 else None
        left = self.slot.enter(
            max(0, self.collectives), self.issued, key[0], key[1], self.slot.rings.pack_stage(),
            FLAG_P2P, NO_PEER if peer is None else peer,
        )  # fmt: skip
        return left, self.transfers.issue(messages, key[1] >> 32)

    # --- refusals, which are rare and may therefore read the peers' beacons

    def _peer_call(self, column: int, number: int) -> CallRecord | None:
        assert self.order_check is not None
        _, name, peer_slot = self.order_check.member(column)
        calls = read_calls(run_shm_dir(self.run) / f"{name}.beacon", peer_slot)
        return next(
            (call for call in reversed(calls) if call.issued == number and not (call.p2p or call.refused)), None
        )

    def _own_call(self, number: int) -> CallRecord | None:
        calls = read_calls(current_beacon().path, self.slot.index)
        return next((call for call in reversed(calls) if call.issued == number and not call.p2p), None)

    def _refusal(self, number: int, column: int) -> CollectiveRefused:
        assert self.order_check is not None
        rank, _, _ = self.order_check.member(column)
        own_call, peer_call = self._own_call(number), self._peer_call(column, number)
        peer = self.ranks[rank] if rank < len(self.ranks) else rank
        return CollectiveRefused(
            self.label, number, _call_text(own_call), _call_text(peer_call), self.global_rank, peer
        )

    # --- c10d's counts, from the recorder's thread

    def update_counts(self, counts: CollectiveCounts) -> None:
        """Records c10d's counts if they have changed."""
        if not self.counted:
            self.counted = True
            self.slot.mark_counted()
        if counts == self.polled_counts:
            return
        now, old = monotonic_ns(), self.written_counts
        entered, completed, started = (self._to_collective(each) for each in counts)
        self.starts_reported |= started > 0 and started >= completed
        started = max(started, completed) if self.starts_reported else -1
        self.polled_counts = counts
        self.written_counts = (
            entered, completed, now if entered != old[0] else old[2], now if completed != old[1] else old[3], started,
        )  # fmt: skip
        self.slot.write_counts(*self.written_counts)

    def _to_collective(self, count: int) -> int:
        return self.offsets.to_collective(count) if count >= 0 else -1 if count == NOT_REPORTED else 0

    def close(self) -> None:
        """Releases the destroyed communicator, so that its threads and sockets can end."""
        self.slot.close()
        self.transfers.close()
        self.group, self.sequence = None, lambda: self.issued
        if self.order_check is not None:
            order_check, self.order_check = self.order_check, None
            order_check.close()


def _call_text(call: CallRecord | None) -> str:
    if call is None:
        return "a different call"
    root = "" if call.root is None else f" root {call.root}"
    what = " ".join(word for word in (call.operation, call.shapes, call.dtype) if word)
    return f"{what}{root} at {call.where}" if call.where else f"{what}{root}"


def recovered_at(members: Iterable[CommunicatorMember]) -> float:
    """When this process entered the newest call that has returned with its data, in Unix seconds; 0.0 if there is none
    among the newest two of each communicator (the newest may be the one that failed)."""
    newest = 0
    for slot in (each.slot for each in members):
        for number in range(max(1, slot.calls - 1), slot.calls + 1):
            at = slot.call_at(number)
            flags = slot.words[at + WHERE_WORD] & (FLAG_ASYNC | FLAG_FAILED | FLAG_REFUSED)
            if slot.words[at + LEFT_WORD] and not flags:
                newest = max(newest, slot.words[at + ENTERED_WORD])
    return time() - (monotonic_ns() - newest) / 1e9 if newest else 0.0
