"""Attention over a forest as dense parts merged by their log-sum-exps, exact in both directions.

Forward: with outputs o_i and log-sum-exps l_i of parts over disjoint keys, l = log sum exp(l_i) and
o = sum exp(l_i - l) o_i (online softmax, Milakov & Gimelshein 2018, arXiv:1805.02867; cascade attention).
Backward: the gradient of a part's scores is P (dP - rowsum(do o)) with P = exp(scores - l), so each part's own
backward kernel is exact when it is given the *merged* o and l; the queries' gradients add up.

On the CPU the parts are the calls of `lockstep.models.calls`, on CUDA those of `lockstep.models.varlen`.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lockstep.models.asked import Asked
from lockstep.models.calls import Call, Picked, calls

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Parts(Protocol):
    """How a kind of device computes a row. Tensors are `[tokens, heads, head size]`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, scale: float) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exps in a form of its own)."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, asked: Asked, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v."""


def cascade(q: Tensor, k: Tensor, v: Tensor, asked: Asked, scale: float, parts: Parts) -> Tensor:
    """Each segment over itself and its ancestors.

    Args:
        q: `[asked tokens, heads, head size]`; k and v `[tokens, key/value heads, head size]`.

    Returns:
        `[asked tokens, heads, head size]`, contiguous.
    """
    out: Tensor = _Cascade.apply(q, k, v, asked, scale, parts)  # type: ignore[no-untyped-call]
    return out


class _Cascade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, asked: Asked, scale: float, parts: Parts) -> Tensor:
        out, lse = parts.forward(q, k, v, asked, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = (asked, scale, parts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        asked, scale, parts = ctx.settings
        return *parts.backward(grad, *ctx.saved_tensors, asked, scale), None, None, None


class CpuParts:
    """torch's flash attention for the CPU; grouped-query heads read the keys they share."""

    @staticmethod
    def fits(q: Tensor, v: Tensor) -> bool:
        return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, scale: float) -> tuple[Tensor, Tensor]:
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for call in calls(asked):
            where = call.queries
            part, part_lse = _forward(
                where.of(q), call.keys.of(k), call.keys.of(v), 0.0, call.causal, attn_mask=_mask(call, q), scale=scale
            )
            if not call.own:
                seen, seen_lse = where.of(out), where.of(lse)
                part = torch.lerp(seen, part, torch.sigmoid(part_lse - seen_lse)[..., None].to(part.dtype))
                part_lse = torch.logaddexp(part_lse, seen_lse)
            where.put(out, part)
            where.put(lse, part_lse)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, asked: Asked, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
        for call in calls(asked):
            where, keys = call.queries, call.keys
            part_lse = where.of(lse)
            if isinstance(where, Picked) and where.hidden is not None:
                part_lse = part_lse + where.hidden  # exp(scores - inf): a padded query takes part in nothing
            part, part_k, part_v = _backward(
                where.of(grad),
                where.of(q),
                keys.of(k),
                keys.of(v),
                where.of(out),
                part_lse,
                0.0,
                call.causal,
                attn_mask=_mask(call, q),
                scale=scale,
            )
            if call.own:
                where.put(dq, part)
            else:
                where.add(dq, part)
            keys.add(dk, part_k)
            keys.add(dv, part_v)
        return dq, dk, dv


def _mask(call: Call, q: Tensor) -> Tensor | None:
    mask = call.mask(q.dtype)
    return None if mask is None else mask.expand(call.queries.count, -1, call.queries.length, -1)


CPU = CpuParts()
