"""Cascade attention over a forest: dense parts are merged by their log-sum-exps, exactly in forward and backward, on
CPU and CUDA.

A packed row holds the segments of a forest of shared prefixes (see `lockstep.data.row_layout`).

Forward: parts over disjoint keys have outputs o_i and log-sum-exps l_i, which are merged to o and l by the online
softmax (Milakov & Gimelshein 2018, arXiv:1805.02867):

    l = log sum exp(l_i)
    o = sum exp(l_i - l) o_i

Backward: the gradient of a part's scores, with P = exp(scores - l), is

    P (dP - rowsum(do o))

So the ordinary backward kernel of each part is exact if its inputs are the *merged* o and l, and the gradients of the
queries are summed.

On the CPU, the parts are the calls of `lockstep.models.attention_plan`. On CUDA they are calls of variable-length flash
attention: a causal one over all segments, then one per depth of the forest for the descendants of all ancestors of that
depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.data.row_layout import RowLayout
from lockstep.models.attention_plan import (
    AttentionCall,
    GatheredTokens,
    QuerySubset,
    ancestor_levels,
    plan_attention_calls,
)

_cpu_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionKernels(Protocol):
    """Computes the attention of a row on one kind of device. Tensors are `[tokens, heads, head size]`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, subset: QuerySubset, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the output, and the log-sum-exps in the form that `backward` takes."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, subset: QuerySubset, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of q, k and v."""


def merged_attention(
    q: Tensor, k: Tensor, v: Tensor, subset: QuerySubset, scale: float, kernels: AttentionKernels
) -> Tensor:
    """Computes attention of each segment over itself and its ancestors.

    Args:
        q: `[subset tokens, heads, head size]`; k and v are `[tokens, key/value heads, head size]`.

    Returns:
        `[subset tokens, heads, head size]`, contiguous.
    """
    out: Tensor = _MergedAttention.apply(q, k, v, subset, scale, kernels)  # type: ignore[no-untyped-call]
    return out


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, subset: QuerySubset, scale: float, kernels: AttentionKernels
    ) -> Tensor:
        out, lse = kernels.forward(q, k, v, subset, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = (subset, scale, kernels)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        subset, scale, kernels = ctx.settings
        return *kernels.backward(grad, *ctx.saved_tensors, subset, scale), None, None, None


class CpuKernels:
    """torch's flash attention for the CPU. With grouped-query attention, heads read shared keys without a copy."""

    @staticmethod
    def supports(q: Tensor, v: Tensor) -> bool:
        return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, subset: QuerySubset, scale: float) -> tuple[Tensor, Tensor]:
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for call in plan_attention_calls(subset):
            queries = call.queries
            part, part_lse = _cpu_flash_forward(
                queries.take(q),
                call.keys.take(k),
                call.keys.take(v),
                0.0,
                call.causal,
                attn_mask=_expanded_mask(call, q),
                scale=scale,
            )
            if not call.is_self:  # the calls of segments over themselves come first, and contain all queries
                previous, previous_lse = queries.take(out), queries.take(lse)
                part = torch.lerp(previous, part, torch.sigmoid(part_lse - previous_lse)[..., None].to(part.dtype))
                part_lse = torch.logaddexp(part_lse, previous_lse)
            queries.put(out, part)
            queries.put(lse, part_lse)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, subset: QuerySubset, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        for call in plan_attention_calls(subset):
            queries, keys = call.queries, call.keys
            merged_lse = queries.take(lse)
            if isinstance(queries, GatheredTokens) and queries.hidden is not None:
                merged_lse = merged_lse + queries.hidden  # makes exp(scores - lse) of padded queries 0
            part, part_k, part_v = _cpu_flash_backward(
                queries.take(grad),
                queries.take(q),
                keys.take(k),
                keys.take(v),
                queries.take(out),
                merged_lse,
                0.0,
                call.causal,
                attn_mask=_expanded_mask(call, q),
                scale=scale,
            )
            if call.is_self:
                queries.put(dq, part)
            else:
                queries.add(dq, part)
            keys.add(dk, part_k)
            keys.add(dv, part_v)
        return dq, dk, dv


def _expanded_mask(call: AttentionCall, q: Tensor) -> Tensor | None:
    mask = call.mask(q.dtype)
    return None if mask is None else mask.expand(call.queries.count, -1, call.queries.length, -1)


CPU_KERNELS = CpuKernels()


_cuda_flash_forward = torch.ops.aten._flash_attention_forward
_cuda_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """Pieces of a row's tokens, for one call of variable-length attention."""

    index: Tensor | None
    """int64 `[tokens of all pieces]`; None if the pieces are the whole row, in its order."""
    cu_seqlens: Tensor
    """int32 `[pieces + 1]`: cumulative lengths, starting with 0."""
    max_seqlen: int

    def take(self, row: Tensor) -> Tensor:
        """Gathers the tokens of the pieces from a row `[tokens, ...]`."""
        return row.contiguous() if self.index is None else row[self.index]


