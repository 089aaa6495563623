"""Decides which ranks without a dump are accused."""

from collections.abc import Mapping, Sequence

from lockstep.watch.diagnosis.evidence_types import UNKNOWN
from lockstep.watch.dumps.member_rows import GroupRows, MemberRow

_MIN_WAITERS = 2


def accuse_missing(groups: Sequence[GroupRows], missing: Sequence[int]) -> dict[int, str]:
    """The ranks without a dump that are accused, each with the reason, and changes their rows: they have not entered
    what the others wait in.

    A rank is accused only if two others wait at their heads in one collective that it alone can block, and if it waits
    for no rank itself, as far as the others show: each rank that it could wait for waits for it, directly or
    indirectly.
    """
    without = set(missing)
    found: dict[int, str] = {}
    for rank in missing:
        waits = [(group, waiting) for group in groups if (waiting := _waiting_for(group, rank))]
        wide = [(group, waiting) for group, waiting in waits if len(waiting) >= _MIN_WAITERS]
        if wide and not _may_wait(groups, rank, without):
            group, waiting = max(wide, key=lambda each: len(each[1]))
            found[rank] = (
                f"no dump of rank {rank}, and {len(waiting)} ranks wait on {group.info.name!r} for which nobody else "
                "can be late"
            )
    for group in groups:
        for row in group.rows:
            if row.rank in found:
                waiting_at = [other.entered for other in group.rows if other.waits]
                done = [other.completed for other in group.rows if other.completed != UNKNOWN]
                row.entered = row.completed = min(waiting_at) - 1 if waiting_at else max(done, default=0)
    return found


def _waiting_for(group: GroupRows, rank: int) -> list[MemberRow]:
    """The members that wait in one collective that `rank` alone can block; empty if there are none. A member whose
    device may not have started the collective can block it, too."""
    if not any(row.rank == rank for row in group.rows):
        return []
    waiting = [row for row in group.rows if row.waits]
    number = min((row.entered for row in waiting), default=UNKNOWN)
    others = [row for row in group.rows if row.rank != rank]
    alone = all(row.entered >= number and not row.uncertain and row.started >= number for row in others)
    return [row for row in waiting if row.entered == number] if alone else []


def _may_wait(groups: Sequence[GroupRows], rank: int, missing: set[int]) -> bool:
    """Whether the rank may wait for another one: one on a common communicator that does not wait for `rank`."""
    peers = {row.rank for group in groups if any(each.rank == rank for each in group.rows) for row in group.rows}
    waiting = _dependents(groups, rank)
    return bool(peers - waiting - missing - {rank})


def _dependents(groups: Sequence[GroupRows], rank: int) -> set[int]:
    """The ranks that wait for `rank`, directly or indirectly."""
    blockers: dict[int, set[int]] = {}
    for group in groups:
        for row in group.rows:
            if row.waits:
                late = {each.rank for each in group.rows if each.entered < row.entered}
                blockers.setdefault(row.rank, set()).update(late)
    found = {rank}
    return _grow(found, blockers)


def _grow(found: set[int], blockers: Mapping[int, set[int]]) -> set[int]:
    while True:
        new = {waiter for waiter, late in blockers.items() if waiter not in found and late & found}
        if not new:
            return found
        found |= new
