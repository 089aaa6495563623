"""Aligns the dumps of many ranks and builds evidence from them.

Calls are aligned by communicator and collective sequence number. `record_id` cannot align them, because each process
counts it over all of its communicators.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.diagnosis.evidence import CallTable, Evidence, MembershipTable, ProcessTable, WaitEdge
from lockstep.watch.diagnosis.evidence_types import (
    NO_EXIT_CODE,
    UNKNOWN,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
)
from lockstep.watch.dumps.decode import CallTexts, CommunicatorTrace
from lockstep.watch.dumps.dump_files import RankDump, ranks_text

NEWEST_CALLS = 16
"""The number of newest calls kept of each member."""
_KEPT_AFTER_DIVERGENCE = 64
"""The number of calls kept after the first divergence; later ones only follow from it."""
_MAX_SPAN = 10_000_000
"""If the sequence numbers of members are further apart than this, the members are not compared."""


@dataclass(frozen=True, slots=True)
class MemberCalls:
    """A member's calls in the order of entering; columns `[calls]`."""

    membership: int
    sequence: NDArray[np.int64]
    signature: NDArray[np.uint64]
    site: NDArray[np.int32]


def informative_calls(columns: Sequence[MemberCalls]) -> list[NDArray[np.int64]]:
    """Selects calls of each member, as ascending indices: the newest, those around the slowest member's newest, and
    those around the first divergence."""
    if not columns:
        return []
    lowest = min(int(column.sequence.min()) for column in columns)
    highest = max(int(column.sequence.max()) for column in columns)
    slowest = min(int(column.sequence.max()) for column in columns)
    diverged_at = highest + 1
    if highest - lowest < _MAX_SPAN:
        first = np.zeros(highest - lowest + 1, np.uint64)
        differs = np.zeros(highest - lowest + 1, np.bool_)
        for column in columns:
            at = column.sequence - lowest
            before = first[at]
            differs[at] |= (before != column.signature) & (before != 0)
            first[at] = np.where(before == 0, column.signature, before)
        if differs.any():
            diverged_at = lowest + int(np.argmax(differs))
    kept = []
    for column in columns:
        numbers = column.sequence
        keep = (numbers > slowest - 2) & (numbers <= slowest + NEWEST_CALLS)
        keep[-NEWEST_CALLS:] = True
        keep |= (numbers >= diverged_at - 1) & (numbers < diverged_at + _KEPT_AFTER_DIVERGENCE)
        kept.append(np.flatnonzero(keep))
    return kept


def find_undecided(dumps: Sequence[RankDump]) -> list[RankDump]:
    """The dumps that must be decoded in full, because their older calls may differ from those of other members, or
    other members are so far ahead that the newest calls of all do not overlap."""
    members: dict[tuple[str, str], list[tuple[RankDump, CommunicatorTrace]]] = defaultdict(list)
    for dump in dumps:
        for group in dump.trace.groups:
            if group.sequence:
                members[group.name, group.members].append((dump, group))
    undecided: dict[int, RankDump] = {}
    for records in members.values():
        slowest = min(group.entered for _, group in records)
        far_apart = any(group.digests and group.sequence[0] > slowest - NEWEST_CALLS for _, group in records)
        if far_apart or _blocks_differ([group for _, group in records]):
            undecided |= {dump.rank: dump for dump, group in records if group.digests}
    return list(undecided.values())


def _blocks_differ(groups: Sequence[CommunicatorTrace]) -> bool:
    """Whether members have different digests of a block of older calls."""
    first: dict[int, int] = {}
    return any(
        first.setdefault(block, digest) != digest
        for group in groups
        for block, digest in enumerate(group.digests, group.digested)
    )


_DEFAULT_GROUP, _NO_DESCRIPTION = "default_pg", "undefined"
_PEER = re.compile(r"(?:recv (?P<me>\d+)<-(?P<from>\d+))|(?:send (?P<self>\d+)->(?P<to>\d+))")


@dataclass
class _DumpedCommunicator:
    """A communicator according to its members' dumps."""

    name: str
    description: str
    backend: str
    ranks: list[int]
    records: dict[int, CommunicatorTrace] = field(default_factory=dict)
    """The record in the dump of each rank."""


