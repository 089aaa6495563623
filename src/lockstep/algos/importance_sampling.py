"""Importance ratios of tokens and sequences, and the correction for the difference between the probabilities of the
engine that sampled the tokens and those of the trainer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to plus and minus this, so that ratios stay finite: exp(20) = 4.9e8. Beyond it, the gradient
through the ratio is zero."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p / q) per token from two log-probabilities, in float32 or better, clamped to `LOG_RATIO_BOUND`."""
    wide = numerator if numerator.dtype.itemsize >= 4 else numerator.float()
    return (wide - denominator.to(wide.dtype)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_sums(values: Tensor, sequences: Tensor) -> Tensor:
    """Returns for each target the sum of the values over its sequence: float64 `[targets]`, without gradient.

    In double precision, so that the order of the targets does not matter.

    Args:
        values: `[targets]`.
        sequences: int64 `[targets]`: equal for targets of the same sequence, from 0 to below the number of targets.
    """
    wide = values.detach().double()
    return torch.zeros_like(wide).index_add_(0, sequences, wide)[sequences]


def sequence_means(values: Tensor, sequences: Tensor, live: Tensor) -> Tensor:
    """Returns for each target the mean of the values over the live targets of its sequence: float64 `[targets]`, 0 if
    there are none.

    Args:
        live: bool `[targets]`: False for targets to leave out.
    """
    counts = sequence_sums(live, sequences).clamp_min(1)
    return sequence_sums(torch.where(live, values, torch.zeros_like(values)), sequences) / counts


@dataclass(frozen=True, slots=True)
class ImportanceWeights:
    """Importance weights, without gradient."""

    weights: Tensor
    """`[targets]`: factors of the token's loss."""
    raw: Tensor
    """`[targets]`: the weights before truncation or masking."""
    cut: Tensor
    """bool `[targets]`: where they were truncated or masked."""


def token_ratios(trainer_logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    """exp(trainer - engine) of each token, `[targets]`, without gradient.

    Args:
        trainer_logprobs: log-probabilities under the policy before the step, computed by the trainer.
        engine_logprobs: log-probabilities of the same tokens, reported by the engine that sampled them.
    """
    return log_ratio(trainer_logprobs.detach(), engine_logprobs.detach()).exp()


def sequence_ratios(trainer_logprobs: Tensor, engine_logprobs: Tensor, sequences: Tensor, live: Tensor) -> Tensor:
    """Returns for each token exp(sum of trainer - engine over its sequence): `[targets]`, without gradient.

    Args:
        sequences: int64 `[targets]`, as in `sequence_sums`.
        live: bool `[targets]`: False for tokens to leave out of the sum.
    """
    change = log_ratio(trainer_logprobs.detach(), engine_logprobs.detach())
    total = sequence_sums(torch.where(live, change, torch.zeros_like(change)), sequences)
    return total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().to(change.dtype)


def truncate_ratios(ratios: Tensor, cap: float) -> ImportanceWeights:
    """Truncated importance sampling, min(ratio, cap).

    Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (TIS).
    """
    return ImportanceWeights(ratios.clamp_max(cap), ratios, ratios > cap)


def mask_ratios(ratios: Tensor, cap: float, floor: float = 0.0) -> ImportanceWeights:
    """Masked importance sampling: the ratio where floor <= ratio <= cap, 0 elsewhere.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (MIS, with a cap alone); with a floor as in IcePop (Ling team 2025).
    """
    cut = (ratios > cap) | (ratios < floor)
    return ImportanceWeights(torch.where(cut, torch.zeros_like(ratios), ratios), ratios, cut)


def logprob_gap(trainer_logprobs: Tensor, engine_logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, maximum) of |trainer - engine| over the targets with nonzero weight; zeros if there are none."""
    gap = (trainer_logprobs.detach() - engine_logprobs.detach()).abs()
    gap = torch.where(weights != 0, gap, torch.zeros_like(gap))
    return gap.sum(), gap.amax() if gap.numel() else gap.sum()
