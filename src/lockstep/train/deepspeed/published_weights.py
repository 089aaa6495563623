"""The rows of the model's weights that a rank publishes and exports."""

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.train.deepspeed.zero_state import full_shape
from lockstep.train.distributed import ParallelContext
from lockstep.train.lazy_weights import LazyWeight

BUCKET_BYTES = 64 << 20
"""Weights of this size are gathered at once."""


class PublishedWeights:
    """The model's weights by rows.

    Below stage 3 every rank has them. At stage 3 a rank holds as many elements of a parameter as every other, which are
    its rows if their number is a multiple of the ranks'. The other parameters are gathered, in buckets.

    Args:
        ranks: the ranks as holders of the model's parameters.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], ranks: ParallelContext) -> None:
        self._weights, self._ranks = weights, ranks

    def rows(self) -> dict[str, LazyWeight]:
        """Returns this rank's rows of every weight. All ranks call it."""
        divided = [name for name, each in self._weights.items() if not self._holds_rows(each)]
        kept = {name: rows for bucket in self._buckets(divided) for name, rows in self._gathered_rows(bucket).items()}
        return {
            name: LazyWeight(
                tuple(full_shape(each)),
                partial(kept.__getitem__, name) if name in kept else partial(self._own_rows, each),
            )
            for name, each in self._weights.items()
        }

    def _holds_rows(self, parameter: Any) -> bool:
        """Whether what this rank holds of a parameter is its rows."""
        shape = full_shape(parameter)
        return not hasattr(parameter, "ds_tensor") or (len(shape) > 0 and shape[0] % self._ranks.shards == 0)

    def _own_rows(self, parameter: Any) -> Tensor:
        """A view of the rows that this rank holds."""
        if not hasattr(parameter, "ds_tensor"):
            whole: Tensor = parameter.detach()
            return whole
        shape = full_shape(parameter)
        held: Tensor = parameter.ds_tensor.detach()
        return held[: shape.numel() // self._ranks.shards].view(shape[0] // self._ranks.shards, *shape[1:])

    def _buckets(self, names: list[str]) -> Iterator[list[str]]:
        bucket: list[str] = []
        size = 0
        for name in names:
            bytes_ = full_shape(self._weights[name]).numel() * self._weights[name].element_size()
            if bucket and size + bytes_ > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(name)
            size += bytes_
        if bucket:
            yield bucket

    def _gathered_rows(self, names: list[str]) -> dict[str, Tensor]:
        """Gathers some parameters on all ranks, and returns copies of this rank's rows."""
        zero = import_module("deepspeed.runtime.zero.partition_parameters")
        found = {}
        with zero.GatheredParameters([self._weights[name] for name in names]), torch.no_grad():
            for name in names:
                first, last = self._ranks.rows(full_shape(self._weights[name])[0])
                found[name] = self._weights[name].detach()[first:last].clone()
        return found
