"""Weights whose rows the ranks share, computed on demand, and gathered bucket by bucket, so that no rank holds a second
copy of the model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.train.distributed import ParallelContext, shard_rows
from lockstep.train.trainer_protocol import BucketWeights, GatheredRows, ParameterShard


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A weight; this rank's rows of it are computed on demand."""

    shape: tuple[int, ...]
    """Shape of the whole weight."""
    rows: Callable[[], Tensor]
    """Returns this rank's rows; a view of the trainer's memory if nothing is merged."""
    constant: bool = False
    """Whether the weight is the same in every version."""


def own_shards(weights: Mapping[str, LazyWeight], ranks: ParallelContext) -> Iterator[ParameterShard]:
    """Yields this rank's rows of the weights, for weight sync. Ranks with copies of the same rows take turns, so that
    every row is written once."""
    for index, (name, weight) in enumerate(weights.items()):
        if index % ranks.replicas != ranks.replica:
            continue
        rows = weight.rows()
        if rows.numel():
            yield ParameterShard(name, weight.shape, ranks.rows(weight.shape[0])[0], rows, weight.constant)


@torch.no_grad()
def gather_buckets(
    weights: Mapping[str, LazyWeight], buckets: Sequence[BucketWeights], ranks: ParallelContext, everyone: bool
) -> Iterator[GatheredRows | None]:
    """Gathers the weights of each bucket from all ranks. All ranks call it with the same buckets and consume all of
    them, because each bucket is one collective on the trainer's communicator.

    Args:
        everyone: whether each rank gets the weights. If not, only the first rank gets them and the others get None; of
            several copies of the parameters, only the first copy takes part.
    """
    for number, bucket in enumerate(buckets):
        if ranks.replica and not everyone:
            yield None
            continue
        rows = [weights[name].rows().to(ranks.device, dtype) for name, dtype in bucket]
        if ranks.shards == 1:
            yield {name: [_as_bytes(own)] for (name, _), own in zip(bucket, rows, strict=True)}
            continue
        flat = torch.cat(
            [_pad_bytes(own, weights[name], ranks.shards) for (name, _), own in zip(bucket, rows, strict=True)]
        )
        parts = ranks.gather_bucket(flat, everyone, why=f"bucket {number} of the weights")
        yield None if parts is None else _split_by_rank(parts, weights, bucket)


def _pad_bytes(rows: Tensor, weight: LazyWeight, shards: int) -> Tensor:
    """Returns a rank's rows as bytes, padded to the size of the first rank's."""
    raw = _as_bytes(rows)
    size = _rows_per_shard(weight, shards) * _row_bytes(weight, rows.dtype)
    return raw if raw.numel() == size else torch.cat([raw, raw.new_zeros(size - raw.numel())])


def _split_by_rank(parts: Sequence[Tensor], weights: Mapping[str, LazyWeight], bucket: BucketWeights) -> GatheredRows:
    found: GatheredRows = {}
    at = 0
    for name, dtype in bucket:
        weight, shards = weights[name], len(parts)
        width = _row_bytes(weight, dtype)
        found[name] = []
        for shard, part in enumerate(parts):
            first, last = shard_rows(shard, shards, _row_count(weight))
            found[name].append(part[at : at + (last - first) * width])
        at += _rows_per_shard(weight, shards) * width
    return found


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.detach().contiguous().view(-1).view(torch.uint8)


def _row_count(weight: LazyWeight) -> int:
    return weight.shape[0] if weight.shape else 1


def _rows_per_shard(weight: LazyWeight, shards: int) -> int:
    """Returns the number of rows that the first rank has; no rank has more."""
    return shard_rows(0, shards, _row_count(weight))[1]


def _row_bytes(weight: LazyWeight, dtype: torch.dtype) -> int:
    return torch.Size(weight.shape[1:]).numel() * dtype.itemsize
