"""Losses per token, and how they become one number.

Policy losses (PPO's clipped objective, GSPO, CISPO), estimates of the KL divergence, entropy, cross-entropy, the
Bradley-Terry loss of reward models, and the weight that each aggregation gives to a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from lockstep.algos.importance_sampling import LOG_RATIO_BOUND, log_ratio, sequence_means

POLICY_STATS = ("ratio", "clip_low", "clip_high", "clip_dual", "kl_k1", "kl_k3")
"""Names of `PolicyTerms.sums`, in order."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """A policy loss per token. Only `loss` has a gradient."""

    loss: Tensor
    """`[targets]`, not yet weighted."""
    ratio: Tensor
    """`[targets]`: new / old, of the token or (GSPO) of its sequence."""
    log_ratio: Tensor
    """`[targets]`: log(new / old) of the token, clamped to `LOG_RATIO_BOUND`."""
    clip_low: Tensor
    """bool `[targets]`: where the lower bound applies. The clipped objectives have no gradient there."""
    clip_high: Tensor
    """bool `[targets]`: where the upper bound applies."""
    clip_dual: Tensor
    """bool `[targets]`: where the dual clip applies (negative advantage, ratio above it). There is no gradient."""

    def sums(self, weights: Tensor) -> Tensor:
        """Returns the sums of the statistics over the targets with nonzero weight, float32 `[len(POLICY_STATS)]`.

        Divided by the number of these targets over all ranks, the sums are the mean ratio, the clip fractions and two
        estimates of KL(old || new) from tokens of the old policy: k1 = -log r and k3 = r - 1 - log r, r = new / old.
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
        old_logprobs: `[targets]`, of the policy that the ratio is taken to.
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
    14): each token t has the ratio sg[s_i] * new_t / sg[new_t] (sg: stop-gradient). Its value is s_i, and its gradient
    is the token's part of the gradient of s_i. So advantages may differ within a sequence. With the aggregation
    `seq-mean-token-mean`, the loss is the paper's objective.

    Args:
        sequences: int64 `[targets]`, as in `sequence_sums`; all targets of a sequence must be in the call.
        live: bool `[targets]`: False for tokens to leave out of the mean.
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

    MiniMax 2025, "MiniMax-M1", equations 4 and 5. Clipping limits a token's weight but never removes its gradient, so
    that rare tokens that change the course of a reasoning are still learned. The paper sets no lower bound:
    clip_low = 1.
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
    """PPO's clipped objective with the ratio exp(change).

    Args:
        change: log-ratio with gradient, of the token or of its sequence.
        token_change: log-ratio of the token, without gradient, for the statistics.
    """
    advantages = advantages.detach().to(change.dtype)
    ratio = change.exp()
    inside = ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(-ratio * advantages, -inside * advantages)
    negative, detached_ratio = advantages < 0, ratio.detach()
    clip_dual = torch.zeros_like(negative)
    if dual is not None:
        loss = torch.where(negative, torch.minimum(loss, -dual * advantages), loss)
        clip_dual = negative & (detached_ratio > dual)
    return PolicyTerms(
        loss=loss,
        ratio=detached_ratio,
        log_ratio=token_change,
        clip_low=negative & (detached_ratio < 1 - low),
        clip_high=(advantages > 0) & (detached_ratio > 1 + high),
        clip_dual=clip_dual,
    )


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The KL estimate -log r = log policy - log reference, `[targets]`."""
    return -log_ratio(reference_logprobs, logprobs)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The KL estimate (log r)^2 / 2, `[targets]`."""
    return log_ratio(reference_logprobs, logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """The KL estimate r - 1 - log r, `[targets]`."""
    change = log_ratio(reference_logprobs, logprobs)
    # expm1 stays exact where policy and reference nearly agree.
    return (torch.expm1(change) - change).clamp_min(0)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimates KL(policy || reference) per token, `[targets]`, from tokens that the policy sampled.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with r = reference / policy: k1 is
    unbiased and has both signs; k2 is biased and never negative; k3 is unbiased and never negative. As a loss, the
    expected gradient of k1 is zero (so k1 is only useful in the reward), that of k2 is the gradient of
    KL(policy || reference), and that of k3 the gradient of KL(reference || policy).

    Args:
        estimator: `k1`, `k2` or `k3`.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator: {estimator!r} is unknown, expected one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](logprobs, reference_logprobs)


