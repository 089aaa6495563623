"""Records and numbers the calls that this process issues on one communicator, and compares them with its peers' calls.

c10d's sequence number also counts calls that are no collectives (point-to-point calls with gloo); `SequenceOffsets`
subtracts these, so that all members have equal numbers.
"""

from time import monotonic_ns
from typing import Any

from lockstep.base.errors import CollectiveRefused
from lockstep.base.folders import run_shm_dir
from lockstep.watch.beacon.beacon_records import (
    CALLS_PER_RING,
    FLAG_P2P,
    FLAG_REFUSED,
    FLAG_UNSURE,
    LEFT_WORD,
    NO_PEER,
    SEQ_WORD,
    WHERE_WORD,
    CallRecord,
)
from lockstep.watch.beacon.call_ring import CommunicatorSlot
from lockstep.watch.beacon.reader import read_calls
from lockstep.watch.beacon.writer import current_beacon
from lockstep.watch.recorder.collective_order import OrderCheck


class SequenceOffsets:
    """Subtracts the calls that c10d's sequence number counts although they are no collectives."""

    def __init__(self) -> None:
        self.total = 0
        self._steps: list[tuple[int, int]] = []
        self._forgotten = 0

    def skip(self, after: int, count: int) -> None:
        """Notes that the backend's number is now `after`, and that `count` calls since the last note were no
        collectives."""
        if count:
            self.total += count
            self._steps.append((after, self.total))
            if len(self._steps) > 256:
                self._forgotten = self._steps[127][1]
                del self._steps[:128]

    def collective(self, number: int) -> int:
        """The communicator's collective that has the backend's `number`."""
        for after, total in reversed(self._steps):
            if number >= after:
                return number - total
        return number - self._forgotten


NOT_REPORTED = -2
CallKey = tuple[int, int, int]
"""A call's signature, the texts word of its record, and the digest of its call site."""
SEQUENCE_CHECK_INTERVAL = 8
STEADY_CALLS = 256
"""After this many calls in a row with the expected number, c10d is queried for every eighth number only."""
NEVER_STEADY = -(1 << 62)


