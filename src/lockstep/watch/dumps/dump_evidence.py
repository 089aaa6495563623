"""Aligns the dumps of many ranks and builds evidence from them.

Calls are aligned by communicator and collective sequence number. `record_id` cannot align them, because each process
counts it over all of its communicators.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable
from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    TRANSFER,
    UNKNOWN,
    CollectiveCall,
    Liveness,
    ProcessInfo,
    ProcessNote,
)
from lockstep.watch.dumps.call_selection import MemberCalls, informative_calls
from lockstep.watch.dumps.communicators import DumpedCommunicator, correct_counts, find_communicators
from lockstep.watch.dumps.decode import CallTexts
from lockstep.watch.dumps.dump_files import RankDump, ranks_text
from lockstep.watch.dumps.dump_times import bound_times
from lockstep.watch.dumps.member_rows import GroupRows, communicator_rows
from lockstep.watch.dumps.missing_dumps import accuse_missing

_TRANSFER = CollectiveCall(TRANSFER)
_TRANSFER_SIGNATURE = 1
"""Digests of calls are hardly ever this small."""


def build_dump_evidence(
    dumps: Sequence[RankDump], gaps: Sequence[str], call_texts: CallTexts, world_size: int | None = None
) -> Evidence:
    """Builds evidence from one dump per rank. Ranks that only other dumps mention are included as unknown."""
    gaps = list(gaps)
    communicators = find_communicators(dumps, world_size)
    ranks = sorted({dump.rank for dump in dumps}.union(range(world_size or 0), *(each.ranks for each in communicators)))
    by_rank = {dump.rank: dump for dump in dumps}
    missing = [rank for rank in ranks if rank not in by_rank]
    if missing:
        gaps.append(f"no dump of {ranks_text(missing)}")
    blank = [
        dump.rank for dump in dumps if not dump.trace.entries and not any(g.from_status for g in dump.trace.groups)
    ]
    if blank:
        gaps.append(f"no entries in the dump of {ranks_text(blank)}")
    for communicator in communicators:
        correct_counts(communicator, by_rank, gaps)
    seen_at = bound_times(dumps)
    at = max(seen_at.values(), default=math.nan)
    groups = communicator_rows(communicators, by_rank)
    accused = accuse_missing(groups, missing)
    for rank, why in accused.items():
        seen_at[rank] = at
        gaps.append(why)
    index = {rank: at for at, rank in enumerate(ranks)}
    notes = {index[row.rank]: ProcessNote(device_moves=True) for each in groups for row in each.rows if row.moves}
    return Evidence(
        at=at,
        processes=_process_table(ranks, by_rank, communicators, seen_at, notes),
        communicators=_membership_table(groups, index),
        calls=_call_table(communicators, groups, by_rank, call_texts),
        source="dumps",
        gaps=tuple(gaps),
        extra={
            "files": {dump.rank: str(dump.file.path) for dump in dumps},
            "entries": sum(dump.trace.entries for dump in dumps),
            "missing": missing,
            "accused": sorted(accused),
            "issued": [row.issued for each in groups for row in each.rows],
        },
    )


def _process_table(
    ranks: Sequence[int],
    by_rank: Mapping[int, RankDump],
    communicators: Sequence[DumpedCommunicator],
    seen_at: Mapping[int, float],
    notes: Mapping[int, ProcessNote],
) -> ProcessTable:
    """Builds the process table. A rank without a dump counts as running, and everything else about it is unknown."""
    unknown = np.full(len(ranks), np.nan)
    newest = {dump.rank: dump.trace.newest for dump in by_rank.values()}
    for communicator in communicators:
        for rank in communicator.records:
            if math.isnan(newest[rank]):
                newest[rank] = _left_behind_at(communicator, rank)
    seen = np.array([seen_at.get(rank, math.nan) for rank in ranks])
    return ProcessTable(
        info=[ProcessInfo(f"rank {rank}", "", rank) for rank in ranks],
        liveness=np.full(len(ranks), Liveness.RUNNING, np.int8),
        exit_code=np.full(len(ranks), NO_EXIT_CODE, np.int32),
        ended_at=unknown, progressed_at=np.array([newest.get(rank, math.nan) for rank in ranks]),
        active_at=unknown.copy(), same_stack_since=unknown.copy(), stage=[""] * len(ranks), notes=notes, seen_at=seen,
    )  # fmt: skip


def _left_behind_at(communicator: DumpedCommunicator, rank: int) -> float:
    """When another rank first entered a collective that this rank has not entered, so that this rank has made no
    progress since. Used if the rank's dump has counters but no entries. NaN if no rank is ahead."""
    own_entered = communicator.records[rank].entered
    ahead = [group.entered_at for group in communicator.records.values() if group.entered > own_entered != UNKNOWN]
    return min((when for when in ahead if not math.isnan(when)), default=math.nan)


