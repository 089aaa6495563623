"""Builds evidence from the reports of agents. These are pure functions; `message_store` keeps the reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.watch.agent.report_messages import (
    BLIND,
    CALL_RECORD,
    ON_DEVICE,
    Roster,
    StateReport,
    WaitReport,
    list_number,
    pack_member,
    pack_process,
)
from lockstep.watch.diagnosis.device_evidence import ProcessDevice, process_devices
from lockstep.watch.diagnosis.evidence import (
    CallTable,
    Evidence,
    FloatArray,
    IntArray,
    MembershipTable,
    ProcessTable,
    WaitEdge,
)
from lockstep.watch.diagnosis.evidence_types import (
    UNKNOWN,
    CollectiveCall,
    CommunicatorInfo,
    Liveness,
    ProcessInfo,
    ProcessNote,
    WaitAlias,
    WaitCondition,
)
from lockstep.watch.recorder.rendezvous_wait import member_list_digest

_PROCESS_DTYPE = np.dtype(
    [("liveness", "i1"), ("code", "<i4"), ("ended", "<f4"), ("moved", "<f4"), ("active", "<f4"), ("same", "<f4")]
)
_MEMBER_DTYPE = np.dtype(
    [("entered", "<i8"), ("completed", "<i8"), ("started", "<i8"), ("in", "<f4"), ("out", "<f4"), ("pending", "<f4"),
     ("blocked", "i1"), ("flags", "u1")]
)  # fmt: skip
_CALL_DTYPE = np.dtype([("member", "<u4"), ("seq", "<i8"), ("signature", "<u8")])


@dataclass(frozen=True, slots=True)
class HostState:
    """The newest reports of a host."""

    roster: Roster
    state: StateReport | None = None
    at: float = float("nan")
    """When the newest state report arrived."""
    about: Mapping[int, CollectiveCall] = field(default_factory=dict)
    """One call of each signature, from all reports."""


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
    for index, each in enumerate(processes):
        by_role.setdefault(each.role, []).append(index)
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


def build_evidence(
    layout: JobLayout,
    hosts: Sequence[HostState],
    at: float,
    host_s: float = 5.0,
    aliases: Mapping[str, WaitAlias] | None = None,
    listening_since: float = float("-inf"),
) -> Evidence:
    """Builds evidence from the newest reports of all hosts, which must be in the layout's order.

    A host without reports for `host_s`, while the supervisor listened, is lost. If all hosts are silent, the supervisor
    itself is cut off, and the evidence is that of the newest report.
    """
    silent = [not at - max(listening_since, each.at) <= host_s for each in hosts]
    gaps = [
        f"host {each.roster.host}: {each.state.devices.gap}" for each in hosts if each.state and each.state.devices.gap
    ]
    gaps += [_silence_text(each, at) for each, lost in zip(hosts, silent, strict=True) if lost]
    cut_off = all(silent)
    newest = max((each.at for each in hosts if each.at == each.at), default=at)
    at = min(at, newest) if cut_off else at
    processes = _build_processes(layout, hosts, [lost and not cut_off for lost in silent])
    about: dict[int, CollectiveCall] = {}
    for each in hosts:
        if each.about:
            about.update(each.about)
    return Evidence(
        at=at,
        processes=processes,
        communicators=_build_communicators(layout, hosts),
        calls=_build_calls(layout, hosts, about),
        edges=_build_edges(layout, hosts, aliases or {}),
        gaps=gaps,
        devices=_build_devices(layout, hosts),
    )


def _silence_text(host: HostState, at: float) -> str:
    since = "ever" if np.isnan(host.at) else f"for {at - host.at:.0f} s"
    return f"no report from host {host.roster.host} {since}"


def _report_times(hosts: Sequence[HostState], counts: Sequence[int], more: int) -> FloatArray:
    """`[records]`: when the state report with each record arrived; NaN for `more` further records."""
    times = np.repeat(np.array([each.at for each in hosts], dtype=np.float64), counts)
    return np.concatenate([times, np.full(more, np.nan)])


def _build_processes(layout: JobLayout, hosts: Sequence[HostState], lost: Sequence[bool]) -> ProcessTable:
    counts = [len(each.roster.processes) for each in hosts]
    blank = pack_process()
    parts = [each.state.processes if each.state else blank * count for each, count in zip(hosts, counts, strict=True)]
    parts.append(pack_process(Liveness.UNSEEN) * layout.unseen)
    table = np.frombuffer(b"".join(parts), dtype=_PROCESS_DTYPE)
    at = _report_times(hosts, counts, layout.unseen)
    liveness = table["liveness"].copy()
    if any(lost):
        is_lost = np.concatenate([np.repeat(np.array(lost, dtype=bool), counts), np.zeros(layout.unseen, dtype=bool)])
        liveness[is_lost & (liveness <= Liveness.STOPPED)] = Liveness.LOST
    stage: list[str] = []
    notes: dict[int, ProcessNote] = {}
    moved = np.full(len(table), np.nan)
    for each, count, first in zip(hosts, counts, layout.first_process, strict=True):
        state = each.state
        stage += state.stages if state and len(state.stages) == count else [""] * count
        if state and state.notes:
            notes.update({first + index: note for index, note in state.notes.items()})
        for index, age in state.moved.items() if state else ():
            if index < count:
                moved[first + index] = each.at - age
    return ProcessTable(
        info=layout.processes,
        liveness=liveness,
        exit_code=table["code"].copy(),
        ended_at=at - table["ended"],
        progressed_at=at - table["moved"],
        active_at=at - table["active"],
        same_stack_since=at - table["same"],
        stage=stage + [""] * layout.unseen,
        notes=notes,
        seen_at=at,
        moved_at=moved,
    )


def _build_devices(layout: JobLayout, hosts: Sequence[HostState]) -> dict[int, tuple[ProcessDevice, ...]]:
    found: dict[int, tuple[ProcessDevice, ...]] = {}
    for each, first in zip(hosts, layout.first_process, strict=True):
        if each.state and each.state.devices.uses:
            found |= process_devices(each.state.devices, first, each.at)
    return found


def _build_communicators(layout: JobLayout, hosts: Sequence[HostState]) -> MembershipTable:
    counts = [len(each.roster.members) for each in hosts]
    blank = pack_member()
    parts = [each.state.members if each.state else blank * count for each, count in zip(hosts, counts, strict=True)]
    parts += [blank, pack_member(0, 0)]
    records = np.frombuffer(b"".join(parts), dtype=_MEMBER_DTYPE)
    table = records.take(layout.record)  # ten times faster than indexing
    flags = table["flags"] | records["flags"].take(layout.record_in_communicator)
    at = _report_times(hosts, counts, 2).take(layout.record)
    return MembershipTable(
        info=layout.communicators,
        starts=layout.starts,
        process=layout.process,
        entered=table["entered"].astype(np.int64),
        completed=table["completed"].astype(np.int64),
        entered_at=at - table["in"],
        completed_at=at - table["out"],
        member_list=layout.made_with,
        uncertain=(flags & BLIND).astype(np.bool_),
        blocked=table["blocked"].astype(np.int8),
        started=table["started"].astype(np.int64),
        pending_at=at - table["pending"],
        on_device=(flags & ON_DEVICE).astype(np.bool_),
    )


def _build_calls(layout: JobLayout, hosts: Sequence[HostState], about: Mapping[int, CollectiveCall]) -> CallTable:
    parts = [each.state.calls if each.state else b"" for each in hosts]
    table = np.frombuffer(b"".join(parts), dtype=_CALL_DTYPE)
    firsts = np.repeat(np.array(layout.first_member, dtype=np.int64), [len(part) // CALL_RECORD.size for part in parts])
    membership = layout.membership.take(firsts + table["member"])
    if (membership < 0).any():
        table, membership = table[membership >= 0], membership[membership >= 0]
    sites: dict[tuple[int, int], str] = {}
    for each, first in zip(hosts, layout.first_member, strict=True):
        if each.state and each.state.sites:
            for member, seq, site in each.state.sites:
                sites[int(layout.membership[first + member]), seq] = site
    return CallTable(
        membership=membership,
        seq=table["seq"].astype(np.int64),
        signature=table["signature"].astype(np.uint64),
        by_signature=about,
        sites=sites,
    )


def _build_edges(layout: JobLayout, hosts: Sequence[HostState], aliases: Mapping[str, WaitAlias]) -> list[WaitEdge]:
    return [
        _build_edge(layout, first + wait.process, wait, each.at, aliases)
        for each, first in zip(hosts, layout.first_process, strict=True)
        if each.state
        for wait in each.state.waits
    ]


def _build_edge(
    layout: JobLayout, process: int, wait: WaitReport, at: float, aliases: Mapping[str, WaitAlias]
) -> WaitEdge:
    on, needs, outside = _resolve_target(layout, wait.waits_for, aliases)
    unwatched = 0
    if outside and wait.meeting:
        on, outside = layout.by_role[layout.processes[process].role], ""
        if wait.expected is not None:
            size = wait.expected.size
            on = tuple(each for each in on if 0 <= layout.processes[each].rank < size)
            unwatched = max(0, size - len({layout.processes[each].rank for each in on}))
    return WaitEdge(
        process=process,
        on=tuple(index for index in on if index != process),
        outside=outside,
        needs=needs if wait.needs is None else wait.needs,
        kind=wait.kind,
        why=wait.why,
        since=at - wait.since,
        progressed_at=at - wait.moved,
        until=at + wait.left,
        main=wait.main,
        idle=wait.idle,
        rendezvous=wait.meeting,
        members=wait.members,
        member_list=_list_number(wait.members),
        unwatched=unwatched,
    )


def _list_number(members: str) -> int:
    """The number of the member list that the wait in a rendezvous shows; UNKNOWN if it shows none."""
    ranks = members.split(", ")
    known = all(rank.isdecimal() for rank in ranks)
    return list_number(member_list_digest([int(rank) for rank in ranks])) if known else UNKNOWN


def _resolve_target(
    layout: JobLayout, waits_for: str, aliases: Mapping[str, WaitAlias]
) -> tuple[tuple[int, ...], WaitCondition, str]:
    """The processes that a wait's target names, whether all or any of them must act, and the target if it is outside
    the job."""
    if waits_for in layout.by_name:
        return (layout.by_name[waits_for],), WaitCondition.ALL, ""
    if waits_for in aliases:
        alias = aliases[waits_for]
        return layout.by_role.get(alias.role, ()), alias.needs, ""
    if waits_for in layout.by_role:
        return layout.by_role[waits_for], WaitCondition.ALL, ""
    names = waits_for.split(" and ")[0].split(", ")
    several = tuple(layout.by_name[name] for name in names if name in layout.by_name)
    return (several, WaitCondition.ALL, "") if several else ((), WaitCondition.ALL, waits_for)
