"""Correction for tokens sampled by an engine whose probabilities are not quite the trainer's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algos.ratios import LOG_RATIO_BOUND, log_ratio
from lockstep.algos.sequences import sequence_sums


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance weights, without gradient."""

    weights: Tensor
    """`[targets]`: they multiply the token's loss."""
    raw: Tensor
    """`[targets]`: before they were cut or masked."""
    cut: Tensor
    """bool `[targets]`: where they were."""


def token_ratios(trainer_logprobs: Tensor, engine_logprobs: Tensor) -> Tensor:
    """exp(trainer - engine) of each token, `[targets]`, without gradient.

    Args:
        trainer_logprobs: of the policy before the step, computed by the trainer (the old log-probabilities).
        engine_logprobs: the same tokens, as the engine reported them when it sampled.
    """
    return log_ratio(trainer_logprobs.detach(), engine_logprobs.detach()).exp()


def sequence_ratios(trainer_logprobs: Tensor, engine_logprobs: Tensor, sequences: Tensor, live: Tensor) -> Tensor:
    """exp(sum of trainer - engine over the tokens of a sequence), at each of its tokens: `[targets]`.

    Args:
        sequences: int64 `[targets]`, as in `sequence_sums`.
        live: bool `[targets]`: the tokens that count.
    """
    change = log_ratio(trainer_logprobs.detach(), engine_logprobs.detach())
    total = sequence_sums(torch.where(live, change, torch.zeros_like(change)), sequences)
    return total.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().to(change.dtype)


def truncated(ratios: Tensor, cap: float) -> Correction:
    """Truncated importance sampling, min(ratio, cap).

    Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training" (TIS).
    """
    return Correction(ratios.clamp_max(cap), ratios, ratios > cap)


def masked(ratios: Tensor, cap: float, floor: float = 0.0) -> Correction:
    """Masked importance sampling: the ratio where floor <= ratio <= cap, 0 elsewhere.

    Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (MIS, with a cap alone); with a floor as in IcePop (Ling team 2025).
    """
    cut = (ratios > cap) | (ratios < floor)
    return Correction(torch.where(cut, torch.zeros_like(ratios), ratios), ratios, cut)


def logprob_gap(trainer_logprobs: Tensor, engine_logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, maximum) of |trainer - engine| over the targets with a weight other than zero; zeros if there are none."""
    gap = (trainer_logprobs.detach() - engine_logprobs.detach()).abs()
    gap = torch.where(weights != 0, gap, torch.zeros_like(gap))
    return gap.sum(), gap.amax() if gap.numel() else gap.sum()
