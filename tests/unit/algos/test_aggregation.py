"""Aggregations against plain averages over lists."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algos.aggregation import AGGREGATIONS, sequence_weights, sum_weighted_losses, target_weights
from lockstep.algos.entropy import cross_entropy, entropy, entropy_loss


def plain(values: list[np.ndarray], kind: str, norm_length: int) -> float:
    """The aggregations as averages of averages; sequences without targets are not there."""
    values = [row for row in values if len(row)]
    if kind == "token-mean":
        return float(np.concatenate(values).mean())
    if kind == "seq-mean-token-mean":
        return float(np.mean([row.mean() for row in values]))
    if kind == "seq-mean-token-sum":
        return float(np.mean([row.sum() for row in values]))
    return float(np.mean([row.sum() / norm_length for row in values]))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.sampled_from(AGGREGATIONS), st.integers(0, 99)
)
def test_equals_plain_averages(lengths: list[int], kind: str, seed: int) -> None:
    rows = [np.random.default_rng(seed).normal(size=length) for length in lengths]
    weights = target_weights(torch.tensor(lengths), kind, norm_length=7)
    total = sum_weighted_losses(torch.tensor(np.concatenate(rows)), weights.double()).item()
    assert total == pytest.approx(plain(rows, kind, 7), rel=1e-5, abs=1e-6)


def test_by_hand() -> None:
    lengths = torch.tensor([1, 0, 3])
    expected = {
        "token-mean": [0.25, 0.25, 0.25, 0.25],
        "seq-mean-token-mean": [1 / 2, 1 / 6, 1 / 6, 1 / 6],
        "seq-mean-token-sum": [1 / 2] * 4,
        "seq-mean-token-sum-norm": [1 / 20] * 4,
    }
    for kind, weights in expected.items():
        torch.testing.assert_close(target_weights(lengths, kind, norm_length=10), torch.tensor(weights))
    assert sequence_weights(lengths, "token-mean")[1].item() == 0


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="expected one of token-mean"):
        target_weights(torch.tensor([1]), "mean")
    with pytest.raises(ValueError, match="norm_length"):
        target_weights(torch.tensor([1]), "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="lengths"):
        target_weights(torch.tensor([1, -1]), "token-mean")
    for kind in AGGREGATIONS:
        assert target_weights(torch.tensor([0, 0]), kind, 3).tolist() == []


def test_weight_zero_silences_nan_in_value_and_gradient() -> None:
    values = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    total = sum_weighted_losses(values, torch.tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 0.5
    assert values.grad.tolist() == [0.5, 0.0, 0.0]


def test_cross_entropy_is_torchs() -> None:
    logits, targets = torch.randn(5, 9), torch.arange(5)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    ours = sum_weighted_losses(cross_entropy(logprobs), target_weights(torch.tensor([2, 3]), "token-mean"))
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(logits, targets))


def test_entropy() -> None:
    torch.testing.assert_close(entropy(torch.zeros(3, 8)), torch.full((3,), 8.0).log())
    masked = torch.tensor([[0.0, -torch.inf, 0.0]], requires_grad=True)
    torch.testing.assert_close(entropy(masked), torch.tensor([2.0]).log())
    logits = torch.randn(4, 11)
    reference = torch.distributions.Categorical(logits=logits / 0.7).entropy()
    torch.testing.assert_close(entropy(logits, 0.7), reference)
    torch.testing.assert_close(entropy_loss(reference, 0.01), -0.01 * reference)
    gradient = torch.autograd.grad(entropy(masked).sum(), masked)[0]
    assert torch.isfinite(gradient).all()
