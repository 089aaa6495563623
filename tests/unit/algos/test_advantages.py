"""Advantages against numbers worked out by hand and against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lockstep.algos.advantages import (
    dr_grpo_advantages,
    groups_with_signal,
    grpo_advantages,
    normalize_values,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    returns_to_go,
    rloo_advantages,
)

matrices = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(2, 9)),
    elements=st.floats(-100, 100, allow_nan=False, width=32),
)


def test_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 1.0, 1.0]])
    # Group 1: mean 1/2, sample deviation sqrt(4 * 1/4 / 3). Group 2: mean 3/2, deviations 3/2 and -1/2, variance 1.
    half = 0.5 / (1 / 3) ** 0.5
    torch.testing.assert_close(
        dr_grpo_advantages(rewards), torch.tensor([[0.5, -0.5, -0.5, 0.5], [1.5, -0.5, -0.5, -0.5]])
    )
    torch.testing.assert_close(
        grpo_advantages(rewards, epsilon=0.0), torch.tensor([[half, -half, -half, half], [1.5, -0.5, -0.5, -0.5]])
    )
    torch.testing.assert_close(grpo_advantages(rewards, epsilon=1.0)[1], torch.tensor([0.75, -0.25, -0.25, -0.25]))
    torch.testing.assert_close(rloo_advantages(rewards)[1], torch.tensor([2.0, -2 / 3, -2 / 3, -2 / 3]))


@pytest.mark.parametrize("function", [grpo_advantages, dr_grpo_advantages, rloo_advantages])
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
    np.testing.assert_allclose(grpo_advantages(torch.tensor(rewards)).numpy(), expected, rtol=1e-9, atol=1e-9)


@given(matrices)
def test_rloo_is_the_mean_of_the_others_and_a_scaled_dr_grpo(rewards: np.ndarray) -> None:
    size = rewards.shape[1]
    others = np.stack([np.delete(rewards, place, axis=1).mean(1) for place in range(size)], axis=1)
    found = rloo_advantages(torch.tensor(rewards))
    np.testing.assert_allclose(found.numpy(), rewards - others, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        found, dr_grpo_advantages(torch.tensor(rewards)) * size / (size - 1), rtol=1e-9, atol=1e-9
    )


@given(matrices, st.floats(-50, 50))
def test_sums_are_zero_and_a_constant_changes_nothing(rewards: np.ndarray, shift: float) -> None:
    # Halves are exact in binary, so that a shift cannot make unequal rewards equal.
    rounded, step = np.round(rewards * 2) / 2, round(shift * 2) / 2
    for function in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        advantages = function(torch.tensor(rounded))
        assert advantages.sum(1).abs().max() < 1e-8
        torch.testing.assert_close(function(torch.tensor(rounded + step)), advantages, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "rewards",
    [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[0.0, torch.nan]])],
)
def test_bad_rewards_are_refused(rewards: torch.Tensor) -> None:
    for function in (grpo_advantages, dr_grpo_advantages, rloo_advantages):
        with pytest.raises(ValueError, match="rewards"):
            function(rewards)


def test_reinforce_plus_plus_by_hand() -> None:
    """Two prompts of two completions with 1, 2, 1 and 2 tokens; the token's return is the reward of its completion."""
    rewards = torch.tensor([[1.0, 0.0], [3.0, 3.0]])
    sequences = torch.tensor([0, 1, 1, 2, 3, 3])
    returns = np.array([1, 0, 0, 3, 3, 3])
    expected = (returns - 10 / 6) / returns.std(ddof=1)
    assert reinforce_plus_plus_advantages(rewards, sequences).tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    # With the baseline, the second group has none: 1/2, -1/2, -1/2, 0, 0, 0.
    returns = np.array([0.5, -0.5, -0.5, 0, 0, 0])
    expected = (returns + 0.5 / 6) / returns.std(ddof=1)
    assert reinforce_plus_plus_baseline_advantages(rewards, sequences).tolist() == pytest.approx(
        expected.tolist(), rel=1e-6
    )


def test_a_penalty_counts_for_its_token_and_those_before_it() -> None:
    sequences = torch.tensor([0, 0, 0, 1, 1])
    penalties = torch.tensor([0.1, 0.2, 0.4, 1.0, 2.0])
    returns = returns_to_go(torch.tensor([1.0, 5.0]), sequences, penalties)
    assert returns.tolist() == pytest.approx([1 - 0.7, 1 - 0.6, 1 - 0.4, 5 - 3.0, 5 - 2.0])
    rewards = torch.tensor([[1.0, 5.0]])
    torch.testing.assert_close(reinforce_plus_plus_advantages(rewards, sequences, penalties), normalize_values(returns))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(0, 2**31))
def test_returns_are_those_of_a_loop_over_tokens(owners: list[int], seed: int) -> None:
    """Sequences may be mixed, as in a tree with shared turns."""
    random = np.random.default_rng(seed)
    rewards, penalties = random.normal(size=6), random.normal(size=len(owners))
    expected = [
        rewards[owner] - sum(penalties[u] for u in range(t, len(owners)) if owners[u] == owner)
        for t, owner in enumerate(owners)
    ]
    found = returns_to_go(torch.tensor(rewards), torch.tensor(owners), torch.tensor(penalties))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


@given(matrices, st.integers(1, 4))
def test_normalised_advantages_have_mean_zero_and_deviation_one(rewards: np.ndarray, length: int) -> None:
    values = torch.tensor(rewards).flatten().repeat_interleave(length)
    found = normalize_values(values)
    if values.max() == values.min():
        assert torch.equal(found, torch.zeros_like(found))
    elif values.std() > 1e-3:
        assert abs(found.mean()) < 1e-5 and found.std().item() == pytest.approx(1.0, rel=1e-4)
    assert normalize_values(torch.tensor([3.0])).tolist() == [0.0]


def test_reinforce_plus_plus_takes_one_completion_per_prompt() -> None:
    found = reinforce_plus_plus_advantages(torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1]))
    assert found.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    with pytest.raises(ValueError, match="at least 2"):
        reinforce_plus_plus_baseline_advantages(torch.tensor([[1.0], [0.0]]), torch.tensor([0, 1]))
