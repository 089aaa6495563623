"""The engine's attention against the formula in 64 bit, for every layout of the keys."""

import numpy as np
import pytest
import torch

from lockstep.rollout.builtin.cached_attention import attend, mask_bias
from lockstep.rollout.builtin.kv_cache import KVTable, KVTableSize

torch.set_num_threads(1)
SLOTS, HEADS, ROOM, TOKENS, QUERIES, DIM = 3, 2, 16, 11, 6, 8


def by_hand(q, k, v, visible, scale):
    """softmax(q k^T scale) v and its log-sum-exp in float64; `visible` bool `[batch, 1, 1 or queries, keys]`."""
    scores = np.einsum("bhqd,bhtd->bhqt", q, k) * scale
    scores = np.where(visible, scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhqt,bhtd->bhqd", weights / total, v), (np.log(total) + most)[..., 0]


def table(transposed, scale=1.0):
    """Keys and values in a table that is larger than needed."""
    torch.manual_seed(0)
    k, v = torch.randn(SLOTS, HEADS, TOKENS, DIM) * scale, torch.randn(SLOTS, HEADS, TOKENS, DIM)
    made = KVTable(KVTableSize(SLOTS + 1, ROOM), transposed)
    keys, values = made.ensure_allocated(k.transpose(1, 2), v.transpose(1, 2))
    keys[:SLOTS, :, :TOKENS], values[:SLOTS, :, :TOKENS] = k, v
    return keys[:SLOTS, :, :TOKENS], values[:SLOTS, :, :TOKENS]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("mask", ["none", "keys", "queries"])
def test_attention_equals_the_formula(transposed, scale, mask):
    keys, values = table(transposed, scale)
    assert (keys.stride(-1) == 1) is not transposed
    q = torch.randn(SLOTS, HEADS, QUERIES, DIM)
    visible = torch.ones(SLOTS, 1, 1, TOKENS, dtype=torch.bool)
    if mask != "none":
        lengths = torch.tensor([TOKENS, 4, 1])[:, None, None, None]
        visible = (torch.arange(TOKENS) < lengths).expand(SLOTS, 1, QUERIES if mask == "queries" else 1, TOKENS)
    added = None if mask == "none" else mask_bias(visible, q.dtype)
    out, lse = attend(q, keys, values, added, 0.3)
    expected, size = by_hand(*(x.double().numpy() for x in (q, keys, values)), visible.numpy(), 0.3)
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-5)
    np.testing.assert_allclose(lse.numpy(), size, rtol=1e-5, atol=1e-5)


def test_half_precision_keeps_its_accuracy():
    keys, values = (x.to(torch.bfloat16) for x in table(False))
    q = torch.randn(SLOTS, HEADS, QUERIES, DIM).to(torch.bfloat16)
    out, lse = attend(q, keys, values, None, 0.3)
    everything = np.ones((1, 1, 1, 1), bool)
    expected, size = by_hand(*(x.double().numpy() for x in (q, keys, values)), everything, 0.3)
    np.testing.assert_allclose(out.double().numpy(), expected, atol=2e-2)
    np.testing.assert_allclose(lse.numpy(), size, atol=1e-3)


def test_a_table_keeps_its_contents_when_it_grows_and_slots_are_copied():
    made = KVTable(KVTableSize(2, 4), keys_transposed=True)
    k, v = torch.randn(2, 4, HEADS, DIM), torch.randn(2, 4, HEADS, DIM)
    for tensor, new in zip(made.ensure_allocated(k, v), (k, v), strict=True):
        tensor.copy_(new.transpose(1, 2))
    made.size = KVTableSize(5, 9)
    keys, values = made.ensure_allocated(k, v)
    assert keys.shape == values.shape == (5, HEADS, 9, DIM)
    made.copy_slots(torch.tensor([1]), torch.tensor([4]), 3)
    for tensor, new in ((keys, k), (values, v)):
        assert torch.equal(tensor[:2, :, :4], new.transpose(1, 2))
        assert torch.equal(tensor[4, :, :3], new[1, :3].transpose(0, 1)) and not tensor[4, :, 3:].any()
