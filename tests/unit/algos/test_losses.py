"""Losses: policy losses and KL estimates against their papers, aggregations against plain averages over lists."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algos.importance_sampling import LOG_RATIO_BOUND, sequence_means, sequence_sums
from lockstep.algos.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    POLICY_STATS,
    cispo,
    cross_entropy,
    entropy,
    entropy_loss,
    gspo,
    k1,
    k2,
    k3,
    kl_divergence,
    ppo_clip,
    sequence_weights,
    sum_weighted_losses,
    target_weights,
)

ratios = st.floats(0.05, 20.0)
advantages = st.floats(-5.0, 5.0)


def scalar_loss(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """Written from the papers, with branches instead of min and max."""
    if advantage >= 0:
        return -advantage * ratio if ratio <= 1 + high else -advantage * (1 + high)
    pessimistic = advantage * ratio if ratio >= 1 - low else advantage * (1 - low)
    if dual is not None and pessimistic < dual * advantage:
        pessimistic = dual * advantage
    return -pessimistic


def run_ppo(ratio: float, advantage: float, **clip):
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    terms = ppo_clip(logprob, torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage]), **clip)
    terms.loss.sum().backward()
    return terms, logprob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "flag"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.1, 2.0, -2.2, -2.2, None),
        (1.5, 2.0, -2.56, 0.0, "clip_high"),  # 1 + 0.28
        (0.5, 2.0, -1.0, -1.0, None),  # a good token that became unlikely is still pushed up
        (0.5, -2.0, 1.6, 0.0, "clip_low"),  # 1 - 0.2
        (1.5, -2.0, 3.0, 3.0, None),
        (4.0, -2.0, 6.0, 0.0, "clip_dual"),  # c = 3
        (4.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float, flag: str | None) -> None:
    terms, found = run_ppo(ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert terms.loss.item() == pytest.approx(loss, abs=1e-12)
    assert found == pytest.approx(gradient, abs=1e-12)
    for name in ("clip_low", "clip_high", "clip_dual"):
        assert getattr(terms, name).item() is (name == flag)


@given(ratios, advantages, st.floats(0, 0.9), st.floats(0, 2), st.none() | st.floats(1.01, 10))
def test_ppo_clip_equals_scalar_form(
    ratio: float, advantage: float, low: float, high: float, dual: float | None
) -> None:
    terms, _ = run_ppo(ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual)
    advantage = torch.tensor(advantage).item()  # as float32 holds it
    assert terms.loss.item() == pytest.approx(scalar_loss(ratio, advantage, low, high, dual), rel=1e-9, abs=1e-9)


@given(ratios, advantages)
def test_a_clip_flag_means_no_gradient(ratio: float, advantage: float) -> None:
    terms, gradient = run_ppo(ratio, advantage, dual_clip=3.0)
    clipped = any(getattr(terms, name).item() for name in ("clip_low", "clip_high", "clip_dual"))
    assert clipped == (gradient == 0) or abs(advantage) < 1e-30


@given(ratios, advantages)
def test_clipped_loss_is_never_below_the_unclipped_loss_and_equal_near_one(ratio: float, advantage: float) -> None:
    terms, _ = run_ppo(ratio, advantage)
    advantage = torch.tensor(advantage).item()
    plain = -ratio * advantage
    assert terms.loss.item() >= plain - 1e-9
    if 0.8 <= ratio <= 1.2:
        assert terms.loss.item() == pytest.approx(plain, rel=1e-9, abs=1e-12)


@given(st.floats(0.01, 0.9), st.floats(0.1, 5), st.floats(-0.95, 2))
def test_symmetric_clip_mirrors(bound: float, advantage: float, change: float) -> None:
    """With equal bounds, loss(1 + d, A) + A and loss(1 - d, -A) - A are the same: the objective is odd around one."""
    change = min(max(change, -0.95), 0.95)
    one, _ = run_ppo(1 + change, advantage, clip_low=bound, clip_high=bound)
    other, _ = run_ppo(1 - change, -advantage, clip_low=bound, clip_high=bound)
    held = torch.tensor(advantage).item()
    assert one.loss.item() + held == pytest.approx(other.loss.item() - held, abs=1e-9)


def test_extreme_log_ratios_stay_finite() -> None:
    logprobs = torch.tensor([0.0, -1e4, 0.0], requires_grad=True)
    terms = ppo_clip(logprobs, torch.tensor([-1e4, 0.0, -1e30]), torch.tensor([-1.0, -1.0, 1.0]))
    terms.loss.sum().backward()
    assert torch.isfinite(terms.loss).all() and torch.isfinite(logprobs.grad).all()
    assert terms.loss[0].item() == pytest.approx(math.exp(LOG_RATIO_BOUND), rel=1e-5)
    assert torch.isfinite(terms.sums(torch.ones(3))).all()


def test_sums_leave_out_targets_of_weight_zero() -> None:
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    new = old + torch.tensor([2.0, 0.5, 0.3, -0.4]).log()
    terms = ppo_clip(new, old, torch.tensor([1.0, -1.0, 1.0, 1.0]))
    new_sums = dict(zip(POLICY_STATS, terms.sums(torch.tensor([0.1, 0.2, 0.0, 0.0])).tolist(), strict=True))
    assert new_sums["ratio"] == pytest.approx(2.5)
    assert (new_sums["clip_high"], new_sums["clip_low"], new_sums["clip_dual"]) == (1, 1, 0)
    assert new_sums["kl_k1"] == pytest.approx(-math.log(2) - math.log(0.5), abs=1e-6)
    assert new_sums["kl_k3"] == pytest.approx((2 - 1 - math.log(2)) + (0.5 - 1 - math.log(0.5)), rel=1e-5)
    with_nan = ppo_clip(torch.where(torch.arange(4) < 2, new, torch.nan), old, torch.ones(4))
    assert torch.isfinite(with_nan.sums(torch.tensor([1.0, 1.0, 0.0, 0.0]))).all()


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


def test_all_policy_losses_have_the_same_gradient_on_policy() -> None:
    """The policy gradient, A grad log pi."""
    _, old, advantages, sequences = sample(7)
    live, per_token = torch.ones(len(old)) > 0, advantages[sequences]
    new = old.clone().requires_grad_()
    for terms in (ppo_clip(new, old, per_token), gspo(new, old, per_token, sequences, live),
                  cispo(new, old, per_token)):  # fmt: skip
        torch.testing.assert_close(torch.autograd.grad(terms.loss.sum(), new)[0], -per_token)


def test_sums_and_means_by_sequence() -> None:
    values, sequences = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([1, 0, 1, 0])
    assert sequence_sums(values, sequences).tolist() == [5.0, 10.0, 5.0, 10.0]
    live = torch.tensor([True, False, True, False])
    assert sequence_means(values, sequences, live).tolist() == [2.5, 0.0, 2.5, 0.0]


logprob = st.floats(-30, 0)


def distributions(seed: int, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, classes, generator=generator, dtype=torch.float64)
    policy, reference = torch.log_softmax(logits, -1)
    return policy, reference


def test_kl_estimates_by_hand() -> None:
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(policy, reference).item() == pytest.approx(math.log(2))
    assert k2(policy, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(policy, reference).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("seed", range(5))
def test_kl_expectations(seed: int) -> None:
    """k1 and k3 are unbiased: their mean under the policy is the divergence; k2 is near it for near distributions."""
    policy, reference = distributions(seed)
    true = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), true)
    near = torch.log_softmax(policy + 0.01 * reference, -1)
    small = (near.exp() * (near - policy)).sum()
    torch.testing.assert_close((near.exp() * k2(near, policy)).sum(), small, rtol=0.02, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_kl_expected_gradients_on_policy(seed: int) -> None:
    """In the loss, on the policy's own tokens: k1 has none, k2 that of KL(p||q), k3 that of KL(q||p)."""
    policy, reference = distributions(seed)
    logits = policy.clone().requires_grad_()

    def expected(estimator) -> torch.Tensor:
        new = torch.log_softmax(logits, -1)
        return torch.autograd.grad((new.exp().detach() * estimator(new, reference)).sum(), logits)[0]

    new = torch.log_softmax(logits, -1)
    forward = torch.autograd.grad((new.exp() * (new - reference)).sum(), logits, retain_graph=True)[0]
    backward = torch.autograd.grad((reference.exp() * (reference - new)).sum(), logits)[0]
    torch.testing.assert_close(expected(k1), torch.zeros_like(logits), rtol=0, atol=1e-12)
    torch.testing.assert_close(expected(k2), forward)
    torch.testing.assert_close(expected(k3), backward)