def cross_entropy(logprobs: Tensor) -> Tensor:
    """The loss of supervised fine-tuning: the negative log-likelihood of each target, in nats, `[targets]`.

    Its `token-mean` is the usual cross-entropy; exp of that is the perplexity.
    """
    return -logprobs


def bradley_terry(gaps: Tensor, margins: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The negative log-likelihood that the better completion wins (Ouyang et al. 2022, eq. 1; margins of Touvron et al.
    2023, eq. 2), `[pairs]`. Label smoothing e is the probability that a label is wrong: the loss of the other outcome
    has the weight e.

    Args:
        gaps: score of the better completion less that of the worse one, `[pairs]`.
        margins: how much better it is, `[pairs]`.
    """
    excess = gaps - margins
    return -(1 - label_smoothing) * logsigmoid(excess) - label_smoothing * logsigmoid(-excess)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H = -sum p log p of softmax(logits / temperature), in nats: `[...]` from logits `[..., classes]`.

    Classes of probability zero (logit -inf) add nothing.
    """
    log_probabilities = torch.log_softmax(logits.float() / temperature, dim=-1)
    finite = log_probabilities.masked_fill(log_probabilities == -torch.inf, 0)
    return -(log_probabilities.exp() * finite).sum(-1)


def entropy_loss(entropies: Tensor, coefficient: float) -> Tensor:
    """The entropy bonus as a loss: -coefficient * H (Mnih et al. 2016, "Asynchronous Methods", section 4)."""
    return -coefficient * entropies


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def sequence_weights(lengths: Tensor, aggregation: str, norm_length: int | None = None) -> Tensor:
    """Returns the weight of each target in each sequence, float64 `[sequences]`; 0 for a sequence without targets.

    The weights include the denominator, so that a mini-batch's loss is the plain sum of weight times loss over the
    targets of all ranks and micro-batches.

    With N sequences that have targets, and L_i targets in sequence i:

    - `token-mean`: 1 / sum of all L. All tokens have the same weight (DAPO, Yu et al. 2025).
    - `seq-mean-token-mean`: 1 / (N L_i). All sequences have the same weight (GRPO, Shao et al. 2024).
    - `seq-mean-token-sum`: 1 / N. A sequence's weight is proportional to its length; the policy gradient of the
      sequence.
    - `seq-mean-token-sum-norm`: 1 / (N norm_length), a constant (Dr. GRPO, Liu et al. 2025).

    Args:
        lengths: int `[sequences]`: the number of targets in each sequence of the mini-batch, over all ranks.
        norm_length: divisor of `seq-mean-token-sum-norm`.

    Raises:
        ValueError: unknown aggregation, negative length, or no norm_length where it is needed.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation: {aggregation!r} is unknown, expected one of {', '.join(AGGREGATIONS)}")
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"lengths: expected none below 0, got {int(lengths.min())}")
    wide = lengths.to(torch.float64)
    present = lengths > 0
    sequences = max(int(present.sum()), 1)
    if aggregation == "token-mean":
        weights = torch.full_like(wide, 1 / max(int(lengths.sum()), 1))
    elif aggregation == "seq-mean-token-mean":
        weights = 1 / (sequences * wide.clamp_min(1))
    elif aggregation == "seq-mean-token-sum":
        weights = torch.full_like(wide, 1 / sequences)
    else:
        if norm_length is None or norm_length < 1:
            raise ValueError(f"norm_length: {aggregation} needs a positive number, got {norm_length}")
        weights = torch.full_like(wide, 1 / (sequences * norm_length))
    return torch.where(present, weights, torch.zeros_like(weights))


def target_weights(lengths: Tensor, aggregation: str, norm_length: int | None = None) -> Tensor:
    """Returns `sequence_weights` repeated for each target: float32 `[sum of lengths]`, sequence by sequence."""
    return sequence_weights(lengths, aggregation, norm_length).repeat_interleave(lengths).float()


def places_in_sequences(sequences: Tensor) -> Tensor:
    """The place of each target among those of its sequence, int64 `[targets]`."""
    order = torch.argsort(sequences, stable=True)
    lengths = torch.bincount(sequences)
    starts = lengths.cumsum(0) - lengths
    place = torch.empty_like(order)
    place[order] = torch.arange(order.numel()) - starts[sequences[order]]
    return place


def sum_weighted_losses(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the sum of weight times value. A target of weight zero adds nothing, even if its value is NaN, and has no
    gradient."""
    return (torch.where(weights != 0, values, torch.zeros_like(values)) * weights).sum()
