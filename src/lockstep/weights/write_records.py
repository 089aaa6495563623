"""What each rank wrote of a version: byte ranges with checksums, and whether they make up the whole."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.errors import TornWeights
from lockstep.weights.weight_plan import WeightPlan

ChecksumMode = Literal["none", "sampled", "complete"]

_BLOCK_BYTES = 4 << 20  # bytes under one checksum
_SAMPLE_BYTES = 4 << 10  # bytes of each sample


@dataclass(frozen=True, slots=True)
class ChecksumBlock:
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
class WriteRecord:
    """A rank's word that it has written its part of a version."""

    rank: int
    version: int
    generation: int
    digest: str
    buckets: tuple[ChecksumBlock, ...]

    def write(self, path: Path) -> None:
        """Visible whole or not at all."""
        rows = [[b.entry, b.start, b.length, b.sampled, b.complete] for b in self.buckets]
        fields = {"rank": self.rank, "version": self.version, "generation": self.generation, "digest": self.digest}
        scratch = path.with_name(path.name + ".new")
        scratch.write_text(json.dumps({**fields, "buckets": rows}))
        scratch.replace(path)

    @classmethod
    def read(cls, path: Path) -> "WriteRecord | None":
        """None where the rank has not marked (or is not done)."""
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        rows = found.pop("buckets")
        return cls(**found, buckets=tuple(ChecksumBlock(*row) for row in rows))


def checksum_blocks(memory: memoryview, entry: int, start: int, complete: bool) -> Iterator[ChecksumBlock]:
    """Cuts what was written (`memory`, from byte `start` of the tensor) into buckets and sums them up."""
    for at in range(0, len(memory), _BLOCK_BYTES):
        piece = memory[at : at + _BLOCK_BYTES]
        whole = zlib.crc32(piece) if complete else None
        yield ChecksumBlock(entry, start + at, len(piece), _sampled_checksum(piece), whole)


def sample_ranges(size: int) -> list[tuple[int, int]]:
    """First and last (exclusive) byte of every sample of so many bytes: beginning, middle and end of each bucket."""
    found = []
    for at in range(0, size, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, size - at)
        if length <= 3 * _SAMPLE_BYTES:
            found.append((at, at + length))
            continue
        for start in (0, (length - _SAMPLE_BYTES) // 2, length - _SAMPLE_BYTES):
            found.append((at + start, at + start + _SAMPLE_BYTES))
    return found


def _sampled_checksum(bucket: memoryview) -> int:
    checksum = 0
    for start, end in sample_ranges(len(bucket)):
        checksum = zlib.crc32(bucket[start:end], checksum)
    return checksum


def matches_checksum(bucket: ChecksumBlock, memory: memoryview, check: ChecksumMode) -> bool:
    """Whether `memory` still is what was written. A complete check falls back to the sampled one where the writer
    made no complete checksum."""
    if check == "none":
        return True
    if check == "complete" and bucket.complete is not None:
        return zlib.crc32(memory) == bucket.complete
    return _sampled_checksum(memory) == bucket.sampled


def find_gaps(plan: WeightPlan, marks: Iterable[WriteRecord]) -> dict[str, str]:
    """Tensors whose bytes were not written exactly once, and what is wrong."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in plan.entries]
    for mark in marks:
        for bucket in mark.buckets:
            pieces[bucket.entry].append((bucket.start, bucket.length))
    wrong = {}
    for entry, parts in zip(plan.entries, pieces, strict=True):
        problem = _tiling_problem(sorted(parts), entry.nbytes)
        if problem:
            wrong[entry.name] = problem
    return wrong


def verify_record(plan: WeightPlan, mark: WriteRecord, memory: memoryview, check: ChecksumMode) -> None:
    """Raises TornWeights where the buffer's `memory` is not what the writer of `mark` has summed up. Each bucket
    counts as progress."""
    here = current_beacon()
    for bucket in mark.buckets:
        entry = plan.entries[bucket.entry]
        start = entry.offset + bucket.start
        if not matches_checksum(bucket, memory[start : start + bucket.length], check):
            raise TornWeights(mark.version, entry.name, bucket.start, bucket.length)
        here.add("buckets")


def find_unwritten(
    plan: WeightPlan, marks: Mapping[int, WriteRecord | None], generation: int, version: int
) -> dict[str, str]:
    """What keeps a version from being whole, by rank or tensor; `marks` by rank."""
    problems: dict[str, str] = {}
    for rank, mark in marks.items():
        if mark is None:
            problems[f"rank {rank}"] = "has not finished writing"
        elif (mark.generation, mark.version) != (generation, version):
            problems[f"rank {rank}"] = f"wrote version {mark.version} of generation {mark.generation}"
    return problems or find_gaps(plan, [mark for mark in marks.values() if mark is not None])


def _tiling_problem(parts: Sequence[tuple[int, int]], size: int) -> str | None:
    at = 0
    for start, length in parts:
        if start != at:
            return f"bytes {at} to {start} were written by no rank" if start > at else f"byte {start} was written twice"
        at += length
    return None if at == size else f"bytes {at} to {size} were written by no rank"


class WeightShard(Protocol):
    """A rank's rows of one tensor, as the trainer gives it."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def constant(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class OutgoingVersion:
    """A version's bytes on the way to another node."""

    memory: memoryview
    marks: tuple[WriteRecord, ...]


class IncomingVersion:
    """A buffer that is being filled with what ranks of another node wrote."""

    def __init__(self, memory: memoryview, keep: Callable[[Sequence[WriteRecord], ChecksumMode], None]) -> None:
        self.memory, self.keep = memory, keep
        """`keep(marks, check)` holds the bytes against the checksums of their writers, and marks the ranks done."""


@dataclass(frozen=True, slots=True)
class VersionView:
    """A version that is being read; the tensors are views of shared memory, valid while the lease is held."""

    version: int
    generation: int
    tensors: Mapping[str, Tensor]
