"""Cuts a version into buckets of whole tensors, with a trailer that identifies and checks each bucket.

The trailer has the bucket's number and checksum, so that a receiver whose communicator was aborted never takes stale
memory for weights: an aborted NCCL collective ends without an error.
"""

import hashlib
import itertools
import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.weights.errors import TornWeights
from lockstep.weights.weight_plan import ALIGNMENT, PlanEntry, WeightPlan
from lockstep.weights.write_records import ChecksumMode, sample_ranges


@dataclass(frozen=True, slots=True)
class TensorBucket:
    """Adjacent tensors of the plan that are gathered, sent, checked and loaded together. Their layout in memory is that
    of the plan's buffer, starting at the first tensor."""

    number: int
    entries: tuple[PlanEntry, ...]

    @property
    def nbytes(self) -> int:
        last = self.entries[-1]
        return last.offset + last.nbytes - self.entries[0].offset

    def byte_range(self, entry: PlanEntry) -> tuple[int, int]:
        """Returns the first and last (exclusive) byte of one of its tensors."""
        start = entry.offset - self.entries[0].offset
        return start, start + entry.nbytes


def cut_buckets(plan: WeightPlan, limit: int) -> tuple[TensorBucket, ...]:
    """Divides all tensors, in the order of the plan, into buckets of at most `limit` bytes. Tensors are not cut,
    because
    engines load whole tensors: a larger tensor is a bucket by itself."""
    groups: list[list[PlanEntry]] = []
    for entry in plan.entries:
        if groups and entry.offset + entry.nbytes - groups[-1][0].offset <= limit:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return tuple(TensorBucket(number, tuple(group)) for number, group in enumerate(groups))


def stream_digest(plan: WeightPlan, limit: int, check: str) -> str:
    """Returns the sha256 (hexadecimal) of everything on which both sides must agree: tensors, their order, buckets and
    checksums."""
    return hashlib.sha256(f"{plan.digest} {limit} {check}".encode()).hexdigest()


_TRAILER = struct.Struct("<8sQqQQ")  # magic, channel, version, bucket, checksum
_MAGIC = b"LOCKSTPS"


def bytes_with_trailer(bucket: TensorBucket) -> int:
    """Returns the size of a bucket with its trailer."""
    return _trailer_offset(bucket) + _TRAILER.size


def tensor_checksum(data: Tensor, check: ChecksumMode) -> int:
    """Computes the crc32 of samples, or of everything, of uint8 `[bytes]` on any device. Copies only those bytes to the
    host."""
    if check == "none":
        return 0
    samples = sample_ranges(data.numel())
    if check == "sampled" and len(samples) > 1:
        data = torch.cat([data[start:end] for start, end in samples])
    on_host: memoryview = data.cpu().numpy().data
    return zlib.crc32(on_host)


def write_trailer(buffer: Tensor, bucket: TensorBucket, channel: int, version: int, check: ChecksumMode) -> None:
    """Writes the trailer after the bucket.

    Args:
        buffer: uint8 `[bytes_with_trailer(bucket)]` with the bucket's tensors. Padding between them is set to zero.
    """
    for start, end in _padding_ranges(bucket):
        buffer[start:end] = 0
    body = _TRAILER.pack(_MAGIC, channel, version, bucket.number, tensor_checksum(buffer[: bucket.nbytes], check))
    at = _trailer_offset(bucket)
    buffer[at : at + len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(buffer.device)


def verify_trailer(buffer: Tensor, bucket: TensorBucket, channel: int, version: int, check: ChecksumMode) -> None:
    """Raises TornWeights if the buffer's trailer is not that of this bucket, or its checksum does not match."""
    at = _trailer_offset(bucket)
    found = _TRAILER.unpack(buffer[at : at + _TRAILER.size].cpu().numpy().tobytes())
    expected = _TRAILER.pack(_MAGIC, channel, version, bucket.number, tensor_checksum(buffer[: bucket.nbytes], check))
    if found != _TRAILER.unpack(expected):
        raise TornWeights(version, f"bucket {bucket.number}, from {bucket.entries[0].name} on", 0, bucket.nbytes)


def _trailer_offset(bucket: TensorBucket) -> int:
    return -(-bucket.nbytes // ALIGNMENT) * ALIGNMENT


def _padding_ranges(bucket: TensorBucket) -> list[tuple[int, int]]:
    """Returns the padding between aligned tensors, which the checksum includes."""
    ranges = [bucket.byte_range(entry) for entry in bucket.entries]
    return [(end, start) for (_, end), (start, _) in itertools.pairwise(ranges) if end < start]
