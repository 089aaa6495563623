"""The critic's loss."""

import torch
from torch import Tensor


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
