"""Entropy of categorical distributions, and cross-entropy, the loss of supervised fine-tuning."""

import torch
from torch import Tensor


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in nats, `[targets]`: the loss is -log p(target | path).

    Its `token-mean` over the targets with a loss is the usual cross-entropy; exp of that is the perplexity.
    """
    return -logprobs


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H = -sum p log p of softmax(logits / temperature), in nats: `[...]` from logits `[..., classes]`.

    Classes of probability zero (logit -inf) add nothing.
    """
    log_probabilities = torch.log_softmax(logits.float() / temperature, dim=-1)
    finite = log_probabilities.masked_fill(log_probabilities == -torch.inf, 0)
    return -(log_probabilities.exp() * finite).sum(-1)


def entropy_loss(entropies: Tensor, coefficient: float) -> Tensor:
    """The bonus as a loss, -coefficient * H per target (Mnih et al. 2016, "Asynchronous Methods", section 4)."""
    return -coefficient * entropies
