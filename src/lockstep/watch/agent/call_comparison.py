"""Compares the calls of the members of each communicator on this host, also those that have completed.

A backend may pair different calls silently (gloo does with a larger broadcast, or another root): then nothing stalls,
and the results are wrong. The newest calls in a report show such a difference only for a moment; this comparison reads
the rings, in the agent, without cost for the ranks. It misses calls that are overwritten between two updates (more than
256 on a communicator, or fewer while the busy communicators of the host have more than `MOST_READ` together).

Members on different hosts are compared by digests of their calls (`call_windows`), which the supervisor compares. If
they differ, it asks two hosts for the calls (`calls_between`), and all hosts to report those from the first difference
on (`show`). It also asks the other hosts for their calls if the members on one host differ, because these may be too
few for a majority.

Only what proves a difference counts: calls that are the same one by c10d's number and by the number of calls from
Python, of running members, on communicators whose numbers are certain. Signatures leave out what may differ.
"""

import logging
import os
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lockstep.base.folders import open_own_file
from lockstep.watch.agent.call_timings import CallTimings
from lockstep.watch.agent.call_windows import CallDigest, CallWindows
from lockstep.watch.agent.process_monitor import ProcessState
from lockstep.watch.beacon.beacon_records import CALLS_PER_RING, MAX_COMMUNICATORS, CallRecord, CommunicatorRecord
from lockstep.watch.beacon.call_follower import CallFollower, FollowedCall
from lockstep.watch.beacon.reader import read_calls
from lockstep.watch.diagnosis.evidence_types import Liveness

log = logging.getLogger(__name__)

KEPT_CALLS = 2 * CALLS_PER_RING
"""Calls that are kept for each member, up to twice as many for a while; members further apart are not compared."""
MOST_READ = 8192
"""Calls that one update reads, about 20 ms of CPU; the next update begins with the communicator after them."""
SHOWN_CALLS = 8
"""Calls of each member that are reported, from the first difference on."""
MOST_DECODED = 4
"""Members whose texts one update decodes because they have made a call of a new signature, about 5 ms of CPU."""
KEPT_SIGNATURES = 1024
"""Signatures that are known of a communicator; then it is forgotten which are new."""
PATIENCE_S = 2.0
"""How long a difference waits for the calls of the remaining members on this host, which decide who is right."""

Membership = tuple[ProcessState, CommunicatorRecord]
MemberKey = tuple[int, int, int]
"""The pid of a process, a slot of its beacon, and when the communicator there was created."""


class CommunicatorLife(NamedTuple):
    """A communicator from its creation to its end. One that is created again may have the same identity."""

    identity: int
    incarnation: int
    """How often its members had created it before, equal on all hosts."""


@dataclass(slots=True)
class _FollowedMember:
    follower: CallFollower
    calls: dict[int, FollowedCall] = field(default_factory=dict)
    """By sequence number."""
    newest: int = 0
    described: dict[int, CallRecord] = field(default_factory=dict)
    """Calls that were the first of their signature, by `CallRecord.number`: their texts may be overwritten before
    another host's calls show a difference."""

    def add(self, call: FollowedCall) -> None:
        self.calls[call.seq] = call
        self.newest = max(self.newest, call.seq)
        if len(self.calls) > 2 * KEPT_CALLS:
            for seq in list(self.calls)[:KEPT_CALLS]:
                del self.calls[seq]


