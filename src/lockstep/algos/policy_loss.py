"""Policy losses, per token: PPO's clipped objective, GSPO, CISPO."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algos.importance_sampling import LOG_RATIO_BOUND, log_ratio, sequence_means

POLICY_STATS = ("ratio", "clip_low", "clip_high", "clip_dual", "kl_k1", "kl_k3")
"""Names of `PolicyTerms.sums`, in order."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """A policy loss per token; all values but `loss` are without gradient."""

    loss: Tensor
    """`[targets]`, not yet weighted."""
    ratio: Tensor
    """`[targets]`: new / old, of the token or (GSPO) of its sequence."""
    log_ratio: Tensor
    """`[targets]`: log(new / old) of the token, cut at `LOG_RATIO_BOUND`."""
    clip_low: Tensor
    """bool `[targets]`: the lower bound acts. The clipped objectives have no gradient there."""
    clip_high: Tensor
    """bool `[targets]`: the upper bound acts."""
    clip_dual: Tensor
    """bool `[targets]`: negative advantage, ratio above the dual clip: no gradient."""

    def sums(self, weights: Tensor) -> Tensor:
        """Sums over the targets with a weight other than zero, float32 `[len(POLICY_STATS)]`.

        Divided by the number of those targets over all ranks they are the mean ratio, the clip fractions and two
        estimates of KL(old || new): k1 = -log r and k3 = r - 1 - log r, with r = new / old, on tokens of the old
        policy.
        """
        counted = weights != 0
        k3 = (torch.expm1(self.log_ratio) - self.log_ratio).clamp_min(0)
        columns = (self.ratio, self.clip_low, self.clip_high, self.clip_dual, -self.log_ratio, k3)
        zero = torch.zeros_like(k3)
        return torch.stack([torch.where(counted, column.to(k3.dtype), zero).sum() for column in columns]).float()


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """The negated clipped objective: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(new - old).

    Schulman et al. 2017, "Proximal Policy Optimization", equation 7. A higher clip_high than clip_low is DAPO's
    "clip-higher" (Yu et al. 2025). With dual_clip = c, the objective of a negative advantage is at least c A
    (Ye et al. 2020, "Mastering Complex Control in MOBA Games", equation 4), so that a large ratio cannot blow it up.

    Args:
        logprobs: `[targets]`, with gradient.
        old_logprobs: `[targets]`, of the policy that counts as the sampling one.
        advantages: `[targets]`.
    """
    change = log_ratio(logprobs, old_logprobs.detach())
    return _clipped_objective(change, change.detach(), advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    live: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyTerms:
    """PPO's clipped objective with the sequence's ratio in place of the token's:

        s_i = exp(mean over the tokens t of sequence i of (new_t - old_t))

    Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5 to 7, in the form of its GSPO-token (eq. 13,
    14): each token t has the ratio sg[s_i] * new_t / sg[new_t], whose value is s_i and whose gradient is the token's
    own part of it. So every token needs of the others only a number without gradient, and advantages may differ
    within a sequence. Aggregated by `seq-mean-token-mean` it is the paper's objective.

    Args:
        sequences: int64 `[targets]`, as in `sequence_sums`; all targets of a sequence must be here.
        live: bool `[targets]`: the tokens that count.
    """
    change = log_ratio(logprobs, old_logprobs.detach())
    mean = sequence_means(change, sequences, live).to(change.dtype)
    own = (logprobs - logprobs.detach()).to(change.dtype)
    clamped = (mean + own).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return _clipped_objective(clamped, change.detach(), advantages, clip_low, clip_high, None)


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_low: float = 1.0, clip_high: float = 4.0
) -> PolicyTerms:
    """REINFORCE with the clipped ratio as a weight: -sg[clip(r, 1 - clip_low, 1 + clip_high)] A new.

    MiniMax 2025, "MiniMax-M1", equations 4 and 5. A bound cuts a token's weight and never its gradient, so that rare
    tokens (the turns of an argument) are still learned. The paper sets no lower bound: clip_low = 1.
    """
    change = log_ratio(logprobs.detach(), old_logprobs.detach())
    ratio = change.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    advantages = advantages.detach().to(change.dtype)
    return PolicyTerms(
        loss=-weight * advantages * logprobs.to(change.dtype),
        ratio=ratio,
        log_ratio=change,
        clip_low=ratio < 1 - clip_low,
        clip_high=ratio > 1 + clip_high,
        clip_dual=torch.zeros_like(ratio, dtype=torch.bool),
    )


def _clipped_objective(
    change: Tensor, token_change: Tensor, advantages: Tensor, low: float, high: float, dual: float | None
) -> PolicyTerms:
    """The clipped objective of the ratio exp(change)."""
    advantages = advantages.detach().to(change.dtype)
    ratio = change.exp()
    inside = ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(-ratio * advantages, -inside * advantages)
    negative, seen = advantages < 0, ratio.detach()
    clip_dual = torch.zeros_like(negative)
    if dual is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual * advantages), loss)
        clip_dual = negative & (seen > dual)
    return PolicyTerms(
        loss=loss,
        ratio=seen,
        log_ratio=token_change,
        clip_low=negative & (seen < 1 - low),
        clip_high=(advantages > 0) & (seen > 1 + high),
        clip_dual=clip_dual,
    )
