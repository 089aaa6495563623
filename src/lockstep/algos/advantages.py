"""Advantages of a group's completions, from their rewards alone.

All take rewards `[groups, group size]` and return advantages of that shape. A group whose rewards are all equal has
no signal: its advantages are exactly zero, whatever rounding would make of it.
"""

import torch
from torch import Tensor


def grpo(rewards: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Reward minus the group's mean, over its standard deviation: (r - mean) / (std + epsilon).

    Shao et al. 2024, "DeepSeekMath", section 4.1.2. The deviation is the sample's (divided by G - 1), as in TRL and
    verl.

    Raises:
        ValueError: not a matrix of at least two finite rewards per group.
    """
    centered = dr_grpo(rewards)
    deviation = rewards.std(dim=1, keepdim=True)
    return _without_signal_zero(rewards, centered / (deviation + epsilon))


def dr_grpo(rewards: Tensor) -> Tensor:
    """Reward minus the group's mean: r - mean. A group's advantages sum to zero.

    Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO): dividing by the deviation favours questions
    that are nearly always or nearly never solved.

    Raises:
        ValueError: not a matrix of at least two finite rewards per group.
    """
    _check(rewards)
    return _without_signal_zero(rewards, rewards - rewards.mean(dim=1, keepdim=True))


def rloo(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the other completions: r_i - sum_{j != i} r_j / (G - 1) = G / (G - 1) (r_i - mean).

    Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization"; Kool et al. 2019.

    Raises:
        ValueError: not a matrix of at least two finite rewards per group.
    """
    _check(rewards)
    size = rewards.shape[1]
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (size - 1)
    return _without_signal_zero(rewards, rewards - others)


def groups_with_signal(rewards: Tensor) -> Tensor:
    """bool `[groups]`: whether not all rewards of the group are equal."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def _without_signal_zero(rewards: Tensor, advantages: Tensor) -> Tensor:
    return torch.where(groups_with_signal(rewards)[:, None], advantages, torch.zeros_like(advantages))


def _check(rewards: Tensor) -> None:
    if rewards.dim() != 2 or rewards.shape[1] < 2 or not rewards.is_floating_point():
        raise ValueError(
            f"rewards: expected floats [groups, group size of at least 2], got {rewards.dtype} {list(rewards.shape)}"
        )
    if not torch.isfinite(rewards).all():
        group, place = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        raise ValueError(
            f"rewards: {rewards[group, place].item()} of completion {place} in group {group} is not finite"
        )