@dataclass(slots=True)
class _FollowedCommunicator:
    members: set[MemberKey]
    """The members that made the calls."""
    incarnation: int
    """See `CommunicatorLife`; -1 if the members differ in it, or if all are on this host."""
    usual: dict[int, FollowedCall] = field(default_factory=dict)
    """The first known call of each sequence number."""
    signatures: set[int] = field(default_factory=set)
    windows: CallWindows | None = None
    """None without incarnation, by which other hosts know the communicator."""

    def add(self, call: FollowedCall) -> FollowedCall:
        """Adds a call of a member. Returns the first known one of its sequence number."""
        known = self.usual.get(call.seq)
        if known is None:
            known = self.usual[call.seq] = call
            if self.windows is not None:
                self.windows.add(call)
        return known


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
        self.timings = CallTimings()
        self._members: dict[MemberKey, _FollowedMember] = {}
        self._communicators: dict[int, _FollowedCommunicator] = {}
        """By identity."""
        self._differences: dict[int, _Difference] = {}
        """By the identity of the communicator. Those that are reported outlive what is known of it otherwise."""
        self._unread, self._undecoded = MOST_READ, MOST_DECODED
        """Calls that this update may still read, and members whose texts it may decode."""
        self._next = 0
        """The identity of the communicator that the last update did not reach."""

    @property
    def found_difference(self) -> bool:
        """Whether a difference is reported."""
        return any(each.shown for each in self._differences.values())

    def update(self, memberships: Iterable[Membership]) -> None:
        """Reads and compares the calls since the last update."""
        communicators: dict[int, list[Membership]] = {}
        given = set[MemberKey]()
        for process, record in memberships:
            given.add(_member_key(process, record))
            if record.pair is None and not record.blind and process.liveness is Liveness.RUNNING:
                communicators.setdefault(record.identity, []).append((process, record))
        compared = {identity: each for identity, each in communicators.items() if len(each) > 1 or _has_others(each)}
        self._forget({_member_key(*each) for members in communicators.values() for each in members}, given)
        descriptors: dict[Path, int] = {}
        try:
            for identity in self._in_turn(list(compared)):
                self._compare(identity, compared[identity], descriptors)
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)

    def digests(self) -> list[tuple[CommunicatorLife, CallDigest]]:
        """The digests since the last time, of communicators with members on other hosts."""
        return [
            (CommunicatorLife(identity, known.incarnation), digest)
            for identity, known in self._communicators.items()
            if known.windows is not None
            for digest in known.windows.take()
        ]

    def differences(self) -> list[tuple[CommunicatorLife, int]]:
        """The communicators with members on other hosts whose members here differ, and from which call on."""
        return [
            (CommunicatorLife(identity, known.incarnation), found.seq)
            for identity, found in self._differences.items()
            if (known := self._communicators.get(identity)) is not None and known.windows is not None
        ]

    def calls_between(self, life: CommunicatorLife, first: int, last: int) -> list[FollowedCall]:
        """The known calls that have these numbers from Python."""
        known = self._communicators.get(life.identity)
        if known is None or known.incarnation != life.incarnation:
            return []
        return [each for each in known.usual.values() if first <= each.issued <= last]

    def show(self, life: CommunicatorLife, seq: int) -> bool:
        """Reports the calls of the members from `seq` on, because those on another host differ. Returns False if the
        communicator is unknown here so far."""
        known, found = self._communicators.get(life.identity), self._differences.get(life.identity)
        if known is None or known.incarnation != life.incarnation:
            return False
        if found is None or found.shown is None:
            self._found(life.identity, seq)
        return True

    def calls_of(self, process: ProcessState, record: CommunicatorRecord) -> Sequence[CallRecord]:
        """The calls of a member from the first difference on; empty without a difference."""
        found = self._differences.get(record.identity)
        return () if found is None or found.shown is None else found.shown.get(_member_key(process, record), ())

    def _in_turn(self, identities: list[int]) -> Iterator[int]:
        """The communicators to compare, beginning with the one that the last update did not reach, until `MOST_READ`
        calls have been read."""
        self._unread, self._undecoded = MOST_READ, MOST_DECODED
        first = identities.index(self._next) if self._next in identities else 0
        for identity in identities[first:] + identities[:first]:
            self._next = identity
            if self._unread <= 0:
                return
            yield identity

    def _forget(self, present: Collection[MemberKey], given: Collection[MemberKey]) -> None:
        """Forgets members that have ended or closed their communicator, and communicators of which none is left: a
        later one of that identity counts anew. A reported difference remains while one of its members is given."""
        for key in self._members.keys() - present:
            del self._members[key]
        for identity in [each for each, known in self._communicators.items() if known.members.isdisjoint(present)]:
            del self._communicators[identity]
            if identity in self._differences and self._differences[identity].shown is None:
                del self._differences[identity]
        self._differences = {
            identity: each
            for identity, each in self._differences.items()
            if each.shown is None or not each.shown.keys().isdisjoint(given)
        }

    def _compare(self, identity: int, members: Sequence[Membership], descriptors: dict[Path, int]) -> None:
        difference = self._differences.get(identity)
        if difference is not None and difference.shown is not None:
            return
        keys = {_member_key(*each) for each in members}
        known = self._communicators.get(identity)
        if known is None:
            incarnation = _incarnation(members) if _has_others(members) else -1
            windows = CallWindows() if incarnation >= 0 else None
            known = self._communicators[identity] = _FollowedCommunicator(keys, incarnation, windows=windows)
        if {pid for pid, *_ in known.members - keys} & {pid for pid, *_ in keys - known.members}:
            return  # created again, and not yet by all
        known.members = keys
        for process, record in members:
            followed = self._members.setdefault(
                _member_key(process, record), _FollowedMember(CallFollower(record.slot))
            )
            calls = self._read(followed.follower, process, record, descriptors)
            if calls:
                self.timings.add(record, known.incarnation, followed.follower.times)
            self._describe(known, followed, calls, process, record)
            for call in calls:
                other = known.add(call)
                followed.add(other if other == call else call)
                if other.signature != call.signature and other.issued == call.issued:
                    self._found(identity, call.seq)
        if len(known.usual) > 2 * KEPT_CALLS:
            for seq in sorted(known.usual)[:KEPT_CALLS]:
                del known.usual[seq]
        self._show(identity, members)

    def _describe(
        self, known: _FollowedCommunicator, followed: _FollowedMember, calls: Sequence[FollowedCall],
        process: ProcessState, record: CommunicatorRecord,
    ) -> None:  # fmt: skip
        """Keeps the texts of calls whose signature is new. A healthy job soon makes no such calls any more."""
        new = {each.signature: each.number for each in reversed(calls) if each.signature not in known.signatures}
        if not new:
            return
        if len(known.signatures) > KEPT_SIGNATURES:
            known.signatures.clear()
        known.signatures |= new.keys()
        if self._undecoded > 0:
            self._undecoded -= 1
            numbers = set(new.values())
            for each in _decoded(process, record):
                if each.number in numbers:
                    followed.described[each.number] = each
                    self.timings.describe(each)
            for number in list(followed.described)[:-CALLS_PER_RING]:
                del followed.described[number]

    def _read(
        self, follower: CallFollower, process: ProcessState, record: CommunicatorRecord, descriptors: dict[Path, int]
    ) -> Sequence[FollowedCall]:
        """The new calls of a member; opens its beacon only if there are any. If it cannot be read, the member is not
        compared from then on."""
        beacon = process.beacon
        if follower.failed or beacon is None or record.newest is None or record.newest.number < follower.next_number:
            return ()
        if beacon.path not in descriptors:
            with suppress(OSError):
                descriptors[beacon.path] = open_own_file(beacon.path)
        if beacon.path not in descriptors:
            return ()
        self._unread -= min(record.newest.number - follower.next_number + 1, CALLS_PER_RING)
        try:
            return follower.read(descriptors[beacon.path], beacon.beat_ns)
        except (OSError, struct.error) as error:
            log.warning("the calls of %s on %s are no longer compared: %r", process.name, record.label, error)
            follower.failed = True
            return ()

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
        if all(each.newest < difference.seq for each in followed.values()):
            difference.found_ns = time.monotonic_ns()  # another host is ahead of this one
        awaited = any(each.newest < last and not each.follower.failed for each in followed.values())
        if awaited and time.monotonic_ns() - difference.found_ns < PATIENCE_S * 1e9:
            return
        difference.shown = {}
        for member in members:
            key = _member_key(*member)
            about = followed[key].described | {call.number: call for call in _decoded(*member) if call.operation}
            calls = (followed[key].calls.get(seq) for seq in range(difference.seq, last + 1))
            difference.shown[key] = [about.get(call.number) or _undescribed(call) for call in calls if call is not None]