def build_dump_evidence(
    dumps: Sequence[RankDump], gaps: Sequence[str], call_texts: CallTexts, world_size: int | None = None
) -> Evidence:
    """Builds evidence from one dump per rank. Ranks that only other dumps mention are included as unknown."""
    gaps = list(gaps)
    communicators = _communicators(dumps, world_size)
    ranks = sorted({dump.rank for dump in dumps}.union(range(world_size or 0), *(each.ranks for each in communicators)))
    by_rank = {dump.rank: dump for dump in dumps}
    missing = [rank for rank in ranks if rank not in by_rank]
    if missing:
        gaps.append(f"no dump of {ranks_text(missing)}")
    blank = [dump.rank for dump in dumps if not dump.trace.entries]
    if blank:
        gaps.append(f"no entries in the dump of {ranks_text(blank)}")
    for communicator in communicators:
        _correct_counts(communicator, by_rank, gaps)
    index = {rank: at for at, rank in enumerate(ranks)}
    members = _membership_table(communicators, by_rank, index)
    return Evidence(
        at=max((dump.taken_at for dump in dumps), default=math.nan),
        processes=_process_table(ranks, by_rank, communicators),
        communicators=members,
        calls=_call_table(communicators, by_rank, call_texts),
        edges=_wait_edges(communicators, index),
        source="dumps",
        gaps=tuple(gaps),
        extra={
            "files": {dump.rank: str(dump.file.path) for dump in dumps},
            "entries": sum(dump.trace.entries for dump in dumps),
            "missing": missing,
        },
    )


def _process_table(
    ranks: Sequence[int], by_rank: Mapping[int, RankDump], communicators: Sequence[_DumpedCommunicator]
) -> ProcessTable:
    """Builds the process table. A rank without a dump counts as running, and everything else about it is unknown."""
    unknown = np.full(len(ranks), np.nan)
    newest = {dump.rank: dump.trace.newest for dump in by_rank.values()}
    for communicator in communicators:
        for rank in communicator.records:
            if math.isnan(newest[rank]):
                newest[rank] = _left_behind_at(communicator, rank)
    seen = np.array([by_rank[rank].taken_at if rank in by_rank else math.nan for rank in ranks])
    return ProcessTable(
        info=[ProcessInfo(f"rank {rank}", "", rank) for rank in ranks],
        liveness=np.full(len(ranks), Liveness.RUNNING, np.int8),
        exit_code=np.full(len(ranks), NO_EXIT_CODE, np.int32),
        ended_at=unknown, progressed_at=np.array([newest.get(rank, math.nan) for rank in ranks]),
        active_at=unknown.copy(), same_stack_since=unknown.copy(), stage=[""] * len(ranks), seen_at=seen,
    )  # fmt: skip


def _left_behind_at(communicator: _DumpedCommunicator, rank: int) -> float:
    """When another rank first entered a collective that this rank has not entered, so that this rank has made no
    progress since. Used if the rank's dump has counters but no entries. NaN if no rank is ahead."""
    own_entered = communicator.records[rank].entered
    ahead = [group.entered_at for group in communicator.records.values() if group.entered > own_entered != UNKNOWN]
    return min((when for when in ahead if not math.isnan(when)), default=math.nan)


def _communicators(dumps: Sequence[RankDump], world_size: int | None) -> list[_DumpedCommunicator]:
    """Groups the records of all dumps by communicator. Different communicators may share a name (`split_group`), and
    the member lists of one communicator may differ, which is a fault."""
    by_name: dict[str, list[tuple[int, CommunicatorTrace, frozenset[int]]]] = defaultdict(list)
    parsed: dict[str, frozenset[int]] = {"": frozenset()}
    for dump in dumps:
        for group in dump.trace.groups:
            if group.members not in parsed:
                parsed[group.members] = frozenset(map(int, re.findall(r"\d+", group.members)))
            by_name[group.name].append((dump.rank, group, parsed[group.members]))
    size = max((max(dump.rank + 1, dump.trace.world) for dump in dumps), default=0)
    found = []
    for name, records in by_name.items():
        for ranks, own_records in _cluster_members(records):
            if all(group.entered <= 0 and not group.waits for _, group, _ in own_records):
                continue  # never used, as far as the dumps reach back
            descriptions = [group.description for _, group, _ in own_records if group.description]
            if not any(listed for _, _, listed in own_records) and (
                _DEFAULT_GROUP in descriptions or name == _DEFAULT_GROUP
            ):
                ranks = set(range(world_size or size))
            backend = next((group.backend for _, group, _ in own_records if group.backend), "")
            found.append(
                _DumpedCommunicator(name, descriptions[0] if descriptions else "", backend, sorted(ranks),
                              {rank: group for rank, group, _ in own_records})
            )  # fmt: skip
    return sorted(found, key=lambda each: (-len(each.ranks), each.name, each.ranks))


