"""Works out how far each rank is on each communicator, and on each pair of ranks with unfinished sends or receives."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

from lockstep.watch.diagnosis.evidence_types import UNKNOWN, CommunicatorInfo
from lockstep.watch.dumps.communicators import DumpedCommunicator, name_communicators
from lockstep.watch.dumps.dump_files import RankDump
from lockstep.watch.dumps.operation_heads import (
    Channel,
    PendingOperation,
    Position,
    RankOperations,
    Transfer,
    collective_position,
    match_transfers,
)
from lockstep.watch.dumps.traces import CommunicatorTrace, PendingEntry

_PART = re.compile(r"(?P<way>recv|send) \d+(?:<-|->)(?P<peer>\d+)")


@dataclass(slots=True)
class MemberRow:
    """A rank's position on a communicator. The rank waits if it has entered more than it has completed."""

    rank: int
    entered: int = UNKNOWN
    completed: int = UNKNOWN
    entered_at: float = math.nan
    completed_at: float = math.nan
    started: int = UNKNOWN
    """The last operation that has started on the device; unknown if the recorder does not note that."""
    member_list: int = UNKNOWN
    uncertain: bool = False
    issued: int = UNKNOWN
    """The last operation that the host has issued."""
    moves: bool = False
    """True if the rank waits, and its device has ended an operation that was issued later."""

    @property
    def waits(self) -> bool:
        return self.entered > self.completed != UNKNOWN


@dataclass(slots=True)
class GroupRows:
    """The members of a communicator, or the two ranks of a channel."""

    info: CommunicatorInfo
    rows: list[MemberRow]


def communicator_rows(communicators: Sequence[DumpedCommunicator], by_rank: Mapping[int, RankDump]) -> list[GroupRows]:
    """The rows of all communicators, followed by those of the channels with unfinished sends or receives."""
    operations = _rank_operations(communicators, by_rank)
    running = _proven_running(communicators, operations)
    operations |= {rank: replace(operations[rank], running=each) for rank, each in running.items()}
    heads = {rank: each.heads for rank, each in operations.items()}
    lost = _ranks_with_lost_operations(by_rank) - running.keys()
    uncertain = lost | {rank for rank, own in heads.items() if _is_opaque(own)}
    timed = _timed_ranks(by_rank)
    infos = name_communicators(communicators)
    found = []
    for number, (info, communicator) in enumerate(zip(infos, communicators, strict=True)):
        rows = [_collective_row(communicator, number, rank, heads, by_rank, timed) for rank in communicator.ranks]
        found.append(GroupRows(info, rows))
    for (number, source, target), positions in match_transfers(operations).items():
        rows = []
        for rank in sorted((source, target)):
            row = MemberRow(rank)
            if rank in positions:
                _place(row, positions[rank], rank in timed)
                # It waits elsewhere, and may have ended the send that is waited for here.
                may_be_ahead = rank == source and not positions[rank].counted
                row.uncertain = may_be_ahead and bool(heads[rank]) and not row.waits
            rows.append(row)
        info = infos[number]
        name = f"{info.name}, rank {source} to {target}"
        found.append(GroupRows(CommunicatorInfo(name, backend=info.backend), rows))
    for row in (row for group in found for row in group.rows if row.rank in by_rank):
        own = heads[row.rank]
        row.moves = row.waits and any(by_rank[row.rank].trace.newest_ended > head.order for head in own)
        row.uncertain |= row.rank in uncertain
        if row.started < row.entered and not by_rank[row.rank].trace.pending_kept:
            row.started = UNKNOWN  # the oldest operation may be another one, and have started
    return found


def _timed_ranks(by_rank: Mapping[int, RankDump]) -> set[int]:
    """The ranks whose recorders note starts. A dump without any start or end does not show it; then those of the others
    do, because the setting is that of the job."""
    traces = {rank: dump.trace for rank, dump in by_rank.items()}
    shown = {rank for rank, trace in traces.items() if trace.timed}
    return {rank for rank, trace in traces.items() if shown and not trace.untimed} | shown


def _ranks_with_lost_operations(by_rank: Mapping[int, RankDump]) -> set[int]:
    """The ranks whose oldest unfinished operation may have been overwritten. A dump without any ended operation and
    without the first one is one of all unfinished operations, or a full one that has lost the older ones; the counters
    or the other dumps of the job show which."""
    traces = {rank: dump.trace for rank, dump in by_rank.items() if dump.trace.entries}
    is_full = not all(trace.only_active for trace in traces.values())
    return {
        rank for rank, trace in traces.items() if not trace.pending_kept
        and (trace.pending_lost or (is_full and trace.only_active and trace.contiguous))
    }  # fmt: skip


