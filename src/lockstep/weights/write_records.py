"""Records of what each rank wrote of a version: byte ranges with checksums. Checks whether they cover all tensors."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from lockstep.base.folders import write_atomically
from lockstep.watch.beacon.writer import current_beacon
from lockstep.weights.errors import TornWeights
from lockstep.weights.weight_plan import WeightPlan

ChecksumMode = Literal["none", "sampled", "complete"]

_BLOCK_BYTES = 4 << 20  # bytes under one checksum
_SAMPLE_BYTES = 4 << 10  # bytes of each sample


@dataclass(frozen=True, slots=True)
class ChecksumBlock:
    """A range of bytes of one tensor, with checksums."""

    entry: int
    """Position in the plan."""
    start: int
    """First byte, relative to the beginning of the tensor."""
    length: int
    sampled: int
    complete: int | None
    """None if the writer computed only the sampled checksum."""


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """A rank's record that it has written its part of a version. In JSON, the blocks are called `buckets`."""

    rank: int
    version: int
    generation: int
    digest: str
    blocks: tuple[ChecksumBlock, ...]

    def write(self, path: Path) -> None:
        """Writes the record atomically."""
        rows = [[b.entry, b.start, b.length, b.sampled, b.complete] for b in self.blocks]
        fields = {"rank": self.rank, "version": self.version, "generation": self.generation, "digest": self.digest}
        write_atomically(path, json.dumps({**fields, "buckets": rows}).encode())

    @classmethod
    def read(cls, path: Path) -> "WriteRecord | None":
        """Reads a record. Returns None if the rank is not done."""
        try:
            found = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        rows = found.pop("buckets")
        return cls(**found, blocks=tuple(ChecksumBlock(*row) for row in rows))


def checksum_blocks(memory: memoryview, entry: int, start: int, complete: bool) -> Iterator[ChecksumBlock]:
    """Cuts written bytes (`memory`, from byte `start` of the tensor) into blocks with checksums."""
    for at in range(0, len(memory), _BLOCK_BYTES):
        piece = memory[at : at + _BLOCK_BYTES]
        complete_checksum = zlib.crc32(piece) if complete else None
        yield ChecksumBlock(entry, start + at, len(piece), _sampled_checksum(piece), complete_checksum)


def sample_ranges(size: int) -> list[tuple[int, int]]:
    """Returns the first and last (exclusive) byte of each sample of `size` bytes: beginning, middle and end of each
    block."""
    found = []
    for at in range(0, size, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, size - at)
        if length <= 3 * _SAMPLE_BYTES:
            found.append((at, at + length))
            continue
        for start in (0, (length - _SAMPLE_BYTES) // 2, length - _SAMPLE_BYTES):
            found.append((at + start, at + start + _SAMPLE_BYTES))
    return found


def _sampled_checksum(block: memoryview) -> int:
    checksum = 0
    for start, end in sample_ranges(len(block)):
        checksum = zlib.crc32(block[start:end], checksum)
    return checksum


def matches_checksum(block: ChecksumBlock, memory: memoryview, check: ChecksumMode) -> bool:
    """Returns whether `memory` has the checksum of the block. A complete check falls back to the sampled checksum if
    the writer computed no complete one."""
    if check == "none":
        return True
    if check == "complete" and block.complete is not None:
        return zlib.crc32(memory) == block.complete
    return _sampled_checksum(memory) == block.sampled


def find_gaps(plan: WeightPlan, records: Iterable[WriteRecord]) -> dict[str, str]:
    """Returns the tensors whose bytes were not all written exactly once, with the problem of each."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in plan.entries]
    for record in records:
        for block in record.blocks:
            pieces[block.entry].append((block.start, block.length))
    problems = {}
    for entry, parts in zip(plan.entries, pieces, strict=True):
        problem = _tiling_problem(sorted(parts), entry.nbytes)
        if problem:
            problems[entry.name] = problem
    return problems


def verify_record(plan: WeightPlan, record: WriteRecord, memory: memoryview, check: ChecksumMode) -> None:
    """Raises TornWeights if the buffer's `memory` does not match the record's checksums. Reports progress after each
    block."""
    beacon = current_beacon()
    for block in record.blocks:
        entry = plan.entries[block.entry]
        start = entry.offset + block.start
        if not matches_checksum(block, memory[start : start + block.length], check):
            raise TornWeights(record.version, entry.name, block.start, block.length)
        beacon.add("buckets")


def find_unwritten(
    plan: WeightPlan, records: Mapping[int, WriteRecord | None], generation: int, version: int
) -> dict[str, str]:
    """Returns what is missing of a version, by rank or tensor. `records` are by rank."""
    problems: dict[str, str] = {}
    for rank, record in records.items():
        if record is None:
            problems[f"rank {rank}"] = "has not finished writing"
        elif (record.generation, record.version) != (generation, version):
            problems[f"rank {rank}"] = f"wrote version {record.version} of generation {record.generation}"
    return problems or find_gaps(plan, [record for record in records.values() if record is not None])


def _tiling_problem(parts: Sequence[tuple[int, int]], size: int) -> str | None:
    at = 0
    for start, length in parts:
        if start != at:
            return f"bytes {at} to {start} were written by no rank" if start > at else f"byte {start} was written twice"
        at += length
    return None if at == size else f"bytes {at} to {size} were written by no rank"


class WeightShard(Protocol):
    """A rank's rows of one tensor."""

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
    """The bytes of a version that a relay sends to another node."""

    memory: memoryview
    records: tuple[WriteRecord, ...]


class IncomingVersion:
    """A buffer that a relay fills with the parts of ranks on another node."""

    def __init__(self, memory: memoryview, keep: Callable[[Sequence[WriteRecord], ChecksumMode], None]) -> None:
        self.memory, self.keep = memory, keep
        """`keep(records, check)` verifies the bytes by the checksums of their writers and stores the records."""


@dataclass(frozen=True, slots=True)
class VersionView:
    """A version being read; its tensors are views of shared memory, valid while the lease is held."""

    version: int
    generation: int
    tensors: Mapping[str, Tensor]
