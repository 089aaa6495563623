"""Log-ratios that stay finite under exp."""

from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""Log-ratios are cut at plus and minus this: exp(20) = 4.9e8. Beyond it, the gradient through the ratio is zero."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """log(p / q) per token from two log-probabilities, in float32 or better, cut at `LOG_RATIO_BOUND`."""
    wide = numerator if numerator.dtype.itemsize >= 4 else numerator.float()
    return (wide - denominator.to(wide.dtype)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
