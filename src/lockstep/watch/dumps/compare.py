"""Where the members of a communicator called different things."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.watch.dumps.choose import Dump
from lockstep.watch.dumps.trace import Group

NEWEST = 16
"""So many of a member's newest calls are kept."""
_DIFFERENT = 64
"""So many sequence numbers are kept from the first one on in which members differ: what follows is its effect."""
_WIDEST = 10_000_000
"""Sequence numbers further apart than this are not of one run."""


@dataclass(frozen=True, slots=True)
class Column:
    """A member's calls, `[calls]` each, in the order in which they were entered."""

    membership: int
    sequence: NDArray[np.int64]
    signature: NDArray[np.uint64]
    site: NDArray[np.int32]


def newest_and_different(columns: Sequence[Column]) -> list[NDArray[np.int64]]:
    """Which calls of each column tell something: the newest, those around where the slowest member is, and those from
    where members first differ; as ascending indices into the column."""
    if not columns:
        return []
    low = min(int(column.sequence.min()) for column in columns)
    high = max(int(column.sequence.max()) for column in columns)
    slowest = min(int(column.sequence.max()) for column in columns)
    parted = high + 1
    if high - low < _WIDEST:
        first = np.zeros(high - low + 1, np.uint64)
        differs = np.zeros(high - low + 1, np.bool_)
        for column in columns:
            at = column.sequence - low
            before = first[at]
            differs[at] |= (before != column.signature) & (before != 0)
            first[at] = np.where(before == 0, column.signature, before)
        if differs.any():
            parted = low + int(np.argmax(differs))
    kept = []
    for column in columns:
        numbers = column.sequence
        keep = (numbers > slowest - 2) & (numbers <= slowest + NEWEST)
        keep[-NEWEST:] = True
        keep |= (numbers >= parted - 1) & (numbers < parted + _DIFFERENT)
        kept.append(np.flatnonzero(keep))
    return kept


def unsettled(dumps: Sequence[Dump]) -> list[Dump]:
    """The dumps of which every call must be known: their older calls may differ from those of other members, or others
    are so far ahead that the newest calls of all have nothing in common."""
    members: dict[tuple[str, str], list[tuple[Dump, Group]]] = defaultdict(list)
    for dump in dumps:
        for group in dump.trace.groups:
            if group.sequence:
                members[group.name, group.members].append((dump, group))
    again: dict[int, Dump] = {}
    for said in members.values():
        slowest = min(group.entered for _, group in said)
        apart = any(group.digests and group.sequence[0] > slowest - NEWEST for _, group in said)
        if apart or _blocks_differ([group for _, group in said]):
            again |= {dump.rank: dump for dump, group in said if group.digests}
    return list(again.values())


def _blocks_differ(groups: Sequence[Group]) -> bool:
    first: dict[int, int] = {}
    return any(
        first.setdefault(block, digest) != digest
        for group in groups
        for block, digest in enumerate(group.digests, group.digested)
    )
