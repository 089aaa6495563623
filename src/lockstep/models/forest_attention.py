"""Attention over packed rows whose segments form trees (forests), registered with transformers' `AttentionInterface` as
"lockstep_forest".

A `layout` that is passed to `model(...)` reaches every layer's attention as a keyword argument, also with FSDP2 and
activation checkpointing. Without a layout, the function is transformers' ordinary SDPA attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lockstep.data.row_layout import RowLayout
from lockstep.models.attention_plan import QuerySubset
from lockstep.models.cascade_attention import CPU_KERNELS, CUDA_KERNELS, merged_attention

FOREST_ATTENTION = "lockstep_forest"

_in_forest: ContextVar[bool] = ContextVar("lockstep_in_forest", default=False)


@contextmanager
def without_model_mask() -> Iterator[None]:
    """Keeps transformers from building a `[tokens, tokens]` mask, because the layout defines which tokens attend to
    which."""
    token = _in_forest.set(True)
    try:
        yield
    finally:
        _in_forest.reset(token)


def forest_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Builds the attention mask that transformers passes to layers. Outside of `without_model_mask`, it is the SDPA
    mask.

    Within it, the mask is None for layers with full attention. For layers with a sliding window it is an empty tensor
    with as many columns as the window, because some models pass the window to their layers only through the mask.

    Raises:
        ValueError: the model adds a custom mask function, which a layout cannot express.
    """
    if not _in_forest.get():
        mask: Tensor | None = sdpa_mask(*args, **kwargs)
        return mask
    if kwargs.get("use_vmap"):
        raise ValueError("the model adds a custom mask function to the causal mask; use packing: single")
    window = kwargs.get("local_size")
    return None if window is None else torch.empty(0, window, dtype=torch.bool)


def forest_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: RowLayout | None = None,
    subset: QuerySubset | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in which each segment attends to itself, causally unless it is whole, and to all tokens of its
    ancestors.

    Args:
        query: `[1, heads, tokens, head size]`.
        key: `[1, key/value heads, tokens, head size]`; value has the same shape.
        attention_mask: with a layout, the result of `forest_mask`.
        layout: layout of the packed row; None for ordinary attention.
        subset: the tokens to compute outputs for; None: all tokens. Not supported with an `effective_window`.
        kwargs: `sliding_window`, `softcap` and `s_aux` (attention sinks) are respected.

    Returns:
        `[1, tokens, heads, value size]`, and None for the weights.

    Raises:
        ValueError: the call is not for one row of the layout's length, or a layout does not support it.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if layout is None and softcap is None and sinks is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is None:
        key, value = _repeat_kv_heads(query, key, value)
        return _explicit_attention(query, key, value, attention_mask, dropout, scale, softcap, sinks), None
    subset = QuerySubset.all_of(layout) if subset is None else subset
    _check_call(module, query, key, subset, kwargs)
    window = effective_window(module, attention_mask, kwargs, layout)
    kernels = next((each for each in (CPU_KERNELS, CUDA_KERNELS) if each.supports(query, value)), None)
    if kernels is not None and window is None and softcap is None and sinks is None and not dropout:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return merged_attention(q, k, v, subset, scale, kernels)[None], None
    return _masked_attention(query, key, value, layout, window, dropout, scale, softcap, sinks), None


def _repeat_kv_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats keys and values for each of the query heads that share them."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def _masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: RowLayout,
    window: int | None,
    dropout: float,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention with a mask, piece by piece: for windows, soft caps and sinks, or if no kernel supports the
    call."""
    key, value = _repeat_kv_heads(query, key, value)
    pieces = []
    for start, stop, piece in layout.parts():
        q, k, v = query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]
        piece_window = window if window is not None and window < piece.tokens else None
        if softcap is not None or sinks is not None:
            piece_mask = piece.mask(q.device, piece_window)
            pieces.append(_explicit_attention(q, k, v, piece_mask, dropout, scale, softcap, sinks))
            continue
        causal = len(piece.lengths) == 1 and piece_window is None and not piece.whole
        mask = None if causal else piece.mask(q.device, piece_window)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=causal)
        pieces.append(out.transpose(1, 2))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).contiguous()


def effective_window(module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any], layout: RowLayout) -> int | None:
    """Returns the layer's sliding window in tokens: from the mask, the layer's arguments, or its attribute. None if it
    covers the whole row."""
    if mask is not None and mask.dim() == 2 and mask.shape[0] == 0:
        window: Any = mask.shape[1]
    else:
        window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
    return window if isinstance(window, int) and 0 < window < layout.longest else None


def _explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Computes attention scores explicitly, for features that SDPA lacks: soft caps (Gemma 2) and sinks (gpt-oss)."""
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    lowest = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = torch.dropout(weights, dropout, train=dropout > 0)
    return (weights @ value).transpose(1, 2).contiguous()


def _check_call(module: nn.Module, query: Tensor, key: Tensor, subset: QuerySubset, kwargs: dict[str, Any]) -> None:
    rows, _, tokens, _ = query.shape
    name, expected = type(module).__name__, subset.layout.tokens
    if rows != 1 or tokens != subset.tokens or key.shape[2] != expected:
        raise ValueError(
            f"{name}: a layout of {expected} tokens needs one row of {subset.tokens} queries and as many "
            f"keys as tokens, got {rows} rows of {tokens} queries and {key.shape[2]} keys"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(f"{name}: attends in both directions, but a layout needs causal attention")
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{name}: a position bias over packed rows is not supported; use packing: single")


def hide_from_compiler() -> None:
    """Excludes attention from compilation: its shapes differ in every row, and it calls fused kernels anyway."""
    AttentionInterface.register(FOREST_ATTENTION, torch.compiler.disable(forest_attention))  # type: ignore[no-untyped-call]


AttentionInterface.register(FOREST_ATTENTION, forest_attention)
AttentionMaskInterface.register(FOREST_ATTENTION, forest_mask)
