"""PPO's clipped policy objective, per token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.algos.ratios import log_ratio

STATS = ("ratio", "clip_low", "clip_high", "clip_dual", "kl_k1", "kl_k3")
"""Names of `PolicyTerms.sums`, in order."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """What the clipped objective says of each token; all but `loss` are without gradient."""

    loss: Tensor
    """`[targets]`, not yet weighted."""
    log_ratio: Tensor
    """`[targets]`: log(new / old), cut at `ratios.LOG_RATIO_BOUND`."""
    clip_low: Tensor
    """bool `[targets]`: negative advantage, ratio below 1 - clip_low: no gradient."""
    clip_high: Tensor
    """bool `[targets]`: positive advantage, ratio above 1 + clip_high: no gradient."""
    clip_dual: Tensor
    """bool `[targets]`: negative advantage, ratio above the dual clip: no gradient."""

    def sums(self, weights: Tensor) -> Tensor:
        """Sums over the targets with a weight other than zero, float32 `[len(STATS)]`.

        Divided by the number of those targets over all ranks they are the mean ratio, the clip fractions and two
        estimates of KL(old || new): k1 = -log r and k3 = r - 1 - log r, with r = new / old, on tokens of the old
        policy.
        """
        counted = weights != 0
        ratio = self.log_ratio.exp()
        k3 = (torch.expm1(self.log_ratio) - self.log_ratio).clamp_min(0)
        columns = (ratio, self.clip_low, self.clip_high, self.clip_dual, -self.log_ratio, k3)
        zero = torch.zeros_like(ratio)
        return torch.stack([torch.where(counted, column.to(ratio.dtype), zero).sum() for column in columns]).float()


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
    advantages = advantages.detach().to(change.dtype)
    ratio = change.exp()
    inside = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantages, -inside * advantages)
    negative, seen = advantages < 0, ratio.detach()
    clip_dual = torch.zeros_like(negative)
    if dual_clip is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual_clip * advantages), loss)
        clip_dual = negative & (seen > dual_clip)
    return PolicyTerms(
        loss=loss,
        log_ratio=change.detach(),
        clip_low=negative & (seen < 1 - clip_low),
        clip_high=(advantages > 0) & (seen > 1 + clip_high),
        clip_dual=clip_dual,
    )
