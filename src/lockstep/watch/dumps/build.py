"""From the dumps of many ranks to `Evidence`.

Ranks are aligned by communicator and collective sequence number. `record_id` counts per process over all communicators
and wraps with the ring, so it says nothing about other ranks.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from lockstep.watch.dumps.choose import Dump, spoken
from lockstep.watch.dumps.compare import Column, newest_and_different
from lockstep.watch.dumps.pool import Calls as Known
from lockstep.watch.dumps.trace import Group
from lockstep.watch.evidence import (
    NO_CODE,
    UNKNOWN,
    Call,
    Calls,
    Communicator,
    Communicators,
    Edge,
    Evidence,
    Life,
    Process,
    Processes,
)

_DEFAULT, _NO_DESCRIPTION = "default_pg", "undefined"
_PEER = re.compile(r"(?:recv (?P<me>\d+)<-(?P<from>\d+))|(?:send (?P<self>\d+)->(?P<to>\d+))")


@dataclass
class _Communicator:
    """A communicator as its members' dumps know it."""

    name: str
    description: str
    backend: str
    ranks: list[int]
    said: dict[int, Group] = field(default_factory=dict)
    """By rank: what its dump says."""


def build(dumps: Sequence[Dump], gaps: Sequence[str], known: Known, world_size: int | None = None) -> Evidence:
    """Evidence of one dump a rank. Ranks that only others speak of are there too, with nothing known of them."""
    gaps = list(gaps)
    communicators = _communicators(dumps, world_size)
    ranks = sorted({dump.rank for dump in dumps}.union(range(world_size or 0), *(each.ranks for each in communicators)))
    by_rank = {dump.rank: dump for dump in dumps}
    missing = [rank for rank in ranks if rank not in by_rank]
    if missing:
        gaps.append(f"no dump of {spoken(missing)}")
    blank = [dump.rank for dump in dumps if not dump.trace.entries]
    if blank:
        gaps.append(f"no entries in the dump of {spoken(blank)}")
    for communicator in communicators:
        _mend(communicator, by_rank, gaps)
    index = {rank: at for at, rank in enumerate(ranks)}
    members = _members(communicators, by_rank, index)
    return Evidence(
        at=max((dump.taken_at for dump in dumps), default=math.nan),
        processes=_processes(ranks, by_rank, communicators),
        communicators=members,
        calls=_calls(communicators, by_rank, known),
        edges=_edges(communicators, index),
        source="dumps",
        gaps=tuple(gaps),
        extra={
            "files": {dump.rank: str(dump.file.path) for dump in dumps},
            "entries": sum(dump.trace.entries for dump in dumps),
            "missing": missing,
        },
    )


def _processes(ranks: Sequence[int], by_rank: Mapping[int, Dump], communicators: Sequence[_Communicator]) -> Processes:
    """A rank without a dump is unknown, not missing: it ran, as far as anybody knows."""
    nothing = np.full(len(ranks), np.nan)
    newest = {dump.rank: dump.trace.newest for dump in by_rank.values()}
    for communicator in communicators:
        for rank in communicator.said:
            if math.isnan(newest[rank]):
                newest[rank] = _left_behind_at(communicator, rank)
    seen = np.array([by_rank[rank].taken_at if rank in by_rank else math.nan for rank in ranks])
    return Processes(
        who=[Process(f"rank {rank}", "", rank) for rank in ranks],
        life=np.full(len(ranks), Life.RUNNING, np.int8),
        exit_code=np.full(len(ranks), NO_CODE, np.int32),
        ended_at=nothing, moved_at=np.array([newest.get(rank, math.nan) for rank in ranks]),
        active_at=nothing.copy(), same_stack_since=nothing.copy(), stage=[""] * len(ranks), seen_at=seen,
    )  # fmt: skip


def _left_behind_at(communicator: _Communicator, rank: int) -> float:
    """When the first of the others entered a collective that this rank, of which only counters are known, has not
    entered: it did not move since. NaN if nobody is ahead of it."""
    mine = communicator.said[rank].entered
    ahead = [group.entered_at for group in communicator.said.values() if group.entered > mine != UNKNOWN]
    return min((when for when in ahead if not math.isnan(when)), default=math.nan)