@given(logprob, logprob)
def test_k2_and_k3_are_never_negative_and_zero_only_at_equality(policy: float, reference: float) -> None:
    one, other = torch.tensor([policy]), torch.tensor([reference])
    assert k2(one, other).item() >= 0 and k3(one, other).item() >= 0
    assert k3(one, one).item() == k1(one, one).item() == 0
    if abs(policy - reference) > 1e-2:
        assert k3(one, other).item() > 0


@given(logprob, logprob)
def test_k1_is_antisymmetric_and_k2_symmetric(policy: float, reference: float) -> None:
    one, other = torch.tensor([policy]), torch.tensor([reference])
    assert k1(one, other).item() == -k1(other, one).item()
    assert k2(one, other).item() == k2(other, one).item()


def test_kl_divergence_by_name_is_finite_at_extremes() -> None:
    policy, reference = torch.tensor([0.0, -1e6], requires_grad=True), torch.tensor([-1e6, 0.0])
    for name in KL_ESTIMATORS:
        value = kl_divergence(policy, reference, name)
        assert torch.isfinite(value).all()
        assert torch.isfinite(torch.autograd.grad(value.sum(), policy)[0]).all()
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_divergence(policy, reference, "k4")


def plain_average(values: list[np.ndarray], kind: str, norm_length: int) -> float:
    """The aggregations as averages of averages; sequences without targets are left out."""
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
def test_aggregations_equal_plain_averages(lengths: list[int], kind: str, seed: int) -> None:
    rows = [np.random.default_rng(seed).normal(size=length) for length in lengths]
    weights = target_weights(torch.tensor(lengths), kind, norm_length=7)
    total = sum_weighted_losses(torch.tensor(np.concatenate(rows)), weights.double()).item()
    assert total == pytest.approx(plain_average(rows, kind, 7), rel=1e-5, abs=1e-6)


def test_aggregations_by_hand() -> None:
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


def test_aggregations_refuse_bad_input() -> None:
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


def test_cross_entropy_equals_that_of_torch() -> None:
    logits, targets = torch.randn(5, 9), torch.arange(5)
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    total = sum_weighted_losses(cross_entropy(logprobs), target_weights(torch.tensor([2, 3]), "token-mean"))
    torch.testing.assert_close(total, torch.nn.functional.cross_entropy(logits, targets))


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
