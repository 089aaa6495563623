"""The order of a job's processes and communicators, from the rosters of all hosts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.watch.agent.report_messages import Roster
from lockstep.watch.diagnosis.evidence import IntArray
from lockstep.watch.diagnosis.evidence_types import UNKNOWN, CommunicatorInfo, ProcessInfo


@dataclass(frozen=True, slots=True)
class JobLayout:
    """The order of processes and communicators in the evidence. It changes only if a roster changes."""

    processes: tuple[ProcessInfo, ...]
    """The processes of each host in the order of hosts, followed by the processes that no host reports."""
    unseen: int
    """The number of processes that no host reports."""
    first_process: tuple[int, ...]
    """`[hosts]`: the index of the host's first process."""
    first_member: tuple[int, ...]
    """`[hosts]`: the index of the host's first member record."""
    communicators: tuple[CommunicatorInfo, ...]
    starts: IntArray
    process: IntArray
    """`[memberships]`: the index of the process."""
    made_with: IntArray
    """`[memberships]`: identifies the member list (see `MembershipTable.member_list`)."""
    record: IntArray
    """`[memberships]`: the index in the concatenated member records of all hosts. If no host reports the membership:
    one past the last record, or two if the process has certainly made no call (see `_fill_pair`)."""
    record_in_communicator: IntArray
    """`[memberships]`: for messages, the record of the same process in their communicator; else equal to `record`."""
    membership: IntArray
    """The inverse of `record`; -1 for a record that was replaced by another host's."""
    by_name: Mapping[str, int]
    by_role: Mapping[str, tuple[int, ...]]
    successions: tuple[tuple[int, ...], ...]
    """Processes that have the same role and rank, since hosts report one that was replaced for some seconds more."""


@dataclass(slots=True)
class _CommunicatorGroup:
    """A communicator while the rosters are merged."""

    about: CommunicatorInfo
    role: str
    size: int = 0
    ranks: tuple[int, ...] | None = None
    of: str = ""
    members: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """(process, record, made with) by rank in the communicator."""


def build_layout(rosters: Sequence[Roster], expected: Sequence[ProcessInfo] = ()) -> JobLayout:
    """Merges rosters. `expected` are the processes that should exist, whether a host reports them or not."""
    processes: list[ProcessInfo] = []
    groups: dict[str, _CommunicatorGroup] = {}
    first_process, first_member, records = [], [], 0
    for roster in rosters:
        first_process.append(len(processes))
        first_member.append(records)
        _merge_roster(roster, len(processes), records, groups)
        processes += roster.processes
        records += len(roster.members)
    index_of = {(each.role, each.rank): index for index, each in enumerate(processes)}
    reported = len(processes)
    for each in expected:
        if (each.role, each.rank) not in index_of:
            index_of[each.role, each.rank] = len(processes)
            processes.append(each)
    for name in sorted(groups, key=lambda each: (bool(groups[each].of), each)):
        if groups[name].of:
            _fill_pair(groups[name], groups.get(groups[name].of), records)
        else:
            _fill_members(groups[name], name, processes, index_of, records)
    groups = {name: group for name, group in groups.items() if len(group.members) == group.size or not group.of}
    in_order = [groups[name] for name in sorted(groups)]
    rows = np.array([group.members[rank] for group in in_order for rank in sorted(group.members)], dtype=np.int64)
    rows = rows.reshape(-1, 3)
    membership = np.full(records + 2, -1, dtype=np.int64)
    membership[rows[:, 1]] = np.arange(len(rows))
    by_role: dict[str, list[int]] = {}
    by_place: dict[tuple[str, int, str], list[int]] = {}
    for index, each in enumerate(processes):
        by_role.setdefault(each.role, []).append(index)
        if each.rank >= 0:
            by_place.setdefault((each.role, each.rank, each.parent), []).append(index)
    return JobLayout(
        processes=tuple(processes),
        unseen=len(processes) - reported,
        first_process=tuple(first_process),
        first_member=tuple(first_member),
        communicators=tuple(group.about for group in in_order),
        starts=np.cumsum([0, *(len(group.members) for group in in_order)], dtype=np.int64),
        process=np.ascontiguousarray(rows[:, 0]),
        made_with=np.ascontiguousarray(rows[:, 2]),
        record=np.ascontiguousarray(rows[:, 1]),
        record_in_communicator=np.array(_records_in_communicator(groups), dtype=np.int64),
        membership=membership,
        by_name={each.name: index for index, each in enumerate(processes)},
        by_role={role: tuple(indices) for role, indices in by_role.items()},
        successions=tuple(tuple(each) for each in by_place.values() if len(each) > 1),
    )


def _merge_roster(roster: Roster, first: int, records: int, groups: dict[str, _CommunicatorGroup]) -> None:
    own = []
    for named in roster.communicators:
        group = groups.setdefault(named.key, _CommunicatorGroup(named.about, ""))
        group.size = max(group.size, named.size)
        group.ranks, group.of = group.ranks or named.ranks, named.of
        own.append(group)
    for number, member in enumerate(roster.members):
        group = own[member.communicator]
        group.role = group.role or roster.processes[member.process].role
        group.members[member.rank] = (first + member.process, records + number, member.made_with)


def _fill_members(
    group: _CommunicatorGroup, key: str, processes: list[ProcessInfo], seen: dict[tuple[str, int], int], unreported: int
) -> None:
    """Adds the members that no host reports; without them, a collective would look complete."""
    if len(group.members) >= group.size:
        return
    own_ranks = all(processes[process].rank == rank for rank, (process, _, _) in group.members.items())
    for rank in range(group.size):
        if rank in group.members:
            continue
        if group.ranks is not None and rank < len(group.ranks):
            place = (group.role, group.ranks[rank])
        elif own_ranks and group.ranks is None:
            place = (group.role, rank)
        else:
            place = (key, rank)
        if place not in seen:
            seen[place] = len(processes)
            known = place[0] == group.role
            name = f"{group.role}-{place[1]}" if known else f"member {rank} of {group.about.name!r}"
            processes.append(ProcessInfo(name, group.role, place[1] if known else -1))
        group.members[rank] = (seen[place], unreported, UNKNOWN)


def _records_in_communicator(groups: Mapping[str, _CommunicatorGroup]) -> list[int]:
    found = []
    for name in sorted(groups):
        group = groups[name]
        of = groups.get(group.of)
        for rank in sorted(group.members):
            known = None if of is None or group.ranks is None else of.members.get(group.ranks[rank])
            found.append((known or group.members[rank])[1])
    return found


def _fill_pair(group: _CommunicatorGroup, of: _CommunicatorGroup | None, unreported: int) -> None:
    """Adds the peer of a process that has sent to or received from it, if the peer has made no call for these messages.
    `of` is the communicator of both. If the peer reports that, it has certainly made none."""
    for rank, rank_in_communicator in enumerate(group.ranks or ()):
        known = None if of is None else of.members.get(rank_in_communicator)
        if rank not in group.members and known is not None:
            process, record, _ = known
            group.members[rank] = (process, unreported if record >= unreported else unreported + 1, UNKNOWN)