def _cluster_members(
    records: Sequence[tuple[int, CommunicatorTrace, frozenset[int]]],
) -> list[tuple[set[int], list[tuple[int, CommunicatorTrace, frozenset[int]]]]]:
    """Groups the records of one name by communicator: records with overlapping member lists belong together, and a
    record without a list belongs to the communicator that lists its rank."""
    clusters: list[tuple[set[int], list[tuple[int, CommunicatorTrace, frozenset[int]]]]] = []
    of_list: dict[frozenset[int], int] = {}
    for each in sorted(records, key=lambda each: not each[2]):
        rank, _, member_list = each
        index = of_list.get(member_list) if member_list else None
        if index is None:
            overlapping = member_list or {rank}
            index = next((i for i, (ranks, _) in enumerate(clusters) if ranks & overlapping), None)
            if index is None and not member_list and len(clusters) == 1:
                index = 0
            if index is None:
                clusters.append((set(), []))
                index = len(clusters) - 1
            if member_list:
                of_list[member_list] = index
        clusters[index][0].update(member_list or {rank})
        clusters[index][1].append(each)
    return clusters


def _correct_counts(communicator: _DumpedCommunicator, by_rank: Mapping[int, RankDump], gaps: list[str]) -> None:
    """Corrects the counts of a communicator by what the records of other members prove.

    If one member completed a collective that no member can complete before all have entered, all members have entered
    it. A dump with lower counts, whose newest entry is older than the next collective on the other ranks, was taken
    earlier, so the later progress of its rank is unknown.
    """
    records = communicator.records
    certain = max((group.certain for group in records.values()), default=UNKNOWN)
    if certain > 0:
        ahead = max(records.values(), key=lambda group: group.certain)
        for rank, group in records.items():
            if 0 <= group.entered < certain - 1:
                next_at = _entry_time(ahead, group.entered + 1)
                if by_rank[rank].trace.newest < next_at:
                    gaps.append(f"the dump of rank {rank} is older than the others: on {communicator.name!r} they "
                                f"finished #{certain} with it, it knows of #{group.entered}")  # fmt: skip
                    group.entered = group.completed = UNKNOWN
    newest = max((group.entered for group in records.values()), default=UNKNOWN)
    for rank in communicator.ranks:
        known = records.get(rank)
        if known is not None and not known.sequence and known.entered == UNKNOWN and certain == newest > 0:
            known.entered = known.completed = certain  # its entries have been overwritten
    if communicator.backend == "gloo":
        _correct_gloo_counts(communicator, by_rank)


def _correct_gloo_counts(communicator: _DumpedCommunicator, by_rank: Mapping[int, RankDump]) -> None:
    """Corrects the completed counts of gloo, which marks a collective as ended a little after its caller continues, in
    any order, and also if it failed or timed out. A collective that others completed, and after which this rank
    continued, is completed. A collective that a member has not entered is not completed."""
    records = communicator.records
    reached = sorted(group.completed for group in records.values())[-2:]
    for group in records.values():
        others = reached[0] if group.completed == reached[-1] else reached[-1]
        if len(reached) > 1 and group.completed < min(group.ended, others):
            group.completed = min(group.ended, others)
    entered = [records[rank].entered if rank in records else 0 if by_rank[rank].trace.complete else UNKNOWN
               for rank in communicator.ranks if rank in records or rank in by_rank]  # fmt: skip
    lowest = min((each for each in entered if each != UNKNOWN), default=UNKNOWN)
    for group in records.values():
        if group.completed == group.entered > max(lowest, group.certain):
            group.completed = group.entered - 1