def _communicators(dumps: Sequence[Dump], world_size: int | None) -> list[_Communicator]:
    """Communicators by name and members: different ones may have one name (`split_group`), and the lists of one
    communicator may differ, which is a fault."""
    by_name: dict[str, list[tuple[int, Group, frozenset[int]]]] = defaultdict(list)
    parsed: dict[str, frozenset[int]] = {"": frozenset()}
    for dump in dumps:
        for group in dump.trace.groups:
            if group.members not in parsed:
                parsed[group.members] = frozenset(map(int, re.findall(r"\d+", group.members)))
            by_name[group.name].append((dump.rank, group, parsed[group.members]))
    size = max((max(dump.rank + 1, dump.trace.world) for dump in dumps), default=0)
    found = []
    for name, said in by_name.items():
        for ranks, mine in _together(said):
            if all(group.entered <= 0 and not group.waits for _, group, _ in mine):
                continue  # nobody has been in it, as far as the dumps reach back
            descriptions = [group.description for _, group, _ in mine if group.description]
            if not any(listed for _, _, listed in mine) and (_DEFAULT in descriptions or name == _DEFAULT):
                ranks = set(range(world_size or size))
            backend = next((group.backend for _, group, _ in mine if group.backend), "")
            found.append(
                _Communicator(name, descriptions[0] if descriptions else "", backend, sorted(ranks),
                              {rank: group for rank, group, _ in mine})
            )  # fmt: skip
    return sorted(found, key=lambda each: (-len(each.ranks), each.name, each.ranks))


def _together(
    said: Sequence[tuple[int, Group, frozenset[int]]],
) -> list[tuple[set[int], list[tuple[int, Group, frozenset[int]]]]]:
    """Those that speak of one communicator: lists that overlap do; who gives no list belongs where it is listed."""
    clusters: list[tuple[set[int], list[tuple[int, Group, frozenset[int]]]]] = []
    of_list: dict[frozenset[int], int] = {}
    for each in sorted(said, key=lambda each: not each[2]):
        rank, _, listed = each
        at = of_list.get(listed) if listed else None
        if at is None:
            wanted = listed or {rank}
            at = next((i for i, (ranks, _) in enumerate(clusters) if ranks & wanted), None)
            if at is None and not listed and len(clusters) == 1:
                at = 0
            if at is None:
                clusters.append((set(), []))
                at = len(clusters) - 1
            if listed:
                of_list[listed] = at
        clusters[at][0].update(listed or {rank})
        clusters[at][1].append(each)
    return clusters


def _mend(communicator: _Communicator, by_rank: Mapping[int, Dump], gaps: list[str]) -> None:
    """Correct what the dumps of a communicator say by what its other members prove.

    A collective that nobody can finish before everybody entered it, finished on one member, was entered by all. A dump
    that knows less, and whose newest entry is older than the next collective on the others, was taken earlier: nothing
    is known of its rank since.
    """
    said = communicator.said
    certain = max((group.certain for group in said.values()), default=UNKNOWN)
    if certain > 0:
        ahead = max(said.values(), key=lambda group: group.certain)
        for rank, group in said.items():
            if 0 <= group.entered < certain - 1:
                next_at = _created(ahead, group.entered + 1)
                if by_rank[rank].trace.newest < next_at:
                    gaps.append(f"the dump of rank {rank} is older than the others: on {communicator.name!r} they "
                                f"finished #{certain} with it, it knows of #{group.entered}")  # fmt: skip
                    group.entered = group.completed = UNKNOWN
    newest = max((group.entered for group in said.values()), default=UNKNOWN)
    for rank in communicator.ranks:
        known = said.get(rank)
        if known is not None and not known.sequence and known.entered == UNKNOWN and certain == newest > 0:
            known.entered = known.completed = certain  # its own entries have left the ring
    if communicator.backend == "gloo":
        _mend_gloo(communicator, by_rank)


def _mend_gloo(communicator: _Communicator, by_rank: Mapping[int, Dump]) -> None:
    """Gloo marks a collective as over a moment after its caller goes on, in any order; and it marks those that failed
    or timed out too. What others finished, and this rank went on after, is finished; what somebody has not entered is
    not."""
    said = communicator.said
    reached = sorted(group.completed for group in said.values())[-2:]
    for group in said.values():
        others = reached[0] if group.completed == reached[-1] else reached[-1]
        if len(reached) > 1 and group.completed < min(group.ended, others):
            group.completed = min(group.ended, others)
    entered = [said[rank].entered if rank in said else 0 if by_rank[rank].trace.whole else UNKNOWN
               for rank in communicator.ranks if rank in said or rank in by_rank]  # fmt: skip
    lowest = min((each for each in entered if each != UNKNOWN), default=UNKNOWN)
    for group in said.values():
        if group.completed == group.entered > max(lowest, group.certain):
            group.completed = group.entered - 1


