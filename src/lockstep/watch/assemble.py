"""From what agents said (`messages`) to evidence: pure functions; `inbox` keeps what they need between ticks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.watch.evidence import Calls, Communicators, Edge, Evidence, Floats, Integers, Processes
from lockstep.watch.facts import UNKNOWN, Call, Communicator, Life, Needs, Note, Process
from lockstep.watch.messages import CALL, Roster, State, Waiter, member_record, process_record

_PROCESS = np.dtype(
    [("life", "i1"), ("code", "<i4"), ("ended", "<f4"), ("moved", "<f4"), ("active", "<f4"), ("same", "<f4")]
)
_MEMBER = np.dtype(
    [("entered", "<i8"), ("completed", "<i8"), ("in", "<f4"), ("out", "<f4"), ("blocked", "i1"), ("blind", "u1")]
)
_CALL = np.dtype([("member", "<u4"), ("seq", "<i8"), ("signature", "<u8")])


@dataclass(frozen=True, slots=True)
class Alias:
    """Whom a wait means that names neither a process nor a role: the processes of a role, all or any of them."""

    role: str
    needs: Needs = Needs.ALL


@dataclass(frozen=True, slots=True)
class Heard:
    """What is known of a host, and when its last state came."""

    roster: Roster
    state: State | None = None
    at: float = float("nan")
    about: Mapping[int, Call] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie; changes only with a roster."""

    who: tuple[Process, ...]
    """Those of the hosts in the hosts' order, then those that nobody reports."""
    unseen: int
    """How many nobody reports."""
    first_process: tuple[int, ...]
    """By host."""
    first_member: tuple[int, ...]
    about: tuple[Communicator, ...]
    starts: Integers
    process: Integers
    """`[memberships]`"""
    made_with: Integers
    record: Integers
    """`[memberships]`: which of all hosts' member records it is; the one behind the last where nobody reports it."""
    membership: Integers
    """The other way round; -1 for a record whose place another host has taken over."""
    by_name: Mapping[str, int]
    by_role: Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class _Group:
    """A communicator while the rosters are merged: member's rank in it -> (process, record, made with)."""

    about: Communicator
    role: str
    size: int = 0
    ranks: tuple[int, ...] | None = None
    members: dict[int, tuple[int, int, int]] = field(default_factory=dict)


def lay_out(rosters: Sequence[Roster], expected: Sequence[Process] = ()) -> Layout:
    """Merges rosters. `expected` are the processes that should be there, reported or not."""
    who: list[Process] = []
    groups: dict[str, _Group] = {}
    first_process, first_member, records = [], [], 0
    for roster in rosters:
        first_process.append(len(who))
        first_member.append(records)
        _merge(roster, len(who), records, groups)
        who += roster.processes
        records += len(roster.members)
    seen = {(each.role, each.rank): index for index, each in enumerate(who)}
    reported = len(who)
    for each in expected:
        if (each.role, each.rank) not in seen:
            seen[each.role, each.rank] = len(who)
            who.append(each)
    for name in sorted(groups):
        _fill(groups[name], name, who, seen, records)
    in_order = [groups[name] for name in sorted(groups)]
    rows = np.array([group.members[rank] for group in in_order for rank in sorted(group.members)], dtype=np.int64)
    rows = rows.reshape(-1, 3)
    membership = np.full(records + 1, -1, dtype=np.int64)
    membership[rows[:, 1]] = np.arange(len(rows))
    by_role: dict[str, list[int]] = {}
    for index, each in enumerate(who):
        by_role.setdefault(each.role, []).append(index)
    return Layout(
        who=tuple(who),
        unseen=len(who) - reported,
        first_process=tuple(first_process),
        first_member=tuple(first_member),
        about=tuple(group.about for group in in_order),
        starts=np.cumsum([0, *(len(group.members) for group in in_order)], dtype=np.int64),
        process=np.ascontiguousarray(rows[:, 0]),
        made_with=np.ascontiguousarray(rows[:, 2]),
        record=np.ascontiguousarray(rows[:, 1]),
        membership=membership,
        by_name={each.name: index for index, each in enumerate(who)},
        by_role={role: tuple(indices) for role, indices in by_role.items()},
    )


