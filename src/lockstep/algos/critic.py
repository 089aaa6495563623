"""The critic of actor-critic methods: advantages computed from its values (GAE), and the loss that trains it."""

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95, last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, "High-Dimensional Continuous Control", eq. 11-16):

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}

    over the tokens of a completion that the policy generated. Other tokens between them, such as an environment's
    reply, are skipped: the time step after the last token before the reply is the first token after it.

    Args:
        rewards: float `[sequences, tokens]`.
        values: the critic's value of the state before each token, `[sequences, tokens]`.
        mask: bool `[sequences, tokens]`: True at tokens that the policy generated, False elsewhere and at padding.
        gamma: discount.
        lam: lambda; with 1 an advantage is the return minus the value, with 0 the one-step error.
        last: value of the state after the last token, `[sequences]`; None means 0, as after an end of sequence.

    Returns:
        Advantages, and returns (advantage + value, which the critic learns), both `[sequences, tokens]` without
        gradient, 0 where the mask is False.

    Raises:
        ValueError: the shapes differ.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.dim() != 2:
        raise ValueError(
            f"rewards {list(rewards.shape)}, values {list(values.shape)} and mask {list(mask.shape)} must have one "
            "shape [sequences, tokens]"
        )
    rewards, values = rewards.detach(), values.detach()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0]) if last is None else last.detach().to(values.dtype)
    next_advantage = torch.zeros_like(next_value)
    for token in range(values.shape[1] - 1, -1, -1):
        own = mask[:, token]
        value = values[:, token]
        error = rewards[:, token] + gamma * next_value - value
        next_advantage = torch.where(own, error + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(own, value, next_value)
        advantages[:, token] = torch.where(own, next_advantage, torch.zeros_like(next_advantage))
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of each target, `[targets]`, and bool `[targets]`: where clipping set the gradient to 0.

    With a clip, the error is the larger of (V - R)^2 / 2 and (clip(V, V_old - clip, V_old + clip) - R)^2 / 2: once a
    value is more than `clip` away from V_old, moving it further towards the return has no gradient (the PPO of
    openai/baselines; Engstrom et al. 2020, "Implementation Matters", section 3).

    Args:
        values: `[targets]`, with gradient.
        returns: `[targets]`, which the critic learns, from `gae`.
        old_values: `[targets]`, the values from which the advantages were computed; needed with a clip.
        clip: how far a value may move from its old value; None for no limit.

    Raises:
        ValueError: the clip is not positive, or there are no old values for it.
    """
    error = (values - returns.detach()).square() / 2
    if clip is None:
        return error, torch.zeros_like(error, dtype=torch.bool)
    if old_values is None or clip <= 0:
        raise ValueError(f"clip must be positive and needs old_values, got clip {clip}")
    old = old_values.detach()
    clipped = (values.clamp(old - clip, old + clip) - returns.detach()).square() / 2
    return torch.maximum(error, clipped), (clipped > error).detach()
