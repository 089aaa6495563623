"""Estimates of KL(policy || reference) from the policy's own tokens.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with r = reference / policy:
k1 = -log r, unbiased, of both signs; k2 = (log r)^2 / 2, biased, never negative; k3 = r - 1 - log r, unbiased and
never negative.

In the loss their gradients differ: that of k1 is zero in expectation on the policy's own tokens (it is only useful
in the reward), that of k2 is the gradient of the KL, that of k3 the gradient of the KL the other way round.
"""

import torch
from torch import Tensor

from lockstep.algos.importance_sampling import log_ratio


def k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """-log r = log policy - log reference, `[targets]`."""
    return -log_ratio(reference_logprobs, logprobs)


def k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log r)^2 / 2, `[targets]`."""
    return log_ratio(reference_logprobs, logprobs).square() / 2


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """r - 1 - log r, `[targets]`; expm1 keeps it exact where policy and reference nearly agree."""
    change = log_ratio(reference_logprobs, logprobs)
    return (torch.expm1(change) - change).clamp_min(0)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """The named estimate per token, `[targets]`.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"estimator: {estimator!r} is unknown, expected one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](logprobs, reference_logprobs)
