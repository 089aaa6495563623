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
    MembershipTable,
    ProcessTable,
    WaitEdge,
)
from lockstep.watch.diagnosis.evidence_types import (
    UNKNOWN,
    CollectiveCall,
    Liveness,
    ProcessNote,
    WaitAlias,
    WaitCondition,
)
from lockstep.watch.recorder.rendezvous_wait import member_list_digest
from lockstep.watch.supervisor.job_layout import JobLayout

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
        edges=_build_edges(layout, hosts, aliases or {}, processes),
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


def _current_by_role(layout: JobLayout, table: ProcessTable) -> Mapping[str, tuple[int, ...]]:
    """The processes of each role without those that were replaced: of several with the same rank, only those that live,
    or, if none does, the last to end. Who waits for a role does not wait for the others."""
    replaced = set[int]()
    for same in layout.successions:
        living = {index for index in same if table.liveness[index] not in (Liveness.DEAD, Liveness.EXITED)}
        reported = {index for index in living if table.liveness[index] != Liveness.LOST}
        replaced |= {*same} - (reported or living or {max(same, key=lambda index: table.ended_at[index])})
    if not replaced:
        return layout.by_role
    return {role: tuple(index for index in on if index not in replaced) for role, on in layout.by_role.items()}


def _build_edges(
    layout: JobLayout, hosts: Sequence[HostState], aliases: Mapping[str, WaitAlias], table: ProcessTable
) -> list[WaitEdge]:
    by_role = _current_by_role(layout, table)
    return [
        _build_edge(layout, by_role, first + wait.process, wait, each.at, aliases)
        for each, first in zip(hosts, layout.first_process, strict=True)
        if each.state
        for wait in each.state.waits
    ]


def _build_edge(
    layout: JobLayout,
    by_role: Mapping[str, tuple[int, ...]],
    process: int,
    wait: WaitReport,
    at: float,
    aliases: Mapping[str, WaitAlias],
) -> WaitEdge:
    on, needs, outside = _resolve_target(layout.by_name, by_role, wait.waits_for, aliases)
    unwatched = 0
    if outside and wait.meeting:
        on, outside = by_role[layout.processes[process].role], ""
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
    by_name: Mapping[str, int], by_role: Mapping[str, tuple[int, ...]], waits_for: str, aliases: Mapping[str, WaitAlias]
) -> tuple[tuple[int, ...], WaitCondition, str]:
    """The processes that a wait's target names, whether all or any of them must act, and the target if it is outside
    the job."""
    if waits_for in by_name:
        return (by_name[waits_for],), WaitCondition.ALL, ""
    if waits_for in aliases:
        alias = aliases[waits_for]
        return by_role.get(alias.role, ()), alias.needs, ""
    if waits_for in by_role:
        return by_role[waits_for], WaitCondition.ALL, ""
    names = waits_for.split(" and ")[0].split(", ")
    several = tuple(by_name[name] for name in names if name in by_name)
    return (several, WaitCondition.ALL, "") if several else ((), WaitCondition.ALL, waits_for)
