"""Advantages without a critic, from rewards alone.

Group-relative methods take rewards `[groups, group size]` and return advantages of that shape. A group whose rewards
are all equal has no signal: its advantages are exactly zero, without rounding errors. REINFORCE++ normalises over the
whole batch and returns one advantage per token.
"""

import torch
from torch import Tensor


def grpo_advantages(rewards: Tensor, epsilon: float = 1e-4) -> Tensor:
    """Reward minus the group's mean, over its standard deviation: (r - mean) / (std + epsilon).

    Shao et al. 2024, "DeepSeekMath", section 4.1.2. The deviation is the sample's (divided by G - 1), as in TRL and
    verl.

    Raises:
        ValueError: the rewards are not a matrix of finite numbers with at least two per group.
    """
    centered = dr_grpo_advantages(rewards)
    deviation = rewards.std(dim=1, keepdim=True)
    return _zero_without_signal(rewards, centered / (deviation + epsilon))


def dr_grpo_advantages(rewards: Tensor) -> Tensor:
    """Reward minus the group's mean: r - mean. A group's advantages sum to zero.

    Liu et al. 2025, "Understanding R1-Zero-Like Training" (Dr. GRPO): dividing by the deviation favours questions
    that are nearly always or nearly never solved.

    Raises:
        ValueError: the rewards are not a matrix of finite numbers with at least two per group.
    """
    _check_rewards(rewards)
    return _zero_without_signal(rewards, rewards - rewards.mean(dim=1, keepdim=True))


def rloo_advantages(rewards: Tensor) -> Tensor:
    """Reward minus the mean of the other completions: r_i - sum_{j != i} r_j / (G - 1) = G / (G - 1) (r_i - mean).

    Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization"; Kool et al. 2019.

    Raises:
        ValueError: the rewards are not a matrix of finite numbers with at least two per group.
    """
    _check_rewards(rewards)
    size = rewards.shape[1]
    others = (rewards.sum(dim=1, keepdim=True) - rewards) / (size - 1)
    return _zero_without_signal(rewards, rewards - others)


def reinforce_plus_plus_advantages(
    rewards: Tensor, sequences: Tensor, penalties: Tensor | None = None, epsilon: float = 1e-8
) -> Tensor:
    """Returns, normalised over all tokens of the batch: (R_t - mean) / (std + epsilon), `[targets]`.

    Hu 2025, "REINFORCE++": a token's return is the reward of its sequence minus the KL penalties of this token and
    those after it, R_t = r - sum_{u >= t} penalty_u. Mean and deviation are over tokens, as in OpenRLHF and verl.

    Args:
        rewards: float `[groups, group size]`; sequence `g * group size + k` is completion k of group g.
        sequences: int64 `[targets]`: the sequence of each target; targets of one sequence in the order of its tokens.
        penalties: `[targets]`, the KL coefficient times the estimated KL of the token.

    Raises:
        ValueError: the rewards are not a matrix of finite numbers.
    """
    _check_rewards(rewards, smallest=1)
    return normalize_values(returns_to_go(rewards.flatten(), sequences, penalties), epsilon)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, sequences: Tensor, penalties: Tensor | None = None, epsilon: float = 1e-8
) -> Tensor:
    """`reinforce_plus_plus_advantages` of rewards minus their group's mean, so that a prompt that is always or never
    solved does not push the policy (the baseline variant of Hu 2025, "REINFORCE++")."""
    return normalize_values(returns_to_go(dr_grpo_advantages(rewards).flatten(), sequences, penalties), epsilon)


def returns_to_go(rewards: Tensor, sequences: Tensor, penalties: Tensor | None = None) -> Tensor:
    """The reward of each target's sequence minus the penalties of this target and those after it: `[targets]`."""
    returns = rewards[sequences]
    if penalties is None:
        return returns
    order = torch.argsort(sequences, stable=True).flip(0)  # sequence by sequence, last token first
    ordered, owners = penalties.double()[order], sequences[order]
    first = torch.ones_like(owners, dtype=torch.bool)
    first[1:] = owners[1:] != owners[:-1]
    start = torch.where(first, torch.arange(owners.numel()), torch.zeros_like(owners)).cummax(0).values
    summed = ordered.cumsum(0)
    remaining = torch.empty_like(summed)
    remaining[order] = summed - (summed - ordered)[start]
    return (returns.double() - remaining).to(returns.dtype)


def normalize_values(values: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / (std + epsilon) over all values, with the sample's deviation; zeros if all are equal."""
    if values.numel() < 2 or not bool(values.amax() > values.amin()):
        return torch.zeros_like(values)
    wide = values.double()
    return ((wide - wide.mean()) / (wide.std() + epsilon)).to(values.dtype)


def groups_with_signal(rewards: Tensor) -> Tensor:
    """Whether the rewards of each group differ: bool `[groups]`."""
    return rewards.amax(dim=1) > rewards.amin(dim=1)


def _zero_without_signal(rewards: Tensor, advantages: Tensor) -> Tensor:
    return torch.where(groups_with_signal(rewards)[:, None], advantages, torch.zeros_like(advantages))


def _check_rewards(rewards: Tensor, smallest: int = 2) -> None:
    if rewards.dim() != 2 or rewards.shape[1] < smallest or not rewards.is_floating_point():
        raise ValueError(
            f"rewards: expected floats [groups, group size of at least {smallest}], "
            f"got {rewards.dtype} {list(rewards.shape)}"
        )
    if not torch.isfinite(rewards).all():
        group, index = (~torch.isfinite(rewards)).nonzero()[0].tolist()
        raise ValueError(
            f"rewards: {rewards[group, index].item()} of completion {index} in group {group} is not finite"
        )
