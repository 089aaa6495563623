"""The seal of a lot: its last bytes say which one it is, and sum it up, so that a receiver that was left alone by its
communicator (NCCL ends a collective that is aborted without an error) never takes memory for weights."""

import itertools
import struct
import zlib

import torch
from torch import Tensor

from lockstep.weights.buckets import Check, samples
from lockstep.weights.errors import TornWeights
from lockstep.weights.plan import ALIGNMENT
from lockstep.weights.stream.lots import Lot

_SEAL = struct.Struct("<8sQqQQ")  # magic, channel, version, lot, checksum
_MAGIC = b"LOCKSTPS"


def sealed_bytes(lot: Lot) -> int:
    """Of a lot with its seal."""
    return _seal_at(lot) + _SEAL.size


def checksum(data: Tensor, check: Check) -> int:
    """crc32 of the samples, or of everything, of uint8 `[bytes]` on any device. Only what is summed up leaves it."""
    if check == "none":
        return 0
    places = samples(data.numel())
    if check == "sampled" and len(places) > 1:
        data = torch.cat([data[start:end] for start, end in places])
    plain: memoryview = data.cpu().numpy().data
    return zlib.crc32(plain)


def seal(buffer: Tensor, lot: Lot, channel: int, version: int, check: Check) -> None:
    """Writes the seal behind the lot.

    Args:
        buffer: uint8 `[sealed_bytes(lot)]`, the lot's bytes filled in; what lies between tensors is set to zero here.
    """
    for start, end in _between(lot):
        buffer[start:end] = 0
    body = _SEAL.pack(_MAGIC, channel, version, lot.number, checksum(buffer[: lot.nbytes], check))
    at = _seal_at(lot)
    buffer[at : at + len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8).to(buffer.device)


def verify(buffer: Tensor, lot: Lot, channel: int, version: int, check: Check) -> None:
    """Raises TornWeights where the buffer is not this lot, as it was sealed."""
    at = _seal_at(lot)
    found = _SEAL.unpack(buffer[at : at + _SEAL.size].cpu().numpy().tobytes())
    expected = _SEAL.pack(_MAGIC, channel, version, lot.number, checksum(buffer[: lot.nbytes], check))
    if found != _SEAL.unpack(expected):
        raise TornWeights(version, f"bucket {lot.number}, from {lot.entries[0].name} on", 0, lot.nbytes)


def _seal_at(lot: Lot) -> int:
    return -(-lot.nbytes // ALIGNMENT) * ALIGNMENT


def _between(lot: Lot) -> list[tuple[int, int]]:
    """Bytes that only align the tensor behind them: nobody fills them, and the checksum has them."""
    places = [lot.place(entry) for entry in lot.entries]
    return [(end, start) for (_, end), (start, _) in itertools.pairwise(places) if end < start]
