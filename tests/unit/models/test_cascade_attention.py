"""Cascade attention: every pair of a forest is in exactly one part, and forward and backward are exact."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lockstep.data.row_layout import RowLayout
from lockstep.models import attention_plan as calls_module
from lockstep.models import cascade_attention as cascade_module
from lockstep.models.attention_plan import GatheredTokens, QuerySubset, TokenBlock, TokenSelection, plan_attention_calls
from lockstep.models.cascade_attention import CPU_KERNELS, CUDA_KERNELS, cascade_levels, merged_attention

FORESTS = {
    "prompt with equal completions": RowLayout([5, *[4] * 6], [-1, *[0] * 6]),
    "prompts with completions of mixed lengths": RowLayout([5, 9, 1, 3, 7, 2, 30, 6], [-1, 0, 0, 0, -1, 4, 4, 4]),
    "documents": RowLayout([3, 3, 3, 17, 2, 2, 40], [-1] * 7),
    "turns": RowLayout([4, 3, 6, 2, 5], [-1, 0, 1, 2, 3]),
    "branches, not in row order": RowLayout([4, 5, 2, 3, 6, 7, 1], [-1, -1, 0, 1, 2, 0, 3]),
    "one token": RowLayout([1], [-1]),
    "prompts with images": RowLayout([3, 16, 2, 5, 4, 1, 9, 3, 6], [-1, 0, 1, 2, 2, -1, 5, 6, 7], whole=[1, 6]),
    "an image alone": RowLayout([12], [-1], whole=[0]),
}


@st.composite
def layouts(draw: st.DrawFn) -> RowLayout:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    parents = [draw(st.integers(-1, segment - 1)) for segment in range(len(lengths))]
    whole = draw(st.sets(st.integers(0, len(lengths) - 1)))
    return RowLayout(lengths, parents, whole=whole)


def places(where: TokenSelection) -> list[list[int]]:
    """Returns the tokens of each row of a call; -1 for padding."""
    if isinstance(where, TokenBlock):
        return [[where.start + r * where.stride + t for t in range(where.length)] for r in range(where.count)]
    rows = where.index.clone()
    if where.hidden is not None:
        rows[where.hidden.flatten().isinf()] = -1
    return rows.unflatten(0, (where.count, where.length)).tolist()


@st.composite
def questions(draw: st.DrawFn) -> QuerySubset:
    layout = draw(layouts())
    every = st.lists(st.integers(0, layout.tokens - 1), min_size=1, max_size=2 * layout.tokens)
    return (
        QuerySubset.of_sources(layout, torch.tensor(draw(every))) if draw(st.booleans()) else QuerySubset.all_of(layout)
    )


def limit(patch: pytest.MonkeyPatch, limits: tuple[int, int, int, int]) -> None:
    for name, value in zip(
        ("MIN_VIEW_QUERIES", "MAX_CALL_QUERIES", "LONG_SEGMENT", "CAUSAL_STEP"), limits, strict=True
    ):
        patch.setattr(calls_module, name, value)


LIMITS = {"views": (1, 1, 99, 9), "both": (6, 12, 5, 2), "gathered": (128, 1024, 384, 128), "steps": (3, 9, 3, 3)}


@settings(deadline=None)
@given(questions(), st.sampled_from([*LIMITS.values()]))
def test_every_pair_is_in_one_call(subset: QuerySubset, limits: tuple[int, int, int, int]) -> None:
    seen = torch.zeros(subset.tokens, subset.layout.tokens, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        limit(patch, limits)
        found = plan_attention_calls(subset)
    for call in found:
        together: list[int] = []
        for queries, keys in zip(places(call.queries), places(call.keys), strict=True):
            together += [q for q in queries if q >= 0]
            for number, q in enumerate(queries):
                causal = call.is_self and not call.is_whole
                for k in keys[: len(keys) - len(queries) + number + 1] if causal else keys:
                    if q >= 0 and k >= 0:
                        seen[q, k] += 1
        assert len(set(together)) == len(together)
    assert torch.equal(seen, subset.layout.mask()[subset.index].long())
    own = [call.is_self for call in found]
    assert own == sorted(own, reverse=True)


@settings(deadline=None)
@given(layouts(), st.data())
def test_a_span_reaches_from_the_first_to_the_last_source(layout: RowLayout, data: st.DataObject) -> None:
    sources = data.draw(st.lists(st.integers(0, layout.tokens - 1), min_size=1))
    subset = QuerySubset.of_sources(layout, torch.tensor(sources))
    expected = []
    for start, stop, _ in layout.segments():
        mine = [source for source in sources if start <= source < stop]
        expected += range(min(mine), max(mine) + 1) if mine else ()
    assert subset.index.tolist() == expected and subset.tokens == len(expected)
    assert subset.index[subset.places_of(torch.tensor(sources))].tolist() == sources


@settings(deadline=None)
@given(layouts())
def test_every_pair_is_in_one_level(layout: RowLayout) -> None:
    seen = torch.zeros(layout.tokens, layout.tokens, dtype=torch.int64)
    row = torch.arange(layout.tokens)
    for level in cascade_levels(layout, torch.device("cpu")):
        queries, keys = level.queries.take(row), level.keys.take(row)
        assert len(set(queries.tolist())) == len(queries)
        for piece in range(len(level.queries.cu_seqlens) - 1):
            q = queries[level.queries.cu_seqlens[piece] : level.queries.cu_seqlens[piece + 1]]
            k = keys[level.keys.cu_seqlens[piece] : level.keys.cu_seqlens[piece + 1]]
            assert len(q) <= level.queries.max_seqlen and len(k) <= level.keys.max_seqlen
            pairs = torch.ones(len(q), len(k), dtype=torch.int64)
            seen[q[:, None], k[None]] += pairs.tril() if level.causal else pairs
    assert torch.equal(seen, layout.mask().long())


def row_of(layout: RowLayout, heads: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `[tokens, heads, 8]` as models produce it: a view of `[heads, tokens, 8]` or of a projection."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, layout.tokens, 8, generator=generator).transpose(0, 1)
    k, v = (torch.randn(layout.tokens, kv_heads, 8, generator=generator) for _ in range(2))
    return q, k, v


def with_gradients(attend, q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> list[Tensor]:
    q, k, v = (x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    (out * weights).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("name", FORESTS)
def test_the_cascade_equals_attention_with_a_mask(name: str, heads: tuple[int, int], limits, monkeypatch) -> None:
    """In float64, against torch's attention with the layout's mask."""
    limit(monkeypatch, limits)
    layout = RowLayout(FORESTS[name].lengths, FORESTS[name].parents, whole=FORESTS[name].whole)
    subset = QuerySubset.all_of(layout)
    q, k, v = (x.double() for x in row_of(layout, *heads))
    weights = torch.randn(layout.tokens, heads[0], 8, generator=torch.Generator().manual_seed(1)).double()

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = heads[0] // heads[1]
        q, k, v = q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=layout.mask(), scale=0.3)[0].transpose(0, 1)

    expected = with_gradients(masked, q, k, v, weights)
    for one, other in zip(with_gradients(attending(subset), q, k, v, weights), expected, strict=True):
        torch.testing.assert_close(one, other)
    # The same where every third token, and in some segments none, is subset for.
    subset = QuerySubset.of_sources(layout, torch.arange(0, layout.tokens, 3))
    weights[[token not in subset.index for token in range(layout.tokens)]] = 0
    few = with_gradients(attending(subset), q[subset.index], k, v, weights[subset.index])
    for one, other in zip(few, with_gradients(masked, q, k, v, weights), strict=True):
        torch.testing.assert_close(one, other[subset.index] if len(one) == subset.tokens != layout.tokens else other)


@pytest.mark.parametrize("name", FORESTS)
def test_the_levels_for_cuda_are_merged_exactly(name: str, monkeypatch) -> None:
    """With formulas in the place of the kernels, which only CUDA has; tests/gpu runs those."""
    layout = RowLayout(FORESTS[name].lengths, FORESTS[name].parents, whole=FORESTS[name].whole)
    subset = QuerySubset.all_of(layout)
    monkeypatch.setattr(cascade_module, "_cuda_flash_forward", dense_forward)
    monkeypatch.setattr(cascade_module, "_cuda_flash_backward", dense_backward)
    q, k, v = row_of(layout, 2, 2)
    weights = torch.randn(layout.tokens, 2, 8, generator=torch.Generator().manual_seed(1))

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=layout.mask(), scale=0.3)[0].transpose(0, 1)

    found = with_gradients(lambda q, k, v: merged_attention(q, k, v, subset, 0.3, CUDA_KERNELS), q, k, v, weights)
    for one, other in zip(found, with_gradients(masked, q, k, v, weights), strict=True):
        torch.testing.assert_close(one, other)


def pieces(q_bounds: Tensor, k_bounds: Tensor, causal: bool):
    """Yields queries, keys and mask of each piece of a call of variable-length attention."""
    for (q0, q1), (k0, k1) in zip(pairwise(q_bounds.tolist()), pairwise(k_bounds.tolist()), strict=True):
        allowed = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        yield slice(q0, q1), slice(k0, k1), allowed.tril(k1 - k0 - (q1 - q0)) if causal else allowed


def dense_forward(q, k, v, q_bounds, k_bounds, q_most, k_most, dropout, causal, debug, *, scale):
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for queries, keys, allowed in pieces(q_bounds, k_bounds, causal):
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys]) * scale
        scores = scores.masked_fill(~allowed, float("-inf"))
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[keys])
    return out, lse


def dense_backward(
    grad, q, k, v, out, lse, q_bounds, k_bounds, q_most, k_most, dropout, causal, seed, unused, *, scale
):
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for queries, keys, allowed in pieces(q_bounds, k_bounds, causal):
        scores = torch.einsum("qhd,khd->hqk", q[queries], k[keys]) * scale
        p = (scores - lse[:, queries, None]).exp() * allowed
        dv[keys] = torch.einsum("hqk,qhd->khd", p, grad[queries])
        dp = torch.einsum("qhd,khd->hqk", grad[queries], v[keys])
        ds = p * (dp - (grad[queries] * out[queries]).sum(-1).T[..., None]) * scale
        dq[queries] = torch.einsum("hqk,khd->qhd", ds, k[keys])
        dk[keys] = torch.einsum("hqk,qhd->khd", ds, q[queries])
    return dq, dk, dv


def attending(subset: QuerySubset) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: merged_attention(q, k, v, subset, 0.3, CPU_KERNELS)


def test_calls_are_made_once_per_row() -> None:
    layout = FORESTS["turns"]
    assert plan_attention_calls(QuerySubset.all_of(layout)) is plan_attention_calls(QuerySubset.all_of(layout))
    device = torch.device("cpu")
    assert cascade_levels(layout, device) is cascade_levels(layout, device)


def test_long_runs_are_views_and_short_segments_are_gathered_together() -> None:
    """16 prompts of 32 tokens with eight completions of 64 tokens each need no gathering."""
    layout = RowLayout([32, *[64] * 8] * 16, [p for g in range(16) for p in (-1, *[9 * g] * 8)])
    fixed = plan_attention_calls(QuerySubset.all_of(layout))
    causal = [call for call in fixed if call.is_self]
    blocks = [call.queries for call in causal if isinstance(call.queries, TokenBlock)]
    assert sum(block.count * block.length for block in blocks) == 16 * 8 * 64
    assert all(isinstance(call.queries, TokenBlock) for call in fixed if not call.is_self)
    short = plan_attention_calls(QuerySubset.all_of(RowLayout([6] * 3 + [7] * 3, [-1] * 6)))
    assert len(short) == 1 and isinstance(short[0].queries, GatheredTokens)


def test_which_rows_the_kernels_support() -> None:
    q, _, v = row_of(FORESTS["turns"], 4, 2)
    assert CPU_KERNELS.supports(q, v) and not CPU_KERNELS.supports(q, v[..., :4])
    assert not CUDA_KERNELS.supports(q, v)
