"""Samples tokens from logits. Every row has its own parameters and seed.

The order is that of transformers: temperature, top-k, top-p (of the renormalised rest; Holtzman et al. 2020,
arXiv:1904.09751), min-p (relative to the largest probability; Nguyen et al. 2024, arXiv:2407.01082). A token is the
inverse of the cumulative distribution at a number in [0, 1), which is a hash of the row's seed and the token's index.
So a completion does not depend on the rest of the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = 256
"""How many tokens to sort first for top-p. If that is not enough, more are sorted."""


@dataclass(slots=True)
class SamplingRows:
    """Sampling parameters `[rows]`. The seeds are on the host, the others on the logits' device."""

    seed: np.ndarray
    """uint64."""
    temperature: Tensor
    """float32; 0 means greedy."""
    top_p: Tensor
    top_k: Tensor
    """int64; 0 means off."""
    min_p: Tensor
    any_greedy: bool
    """Whether any row is greedy."""
    any_scaled: bool
    """Whether any row has a temperature other than 0 and 1."""
    any_top: bool
    """Whether any row uses top-p or top-k."""
    any_min_p: bool
    """Whether any row uses min-p."""

    @classmethod
    def of(
        cls,
        seed: np.ndarray,
        temperature: np.ndarray,
        top_p: np.ndarray,
        top_k: np.ndarray,
        min_p: np.ndarray,
        device: torch.device,
    ) -> "SamplingRows":
        """Makes the parameters from arrays `[rows]`."""
        return cls(
            seed=seed.astype(np.uint64),
            temperature=torch.from_numpy(temperature.astype(np.float32)).to(device),
            top_p=torch.from_numpy(top_p.astype(np.float32)).to(device),
            top_k=torch.from_numpy(top_k.astype(np.int64)).to(device),
            min_p=torch.from_numpy(min_p.astype(np.float32)).to(device),
            any_greedy=bool((temperature == 0).any()),
            any_scaled=bool(((temperature != 0) & (temperature != 1)).any()),
            any_top=bool(((top_p < 1) | (top_k > 0)).any()),
            any_min_p=bool((min_p > 0).any()),
        )


def sample_tokens(logits: Tensor, rows: SamplingRows, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    Args:
        logits: float32 `[rows, vocabulary]`, finite or -inf, with a finite maximum per row. Overwritten.
        rows: the sampling parameters.
        index: int64 `[rows]`: how many tokens the row has generated before.

    Returns:
        int64 tokens `[rows]` and their float32 log-probabilities `[rows]`, under the distribution that was sampled from
        (for a greedy row: under the model's, at temperature 1). If the logits of a row have no finite maximum, its
        log-probability is not finite.
    """
    best = logits.argmax(-1) if rows.any_greedy else None
    logprobs = torch.log_softmax(truncate_distribution(logits, rows), -1)
    tokens = _inverse_cdf(logprobs.exp(), uniform_draws(rows.seed, index))
    if best is not None:
        tokens = torch.where(rows.temperature == 0, best, tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def truncate_distribution(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Applies temperature and truncation: the score of a token that cannot be drawn is -inf. Greedy rows stay the same.
    Overwrites the logits."""
    scores = logits
    is_greedy = rows.temperature == 0 if rows.any_greedy or rows.any_scaled or rows.any_top or rows.any_min_p else None
    if is_greedy is None:
        return scores
    if rows.any_scaled:
        scores = scores.div_(torch.where(is_greedy, 1.0, rows.temperature).unsqueeze(1))
    if rows.any_top:
        limited = ~is_greedy & ((rows.top_p < 1) | (rows.top_k > 0))
        chosen = limited.nonzero().squeeze(1)
        if len(chosen):
            scores[chosen] = _keep_top(scores[chosen], rows.top_k[chosen], rows.top_p[chosen])
    if rows.any_min_p:
        floor = scores.amax(-1) + torch.where(is_greedy, 0.0, rows.min_p).log()
        scores = scores.masked_fill(scores < floor.unsqueeze(1), -torch.inf)
    return scores


def _keep_top(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the `top_k` best tokens of each row, and of these the smallest set with probability `top_p`."""
    vocabulary = scores.shape[1]
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)
    total = torch.logsumexp(scores, -1, keepdim=True)
    candidates = min(vocabulary, _CANDIDATES)
    while True:
        best, order = torch.topk(scores, candidates, dim=-1)
        # Renormalising after top-k only makes top-p's set smaller, so the test may use the sum without it.
        enough = (top_k <= candidates) | ((best - total).exp().sum(-1) > top_p)
        if candidates == vocabulary or bool(enough.all()):
            break
        candidates = min(vocabulary, candidates * 8)
    rank = torch.arange(candidates, device=scores.device)
    in_top_k = rank < top_k.unsqueeze(1)
    norm = torch.where(
        top_k < vocabulary, torch.logsumexp(best.masked_fill(~in_top_k, -torch.inf), -1), total.squeeze(1)
    )
    probability = (best - norm.unsqueeze(1)).exp().masked_fill(~in_top_k, 0.0)
    before = torch.cumsum(probability, -1) - probability
    # top_p = 1 means off: rounding must not cut the tail. The best token is always kept.
    keep = in_top_k & ((before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1) | (rank == 0))
    kept = torch.full_like(scores, -torch.inf)
    return kept.scatter_(1, order, best.masked_fill(~keep, -torch.inf))


def _inverse_cdf(probability: Tensor, u: np.ndarray) -> Tensor:
    """Returns the first token of each row at which the cumulative probability exceeds `u` `[rows]` times its total."""
    cumulative = torch.cumsum(probability, -1)
    # At most the largest float32 below 1, so that its product with the total stays below the total.
    below = np.minimum(u.astype(np.float32), np.float32(1 - 2**-24))
    target = torch.from_numpy(below).to(probability.device).unsqueeze(1) * cumulative[:, -1:]
    # If everything is NaN, the index found is past the last token.
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probability.shape[1] - 1)


def uniform_draws(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Returns float64 `[rows]` in [0, 1): splitmix64 (Steele, Lea, Flood 2014) of seed and index, integers `[rows]`."""
    state = _mix(seed.astype(np.uint64) + _GOLDEN) + index.astype(np.uint64) * _GOLDEN
    drawn: np.ndarray = (_mix(state) >> np.uint64(11)) * 2.0**-53
    return drawn


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
    """The mixing function of splitmix64. Products of uint64 wrap around."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
