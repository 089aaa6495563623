"""From logits to tokens: every row with its own parameters and its own seed.

The order is that of transformers: temperature, then top-k, then top-p (of what is left, renormalised; Holtzman
et al. 2020, arXiv:1904.09751), then min-p (of the largest probability; Nguyen et al. 2024, arXiv:2407.01082).
The draw is the inverse of the cumulative distribution at a number in [0, 1) that is a hash of the row's seed and
the token's index, so a completion depends on nothing else in the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CANDIDATES = 256  # first guess of how many tokens top-p needs; more are sorted if that is not enough


@dataclass(slots=True)
class SamplingRows:
    """Parameters per row, all `[rows]`; the seeds on the host, the others on the logits' device."""

    seed: np.ndarray
    """uint64."""
    temperature: Tensor
    """float32; 0 is greedy."""
    top_p: Tensor
    top_k: Tensor
    """int64; 0 is off."""
    min_p: Tensor
    greedy: bool
    """Whether any row is greedy."""
    scaled: bool
    """Whether any row has a temperature other than 0 and 1."""
    ranked: bool
    """Whether any row uses top-p or top-k."""
    floored: bool
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
        """From arrays `[rows]`."""
        return cls(
            seed=seed.astype(np.uint64),
            temperature=torch.from_numpy(temperature.astype(np.float32)).to(device),
            top_p=torch.from_numpy(top_p.astype(np.float32)).to(device),
            top_k=torch.from_numpy(top_k.astype(np.int64)).to(device),
            min_p=torch.from_numpy(min_p.astype(np.float32)).to(device),
            greedy=bool((temperature == 0).any()),
            scaled=bool(((temperature != 0) & (temperature != 1)).any()),
            ranked=bool(((top_p < 1) | (top_k > 0)).any()),
            floored=bool((min_p > 0).any()),
        )


def sample_tokens(logits: Tensor, rows: SamplingRows, index: np.ndarray) -> tuple[Tensor, Tensor]:
    """Draws one token per row.

    Args:
        logits: float32 `[rows, vocabulary]`, finite or -inf, with a finite maximum per row. Overwritten.
        rows: parameters.
        index: int64 `[rows]`: how many tokens the row has generated before.

    Returns:
        int64 tokens `[rows]` and their float32 log-probabilities `[rows]` under the distribution that was drawn
        from; of a greedy row under the model's own distribution (temperature 1). A row whose logits have no finite
        maximum gets a log-probability that is not finite either.
    """
    best = logits.argmax(-1) if rows.greedy else None
    logprobs = torch.log_softmax(truncate_distribution(logits, rows), -1)
    tokens = _inverse_cdf(logprobs.exp(), uniform_draws(rows.seed, index))
    if best is not None:
        tokens = torch.where(rows.temperature == 0, best, tokens)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def truncate_distribution(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Scores after temperature and truncation, -inf where a token cannot be drawn; greedy rows as they are.
    The logits are overwritten."""
    scores = logits
    free = rows.temperature == 0 if rows.greedy or rows.scaled or rows.ranked or rows.floored else None
    if free is None:
        return scores
    if rows.scaled:
        scores = scores.div_(torch.where(free, 1.0, rows.temperature).unsqueeze(1))
    if rows.ranked:
        limited = ~free & ((rows.top_p < 1) | (rows.top_k > 0))
        chosen = limited.nonzero().squeeze(1)
        if len(chosen):
            scores[chosen] = _ranked(scores[chosen], rows.top_k[chosen], rows.top_p[chosen])
    if rows.floored:
        floor = scores.amax(-1) + torch.where(free, 0.0, rows.min_p).log()
        scores = scores.masked_fill(scores < floor.unsqueeze(1), -torch.inf)
    return scores


def _ranked(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the `top_k` best of each row, then the smallest best set of them with probability `top_p`."""
    vocabulary = scores.shape[1]
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)
    total = torch.logsumexp(scores, -1, keepdim=True)
    looked = min(vocabulary, _CANDIDATES)
    while True:
        best, order = torch.topk(scores, looked, dim=-1)
        # Renormalising after top-k only shrinks top-p's set, so the plain sum is a safe test.
        enough = (top_k <= looked) | ((best - total).exp().sum(-1) > top_p)
        if looked == vocabulary or bool(enough.all()):
            break
        looked = min(vocabulary, looked * 8)
    rank = torch.arange(looked, device=scores.device)
    in_top_k = rank < top_k.unsqueeze(1)
    norm = torch.where(
        top_k < vocabulary, torch.logsumexp(best.masked_fill(~in_top_k, -torch.inf), -1), total.squeeze(1)
    )
    probability = (best - norm.unsqueeze(1)).exp().masked_fill(~in_top_k, 0.0)
    before = torch.cumsum(probability, -1) - probability
    # top_p = 1 is off: rounding must not cut the tail. The best token always stays.
    keep = in_top_k & ((before < top_p.unsqueeze(1)) | (top_p >= 1).unsqueeze(1) | (rank == 0))
    kept = torch.full_like(scores, -torch.inf)
    return kept.scatter_(1, order, best.masked_fill(~keep, -torch.inf))


def _inverse_cdf(probability: Tensor, u: np.ndarray) -> Tensor:
    """The token at which the cumulative probability first exceeds `u` `[rows]` times its total."""
    cumulative = torch.cumsum(probability, -1)
    # The largest float32 below 1: times the total it stays below the total.
    below = np.minimum(u.astype(np.float32), np.float32(1 - 2**-24))
    target = torch.from_numpy(below).to(probability.device).unsqueeze(1) * cumulative[:, -1:]
    # If everything is NaN, the index found is past the last token.
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probability.shape[1] - 1)


def uniform_draws(seed: np.ndarray, index: np.ndarray) -> np.ndarray:
    """float64 in [0, 1): splitmix64 (Steele, Lea, Flood 2014) of seed and index, integers `[rows]` each."""
    state = _mixed(seed.astype(np.uint64) + _GOLDEN) + index.astype(np.uint64) * _GOLDEN
    drawn: np.ndarray = (_mixed(state) >> np.uint64(11)) * 2.0**-53
    return drawn


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Arithmetic of uint64 wraps around."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
