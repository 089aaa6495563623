"""Attention over forests, as a function of transformers' `AttentionInterface` named "lockstep_forest".

A `layout=` given to `model(...)` travels as a keyword into every layer's attention, under FSDP2 and under
activation checkpointing. Without one, the function is transformers' ordinary SDPA attention.
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
    """Inside, transformers builds no `[tokens, tokens]` mask of its own: the layout defines which tokens attend to
    which."""
    token = _in_forest.set(True)
    try:
        yield
    finally:
        _in_forest.reset(token)


def forest_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Builds the mask of a kind of layers for transformers: the SDPA mask outside of `without_model_mask`.

    Inside, nothing for layers that see everything, and for layers with a sliding window an empty tensor of as many
    columns as the window: some models tell their layers of the window only by the mask.

    Raises:
        ValueError: the model overlays a mask of its own, which a layout cannot express.
    """
    if not _in_forest.get():
        mask: Tensor | None = sdpa_mask(*args, **kwargs)
        return mask
    if kwargs.get("use_vmap"):
        raise ValueError("the model overlays a mask of its own on the causal one; use packing: single")
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
    """Attention in which each segment sees itself causally and its ancestors wholly.

    Args:
        query: `[1, heads, tokens, head size]`.
        key: `[1, key/value heads, tokens, head size]`; value alike.
        attention_mask: with a layout, what `forest_mask` made.
        layout: of the packed row, or None for ordinary attention.
        subset: the tokens of the queries, where no `effective_window` hides anything; None for all tokens.
        kwargs: `effective_window`, `softcap` and `s_aux` (attention sinks) are respected.

    Returns:
        `[1, tokens, heads, value size]`, and None for the weights.

    Raises:
        ValueError: the call is not one row of the layout's length, or asks for what the layout cannot express.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if layout is None and softcap is None and sinks is None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return found
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is None:
        key, value = _repeat_kv_heads(query, key, value)
        return _explicit_attention(query, key, value, attention_mask, dropout, scale, softcap, sinks), None
    subset = QuerySubset.all_of(layout) if subset is None else subset
    _check_call(module, query, key, subset, kwargs)
    window = effective_window(module, attention_mask, kwargs, layout)
    parts = next((each for each in (CPU_KERNELS, CUDA_KERNELS) if each.fits(query, value)), None)
    if parts is not None and window is None and softcap is None and sinks is None and not dropout:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return merged_attention(q, k, v, subset, scale, parts)[None], None
    return _masked_attention(query, key, value, layout, window, dropout, scale, softcap, sinks), None


def _repeat_kv_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for each of the query heads that share them."""
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
    """Attention with a mask over each part of the row: for windows, soft caps, sinks, and where no kernel fits."""
    key, value = _repeat_kv_heads(query, key, value)
    pieces = []
    for start, stop, piece in layout.parts():
        q, k, v = query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop]
        reach = window if window is not None and window < piece.tokens else None
        if softcap is not None or sinks is not None:
            seen = piece.mask(q.device, reach)
            pieces.append(_explicit_attention(q, k, v, seen, dropout, scale, softcap, sinks))
            continue
        causal = len(piece.lengths) == 1 and reach is None
        mask = None if causal else piece.mask(q.device, reach)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, is_causal=causal)
        pieces.append(out.transpose(1, 2))
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)).contiguous()


def effective_window(module: nn.Module, marker: Tensor | None, kwargs: dict[str, Any], layout: RowLayout) -> int | None:
    """The layer's sliding window in tokens: given by the mask, passed by the layer, or an attribute of it; None where
    it hides nothing of this row."""
    if marker is not None and marker.dim() == 2 and marker.shape[0] == 0:
        window: Any = marker.shape[1]
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
    """Attention with explicit scores, for what SDPA cannot do: soft-capped scores (Gemma 2), sinks (gpt-oss)."""
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    hidden = torch.finfo(scores.dtype).min
    scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
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
        raise ValueError(f"{name}: attends in both directions; a layout means causal attention")
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{name}: a position bias over packed rows is not supported; use packing: single")


def hide_from_compiler() -> None:
    """Excludes the attention from compilation: its calls depend on the row, and are kernels already."""
    AttentionInterface.register(FOREST_ATTENTION, torch.compiler.disable(forest_attention))  # type: ignore[no-untyped-call]


AttentionInterface.register(FOREST_ATTENTION, forest_attention)
AttentionMaskInterface.register(FOREST_ATTENTION, forest_mask)
