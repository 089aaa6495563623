"""From per-token losses to one number: the weight of each target.

Weights carry their denominator, so that a mini-batch's loss is the plain sum over all targets of all ranks and
micro-batches of weight times value; no rank needs to know of another.
"""

import torch
from torch import Tensor

AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def sequence_weights(lengths: Tensor, aggregation: str, norm_length: int | None = None) -> Tensor:
    """The weight of each target of each sequence, float64 `[sequences]`; 0 for a sequence without targets.

    With N sequences that have targets, and L_i targets in sequence i:

    - `token-mean`: 1 / sum of all L. Every token counts alike (DAPO, Yu et al. 2025).
    - `seq-mean-token-mean`: 1 / (N L_i). Every sequence counts alike (GRPO, Shao et al. 2024).
    - `seq-mean-token-sum`: 1 / N. A sequence counts by its length; the policy gradient of the sequence.
    - `seq-mean-token-sum-norm`: 1 / (N norm_length), a constant (Dr. GRPO, Liu et al. 2025).

    Args:
        lengths: int `[sequences]`: targets with a loss in each sequence of the mini-batch, over all ranks.
        norm_length: divisor of `seq-mean-token-sum-norm`.

    Raises:
        ValueError: unknown aggregation, negative length, or no norm_length where it is needed.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation: {aggregation!r} is unknown, expected one of {', '.join(AGGREGATIONS)}")
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"lengths: expected none below 0, got {int(lengths.min())}")
    wide = lengths.to(torch.float64)
    present = lengths > 0
    sequences = max(int(present.sum()), 1)
    if aggregation == "token-mean":
        weights = torch.full_like(wide, 1 / max(int(lengths.sum()), 1))
    elif aggregation == "seq-mean-token-mean":
        weights = 1 / (sequences * wide.clamp_min(1))
    elif aggregation == "seq-mean-token-sum":
        weights = torch.full_like(wide, 1 / sequences)
    else:
        if norm_length is None or norm_length < 1:
            raise ValueError(f"norm_length: {aggregation} needs a positive number, got {norm_length}")
        weights = torch.full_like(wide, 1 / (sequences * norm_length))
    return torch.where(present, weights, torch.zeros_like(weights))


def target_weights(lengths: Tensor, aggregation: str, norm_length: int | None = None) -> Tensor:
    """`sequence_weights`, repeated for each target: float32 `[sum of lengths]`, sequence by sequence."""
    return sequence_weights(lengths, aggregation, norm_length).repeat_interleave(lengths).float()


def sum_weighted_losses(values: Tensor, weights: Tensor) -> Tensor:
    """Sum of weight times value; a target of weight zero adds nothing, not even a NaN, and gets no gradient."""
    return (torch.where(weights != 0, values, torch.zeros_like(values)) * weights).sum()
