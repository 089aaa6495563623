"""The loss of supervised fine-tuning."""

from torch import Tensor


def cross_entropy(logprobs: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in nats, `[targets]`: the loss is -log p(target | path).

    Its `token-mean` over the targets with a loss is the usual cross-entropy; exp of that is the perplexity.
    """
    return -logprobs
