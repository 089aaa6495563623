"""Compares the calls of the members of each communicator on this host, also those that have completed.

A backend may pair different calls silently (gloo does with a larger broadcast, or another root): then nothing stalls,
and the results are wrong. The newest calls in a report show such a difference only for a moment; this comparison reads
every call of the rings, in the agent, without cost for the ranks.

Only what proves a difference counts: calls that are the same one by c10d's number and by the number of calls from
Python, of running members, on communicators whose numbers are certain. Signatures leave out what may differ.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.base.folders import open_own_file
from lockstep.watch.agent.process_monitor import ProcessState
from lockstep.watch.beacon.beacon_records import CallRecord, CommunicatorRecord
from lockstep.watch.beacon.call_follower import CallFollower, FollowedCall
from lockstep.watch.beacon.reader import read_calls
from lockstep.watch.diagnosis.evidence_types import Liveness

KEPT_CALLS = 1024
"""Calls that are kept for each member; members further apart than this are not compared."""
SHOWN_CALLS = 8
"""Calls of each member that are reported, from the first difference on."""
PATIENCE_S = 2.0
"""How long a difference waits for the calls of the remaining members on this host, which decide who is right."""

Membership = tuple[ProcessState, CommunicatorRecord]
MemberKey = tuple[int, int, int]
"""The pid of a process, a slot of its beacon, and when the communicator there was created."""


@dataclass(slots=True)
class _FollowedMember:
    follower: CallFollower
    calls: dict[int, FollowedCall] = field(default_factory=dict)
    """By sequence number."""
    newest: int = 0

    def add(self, call: FollowedCall) -> None:
        self.calls[call.seq] = call
        self.newest = max(self.newest, call.seq)
        if len(self.calls) > 2 * KEPT_CALLS:
            for seq in list(self.calls)[:KEPT_CALLS]:
                del self.calls[seq]


@dataclass(slots=True)
class _Difference:
    """The first sequence number at which two members of a communicator made different calls."""

    seq: int
    found_ns: int
    shown: dict[MemberKey, Sequence[CallRecord]] | None = None
    """The calls to report; None as long as those of other members are awaited."""


class CallComparison:
    """Follows all members on this host."""

    def __init__(self) -> None:
        self._members: dict[MemberKey, _FollowedMember] = {}
        self._usual: dict[int, dict[int, FollowedCall]] = {}
        """For each communicator, by its identity, the first known call of each sequence number."""
        self._differences: dict[int, _Difference] = {}

    @property
    def found_difference(self) -> bool:
        """Whether a difference is reported."""
        return any(each.shown for each in self._differences.values())

    def update(self, memberships: Iterable[Membership]) -> None:
        """Reads and compares the calls since the last update."""
        communicators: dict[int, list[Membership]] = {}
        for process, record in memberships:
            if record.pair is None and not record.blind and process.liveness is Liveness.RUNNING:
                communicators.setdefault(record.identity, []).append((process, record))
        compared = {identity: each for identity, each in communicators.items() if len(each) > 1}
        self._forget(communicators)
        descriptors: dict[Path, int] = {}
        try:
            for identity, members in compared.items():
                self._compare(identity, members, descriptors)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def calls_of(self, process: ProcessState, record: CommunicatorRecord) -> Sequence[CallRecord]:
        """The calls of a member from the first difference on; empty without a difference."""
        found = self._differences.get(record.identity)
        return () if found is None or found.shown is None else found.shown.get(_member_key(process, record), ())

    def _forget(self, communicators: Mapping[int, Sequence[Membership]]) -> None:
        """Forgets members that have ended or closed their communicator. A reported difference remains."""
        present = {_member_key(*each) for members in communicators.values() for each in members}
        for key in self._members.keys() - present:
            del self._members[key]
        for identity in self._usual.keys() - communicators.keys():
            del self._usual[identity]
        for identity in self._differences.keys() - communicators.keys():
            if self._differences[identity].shown is None:
                del self._differences[identity]

    def _compare(self, identity: int, members: Sequence[Membership], descriptors: dict[Path, int]) -> None:
        difference = self._differences.get(identity)
        if difference is not None and difference.shown is not None:
            return
        usual = self._usual.setdefault(identity, {})
        for process, record in members:
            followed = self._members.setdefault(
                _member_key(process, record), _FollowedMember(CallFollower(record.slot))
            )
            for call in self._read(followed.follower, process, record, descriptors):
                followed.add(call)
                other = usual.setdefault(call.seq, call)
                if other.signature != call.signature and other.issued == call.issued:
                    self._found(identity, call.seq)
        if len(usual) > 2 * KEPT_CALLS:
            for seq in sorted(usual)[:KEPT_CALLS]:
                del usual[seq]
        self._show(identity, members)

    def _read(
        self, follower: CallFollower, process: ProcessState, record: CommunicatorRecord, descriptors: dict[Path, int]
    ) -> Sequence[FollowedCall]:
        """The new calls of a member; opens its beacon only if there are any."""
        beacon = process.beacon
        if beacon is None or record.newest is None or record.newest.number < follower.next_number:
            return ()
        if beacon.path not in descriptors:
            with suppress(OSError):
                descriptors[beacon.path] = open_own_file(beacon.path)
        return follower.read(descriptors[beacon.path], beacon.beat_ns) if beacon.path in descriptors else ()

    def _found(self, identity: int, seq: int) -> None:
        known = self._differences.get(identity)
        if known is None:
            self._differences[identity] = _Difference(seq, time.monotonic_ns())
        else:
            known.seq = min(known.seq, seq)

    def _show(self, identity: int, members: Sequence[Membership]) -> None:
        """Selects the calls to report once those of all members are known, or after `PATIENCE_S`."""
        difference = self._differences.get(identity)
        if difference is None:
            return
        followed = {_member_key(*each): self._members[_member_key(*each)] for each in members}
        last = difference.seq + SHOWN_CALLS - 1
        awaited = any(each.newest < last and not each.follower.failed for each in followed.values())
        if awaited and time.monotonic_ns() - difference.found_ns < PATIENCE_S * 1e9:
            return
        difference.shown = {}
        for member in members:
            key, about = _member_key(*member), {call.number: call for call in _decoded(*member)}
            calls = (followed[key].calls.get(seq) for seq in range(difference.seq, last + 1))
            difference.shown[key] = [about.get(call.number) or _undescribed(call) for call in calls if call is not None]


def _member_key(process: ProcessState, record: CommunicatorRecord) -> MemberKey:
    return process.pid, record.slot, record.created_ns


def _decoded(process: ProcessState, record: CommunicatorRecord) -> Sequence[CallRecord]:
    return () if process.beacon is None else read_calls(process.beacon.path, record.slot)


def _undescribed(call: FollowedCall) -> CallRecord:
    """A call whose texts have been overwritten."""
    return CallRecord(call.number, call.seq, call.issued, call.signature, "", "", "", None, "", "", "", 0, 0)
