"""Where the members of a communicator called different things."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