class CommunicatorMember:
    """The membership of this process in one communicator. Only one thread at a time issues calls on it.

    The sequence number of a call is c10d's, which callers from C++ advance too. While all calls come from Python, it is
    the number of issued calls plus a constant (`lead`), and c10d is queried only now and then: a query costs half as
    much as all the rest. Once another caller turns up, the calls since the last query are marked unsure, and from then
    on c10d is queried every time.
    """

    __slots__ = (
        "counted", "entered", "group", "issued", "keepalive_rounds", "label", "lead", "line", "name", "offsets",
        "order_check", "queried", "rank", "ranks", "raw", "run", "seen", "sequence", "steady", "sure", "until",
    )  # fmt: skip

    def __init__(self, group: Any, line: CommunicatorSlot, name: str, label: str, ranks: list[int], rank: int) -> None:
        self.group, self.line, self.name, self.label = group, line, name, label
        self.ranks, self.rank = ranks, rank
        self.order_check: OrderCheck | None = None
        self.run = ""
        self.issued = self.lead = self.steady = self.seen = 0
        self.queried = self.until = self.sure = 0
        """The call of the last query, the call before which no query is needed, and the newest call whose number is
        certain."""
        self.offsets = SequenceOffsets()
        self.raw = (-1, -1)
        """The counts of the last poll."""
        self.entered = (-1, -1, 0, 0)
        self.counted = False
        self.keepalive_rounds = 0
        self.sequence = group._get_sequence_number_for_group
        try:
            self.sequence()
        except (RuntimeError, NotImplementedError):
            self.sequence = lambda: self.issued

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank] if self.rank < len(self.ranks) else self.rank

    def enter(self, what: CallKey) -> int:
        """Records that a collective begins; returns the position of its record, for `CommunicatorSlot.leave`.

        Raises:
            CollectiveRefused: another member on this host has entered a different call at this place.
        """
        self.issued, line = self.issued + 1, self.line
        left = line.enter(self.number(self.issued), self.issued, what[0], what[1], line.rings.pack_stage())
        if self.order_check is not None:
            self.check_order(self.order_check, what, left)
        return left

    # --- sequence numbers

    def number(self, issued: int) -> int:
        """The sequence number of the call that begins now."""
        return issued + self.lead if issued < self.until else self.query_sequence(issued)

    def query_sequence(self, issued: int) -> int:
        """The sequence number that c10d gives to the call that begins now."""
        seq: int = max(0, self.sequence() + 1 - self.offsets.total)
        if seq - issued == self.lead:
            self.steady += issued - self.queried
        else:
            self._mark_unsure(seq - issued, self.line.calls)
        self.queried, self.sure = issued, self.line.calls + 1
        self.until = issued + (SEQUENCE_CHECK_INTERVAL if self.steady >= STEADY_CALLS else 1)
        return seq

    def _mark_unsure(self, lead: int, newest: int) -> None:
        """Marks the calls from the last query to number `newest` as unsure."""
        line = self.line
        for number in range(max(self.sure + 1, line.calls - CALLS_PER_RING + 1), newest + 1):
            line.words[line.call_at(number) + WHERE_WORD] |= FLAG_UNSURE
        self.lead, self.until = lead, 0
        self.steady = NEVER_STEADY if self.queried else 0

    def resynchronize(self) -> None:
        """Queries c10d after a call that c10d may have counted several times or not at all."""
        self.lead = self.sequence() - self.offsets.total - self.issued
        self.queried, self.sure, self.until = self.issued, self.line.calls, 0

    def verify(self) -> None:
        """Queries c10d about the newest call, unless another has followed since the last poll. The recorder's thread
        calls this."""
        issued, line = self.issued, self.line
        if issued != self.seen or issued <= self.queried or issued >= self.until:
            self.seen = issued
            return
        newest = line.calls
        at = line.call_at(newest)
        inside = line.words[at + LEFT_WORD] == 0
        lead = self.sequence() - self.offsets.total - issued
        if issued != self.issued or inside != (line.words[at + LEFT_WORD] == 0):
            return
        if inside and lead < self.lead:  # the backend has not seen it yet
            return
        if lead != self.lead:
            self._mark_unsure(lead, newest - inside)
            if inside:
                line.words[at + SEQ_WORD] = issued + lead
        self.queried, self.sure = issued, newest

    def check_order(self, order_check: OrderCheck, what: CallKey, left: int) -> None:
        """Raises CollectiveRefused if a peer has entered a different call as the same collective."""
        other = order_check.enter(self.issued, what[0] ^ what[2])
        if other is not None:
            self.line.leave(left, FLAG_REFUSED)
            refusal = self._refusal(self.issued, other)
            self.issued -= 1
            raise refusal

    def enter_p2p(self, what: CallKey, peer: int | None) -> int:
        """Records that a point-to-point call begins."""
        self.line.blind()
        return self.line.enter(
            max(0, self.sequence() - self.offsets.total), self.issued, what[0], what[1], self.line.rings.pack_stage(),
            FLAG_P2P, NO_PEER if peer is None else peer,
        )  # fmt: skip

    # --- refusals: rare, so they may read the peers' beacons

    def _call_of(self, column: int, number: int) -> CallRecord | None:
        assert self.order_check is not None
        _, name, slot = self.order_check.member(column)
        calls = read_calls(run_shm_dir(self.run) / f"{name}.beacon", slot)
        return next(
            (call for call in reversed(calls) if call.issued == number and not (call.p2p or call.refused)), None
        )

    def _own_call(self, number: int) -> CallRecord | None:
        calls = read_calls(current_beacon().path, self.line.slot)
        return next((call for call in reversed(calls) if call.issued == number and not call.p2p), None)

    def _refusal(self, number: int, column: int) -> CollectiveRefused:
        assert self.order_check is not None
        rank, _, _ = self.order_check.member(column)
        mine, theirs = self._own_call(number), self._call_of(column, number)
        peer = self.ranks[rank] if rank < len(self.ranks) else rank
        return CollectiveRefused(self.label, number, _call_text(mine), _call_text(theirs), self.global_rank, peer)

    # --- c10d's counts, from the recorder's thread

    def count(self, raw: tuple[int, int]) -> None:
        """Records c10d's own counts where they changed: -1 for none yet, `NOT_REPORTED` without a source."""
        if not self.counted:
            self.counted = True
            self.line.counted()
        if raw == self.raw:
            return
        now, old = monotonic_ns(), self.entered
        entered = self.offsets.collective(raw[0]) if raw[0] >= 0 else 0
        completed = self.offsets.collective(raw[1]) if raw[1] >= 0 else (-1 if raw[1] == NOT_REPORTED else 0)
        self.raw = raw
        self.entered = (
            entered, completed, now if entered != old[0] else old[2], now if completed != old[1] else old[3],
        )  # fmt: skip
        self.line.counts(*self.entered)

    def close(self) -> None:
        """Drops the destroyed communicator, so that its threads and sockets can end."""
        self.line.close()
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
