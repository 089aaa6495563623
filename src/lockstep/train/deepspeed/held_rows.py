"""This rank's rows of the model's parameters, whatever part of them DeepSpeed has it hold."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.train.deepspeed.zero_state import full_shape
from lockstep.train.distributed import ParallelContext
from lockstep.train.lazy_weights import LazyWeight

BUCKET_BYTES = 64 << 20
"""Parameters of this size are gathered at once."""


def held_rows(ranks: ParallelContext, parameters: Mapping[str, nn.Parameter]) -> dict[str, LazyWeight]:
    """Returns this rank's rows of parameters, by name. All ranks call it.

    Below stage 3 every rank has all rows. At stage 3 a rank holds as many elements of a parameter as every other, which
    are its rows if their number is a multiple of the ranks'. The other parameters are gathered, in buckets.

    Args:
        ranks: the ranks as holders of the model's parameters.
    """
    divided = [name for name, each in parameters.items() if not _holds_rows(each, ranks)]
    kept: dict[str, Tensor] = {}
    sizes = {name: full_shape(parameters[name]).numel() * parameters[name].element_size() for name in divided}
    for bucket in split_into_buckets(sizes):
        kept |= _gathered_rows({name: parameters[name] for name in bucket}, ranks)
    return {
        name: LazyWeight(
            tuple(full_shape(each)),
            partial(kept.__getitem__, name) if name in kept else partial(_own_rows, each, ranks),
        )
        for name, each in parameters.items()
    }


def _holds_rows(parameter: Any, ranks: ParallelContext) -> bool:
    """Whether what this rank holds of a parameter is its rows."""
    shape = full_shape(parameter)
    return not hasattr(parameter, "ds_tensor") or (len(shape) > 0 and shape[0] % ranks.shards == 0)


def _own_rows(parameter: Any, ranks: ParallelContext) -> Tensor:
    """A view of the rows that this rank holds."""
    if not hasattr(parameter, "ds_tensor"):
        whole: Tensor = parameter.detach()
        return whole
    shape = full_shape(parameter)
    held: Tensor = parameter.ds_tensor.detach()
    return held[: shape.numel() // ranks.shards].view(shape[0] // ranks.shards, *shape[1:])


def split_into_buckets(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yields the names of tensors that are gathered at once, in order.

    Args:
        sizes: the bytes of each tensor.
    """
    bucket: list[str] = []
    size = 0
    for name, bytes_ in sizes.items():
        if bucket and size + bytes_ > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += bytes_
    if bucket:
        yield bucket


def _gathered_rows(parameters: Mapping[str, Any], ranks: ParallelContext) -> dict[str, Tensor]:
    """Gathers some parameters on all ranks in one collective, and returns copies of this rank's rows. DeepSpeed's
    `GatheredParameters` would gather them one by one."""
    held = {name: each.ds_tensor.detach().flatten().to(ranks.device) for name, each in parameters.items()}
    gathered = ranks.gather_flat(torch.cat(list(held.values())), why="parameters that are not divided by rows")
    found, at = {}, 0
    for name, part in held.items():
        shape = full_shape(parameters[name])
        whole = gathered[:, at : at + part.numel()].flatten()[: shape.numel()].view(shape)  # the last part is padded
        first, last = ranks.rows(shape[0])
        found[name] = whole[first:last].clone()
        at += part.numel()
    return found
