"""GSPO and CISPO against their papers' formulas, differentiated as they stand there."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algos.aggregation import sum_weighted_losses, target_weights
from lockstep.algos.importance_sampling import sequence_means, sequence_sums
from lockstep.algos.policy_loss import cispo, gspo, ppo_clip

LENGTHS = [3, 1, 4, 2]


def sample(seed: int, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(new log-probabilities with gradient, old ones, advantage of each sequence, sequence of each token)."""
    draw = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    old = -3 * torch.rand(count, generator=draw, dtype=torch.float64) - 0.1
    new = (old + spread * torch.randn(count, generator=draw, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(len(LENGTHS), generator=draw, dtype=torch.float64)
    return new, old, advantages, torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))


def gspo_paper(new: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Zheng et al. 2025, equation 5 with 7, negated: sequence by sequence, no stop-gradient anywhere."""
    total = torch.zeros((), dtype=torch.float64)
    for y, y_old, advantage in zip(new.split(LENGTHS), old.split(LENGTHS), advantages, strict=True):
        s = ((y.sum() - y_old.sum()) / len(y)).exp()
        total = total + torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage)
    return -total / len(LENGTHS)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(3e-4, 4e-4), (0.1, 0.2), (0.9, 5.0)]))
def test_gspo_is_the_papers_objective_and_has_its_gradient(seed: int, clip: tuple[float, float]) -> None:
    new, old, advantages, sequences = sample(seed)
    shuffled = torch.randperm(len(new), generator=torch.Generator().manual_seed(seed))
    live = torch.ones(len(new), dtype=torch.bool)
    per_token = gspo(
        new[shuffled], old[shuffled], advantages[sequences][shuffled], sequences[shuffled], live, *clip
    ).loss
    weights = target_weights(torch.tensor(LENGTHS), "seq-mean-token-mean").double()[shuffled]
    found = sum_weighted_losses(per_token, weights)
    expected = gspo_paper(new, old, advantages, *clip)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)  # parts that cancel, in float32
    got, wanted = torch.autograd.grad(found, new)[0], torch.autograd.grad(expected, new)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-9)


def test_gspo_by_hand() -> None:
    new = torch.log(torch.tensor([0.4, 0.1, 0.5])).requires_grad_()
    old = torch.log(torch.tensor([0.2, 0.2, 0.5]))
    # Sequence 0: ratios 2 and 1/2, geometric mean 1. Sequence 1: ratio 1, advantage -1.
    terms = gspo(new, old, torch.tensor([2.0, 2.0, -1.0]), torch.tensor([0, 0, 1]), torch.ones(3) > 0)
    assert terms.loss.tolist() == pytest.approx([-2.0, -2.0, 1.0], rel=1e-6)
    assert terms.ratio.tolist() == pytest.approx([1.0, 1.0, 1.0], rel=1e-6)
    assert terms.log_ratio.tolist() == pytest.approx([math.log(2), -math.log(2), 0], rel=1e-6)
    assert not (terms.clip_low | terms.clip_high).any(), "each token's ratio alone would be far out of the bounds"
    assert torch.autograd.grad(terms.loss.sum(), new)[0].tolist() == pytest.approx([-2.0, -2.0, 1.0], rel=1e-6)


def test_gspo_clips_a_whole_sequence() -> None:
    old = torch.full((4,), -1.0)
    new = (old + torch.tensor([0.002, 0.0, -0.002, 0.0])).requires_grad_()  # means +0.001 and -0.001
    terms = gspo(new, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.tensor([0, 0, 1, 1]), torch.ones(4) > 0)
    assert terms.clip_high.tolist() == [True, True, False, False]
    assert terms.clip_low.tolist() == [False, False, True, True]
    assert torch.autograd.grad(terms.loss.sum(), new)[0].tolist() == [0.0] * 4
    assert terms.loss.tolist() == pytest.approx([-1.0004, -1.0004, 0.9997, 0.9997], rel=1e-6)


def test_gspo_counts_live_tokens_only() -> None:
    new, old = torch.tensor([-1.0, math.nan, -1.0]), torch.tensor([-1.2, -1.0, -1.4])
    terms = gspo(new, old, torch.ones(3), torch.tensor([0, 0, 0]), torch.tensor([True, False, True]), 0.9, 9.0)
    assert terms.ratio[[0, 2]].tolist() == pytest.approx([math.exp(0.3)] * 2, rel=1e-6)


def test_gspo_of_single_tokens_is_ppo() -> None:
    new, old, _, _ = sample(3)
    advantages, live = torch.linspace(-2, 2, len(new), dtype=torch.float64), torch.ones(len(new)) > 0
    one = gspo(new, old, advantages, torch.arange(len(new)), live, 0.2, 0.3)
    other = ppo_clip(new, old, advantages, 0.2, 0.3)
    torch.testing.assert_close(one.loss, other.loss)
    torch.testing.assert_close(
        torch.autograd.grad(one.loss.sum(), new)[0], torch.autograd.grad(other.loss.sum(), new)[0]
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "low", "high"),
    [(1.0, 2.0, 1.0, False, False), (3.0, 2.0, 3.0, False, False), (8.0, 2.0, 5.0, False, True),
     (8.0, -2.0, 5.0, False, True), (0.01, -2.0, 0.01, False, False), (0.01, 2.0, 0.01, False, False)],
)  # fmt: skip
def test_cispo_by_hand(ratio: float, advantage: float, weight: float, low: bool, high: bool) -> None:
    """MiniMax-M1, equations 4 and 5: sg[clip(r)] A log pi; the gradient is never zero."""
    new = torch.tensor([math.log(ratio) - 3.0], dtype=torch.float64, requires_grad=True)
    terms = cispo(new, torch.tensor([-3.0], dtype=torch.float64), torch.tensor([advantage]))
    assert terms.loss.item() == pytest.approx(-weight * advantage * new.item())
    assert torch.autograd.grad(terms.loss.sum(), new)[0].item() == pytest.approx(-weight * advantage)
    assert (terms.clip_low.item(), terms.clip_high.item()) == (low, high)


def test_cispo_may_have_a_lower_bound() -> None:
    new = torch.tensor([math.log(0.1)], requires_grad=True)
    terms = cispo(new, torch.zeros(1), torch.ones(1), clip_low=0.5)
    assert torch.autograd.grad(terms.loss.sum(), new)[0].item() == pytest.approx(-0.5)
    assert terms.clip_low.item()


def test_all_losses_have_the_same_gradient_on_policy() -> None:
    """The policy gradient, A grad log pi."""
    _, old, advantages, sequences = sample(7)
    live, per_token = torch.ones(len(old)) > 0, advantages[sequences]
    new = old.clone().requires_grad_()
    for terms in (ppo_clip(new, old, per_token), gspo(new, old, per_token, sequences, live),
                  cispo(new, old, per_token)):  # fmt: skip
        torch.testing.assert_close(torch.autograd.grad(terms.loss.sum(), new)[0], -per_token)


def test_sums_by_sequence() -> None:
    values, sequences = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 1, 0])
    assert sequence_sums(values, sequences).tolist() == [5.0, 10.0, 5.0, 10.0]
    live = torch.tensor([True, False, True, False])
    assert sequence_means(values, sequences, live).tolist() == [2.5, 0.0, 2.5, 0.0]