def _proven_running(
    communicators: Sequence[DumpedCommunicator], operations: Mapping[int, RankOperations]
) -> dict[int, PendingOperation]:
    """The operation that the device of a rank certainly runs, whatever else is unfinished: another member has completed
    it, which none can before all run it."""
    found: dict[int, PendingOperation] = {}
    for number, communicator in enumerate(communicators):
        groups = communicator.records.values()
        if communicator.backend == "gloo" or any(group.issued or group.uncertain for group in groups):
            continue
        counts = [group.completed if _needs_all(groups) else group.certain for group in groups]
        for rank, group in communicator.records.items():
            if group.pending is not None and UNKNOWN < group.completed < max(counts):
                own = (each for each in operations[rank].pending if each.communicator == number)
                found.setdefault(rank, next(own))
    return found


def _needs_all(groups: Iterable[CommunicatorTrace]) -> bool:
    """Whether all collectives of a communicator that the dumps hold need all members."""
    known = [group for group in groups if group.sequence]
    return bool(known) and all(group.needs_all for group in known)


def _is_opaque(heads: Sequence[PendingOperation]) -> bool:
    """Whether a rank waits in a batch whose parts are unknown."""
    return any(not head.transfers and not head.sequence for head in heads)


def _collective_row(
    communicator: DumpedCommunicator, number: int, rank: int, heads: Mapping[int, Sequence[PendingOperation]],
    by_rank: Mapping[int, RankDump], timed: Collection[int],
) -> MemberRow:  # fmt: skip
    group = communicator.records.get(rank)
    if group is None:
        known = rank in by_rank and by_rank[rank].trace.complete
        return MemberRow(rank, entered=0, completed=0, issued=0) if known else MemberRow(rank)
    row = MemberRow(
        rank, group.entered, group.completed, group.entered_at, group.completed_at, issued=group.entered,
        member_list=crc32(group.members.encode()) if group.members else UNKNOWN, uncertain=group.uncertain,
    )  # fmt: skip
    if communicator.backend != "gloo" and group.entered != UNKNOWN:
        _place(row, collective_position(heads[rank], number, group.entered, group.completed), rank in timed)
        if not row.waits:
            row.entered_at = group.entered_at
    return row


def _place(row: MemberRow, position: Position, timed: bool) -> None:
    row.entered, row.completed, row.entered_at = position.entered, position.completed, position.since
    if timed:
        row.started = position.entered if position.started else position.completed


def _rank_operations(
    communicators: Sequence[DumpedCommunicator], by_rank: Mapping[int, RankDump]
) -> dict[int, RankOperations]:
    """The unfinished operations of each rank with a dump; gloo's ranks have no heads, because their calls return only
    when they have ended."""
    pending: dict[int, list[PendingOperation]] = {rank: [] for rank in by_rank}
    issued: dict[int, dict[Channel, int]] = {rank: {} for rank in by_rank}
    for number, communicator in enumerate(communicators):
        if communicator.backend == "gloo":
            continue
        for rank, group in communicator.records.items():
            if group.pending is not None:
                pending[rank].append(_operation(group.pending, number, group.completed + 1, ()))
            for entry in group.transfers:
                transfers = tuple(filter(None, (_transfer(part, communicator.ranks, rank) for part in entry.parts)))
                pending[rank].append(_operation(entry, number, 0, transfers))
            for part, count in group.issued.items():
                transfer = _transfer(part, communicator.ranks, rank)
                if transfer is not None:
                    issued[rank][number, *transfer] = count
    return {
        rank: RankOperations(pending[rank], issued[rank] if dump.trace.complete else None)
        for rank, dump in by_rank.items()
    }


def _operation(
    entry: PendingEntry, communicator: int, sequence: int, transfers: tuple[Transfer, ...]
) -> PendingOperation:
    return PendingOperation(entry.order, communicator, sequence, transfers, entry.since, entry.started)


def _transfer(part: str, members: Sequence[int], rank: int) -> Transfer | None:
    """The ranks of a send or receive, whose text has the ranks within the communicator; None if they are unknown."""
    match = _PART.search(part)
    at = int(match["peer"]) if match else len(members)
    if match is None or at >= len(members) or members[at] == rank:
        return None
    return (rank, members[at]) if match["way"] == "send" else (members[at], rank)
