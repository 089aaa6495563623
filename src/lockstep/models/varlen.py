"""The parts of `lockstep.models.cascade` on CUDA: variable-length flash attention, no padding.

One causal call over all segments, then one call per depth of the forest: the descendants of every ancestor of that
depth, behind one another, over these ancestors.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from lockstep.data.layout import Layout
from lockstep.models.asked import Asked
from lockstep.models.calls import families

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, slots=True)
class Spans:
    """Tokens of a row, cut into pieces."""

    index: Tensor | None
    """int64 `[tokens of all pieces]`; None for the whole row as it is."""
    ends: Tensor
    """int32 `[pieces + 1]`: cumulative lengths."""
    longest: int

    def of(self, row: Tensor) -> Tensor:
        return row.contiguous() if self.index is None else row[self.index]


@dataclass(frozen=True, slots=True)
class Level:
    queries: Spans
    keys: Spans
    causal: bool


def levels(layout: Layout, device: torch.device) -> list[Level]:
    """The segments over themselves, then the descendants of each depth's ancestors over these."""

    def make(row: Layout) -> list[Level]:
        own = _spans([range(start, stop) for start, stop, _ in row.segments()], device, whole=True)
        made = [Level(own, own, True)]
        for family in families(Asked.everything(row)):
            queries = [list(below) for _, below in family]
            made.append(Level(_spans(queries, device), _spans([list(above) for above, _ in family], device), False))
        return made

    return layout.kept(("levels", device), make)


def _spans(pieces: list[range] | list[list[int]], device: torch.device, whole: bool = False) -> Spans:
    lengths = [len(piece) for piece in pieces]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
    index = None if whole else torch.tensor([token for piece in pieces for token in piece]).to(device)
    return Spans(index, ends, max(lengths))


class CudaParts:
    """torch's flash attention for CUDA, in half precision, over whole rows; sums over parts are kept in float32."""

    @staticmethod
    def fits(q: Tensor, v: Tensor) -> bool:
        half = q.dtype in (torch.float16, torch.bfloat16)
        return q.device.type == "cuda" and half and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = q, q  # replaced by the first level, which is the causal one
        for level in levels(asked.layout, q.device):
            a, b = level.queries, level.keys
            part, part_lse, *_ = _forward(
                a.of(q), b.of(k), b.of(v), a.ends, b.ends, a.longest, b.longest, 0.0, level.causal, False, scale=scale
            )
            if level.causal:
                out, lse = part, part_lse  # [tokens, heads, size] and [heads, tokens]
                continue
            seen, seen_lse = a.of(out), lse[:, a.index]
            share = torch.sigmoid(part_lse - seen_lse).t()[..., None]
            out[a.index] = torch.lerp(seen.float(), part.float(), share).to(out.dtype)
            lse[:, a.index] = torch.logaddexp(part_lse, seen_lse)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, asked: Asked, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v)]
        seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
        for level in levels(asked.layout, q.device):
            a, b = level.queries, level.keys
            part_lse = lse if a.index is None else lse[:, a.index].contiguous()
            parts = _backward(
                a.of(grad),
                a.of(q),
                b.of(k),
                b.of(v),
                a.of(out),
                part_lse,
                a.ends,
                b.ends,
                a.longest,
                b.longest,
                0.0,
                level.causal,
                seed,
                unused,
                scale=scale,
            )
            for total, part, where in zip(sums, parts, (a, b, b), strict=True):
                # No token is twice in a level, so that indexing adds each once, and deterministically.
                if where.index is None:
                    total += part
                else:
                    total[where.index] += part
        dq, dk, dv = (total.to(q.dtype) for total in sums)
        return dq, dk, dv


CUDA = CudaParts()