def _entry_time(group: CommunicatorTrace, sequence: int) -> float:
    """When a rank entered a collective, or the next later one with an entry, in Unix seconds; NaN if there is none."""
    later = (when for number, when in zip(group.sequence, group.created, strict=True) if number >= sequence)
    return next(later, math.nan) / 1e9


def _membership_table(
    communicators: Sequence[_DumpedCommunicator], by_rank: Mapping[int, RankDump], index: Mapping[int, int]
) -> MembershipTable:
    columns: dict[str, list[float]] = defaultdict(list)
    starts = [0]
    for communicator in communicators:
        for rank in communicator.ranks:
            group = communicator.records.get(rank)
            complete = rank in by_rank and by_rank[rank].trace.complete
            without_record = 0 if complete else UNKNOWN
            columns["process"].append(index[rank])
            columns["entered"].append(group.entered if group else without_record)
            columns["completed"].append(group.completed if group else without_record)
            columns["entered_at"].append(group.entered_at if group else math.nan)
            columns["completed_at"].append(group.completed_at if group else math.nan)
            columns["member_list"].append(crc32(group.members.encode()) if group and group.members else UNKNOWN)
            columns["uncertain"].append(group.uncertain if group else False)
        starts.append(len(columns["process"]))
    return MembershipTable(
        info=_communicator_names(communicators),
        starts=np.array(starts, np.int64),
        process=np.array(columns["process"], np.int64),
        entered=np.array(columns["entered"], np.int64),
        completed=np.array(columns["completed"], np.int64),
        entered_at=np.array(columns["entered_at"], np.float64),
        completed_at=np.array(columns["completed_at"], np.float64),
        member_list=np.array(columns["member_list"], np.int64),
        uncertain=np.array(columns["uncertain"], np.bool_),
    )


def _communicator_names(communicators: Sequence[_DumpedCommunicator]) -> list[CommunicatorInfo]:
    """Unique names for communicators: the user's description if it is unique, because torch's names are numbers and
    hashes."""
    descriptions = ["" if each.description == _NO_DESCRIPTION else each.description for each in communicators]
    names = []
    for each, description in zip(communicators, descriptions, strict=True):
        is_unique = descriptions.count(description) == 1 or description == each.name
        names.append((description if is_unique else f"{description} {each.name}") if description else each.name)
    duplicates = {name for name in names if names.count(name) > 1}
    names = [
        f"{name} {each.ranks[:4]}" if name in duplicates else name
        for name, each in zip(names, communicators, strict=True)
    ]
    return [
        CommunicatorInfo(name, description, each.backend)
        for name, description, each in zip(names, descriptions, communicators, strict=True)
    ]


def _call_table(
    communicators: Sequence[_DumpedCommunicator], by_rank: Mapping[int, RankDump], call_texts: CallTexts
) -> CallTable:
    """Builds the call table from the informative calls of each member."""
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
    signature = np.concatenate(signatures or [np.empty(0, np.uint64)])
    used = set(signature.tolist())
    return CallTable(
        membership=np.concatenate(memberships or [np.empty(0, np.int64)]),
        seq=np.concatenate(sequences or [np.empty(0, np.int64)]),
        signature=signature,
        by_signature={each: CollectiveCall(*call) for each, call in call_texts.items() if each in used},
        sites=sites,
    )


def _wait_edges(communicators: Sequence[_DumpedCommunicator], index: Mapping[int, int]) -> list[WaitEdge]:
    """Sends and receives that have not ended, as wait edges. Only NCCL records them; their ranks are those within the
    communicator."""
    edges = []
    for communicator in communicators:
        for rank, group in communicator.records.items():
            for what, since in group.waits[:1]:
                match = _PEER.search(what)
                peer = int(match["from"] or match["to"]) if match else len(communicator.ranks)
                if peer < len(communicator.ranks) and communicator.ranks[peer] != rank:
                    on = (index[communicator.ranks[peer]],)
                    kind, name = what.split(" ")[0], communicator.description or communicator.name
                    why = f"{'from' if kind == 'recv' else 'to'} rank {communicator.ranks[peer]} on {name}"
                    edges.append(WaitEdge(index[rank], on, kind=kind, why=why, since=since))
    return edges
