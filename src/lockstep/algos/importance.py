"""Correction for tokens sampled by an engine whose probabilities are not quite the trainer's."""

import torch
from torch import Tensor

from lockstep.algos.ratios import log_ratio


def truncated_weights(trainer_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance weights min(exp(trainer - engine), cap) per token, `[targets]`, without gradient.

    Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training". They multiply the token's loss.

    Args:
        trainer_logprobs: of the policy that generated, computed by the trainer (the old log-probabilities).
        engine_logprobs: the same tokens, as the engine reported them when it sampled.
        cap: largest weight.
    """
    return log_ratio(trainer_logprobs.detach(), engine_logprobs.detach()).exp().clamp_max(cap)


def logprob_gap(trainer_logprobs: Tensor, engine_logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, maximum) of |trainer - engine| over the targets with a weight other than zero; zeros if there are none."""
    gap = (trainer_logprobs.detach() - engine_logprobs.detach()).abs()
    gap = torch.where(weights != 0, gap, torch.zeros_like(gap))
    return gap.sum(), gap.amax() if gap.numel() else gap.sum()
