"""Attention with its log-sum-exp, and the hook through which a model's own forward reaches the engine's cache."""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "lockstep_decode"
_MIN_EXPONENT = -60.0
"""Lower scores have no weight in 32 bit. Below -87 the exponential would be subnormal: MKL takes up to forty times as
long for it, and several times as long for its products."""


class UnsupportedAttention(ValueError):
    """A model's attention has a feature that this one does not compute."""


class EngineForward(Protocol):
    """One forward of the engine: knows which tokens are in it and where their keys and values belong."""

    windows: dict[int, int]
    """Layers with a sliding window, and its size."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """`q [tokens, heads, dim]`, `k, v [tokens, kv heads, dim]` to contiguous `[tokens, heads, dim]`."""

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keeps keys and values `[tokens, kv heads, dim]`."""


def engine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    turn: EngineForward | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """The function in transformers' registry. Raises UnsupportedAttention for soft caps, sinks, biases."""
    if turn is None:
        raise UnsupportedAttention(f"{ATTENTION_NAME} was called without `turn`: the model does not pass it on")
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise UnsupportedAttention(f"{ATTENTION_NAME} does not compute {name}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedAttention(f"{type(module).__name__} has no layer_idx")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return turn.attend(layer, q, k, v, scale, sliding_window).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, engine_attention)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp.

    Args:
        q: `[batch, kv heads, queries, dim]`, the query heads of a kv head folded into the queries.
        k, v: `[batch, kv heads, keys, dim]`, as they lie in the cache.
        mask: added to the scores, `[batch, 1, 1 or queries, keys]`.

    Returns:
        `[batch, kv heads, queries, dim]` and float32 `[batch, kv heads, queries]`.
    """
    batch, heads, queries, dim = q.shape
    if uses_matmul_attention(q):
        return _matmul_attention(q, k, v, mask, scale)
    if mask is not None:
        mask = mask.expand(batch, 1, queries, k.shape[2])
    if q.device.type == "cpu" and dim == v.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)
        return out, lse
    if q.device.type == "cuda" and dim == v.shape[-1] and dim % 8 == 0:
        mask = None if mask is None else mask.expand(-1, heads, -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, scale=scale)
        return out, lse[..., :queries]  # which is padded to whole blocks of queries
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), v), lse


def uses_matmul_attention(like: Tensor) -> bool:
    """Whether to compute attention as two plain matrix products: with few queries the CPU's own kernel, which splits
    them into small ones, takes up to twice as long. Only in float32, whose products are precise enough."""
    return like.device.type == "cpu" and like.dtype == torch.float32


def _matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    scores = q.new_empty(batch * heads, queries, k.shape[2])
    keys = k.flatten(0, 1).transpose(1, 2)
    torch.baddbmm(scores, q.flatten(0, 1), keys, beta=0, alpha=scale, out=scores)
    if mask is not None:
        scores.view(batch, heads, queries, -1).add_(mask)
    most = scores.amax(-1, keepdim=True)
    total = scores.sub_(most).clamp_(min=_MIN_EXPONENT).exp_().sum(-1, keepdim=True)
    out = torch.bmm(scores, v.flatten(0, 1)).div_(total)
    return out.view(batch, heads, queries, -1), total.log_().add_(most).view(batch, heads, queries)


def mask_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """bool `[..., keys]` to what is added to scores. Finite: a query that sees nothing gets weight 0 in the merge,
    not NaN. Rows begin at multiples of 16 elements, as CUDA's kernel wants them."""
    *rest, keys = visible.shape
    made = torch.zeros(*rest, -(-keys // 16) * 16, dtype=dtype, device=visible.device)[..., :keys]
    return made.masked_fill_(~visible, torch.finfo(dtype).min / 2)