def _has_others(members: Sequence[Membership]) -> bool:
    """Whether a communicator has further members, on other hosts."""
    return members[0][1].size > len(members)


def _incarnation(members: Sequence[Membership]) -> int:
    """How often all members had created their communicator before; -1 if they differ in it, or if a beacon has no
    unused slot left, so that those of earlier communicators may have been used again."""
    beacons = [(process.beacon, record) for process, record in members if process.beacon is not None]
    if any(max(each.slot for each in beacon.communicators) >= MAX_COMMUNICATORS - 1 for beacon, _ in beacons):
        return -1
    found = {
        sum(each.identity == record.identity and each.created_ns < record.created_ns for each in beacon.communicators)
        for beacon, record in beacons
    }
    return found.pop() if len(found) == 1 else -1


def _member_key(process: ProcessState, record: CommunicatorRecord) -> MemberKey:
    return process.pid, record.slot, record.created_ns


def _decoded(process: ProcessState, record: CommunicatorRecord) -> Sequence[CallRecord]:
    with suppress(OSError, struct.error):  # the texts are missing then
        return () if process.beacon is None else read_calls(process.beacon.path, record.slot)
    return ()


def _undescribed(call: FollowedCall) -> CallRecord:
    """A call whose texts have been overwritten."""
    return CallRecord(call.number, call.seq, call.issued, call.signature, "", "", "", None, "", "", "", 0, 0)
