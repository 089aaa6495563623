"""Attention over the engine's KV cache: the function that a model's own forward calls in place of its attention, and
the kernels.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

ATTENTION_NAME = "lockstep_decode"
_MIN_EXPONENT = -60.0
"""Scores further below the maximum have no weight in float32. Below -87 the exponential would be subnormal: MKL takes
up to forty times as long for it, and several times as long for products with it."""


class UnsupportedAttention(ValueError):
    """A model's attention has a feature that `engine_attention` does not compute."""


class ForwardBatch(Protocol):
    """The batch of one forward: its tokens, and where their keys and values are stored in the cache."""

    windows: dict[int, int]
    """Size of the sliding window by layer, for layers that have one."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """Stores the keys and values, and computes attention over the cache.

        `q [tokens, heads, dim]`, `k, v [tokens, kv heads, dim]` to contiguous `[tokens, heads, dim]`.
        """

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores keys and values `[tokens, kv heads, dim]` in the cache."""


def engine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    forward_batch: ForwardBatch | None = None,
    **extra: object,
) -> tuple[Tensor, None]:
    """The attention function in transformers' registry. Raises UnsupportedAttention for soft caps, sinks, biases."""
    if forward_batch is None:
        problem = "was called without `forward_batch`: the model does not pass its keyword arguments to its attention"
        raise UnsupportedAttention(f"{ATTENTION_NAME} {problem}")
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise UnsupportedAttention(f"{ATTENTION_NAME} does not compute {name}")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedAttention(f"{type(module).__name__} has no layer_idx")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return forward_batch.attend(layer, q, k, v, scale, sliding_window).unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, engine_attention)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Computes attention and its log-sum-exp.

    Args:
        q: `[batch, kv heads, queries, dim]`, where the query heads of a kv head are folded into the queries.
        k, v: `[batch, kv heads, keys, dim]`, views of the cache.
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
        return out, lse[..., :queries]  # it is padded to whole blocks of queries
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * scale
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    return torch.matmul(torch.exp(scores - lse.unsqueeze(-1)).to(v.dtype), v), lse


def uses_matmul_attention(like: Tensor) -> bool:
    """Whether to compute attention as two plain matrix products. With few queries the CPU's attention kernel, which
    splits these products into small ones, takes up to twice as long. Other dtypes than float32 are not precise
    enough."""
    return like.device.type == "cpu" and like.dtype == torch.float32


def _matmul_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    scores = q.new_empty(batch * heads, queries, k.shape[2])
    keys = k.flatten(0, 1).transpose(1, 2)
    torch.baddbmm(scores, q.flatten(0, 1), keys, beta=0, alpha=scale, out=scores)
    if mask is not None:
        scores.view(batch, heads, queries, -1).add_(mask)
    maximum = scores.amax(-1, keepdim=True)
    total = scores.sub_(maximum).clamp_(min=_MIN_EXPONENT).exp_().sum(-1, keepdim=True)
    out = torch.bmm(scores, v.flatten(0, 1)).div_(total)
    return out.view(batch, heads, queries, -1), total.log_().add_(maximum).view(batch, heads, queries)


def mask_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts bool `[..., keys]` to a bias that is added to scores.

    The bias is finite, so that a query to which no key is visible gets weight 0 when parts of the attention are merged,
    and not NaN. Rows begin at multiples of 16 elements, which CUDA's kernel requires.
    """
    *rest, keys = visible.shape
    bias = torch.zeros(*rest, -(-keys // 16) * 16, dtype=dtype, device=visible.device)[..., :keys]
    return bias.masked_fill_(~visible, torch.finfo(dtype).min / 2)
