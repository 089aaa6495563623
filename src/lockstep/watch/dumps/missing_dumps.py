"""Decides which ranks without a dump are accused."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lockstep.watch.diagnosis.evidence_types import UNKNOWN
from lockstep.watch.dumps.member_rows import GroupRows, MemberRow

_MIN_WAITERS = 2

_Places = Mapping[int, Sequence[tuple[int, MemberRow]]]
"""The rows of each rank, each with the index of its group."""


def accuse_missing(groups: Sequence[GroupRows], missing: Sequence[int]) -> dict[int, str]:
    """The ranks without a dump that are accused, each with the reason, and changes their rows: they have not entered
    what the others wait in.

    A rank is accused only if two others wait at their heads in one collective that it alone can block, and if it waits
    for no rank itself, as far as the others show: each rank that it could wait for waits for it, directly or
    indirectly, and it shares no communicator with other missing ranks that no dump lists.
    """
    without = set(missing)
    places: defaultdict[int, list[tuple[int, MemberRow]]] = defaultdict(list)
    blocked: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for at, group in enumerate(groups):
        for row in group.rows:
            places[row.rank].append((at, row))
        blocker, waiters = _sole_blocker(group)
        if blocker in without and waiters >= _MIN_WAITERS:
            blocked[blocker].append((waiters, group.info.name))
    found: dict[int, str] = {}
    hidden = _may_share_hidden_groups(groups, missing)
    for rank in missing:
        if rank in blocked and rank not in hidden and not _may_wait(groups, places, rank, without):
            waiters, name = max(blocked[rank], key=lambda each: each[0])
            found[rank] = (
                f"no dump of rank {rank}, and {waiters} ranks wait on {name!r} for which nobody else can be late"
            )
    for at, row in (place for rank in found for place in places[rank]):
        row.entered = row.completed = _last_passed(groups[at])
    return found


def _may_share_hidden_groups(groups: Sequence[GroupRows], missing: Sequence[int]) -> set[int]:
    """The missing ranks that may be members of a communicator that no dump lists, and wait there for each other: of a
    description and size whose listed communicators leave out at least as many missing ranks as it has members."""
    listed: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for group in groups:
        if group.info.description:
            listed[group.info.description, len(group.rows)].update(row.rank for row in group.rows)
    left_out = {kind: set(missing) - ranks for kind, ranks in listed.items()}
    return set().union(*(ranks for (_, size), ranks in left_out.items() if len(ranks) >= size))


def _sole_blocker(group: GroupRows) -> tuple[int, int]:
    """The only rank that can block the oldest collective in which members wait, and the number of these; `UNKNOWN` if
    there are several, or none wait. A member whose device may not have started the collective can block it, too."""
    waiting = [row.entered for row in group.rows if row.waits]
    oldest = min(waiting, default=UNKNOWN)
    blockers = [row.rank for row in group.rows if row.uncertain or min(row.entered, row.started) < oldest]
    return blockers[0] if waiting and len(blockers) == 1 else UNKNOWN, waiting.count(oldest)


def _last_passed(group: GroupRows) -> int:
    """The last collective that cannot be the one in which members wait."""
    waiting = [row.entered for row in group.rows if row.waits]
    return min(waiting) - 1 if waiting else max(0, *(row.completed for row in group.rows))


def _may_wait(groups: Sequence[GroupRows], places: _Places, rank: int, missing: set[int]) -> bool:
    """Whether the rank may wait for another one: one on a common communicator that does not wait for `rank`."""
    peers: set[int] = set()
    for at, _ in places[rank]:
        rows = groups[at].rows
        # It may wait for another missing rank where others wait that either of them can block.
        both = any(row.waits for row in rows)
        peers.update(row.rank for row in rows if both or row.rank not in missing)
    return bool(peers - _dependents(groups, places, rank))


def _dependents(groups: Sequence[GroupRows], places: _Places, rank: int) -> set[int]:
    """The rank and those that wait for it, directly or indirectly."""
    found, todo = {rank}, [rank]
    lowest: dict[int, int] = {}
    """For each group, how far the last of the ranks found so far is: all that wait further on are found."""
    while todo:
        for at, own in places[todo.pop()]:
            if at not in lowest or own.entered < lowest[at]:
                lowest[at] = own.entered
                new = {row.rank for row in groups[at].rows if row.waits and row.entered > own.entered} - found
                found |= new
                todo += new
    return found
