"""Puts together the communicators of a job from the records in its ranks' dumps."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.watch.diagnosis.evidence_types import UNKNOWN, CommunicatorInfo
from lockstep.watch.dumps.dump_files import RankDump
from lockstep.watch.dumps.traces import CommunicatorTrace

_DEFAULT_GROUP, _NO_DESCRIPTION = "default_pg", "undefined"


@dataclass
class DumpedCommunicator:
    """A communicator according to its members' dumps."""

    name: str
    description: str
    backend: str
    ranks: list[int]
    records: dict[int, CommunicatorTrace] = field(default_factory=dict)
    """The record in the dump of each rank."""


def find_communicators(dumps: Sequence[RankDump], world_size: int | None) -> list[DumpedCommunicator]:
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
            if all(group.entered <= 0 and not group.issued for _, group, _ in own_records):
                continue  # never used, as far as the dumps reach back
            descriptions = [group.description for _, group, _ in own_records if group.description]
            if not any(listed for _, _, listed in own_records) and (
                _DEFAULT_GROUP in descriptions or name == _DEFAULT_GROUP
            ):
                ranks = set(range(world_size or size))
            backend = next((group.backend for _, group, _ in own_records if group.backend), "")
            _forget_mixed_counters([group for _, group, _ in own_records])
            found.append(
                DumpedCommunicator(name, descriptions[0] if descriptions else "", backend, sorted(ranks),
                              {rank: group for rank, group, _ in own_records})
            )  # fmt: skip
    return sorted(found, key=lambda each: (-len(each.ranks), each.name, each.ranks))


def _forget_mixed_counters(groups: Sequence[CommunicatorTrace]) -> None:
    """Makes counters from `pg_status` unknown if the communicator has sends and receives, which they count as well."""
    if any(group.issued for group in groups):
        for group in groups:
            if group.from_status:
                group.entered = group.completed = UNKNOWN
                group.pending = None


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


def correct_counts(communicator: DumpedCommunicator, by_rank: Mapping[int, RankDump], gaps: list[str]) -> None:
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


def _correct_gloo_counts(communicator: DumpedCommunicator, by_rank: Mapping[int, RankDump]) -> None:
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


def name_communicators(communicators: Sequence[DumpedCommunicator]) -> list[CommunicatorInfo]:
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
