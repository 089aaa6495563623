"""What an agent says of what it sees: rosters and states, as `messages` has them."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.watch.beacon import read_calls
from lockstep.watch.eyes import Eyes, Seen
from lockstep.watch.facts import NO_CODE, UNKNOWN, Call, Communicator, Note, Process
from lockstep.watch.messages import (
    NAN,
    Member,
    Named,
    Roster,
    State,
    Waiter,
    call_records,
    member_record,
    process_record,
    waiter,
)
from lockstep.watch.records import CallRecord, CommunicatorRecord

QUIET_S = 1.0
"""Of those that moved within this time nothing is said but that."""
CALLS_TOLD = 8
"""Newest calls of a member that waits in one; of the others one is enough."""


@dataclass
class Teller:
    """Makes messages of looks; a roster when who is there has changed, a state always."""

    host: str
    roster: Roster = field(default_factory=lambda: Roster("", 0))
    _told: set[int] = field(default_factory=set)
    """Signatures that every listener has heard of."""

    def forget(self) -> None:
        """Somebody new listens: what signatures mean is told again."""
        self._told.clear()

    def tell(self, eyes: Eyes, gaps: Sequence[str] = ()) -> tuple[Roster, State]:
        """The messages about what the eyes have seen. The roster's number has grown when it is another."""
        everybody = sorted(eyes.seen.values(), key=lambda seen: (seen.role, seen.rank, seen.name))
        memberships = [
            (index, record)
            for index, seen in enumerate(everybody)
            if seen.beacon is not None
            for record in seen.beacon.communicators
            if not record.closed
        ]
        self._enrol(everybody, memberships)
        now = time.monotonic_ns()
        calls = [_calls(everybody[index], record, now) for index, record in memberships]
        state = State(
            self.host,
            self.roster.number,
            processes=b"".join(_record(each, now) for each in everybody),
            members=b"".join(_member(record, now) for _, record in memberships),
            stages=tuple(each.beacon.stage if each.beacon is not None else "" for each in everybody),
            notes={i: note for i, each in enumerate(everybody) if (note := _note(each, eyes, now)) is not None},
            waits=tuple(_waits(everybody, now)),
            calls=call_records((i, call.seq, call.signature) for i, some in enumerate(calls) for call in some),
            about=self._about(calls),
            sites=tuple((i, call.seq, call.where) for i, some in enumerate(calls) for call in some if call.site),
            gaps=tuple(gaps),
        )
        return self.roster, state

    def _enrol(self, everybody: Sequence[Seen], memberships: Sequence[tuple[int, CommunicatorRecord]]) -> None:
        """Gives the roster a new number when who is there has changed."""
        processes = tuple(Process(each.name, each.role, each.rank, self.host, each.pid) for each in everybody)
        named: dict[int, Named] = {}
        for _, each in memberships:
            about = Communicator(each.label, each.description, each.backend)
            named.setdefault(each.identity, Named(f"{each.identity:x}", about, each.size))
        numbers = {identity: number for number, identity in enumerate(named)}
        members = tuple(
            Member(index, numbers[each.identity], each.rank, each.members >> 1) for index, each in memberships
        )
        old, new = self.roster, (processes, tuple(named.values()), members)
        if not old.number or new != (old.processes, old.communicators, old.members):
            self.roster = Roster(self.host, old.number + 1, *new)

    def _about(self, calls: Iterable[Sequence[CallRecord]]) -> dict[int, Call]:
        about = {
            call.signature: Call(call.operation, call.shapes, call.dtype, call.root, call.where)
            for some in calls
            for call in some
            if call.signature not in self._told and call.operation
        }
        if len(self._told) > 2048:  # ever new shapes: the listener forgets the oldest too
            self._told.clear()
        self._told.update(about)
        return about


def _record(seen: Seen, now: int) -> bytes:
    code = None if seen.exit_code == NO_CODE else seen.exit_code
    return process_record(
        seen.life, code, _age(seen.ended_ns, now), _age(seen.moved_ns, now), _age(seen.active_ns, now),
        _age(seen.same_stack_ns, now),
    )  # fmt: skip


def _member(record: CommunicatorRecord, now: int) -> bytes:
    inside = record.inside
    blocked = True if inside is not None and not inside.asynchronous else None
    return member_record(
        record.entered, record.completed, _age(record.entered_ns, now), _age(record.completed_ns, now), blocked,
        record.blind,
    )  # fmt: skip


def _calls(seen: Seen, record: CommunicatorRecord, now: int) -> Sequence[CallRecord]:
    """The newest collectives of a member: more of one that stands, where what came before tells what went wrong."""
    newest = record.newest
    if newest is None or seen.beacon is None:
        return ()
    if now - seen.moved_ns < QUIET_S * 1e9:
        found: Sequence[CallRecord] = (newest,)
    else:
        found = read_calls(seen.beacon.path, record.slot, CALLS_TOLD)
    return [call for call in found if not call.p2p and call.seq != UNKNOWN]


def _note(seen: Seen, eyes: Eyes, now: int) -> Note | None:
    """What is to be said of a process that ended, or has not moved for a while."""
    if seen.living and now - seen.moved_ns < QUIET_S * 1e9:
        return None
    stage = seen.beacon.stage if seen.beacon is not None else ""
    # A stack that is older than the last move is of another place.
    where = seen.where if seen.stack_ns >= seen.moved_ns else ""
    return Note(where, seen.error, seen.cause, seen.ours, eyes.history.expected_s(seen.role, stage))


def _waits(everybody: Iterable[Seen], now: int) -> Iterable[Waiter]:
    for index, seen in enumerate(everybody):
        if not seen.living or seen.beacon is None:
            continue
        for record in seen.beacon.waits:
            yield waiter(index, record, now, main=record.thread == seen.pid)


def _age(at_ns: int, now: int) -> float:
    return (now - at_ns) / 1e9 if at_ns else NAN
