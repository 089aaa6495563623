"""Weights gathered from their rows, bucket by bucket, so that nobody holds a second copy of the whole."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.train.distributed import Ranks
from lockstep.train.merge import Weight
from lockstep.train.shards import rows_of

Wanted = Sequence[tuple[str, torch.dtype]]
"""Names of weights and the types in which they leave."""
Pieces = dict[str, list[Tensor]]
"""By name, the rows of all ranks in their order, uint8 `[bytes]` each."""


@torch.no_grad()
def gathered(
    weights: Mapping[str, Weight], buckets: Sequence[Wanted], ranks: Ranks, everyone: bool
) -> Iterator[Pieces | None]:
    """Per bucket what all ranks have of its weights. All ranks call it with the same buckets and go through all of
    them: each bucket is one collective on the trainer's own communicator.

    Args:
        everyone: whether each rank gets it. Otherwise the first one does, and the others get None; of several copies
            of the parameters only the first copy gathers then.
    """
    for number, bucket in enumerate(buckets):
        if ranks.replica and not everyone:
            yield None
            continue
        rows = [weights[name].rows().to(ranks.device, dtype) for name, dtype in bucket]
        if ranks.shards == 1:
            yield {name: [_raw(own)] for (name, _), own in zip(bucket, rows, strict=True)}
            continue
        flat = torch.cat(
            [_padded(own, weights[name], ranks.shards) for (name, _), own in zip(bucket, rows, strict=True)]
        )
        parts = ranks.gather_bucket(flat, everyone, why=f"bucket {number} of the weights")
        yield None if parts is None else _apart(parts, weights, bucket)


def _padded(rows: Tensor, weight: Weight, shards: int) -> Tensor:
    """A rank's rows as bytes, as many as the first rank's."""
    raw = _raw(rows)
    size = _chunk(weight, shards) * _row_bytes(weight, rows.dtype)
    return raw if raw.numel() == size else torch.cat([raw, raw.new_zeros(size - raw.numel())])


def _apart(parts: Sequence[Tensor], weights: Mapping[str, Weight], bucket: Wanted) -> Pieces:
    found: Pieces = {}
    at = 0
    for name, dtype in bucket:
        weight, shards = weights[name], len(parts)
        width = _row_bytes(weight, dtype)
        found[name] = []
        for shard, part in enumerate(parts):
            first, last = rows_of(shard, shards, _rows(weight))
            found[name].append(part[at : at + (last - first) * width])
        at += _chunk(weight, shards) * width
    return found


def _raw(rows: Tensor) -> Tensor:
    return rows.detach().contiguous().view(-1).view(torch.uint8)


def _rows(weight: Weight) -> int:
    return weight.shape[0] if weight.shape else 1


def _chunk(weight: Weight, shards: int) -> int:
    """Rows of the first rank."""
    return rows_of(0, shards, _rows(weight))[1]


def _row_bytes(weight: Weight, dtype: torch.dtype) -> int:
    return torch.Size(weight.shape[1:]).numel() * dtype.itemsize
