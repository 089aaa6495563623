"""Selects the calls of each member that a diagnosis needs, and the dumps that must be decoded in full for them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.dumps.dump_files import RankDump
from lockstep.watch.dumps.traces import CommunicatorTrace

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
