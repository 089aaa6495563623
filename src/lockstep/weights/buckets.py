"""What each rank wrote: pieces of tensors with their checksums, and whether they make up the whole."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.watch import beacon
from lockstep.weights.errors import TornWeights
from lockstep.weights.plan import Plan

Check = Literal["none", "sampled", "complete"]

_BUCKET = 4 << 20  # bytes under one checksum
_SAMPLE = 4 << 10  # bytes of each sample


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some bytes of one tensor."""

    entry: int
    """Position in the plan."""
    start: int
    """First byte, from the tensor's beginning."""
    length: int
    sampled: int
    complete: int | None
    """None where the writer sampled only."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A rank's word that it has written its part of a version."""

    rank: int
    version: int
    generation: int
    digest: str
    buckets: tuple[Bucket, ...]

    def write(self, path: Path) -> None:
        """Visible whole or not at all."""
        rows = [[b.entry, b.start, b.length, b.sampled, b.complete] for b in self.buckets]
        fields = {"rank": self.rank, "version": self.version, "generation": self.generation, "digest": self.digest}
        scratch = path.with_name(path.name + ".new")
        scratch.write_text(json.dumps({**fields, "buckets": rows}))
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> "Mark | None":
        """None where the rank has not marked (or is not done)."""
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        rows = found.pop("buckets")
        return cls(**found, buckets=tuple(Bucket(*row) for row in rows))


def buckets_of(memory: memoryview, entry: int, start: int, complete: bool) -> Iterator[Bucket]:
    """Cuts what was written (`memory`, from byte `start` of the tensor) into buckets and sums them up."""
    for at in range(0, len(memory), _BUCKET):
        piece = memory[at : at + _BUCKET]
        whole = zlib.crc32(piece) if complete else None
        yield Bucket(entry, start + at, len(piece), _sampled(piece), whole)


def samples(size: int) -> list[tuple[int, int]]:
    """First and last (exclusive) byte of every sample of so many bytes: beginning, middle and end of each bucket."""
    found = []
    for at in range(0, size, _BUCKET):
        length = min(_BUCKET, size - at)
        if length <= 3 * _SAMPLE:
            found.append((at, at + length))
            continue
        for start in (0, (length - _SAMPLE) // 2, length - _SAMPLE):
            found.append((at + start, at + start + _SAMPLE))
    return found


def _sampled(bucket: memoryview) -> int:
    checksum = 0
    for start, end in samples(len(bucket)):
        checksum = zlib.crc32(bucket[start:end], checksum)
    return checksum


def intact(bucket: Bucket, memory: memoryview, check: Check) -> bool:
    """Whether `memory` still is what was written. A complete check falls back to the sampled one where the writer
    made no complete checksum."""
    if check == "none":
        return True
    if check == "complete" and bucket.complete is not None:
        return zlib.crc32(memory) == bucket.complete
    return _sampled(memory) == bucket.sampled


def gaps(plan: Plan, marks: Iterable[Mark]) -> dict[str, str]:
    """Tensors whose bytes were not written exactly once, and what is wrong."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in plan.entries]
    for mark in marks:
        for bucket in mark.buckets:
            pieces[bucket.entry].append((bucket.start, bucket.length))
    wrong = {}
    for entry, parts in zip(plan.entries, pieces, strict=True):
        problem = _tiling(sorted(parts), entry.nbytes)
        if problem:
            wrong[entry.name] = problem
    return wrong


def hold_against(plan: Plan, mark: Mark, memory: memoryview, check: Check) -> None:
    """Raises TornWeights where the buffer's `memory` is not what the writer of `mark` has summed up. Each bucket counts
    as progress."""
    here = beacon.current()
    for bucket in mark.buckets:
        entry = plan.entries[bucket.entry]
        start = entry.offset + bucket.start
        if not intact(bucket, memory[start : start + bucket.length], check):
            raise TornWeights(mark.version, entry.name, bucket.start, bucket.length)
        here.add("buckets")


def unfinished(plan: Plan, marks: Mapping[int, Mark | None], generation: int, version: int) -> dict[str, str]:
    """What keeps a version from being whole, by rank or tensor; `marks` by rank."""
    problems: dict[str, str] = {}
    for rank, mark in marks.items():
        if mark is None:
            problems[f"rank {rank}"] = "has not finished writing"
        elif (mark.generation, mark.version) != (generation, version):
            problems[f"rank {rank}"] = f"wrote version {mark.version} of generation {mark.generation}"
    return problems or gaps(plan, [mark for mark in marks.values() if mark is not None])


def _tiling(parts: Sequence[tuple[int, int]], size: int) -> str | None:
    at = 0
    for start, length in parts:
        if start != at:
            return f"bytes {at} to {start} were written by no rank" if start > at else f"byte {start} was written twice"
        at += length
    return None if at == size else f"bytes {at} to {size} were written by no rank"