def _membership_table(groups: Sequence[GroupRows], index: Mapping[int, int]) -> MembershipTable:
    rows = [row for each in groups for row in each.rows]
    starts = np.cumsum([0, *(len(each.rows) for each in groups)])
    return MembershipTable(
        info=[each.info for each in groups],
        starts=starts.astype(np.int64),
        process=np.array([index[row.rank] for row in rows], np.int64),
        entered=np.array([row.entered for row in rows], np.int64),
        completed=np.array([row.completed for row in rows], np.int64),
        entered_at=np.array([row.entered_at for row in rows], np.float64),
        completed_at=np.array([row.completed_at for row in rows], np.float64),
        member_list=np.array([row.member_list for row in rows], np.int64),
        uncertain=np.array([row.uncertain for row in rows], np.bool_),
        started=np.array([row.started for row in rows], np.int64),
    )


def _call_table(
    communicators: Sequence[DumpedCommunicator],
    groups: Sequence[GroupRows],
    by_rank: Mapping[int, RankDump],
    call_texts: CallTexts,
) -> CallTable:
    """Builds the call table from the informative calls of each member, and the pending sends and receives."""
    memberships, sequences, signatures = [], [], []
    sites: dict[tuple[int, int], str] = {}
    start = 0
    for communicator in communicators:
        columns = []
        for offset, rank in enumerate(communicator.ranks):
            group = communicator.records.get(rank)
            if group is not None and group.sequence:
                numbers = (np.frombuffer(column, column.typecode)
                           for column in (group.sequence, group.signature, group.site))  # fmt: skip
                columns.append(MemberCalls(start + offset, *numbers))
        kept = informative_calls(columns)
        for column, rows in zip(columns, kept, strict=True):
            names = by_rank[communicator.ranks[column.membership - start]].trace.sites
            memberships.append(np.full(len(rows), column.membership, np.int64))
            sequences.append(column.sequence[rows])
            signatures.append(column.signature[rows])
            for row in rows:
                if site := names[column.site[row]]:
                    sites[column.membership, int(column.sequence[row])] = site
        start += len(communicator.ranks)
    for channel in groups[len(communicators) :]:
        waiting = [(at, row.entered) for at, row in enumerate(channel.rows, start) if row.waits]
        memberships.append(np.array([at for at, _ in waiting], np.int64))
        sequences.append(np.array([number for _, number in waiting], np.int64))
        signatures.append(np.full(len(waiting), _TRANSFER_SIGNATURE, np.uint64))
        start += len(channel.rows)
    signature = np.concatenate(signatures or [np.empty(0, np.uint64)])
    used = set(signature.tolist())
    return CallTable(
        membership=np.concatenate(memberships or [np.empty(0, np.int64)]),
        seq=np.concatenate(sequences or [np.empty(0, np.int64)]),
        signature=signature,
        by_signature={each: CollectiveCall(*call) for each, call in call_texts.items() if each in used}
        | {_TRANSFER_SIGNATURE: _TRANSFER},
        sites=sites,
    )