def _merge(roster: Roster, first: int, records: int, groups: dict[str, _Group]) -> None:
    own = []
    for named in roster.communicators:
        group = groups.setdefault(named.key, _Group(named.about, ""))
        group.size = max(group.size, named.size)
        group.ranks = group.ranks or named.ranks
        own.append(group)
    for number, member in enumerate(roster.members):
        group = own[member.communicator]
        group.role = group.role or roster.processes[member.process].role
        group.members[member.rank] = (first + member.process, records + number, member.made_with)


def _fill(group: _Group, key: str, who: list[Process], seen: dict[tuple[str, int], int], nobodys: int) -> None:
    """Members that nobody reports are members still: without them, a collective would look complete."""
    if len(group.members) >= group.size:
        return
    own_ranks = all(who[process].rank == rank for rank, (process, _, _) in group.members.items())
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
            seen[place] = len(who)
            known = place[0] == group.role
            name = f"{group.role}-{place[1]}" if known else f"member {rank} of {group.about.name!r}"
            who.append(Process(name, group.role, place[1] if known else -1))
        group.members[rank] = (seen[place], nobodys, UNKNOWN)


def assemble(
    layout: Layout,
    heard: Sequence[Heard],
    at: float,
    host_s: float = 5.0,
    aliases: Mapping[str, Alias] | None = None,
    listening_since: float = float("-inf"),
) -> Evidence:
    """Evidence from what was heard of every host, in the layout's order of hosts.

    A host that was silent for `host_s` while somebody listened is lost, unless all are: then it is the listener who is
    cut off, and the evidence is of when it heard last.
    """
    silent = [not at - max(listening_since, each.at) <= host_s for each in heard]
    gaps = [gap for each in heard if each.state for gap in each.state.gaps]
    gaps += [_silence(each, at) for each, lost in zip(heard, silent, strict=True) if lost]
    cut_off = all(silent)
    newest = max((each.at for each in heard if each.at == each.at), default=at)
    at = min(at, newest) if cut_off else at
    processes = _processes(layout, heard, [lost and not cut_off for lost in silent])
    about: dict[int, Call] = {}
    for each in heard:
        if each.about:
            about.update(each.about)
    return Evidence(
        at=at,
        processes=processes,
        communicators=_communicators(layout, heard),
        calls=_calls(layout, heard, about),
        edges=_edges(layout, heard, aliases or {}),
        gaps=gaps,
    )


def _silence(heard: Heard, at: float) -> str:
    since = "ever" if np.isnan(heard.at) else f"for {at - heard.at:.0f} s"
    return f"nothing heard of host {heard.roster.host} {since}"


def _at(heard: Sequence[Heard], counts: Sequence[int], more: int) -> Floats:
    """When the state came that a record is of."""
    times = np.repeat(np.array([each.at for each in heard], dtype=np.float64), counts)
    return np.concatenate([times, np.full(more, np.nan)])


def _processes(layout: Layout, heard: Sequence[Heard], lost: Sequence[bool]) -> Processes:
    counts = [len(each.roster.processes) for each in heard]
    nothing = process_record()
    parts = [each.state.processes if each.state else nothing * count for each, count in zip(heard, counts, strict=True)]
    parts.append(process_record(Life.UNSEEN) * layout.unseen)
    table = np.frombuffer(b"".join(parts), dtype=_PROCESS)
    at = _at(heard, counts, layout.unseen)
    life = table["life"].copy()
    if any(lost):
        gone = np.concatenate([np.repeat(np.array(lost, dtype=bool), counts), np.zeros(layout.unseen, dtype=bool)])
        life[gone & (life <= Life.STOPPED)] = Life.LOST
    stage: list[str] = []
    notes: dict[int, Note] = {}
    for each, count, first in zip(heard, counts, layout.first_process, strict=True):
        state = each.state
        stage += state.stages if state and len(state.stages) == count else [""] * count
        if state and state.notes:
            notes.update({first + index: note for index, note in state.notes.items()})
    return Processes(
        who=layout.who,
        life=life,
        exit_code=table["code"].copy(),
        ended_at=at - table["ended"],
        moved_at=at - table["moved"],
        active_at=at - table["active"],
        same_stack_since=at - table["same"],
        stage=stage + [""] * layout.unseen,
        notes=notes,
        seen_at=at,
    )


