"""Sums over the sequences that targets belong to."""

import torch
from torch import Tensor


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """The sum of a value over all targets of the same sequence, at each of them: float64 `[targets]`.

    In double precision, so that the order of additions does not show.

    Args:
        values: `[targets]`, no gradient goes through.
        sequences: int64 `[targets]`: equal for targets of the same sequence, from 0 to below the number of targets.
    """
    wide = values.detach().double()
    return torch.zeros_like(wide).index_add_(0, sequences, wide)[sequences]


def sequence_means(values: Tensor, sequences: Tensor, live: Tensor) -> Tensor:
    """The mean of a value over the targets of the same sequence that count: float64 `[targets]`, 0 where none does.

    Args:
        live: bool `[targets]`: which ones count.
    """
    counts = sequence_sums(live, sequences).clamp_min(1)
    return sequence_sums(torch.where(live, values, torch.zeros_like(values)), sequences) / counts
