"""The clipped objective against hand-computed cases, a scalar implementation and its own symmetries."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algos.importance_sampling import LOG_RATIO_BOUND
from lockstep.algos.policy_loss import POLICY_STATS, ppo_clip

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


def run(ratio: float, advantage: float, **clip):
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
def test_by_hand(ratio: float, advantage: float, loss: float, gradient: float, flag: str | None) -> None:
    terms, found = run(ratio, advantage, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    assert terms.loss.item() == pytest.approx(loss, abs=1e-12)
    assert found == pytest.approx(gradient, abs=1e-12)
    for name in ("clip_low", "clip_high", "clip_dual"):
        assert getattr(terms, name).item() is (name == flag)


@given(ratios, advantages, st.floats(0, 0.9), st.floats(0, 2), st.none() | st.floats(1.01, 10))
def test_equals_the_scalar_form(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> None:
    terms, _ = run(ratio, advantage, clip_low=low, clip_high=high, dual_clip=dual)
    advantage = torch.tensor(advantage).item()  # as float32 holds it
    assert terms.loss.item() == pytest.approx(scalar_loss(ratio, advantage, low, high, dual), rel=1e-9, abs=1e-9)


@given(ratios, advantages)
def test_a_flag_means_no_gradient(ratio: float, advantage: float) -> None:
    terms, gradient = run(ratio, advantage, dual_clip=3.0)
    clipped = any(getattr(terms, name).item() for name in ("clip_low", "clip_high", "clip_dual"))
    assert clipped == (gradient == 0) or abs(advantage) < 1e-30


@given(ratios, advantages)
def test_is_never_below_the_unclipped_loss_and_equal_near_one(ratio: float, advantage: float) -> None:
    terms, _ = run(ratio, advantage)
    advantage = torch.tensor(advantage).item()
    plain = -ratio * advantage
    assert terms.loss.item() >= plain - 1e-9
    if 0.8 <= ratio <= 1.2:
        assert terms.loss.item() == pytest.approx(plain, rel=1e-9, abs=1e-12)


@given(st.floats(0.01, 0.9), st.floats(0.1, 5), st.floats(-0.95, 2))
def test_symmetric_clip_mirrors(bound: float, advantage: float, change: float) -> None:
    """With equal bounds, loss(1 + d, A) + A and loss(1 - d, -A) - A are the same: the objective is odd around one."""
    change = min(max(change, -0.95), 0.95)
    one, _ = run(1 + change, advantage, clip_low=bound, clip_high=bound)
    other, _ = run(1 - change, -advantage, clip_low=bound, clip_high=bound)
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
