"""How a version is cut into buckets of whole tensors, and the trailer that identifies and checks each.

A bucket's last bytes say which one it is and hold its checksum, so a receiver whose communicator was aborted (NCCL
ends an aborted collective without an error) never takes stale memory for weights.
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
    """Neighbouring tensors of the plan that are gathered, sent, checked and loaded together. They are laid out in
    memory as in the plan's buffer, starting at the first one's offset."""

    number: int
    entries: tuple[PlanEntry, ...]

    @property
    def nbytes(self) -> int:
        last = self.entries[-1]
        return last.offset + last.nbytes - self.entries[0].offset

    def place(self, entry: PlanEntry) -> tuple[int, int]:
        """First and last (exclusive) byte of one of its tensors."""
        start = entry.offset - self.entries[0].offset
        return start, start + entry.nbytes


def cut_buckets(plan: WeightPlan, limit: int) -> tuple[TensorBucket, ...]:
    """All tensors in the order of the plan, in buckets of at most `limit` bytes. Tensors are not cut, because an engine
    loads whole ones: a larger tensor is a bucket by itself."""
    groups: list[list[PlanEntry]] = []
    for entry in plan.entries:
        if groups and entry.offset + entry.nbytes - groups[-1][0].offset <= limit:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return tuple(TensorBucket(number, tuple(group)) for number, group in enumerate(groups))


def stream_digest(plan: WeightPlan, limit: int, check: str) -> str:
    """sha256, hexadecimal, of what both sides must agree on: tensors and their order, buckets, checksums."""
    return hashlib.sha256(f"{plan.digest} {limit} {check}".encode()).hexdigest()


_TRAILER = struct.Struct("<8sQqQQ")  # magic, channel, version, bucket, checksum
_MAGIC = b"LOCKSTPS"


def bytes_with_trailer(bucket: TensorBucket) -> int:
    """Size of a bucket with its trailer."""
    return _trailer_offset(bucket) + _TRAILER.size


def tensor_checksum(data: Tensor, check: ChecksumMode) -> int:
    """crc32 of the samples, or of everything, of uint8 `[bytes]` on any device. Only those bytes are copied off it."""
    if check == "none":
        return 0
    places = sample_ranges(data.numel())
    if check == "sampled" and len(places) > 1:
        data = torch.cat([data[start:end] for start, end in places])
    plain: memoryview = data.cpu().numpy().data
    return zlib.crc32(plain)


def write_trailer(buffer: Tensor, bucket: TensorBucket, channel: int, version: int, check: ChecksumMode) -> None:
    """Writes the trailer after the bucket.

    Args:
        buffer: uint8 `[bytes_with_trailer(bucket)]` with the bucket's tensors; padding between them is zeroed here.
    """
    for start, end in _padding_ranges(bucket):
        buffer[start:end] = 0
    body = _TRAILER.pack(_MAGIC, channel, version, bucket.number, tensor_checksum(buffer[: bucket.nbytes], check))
    at = _trailer_offset(bucket)
    buffer[at : at + len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(buffer.device)


def verify_trailer(buffer: Tensor, bucket: TensorBucket, channel: int, version: int, check: ChecksumMode) -> None:
    """Raises TornWeights unless the buffer holds this bucket as its trailer describes it."""
    at = _trailer_offset(bucket)
    found = _TRAILER.unpack(buffer[at : at + _TRAILER.size].cpu().numpy().tobytes())
    expected = _TRAILER.pack(_MAGIC, channel, version, bucket.number, tensor_checksum(buffer[: bucket.nbytes], check))
    if found != _TRAILER.unpack(expected):
        raise TornWeights(version, f"bucket {bucket.number}, from {bucket.entries[0].name} on", 0, bucket.nbytes)


def _trailer_offset(bucket: TensorBucket) -> int:
    return -(-bucket.nbytes // ALIGNMENT) * ALIGNMENT


def _padding_ranges(bucket: TensorBucket) -> list[tuple[int, int]]:
    """Padding before aligned tensors: no tensor fills it, and the checksum covers it."""
    places = [bucket.place(entry) for entry in bucket.entries]
    return [(end, start) for (_, end), (start, _) in itertools.pairwise(places) if end < start]