def _created(group: Group, sequence: int) -> float:
    """When a rank entered a collective, or the next one of which the time is known, Unix seconds; NaN if none is."""
    later = (when for number, when in zip(group.sequence, group.created, strict=True) if number >= sequence)
    return next(later, math.nan) / 1e9


def _members(
    communicators: Sequence[_Communicator], by_rank: Mapping[int, Dump], index: Mapping[int, int]
) -> Communicators:
    columns: dict[str, list[float]] = defaultdict(list)
    starts = [0]
    for communicator in communicators:
        for rank in communicator.ranks:
            group = communicator.said.get(rank)
            whole = rank in by_rank and by_rank[rank].trace.whole
            nothing = 0 if whole else UNKNOWN
            columns["process"].append(index[rank])
            columns["entered"].append(group.entered if group else nothing)
            columns["completed"].append(group.completed if group else nothing)
            columns["entered_at"].append(group.entered_at if group else math.nan)
            columns["completed_at"].append(group.completed_at if group else math.nan)
            columns["ranks"].append(crc32(group.members.encode()) if group and group.members else UNKNOWN)
            columns["blind"].append(group.blind if group else False)
        starts.append(len(columns["process"]))
    return Communicators(
        about=_about(communicators),
        starts=np.array(starts, np.int64),
        process=np.array(columns["process"], np.int64),
        entered=np.array(columns["entered"], np.int64),
        completed=np.array(columns["completed"], np.int64),
        entered_at=np.array(columns["entered_at"], np.float64),
        completed_at=np.array(columns["completed_at"], np.float64),
        ranks=np.array(columns["ranks"], np.int64),
        blind=np.array(columns["blind"], np.bool_),
    )


def _about(communicators: Sequence[_Communicator]) -> list[Communicator]:
    """Called what the user calls them, where that is one; torch's own names are numbers and hashes."""
    meant = ["" if each.description == _NO_DESCRIPTION else each.description for each in communicators]
    names = []
    for each, description in zip(communicators, meant, strict=True):
        alone = meant.count(description) == 1 or description == each.name
        names.append((description if alone else f"{description} {each.name}") if description else each.name)
    twice = {name for name in names if names.count(name) > 1}
    names = [
        f"{name} {each.ranks[:4]}" if name in twice else name for name, each in zip(names, communicators, strict=True)
    ]
    return [
        Communicator(name, description, each.backend)
        for name, description, each in zip(names, meant, communicators, strict=True)
    ]


def _calls(communicators: Sequence[_Communicator], by_rank: Mapping[int, Dump], known: Known) -> Calls:
    """The newest calls of each member, and those in which members differ."""
    memberships, sequences, signatures = [], [], []
    sites: dict[tuple[int, int], str] = {}
    start = 0
    for communicator in communicators:
        columns = []
        for offset, rank in enumerate(communicator.ranks):
            group = communicator.said.get(rank)
            if group is not None and group.sequence:
                numbers = (np.frombuffer(column, column.typecode)
                           for column in (group.sequence, group.signature, group.site))  # fmt: skip
                columns.append(Column(start + offset, *numbers))
        kept = newest_and_different(columns)
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
    return Calls(
        membership=np.concatenate(memberships or [np.empty(0, np.int64)]),
        seq=np.concatenate(sequences or [np.empty(0, np.int64)]),
        signature=signature,
        about={each: Call(*call) for each, call in known.items() if each in used},
        sites=sites,
    )


def _edges(communicators: Sequence[_Communicator], index: Mapping[int, int]) -> list[Edge]:
    """Sends and receives that have not ended. Only NCCL records them; they name ranks within the communicator."""
    edges = []
    for communicator in communicators:
        for rank, group in communicator.said.items():
            for what, since in group.waits[:1]:
                match = _PEER.search(what)
                peer = int(match["from"] or match["to"]) if match else len(communicator.ranks)
                if peer < len(communicator.ranks) and communicator.ranks[peer] != rank:
                    on = (index[communicator.ranks[peer]],)
                    kind, name = what.split(" ")[0], communicator.description or communicator.name
                    why = f"{'from' if kind == 'recv' else 'to'} rank {communicator.ranks[peer]} on {name}"
                    edges.append(Edge(index[rank], on, kind=kind, why=why, since=since))
    return edges
