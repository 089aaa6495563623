"""How a version is cut for the way between nodes: pure functions, the same on both sides."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lockstep.weights.buckets import Mark
from lockstep.weights.plan import ALIGNMENT, Plan

SMALL = 256 << 10
"""Bytes. Runs shorter than this travel together in one parcel."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring bytes of a buffer."""

    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


Parcel = tuple[Run, ...]
"""What is sent at once: one run as it lies in memory, or several that are copied together first."""


def parcels(plan: Plan, marks: Sequence[Mark], limit: int) -> list[Parcel]:
    """Everything that the writers of `marks` wrote, in the order of the buffer, cut into parcels of `limit` bytes at
    most. Bytes between two tensors that only align the second go along."""
    pieces = []
    for mark in marks:
        for bucket in mark.buckets:
            entry = plan.entries[bucket.entry]
            end = bucket.start + bucket.length
            # Beyond the end of a tensor is padding; beyond the end of a rank's rows are those of another.
            padded = entry.offset + (-(-end // ALIGNMENT) * ALIGNMENT if end == entry.nbytes else end)
            pieces.append((entry.offset + bucket.start, bucket.length, padded))
    return list(_packed(_cut(_joined(sorted(pieces)), limit), limit))


def size(parcel: Parcel) -> int:
    """Bytes."""
    return sum(run.length for run in parcel)


def gathered(parcel: Parcel, memory: memoryview, staging: memoryview) -> memoryview:
    """The parcel's bytes in one piece: those of `memory` itself, or copied into `staging`."""
    if len(parcel) == 1:
        return memory[parcel[0].start : parcel[0].end]
    at = 0
    for run in parcel:
        staging[at : at + run.length] = memory[run.start : run.end]
        at += run.length
    return staging[:at]


def spread(parcel: Parcel, piece: memoryview, memory: memoryview) -> None:
    """Puts what was received into its places, where it was not received there already (a parcel of one run is)."""
    at = 0
    for run in parcel if len(parcel) > 1 else ():
        memory[run.start : run.end] = piece[at : at + run.length]
        at += run.length


def digest(parcel: Parcel, memory: memoryview) -> bytes:
    """sha256. Parcels with equal ones have equal bytes: a checksum of 32 bits would not do for that."""
    whole = hashlib.sha256()
    for run in parcel:
        whole.update(memory[run.start : run.end])
    return whole.digest()


def changed(before: Sequence[bytes] | None, now: Sequence[bytes]) -> list[int]:
    """Positions of the parcels to send to a receiver that has those of `before`; all where it has nothing like them."""
    if before is None or len(before) != len(now):
        return list(range(len(now)))
    return [position for position, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]


def _joined(pieces: Iterable[tuple[int, int, int]]) -> Iterator[Run]:
    """Of (start, length, end with padding)."""
    start = end = reach = -1
    for at, length, padded in pieces:
        if at != reach and start >= 0:
            yield Run(start, end - start)
        if at != reach:
            start = at
        end, reach = at + length, padded
    if start >= 0:
        yield Run(start, end - start)


def _cut(runs: Iterable[Run], limit: int) -> Iterator[Run]:
    for run in runs:
        for at in range(run.start, run.end, limit):
            yield Run(at, min(limit, run.end - at))


def _packed(runs: Iterable[Run], limit: int) -> Iterator[Parcel]:
    together: list[Run] = []
    for run in runs:
        small = run.length < min(SMALL, limit)
        if together and (not small or size(tuple(together)) + run.length > limit):
            yield tuple(together)
            together = []
        if small:
            together.append(run)
        else:
            yield (run,)
    if together:
        yield tuple(together)