@dataclass(frozen=True, slots=True)
class CascadeLevel:
    """One call of variable-length attention: piece i of the queries attends to piece i of the keys."""

    queries: TokenSpans
    keys: TokenSpans
    causal: bool
    is_self: bool
    """Whether segments attend to themselves. Such levels come first, and contain every token once."""


def cascade_levels(layout: RowLayout, device: torch.device) -> list[CascadeLevel]:
    """Returns the parts of a row: all segments over themselves, then per depth the descendants over their ancestors."""

    def make(layout: RowLayout) -> list[CascadeLevel]:
        levels = [*_self_levels(layout, device)]
        for level in ancestor_levels(QuerySubset.all_of(layout)):
            queries = _token_spans([list(descendants) for _, descendants in level], device)
            keys = _token_spans([list(ancestor) for ancestor, _ in level], device)
            levels.append(CascadeLevel(queries, keys, False, False))
        return levels

    return layout.cached(("levels", device), make)


def _self_levels(layout: RowLayout, device: torch.device) -> Iterator[CascadeLevel]:
    """Yields the level of the segments that attend to themselves causally, and of those that do in both directions."""
    segments = [range(start, stop) for start, stop, _ in layout.segments()]
    for causal in (True, False):
        chosen = [tokens for segment, tokens in enumerate(segments) if (segment in layout.whole) is not causal]
        if chosen:
            spans = _token_spans(chosen, device, is_whole_row=len(chosen) == len(segments))
            yield CascadeLevel(spans, spans, causal, True)


def _token_spans(pieces: list[range] | list[list[int]], device: torch.device, is_whole_row: bool = False) -> TokenSpans:
    lengths = [len(piece) for piece in pieces]
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    index = None if is_whole_row else torch.tensor([token for piece in pieces for token in piece]).to(device)
    return TokenSpans(index, cu_seqlens, max(lengths))


class CudaKernels:
    """torch's flash attention for CUDA, in half precision. Sums over parts are kept in float32.

    It computes all queries of a row: only `fused_decoder`, which is for the CPU, asks for fewer.
    """

    @staticmethod
    def supports(q: Tensor, v: Tensor) -> bool:
        half = q.dtype in (torch.float16, torch.bfloat16)
        return q.device.type == "cuda" and half and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, subset: QuerySubset, scale: float) -> tuple[Tensor, Tensor]:
        first, *others = cascade_levels(subset.layout, q.device)
        out, lse = _cuda_forward_part(first, q, k, v, scale)
        if first.queries.index is not None:  # only a part of the row's segments attends to itself causally
            parts, (out, lse) = (out, lse), (q.new_empty(q.shape), lse.new_empty(q.shape[1], q.shape[0]))
            out[first.queries.index], lse[:, first.queries.index] = parts
        for level in others:
            index = level.queries.index
            part, part_lse = _cuda_forward_part(level, q, k, v, scale)
            if level.is_self:
                out[index], lse[:, index] = part, part_lse
                continue
            previous, previous_lse = level.queries.take(out), lse[:, index]
            share = torch.sigmoid(part_lse - previous_lse).t()[..., None]
            out[index] = torch.lerp(previous.float(), part.float(), share).to(out.dtype)
            lse[:, index] = torch.logaddexp(part_lse, previous_lse)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, subset: QuerySubset, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        for level in cascade_levels(subset.layout, q.device):
            queries, keys = level.queries, level.keys
            merged_lse = lse if queries.index is None else lse[:, queries.index].contiguous()
            parts = _cuda_flash_backward(
                queries.take(grad),
                queries.take(q),
                keys.take(k),
                keys.take(v),
                queries.take(out),
                merged_lse,
                queries.cu_seqlens,
                keys.cu_seqlens,
                queries.max_seqlen,
                keys.max_seqlen,
                0.0,
                level.causal,
                seed,
                unused,
                scale=scale,
            )
            for total, part, spans in zip(sums, parts, (queries, keys, keys), strict=True):
                # No token occurs twice in a level, so the indexed += loses nothing and is deterministic.
                if spans.index is None:
                    total += part
                else:
                    total[spans.index] += part
        dq, dk, dv = (total.to(q.dtype) for total in sums)
        return dq, dk, dv


def _cuda_forward_part(level: CascadeLevel, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output `[tokens, heads, head size]` and the log-sum-exps `[heads, tokens]` of a level's queries."""
    queries, keys = level.queries, level.keys
    out, lse, *_ = _cuda_flash_forward(
        queries.take(q),
        keys.take(k),
        keys.take(v),
        queries.cu_seqlens,
        keys.cu_seqlens,
        queries.max_seqlen,
        keys.max_seqlen,
        0.0,
        level.causal,
        False,
        scale=scale,
    )
    return out, lse


CUDA_KERNELS = CudaKernels()
