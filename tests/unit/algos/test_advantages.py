"""Advantages against numbers worked out by hand and against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.algos.advantages import dr_grpo, groups_with_signal, grpo, rloo

matrices = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(2, 9)),
    elements=st.floats(-100, 100, allow_nan=False, width=32),
)


def test_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    # Group 1: mean 1/2, sample deviation sqrt(4 * 1/4 / 3). Group 2: mean 3/2, deviations 3/2 and -1/2, variance 1.
    half = 0.5 / (1 / 3) ** 0.5
    torch.testing.assert_close(dr_grpo(rewards), torch.tensor([[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]]))
    torch.testing.assert_close(
        grpo(rewards, epsilon=0.0), torch.tensor([[half, -half, -half, half], [1.5, -0.5, -0.5, -0.5]])
    )
    torch.testing.assert_close(grpo(rewards, epsilon=1.0)[1], torch.tensor([0.75, -0.25, -0.25, -0.25]))
    torch.testing.assert_close(rloo(rewards)[1], torch.tensor([2.0, -2 / 3, -2 / 3, -2 / 3]))


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo])
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e8, -7.3])
def test_a_group_without_signal_is_exactly_zero(function, value: float) -> None:
    rewards = torch.full((2, 7), value)
    rewards[1, 0] += 1000
    advantages = function(rewards)
    assert torch.equal(advantages[0], torch.zeros(7))
    assert advantages[1].abs().min() > 0
    assert groups_with_signal(rewards).tolist() == [False, True]


@given(matrices)
def test_grpo_equals_numpy(rewards: np.ndarray) -> None:
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True, ddof=1) + 1e-4)
    expected[rewards.max(1) == rewards.min(1)] = 0
    np.testing.assert_allclose(grpo(torch.tensor(rewards)).numpy(), expected, rtol=1e-9, atol=1e-9)


@given(matrices)
def test_rloo_is_the_mean_of_the_others_and_a_scaled_dr_grpo(rewards: np.ndarray) -> None:
    size = rewards.shape[1]
    others = np.stack([np.delete(rewards, place, axis=1).mean(1) for place in range(size)], axis=1)
    found = rloo(torch.tensor(rewards))
    np.testing.assert_allclose(found.numpy(), rewards - others, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, dr_grpo(torch.tensor(rewards)) * size / (size - 1), rtol=1e-9, atol=1e-9)


@given(matrices, st.floats(-50, 50))
def test_sums_are_zero_and_a_constant_changes_nothing(rewards: np.ndarray, shift: float) -> None:
    # Halves are exact in binary, so that a shift cannot make unequal rewards equal.
    rounded, step = np.round(rewards * 2) / 2, round(shift * 2) / 2
    for function in (grpo, dr_grpo, rloo):
        advantages = function(torch.tensor(rounded))
        assert advantages.sum(1).abs().max() < 1e-8
        torch.testing.assert_close(function(torch.tensor(rounded + step)), advantages, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "rewards",
    [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0.0, torch.nan]])],
)
def test_bad_rewards_are_refused(rewards: torch.Tensor) -> None:
    for function in (grpo, dr_grpo, rloo):
        with pytest.raises(ValueError, match="rewards"):
            function(rewards)