def _communicators(layout: Layout, heard: Sequence[Heard]) -> Communicators:
    counts = [len(each.roster.members) for each in heard]
    nothing = member_record()
    parts = [each.state.members if each.state else nothing * count for each, count in zip(heard, counts, strict=True)]
    parts.append(nothing)
    table = np.frombuffer(b"".join(parts), dtype=_MEMBER).take(layout.record)  # a tenth of the time of an index
    at = _at(heard, counts, 1).take(layout.record)
    return Communicators(
        about=layout.about,
        starts=layout.starts,
        process=layout.process,
        entered=table["entered"].astype(np.int64),
        completed=table["completed"].astype(np.int64),
        entered_at=at - table["in"],
        completed_at=at - table["out"],
        ranks=layout.made_with,
        blind=table["blind"].astype(np.bool_),
        blocked=table["blocked"].astype(np.int8),
    )


def _calls(layout: Layout, heard: Sequence[Heard], about: Mapping[int, Call]) -> Calls:
    parts = [each.state.calls if each.state else b"" for each in heard]
    table = np.frombuffer(b"".join(parts), dtype=_CALL)
    firsts = np.repeat(np.array(layout.first_member, dtype=np.int64), [len(part) // CALL.size for part in parts])
    membership = layout.membership.take(firsts + table["member"])
    if (membership < 0).any():
        table, membership = table[membership >= 0], membership[membership >= 0]
    sites: dict[tuple[int, int], str] = {}
    for each, first in zip(heard, layout.first_member, strict=True):
        if each.state and each.state.sites:
            for member, seq, site in each.state.sites:
                sites[int(layout.membership[first + member]), seq] = site
    return Calls(
        membership=membership,
        seq=table["seq"].astype(np.int64),
        signature=table["signature"].astype(np.uint64),
        about=about,
        sites=sites,
    )


def _edges(layout: Layout, heard: Sequence[Heard], aliases: Mapping[str, Alias]) -> list[Edge]:
    return [
        _edge(layout, first + wait.process, wait, each.at, aliases)
        for each, first in zip(heard, layout.first_process, strict=True)
        if each.state
        for wait in each.state.waits
    ]


def _edge(layout: Layout, process: int, wait: Waiter, at: float, aliases: Mapping[str, Alias]) -> Edge:
    on, needs, outside = _whom(layout, wait.whom, aliases)
    elsewhere = 0
    if outside and wait.meeting:
        on, outside = layout.by_role[layout.who[process].role], ""
        if wait.expected is not None:
            size = wait.expected.size
            on = tuple(each for each in on if 0 <= layout.who[each].rank < size)
            elsewhere = max(0, size - len({layout.who[each].rank for each in on}))
    return Edge(
        process=process,
        on=tuple(index for index in on if index != process),
        outside=outside,
        needs=needs if wait.needs is None else wait.needs,
        kind=wait.kind,
        why=wait.why,
        since=at - wait.since,
        moved_at=at - wait.moved,
        until=at + wait.left,
        main=wait.main,
        idle=wait.idle,
        meeting=wait.meeting,
        members=wait.members,
        elsewhere=elsewhere,
    )


def _whom(layout: Layout, whom: str, aliases: Mapping[str, Alias]) -> tuple[tuple[int, ...], Needs, str]:
    """Processes, how many of them are needed, and the name where they are none of the job's."""
    if whom in layout.by_name:
        return (layout.by_name[whom],), Needs.ALL, ""
    if whom in aliases:
        alias = aliases[whom]
        return layout.by_role.get(alias.role, ()), alias.needs, ""
    if whom in layout.by_role:
        return layout.by_role[whom], Needs.ALL, ""
    names = whom.split(" and ")[0].split(", ")
    several = tuple(layout.by_name[name] for name in names if name in layout.by_name)
    return (several, Needs.ALL, "") if several else ((), Needs.ALL, whom)
