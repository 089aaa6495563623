"""The critic of actor-critic methods: advantages computed from its values (GAE), and the loss that trains it."""

import torch
from torch import Tensor

from lockstep.algos.losses import places_in_sequences


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    last: Tensor | None = None,
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
        lam: lambda, or one for each sequence, `[sequences]`; with 1 an advantage is the return minus the value, with 0
            the one-step error.
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


def gae_of_targets(
    rewards: Tensor,
    values: Tensor,
    sequences: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    last: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`gae` for the targets of a batch, which are the tokens that the policy generated: `[targets]` each.

    Args:
        rewards: `[targets]`, see `token_rewards`.
        values: `[targets]`, the critic's value of the state before each token.
        sequences: int64 `[targets]`: the sequence of each target; targets of one sequence in the order of its tokens.
        lam: lambda, or one for each sequence, by its number: `[sequences]`.
        last: value of the state after the last token of each sequence, by its number: `[sequences]`; None means 0.
    """
    if not sequences.numel():
        return torch.zeros_like(rewards), torch.zeros_like(rewards)
    place = places_in_sequences(sequences)
    shape = int(sequences.max()) + 1, int(place.max()) + 1
    padded, mask = rewards.new_zeros(2, *shape), torch.zeros(shape, dtype=torch.bool)
    padded[0, sequences, place], padded[1, sequences, place], mask[sequences, place] = rewards, values, True
    of_each = lam[: shape[0]].to(rewards.dtype) if isinstance(lam, Tensor) else lam
    found = gae(padded[0], padded[1], mask, gamma, of_each, None if last is None else last[: shape[0]])
    return found[0][sequences, place], found[1][sequences, place]


def token_rewards(rewards: Tensor, sequences: Tensor, penalties: Tensor | None = None) -> Tensor:
    """The reward of each target, `[targets]`: minus its penalty, and at the last target of a sequence plus the
    sequence's reward (Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", section 2.2).

    Args:
        rewards: `[sequences]`, by the number of the sequence.
        sequences: int64 `[targets]`, as in `gae_of_targets`.
        penalties: `[targets]`, the KL coefficient times the estimated KL of the token.
    """
    found = torch.zeros(sequences.numel(), dtype=rewards.dtype) if penalties is None else -penalties.to(rewards.dtype)
    if not sequences.numel():
        return found
    ends = torch.zeros(int(sequences.max()) + 1, dtype=torch.int64)
    ends.scatter_reduce_(0, sequences, torch.arange(sequences.numel()), "amax")
    present = torch.unique(sequences)
    found[ends[present]] += rewards[present]
    return found


def length_adaptive_lambda(sequences: Tensor, alpha: float) -> Tensor:
    """Lambda of each sequence of n targets, `[sequences]`: 1 - 1 / (alpha n), at least 0 (Yue et al. 2025, "VAPO",
    equation 6), so that the error of a value reaches a share of a sequence that does not depend on its length."""
    lengths = torch.bincount(sequences).clamp_min(1).double()
    return (1 - 1 / (alpha * lengths)).clamp_min(0)


def adapt_kl_coefficient(coefficient: float, kl: float, target: float, sequences: int, horizon: int) -> float:
    """The next step's coefficient: k (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon) (Ziegler et al. 2019, section
    2.2, with sequences instead of tokens as the unit of the horizon, as in OpenRLHF, verl and TRL).

    Args:
        coefficient: this step's.
        kl: mean over the step's sequences of the estimated KL per token.
        target: the KL to be held.
        sequences: n, those of the step.
        horizon: sequences over which an error of 100 % would change the coefficient by 100 %, were it not clipped.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * sequences / horizon)


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """The share of the returns' variance that the values explain: 1 - Var(R - V) / Var(R). None if all returns are
    equal."""
    wide = returns.double()
    spread = wide.var(correction=0)
    return None if spread == 0 else float(1 - (wide - values.double()).var(correction=0) / spread)


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
