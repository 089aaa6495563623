"""The critic: advantages from its values (GAE), and its loss."""

import torch
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95, last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, "High-Dimensional Continuous Control", eq. 11-16):

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lambda A_{t+1}

    over the tokens of a completion that the policy generated. What lies between them (an environment's answer) is no
    step of time: the token before it is followed by the one after it.

    Args:
        rewards: float `[sequences, tokens]`.
        values: of the state before each token, `[sequences, tokens]`.
        mask: bool `[sequences, tokens]`: the policy's own tokens; padding is False.
        gamma: discount.
        lam: lambda; 1 is the return minus the value, 0 the one-step error.
        last: value of the state after the last token, `[sequences]`; 0 when None, as after an end of sequence.

    Returns:
        Advantages and returns (advantage + value: what the critic learns), both `[sequences, tokens]` without gradient,
        0 where the mask is False.

    Raises:
        ValueError: shapes that differ.
    """
    if not rewards.shape == values.shape == mask.shape or rewards.dim() != 2:
        raise ValueError(
            f"rewards {list(rewards.shape)}, values {list(values.shape)} and mask {list(mask.shape)} must have one "
            "shape [sequences, tokens]"
        )
    rewards, values = rewards.detach(), values.detach()
    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0]) if last is None else last.detach().to(values.dtype)
    ahead = torch.zeros_like(following)
    for token in range(values.shape[1] - 1, -1, -1):
        own = mask[:, token]
        value = values[:, token]
        error = rewards[:, token] + gamma * following - value
        ahead = torch.where(own, error + gamma * lam * ahead, ahead)
        following = torch.where(own, value, following)
        advantages[:, token] = torch.where(own, ahead, torch.zeros_like(ahead))
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def value_loss(
    values: Tensor, returns: Tensor, old_values: Tensor | None = None, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """Half the squared error per token, `[targets]`, and bool `[targets]`, where clipping took the gradient.

    With a clip, the larger of (V - R)^2 / 2 and (clip(V, V_old - clip, V_old + clip) - R)^2 / 2: the value may not
    move further than `clip` from what it was when the advantages were made, as far as moving on would lower the error
    (the PPO of openai/baselines; Engstrom et al. 2020, "Implementation Matters", section 3).

    Args:
        values: `[targets]`, with gradient.
        returns: `[targets]`, what is learned (`gae`).
        old_values: `[targets]`, those that the advantages were made with; needed with a clip.

    Raises:
        ValueError: a clip without old values, or one that is not positive.
    """
    error = (values - returns.detach()).square() / 2
    if clip is None:
        return error, torch.zeros_like(error, dtype=torch.bool)
    if old_values is None or clip <= 0:
        raise ValueError(f"clip {clip} needs a positive number and the values that the advantages were made with")
    old = old_values.detach()
    held = (values.clamp(old - clip, old + clip) - returns.detach()).square() / 2
    return torch.maximum(error, held), (held > error).detach()
