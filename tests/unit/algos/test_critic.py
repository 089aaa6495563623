"""GAE against its definition as a sum, and the critic's loss by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algos.critic import (
    adapt_kl_coefficient,
    explained_variance,
    gae,
    gae_of_targets,
    length_adaptive_lambda,
    token_rewards,
    value_loss,
)


def by_definition(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, gamma: float, lam: float, last: float
) -> np.ndarray:
    """Schulman et al. 2015, equations 11 and 16: A_t = sum over l of (gamma lambda)^l delta_{t+l}, of one sequence."""
    own = np.flatnonzero(mask)
    r, v = rewards[own], np.append(values[own], last)
    deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(own.size)]
    found = np.zeros(mask.size)
    for t in range(own.size):
        found[own[t]] = sum((gamma * lam) ** k * deltas[t + k] for k in range(own.size - t))
    return found


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 7), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_gae_is_the_sum_of_its_definition(seed: int, tokens: int, gamma: float, lam: float, cut: bool) -> None:
    random = np.random.default_rng(seed)
    rewards, values = random.normal(size=(3, tokens)), random.normal(size=(3, tokens))
    mask, last = random.random((3, tokens)) < 0.7, random.normal(size=3) * cut
    given_last = torch.tensor(last) if cut else None
    advantages, returns = gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), gamma, lam, given_last)
    expected = [by_definition(rewards[i], values[i], mask[i], gamma, lam, float(last[i])) for i in range(3)]
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(returns.numpy(), np.where(mask, np.array(expected) + values, 0), atol=1e-9)


def test_gae_by_hand() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.2, 0.5, 0.4]])
    mask = torch.tensor([[True, True, True]])
    # deltas with gamma 1: 0.5 - 0.2, 0.4 - 0.5, 1 - 0.4
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=0.5)
    assert advantages[0].tolist() == pytest.approx([0.3 + 0.5 * (-0.1 + 0.5 * 0.6), -0.1 + 0.5 * 0.6, 0.6])
    monte_carlo, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert monte_carlo[0].tolist() == pytest.approx([0.8, 0.5, 0.6]), "lambda 1: the return less the value"
    assert returns[0].tolist() == pytest.approx([1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"one shape \[sequences, tokens\]"):
        gae(rewards, values[:, :2], mask)


@pytest.mark.parametrize(
    ("value", "returned", "old", "loss", "gradient", "held"),
    [
        (1.0, 3.0, 1.0, 2.0, -2.0, False),
        (1.5, 3.0, 1.0, (3 - 1.2) ** 2 / 2, 0.0, True),  # moved further than 0.2 towards the return
        (0.5, 3.0, 1.0, (3 - 0.5) ** 2 / 2, -2.5, False),  # moved away: pulled back
        (1.1, 3.0, 1.0, (3 - 1.1) ** 2 / 2, -1.9, False),
    ],
)
def test_the_value_loss_by_hand(value, returned, old, loss, gradient, held) -> None:
    values = torch.tensor([value], requires_grad=True)
    per_token, clipped = value_loss(values, torch.tensor([returned]), torch.tensor([old]), clip=0.2)
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(loss)
    assert values.grad.item() == pytest.approx(gradient)
    assert clipped.item() is held


def test_the_value_loss_without_clip() -> None:
    per_token, clipped = value_loss(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0]))
    assert per_token.tolist() == [2.0, 0.0] and not clipped.any()
    with pytest.raises(ValueError, match=r"clip must be positive and needs old_values, got clip 0.2"):
        value_loss(torch.tensor([1.0]), torch.tensor([1.0]), clip=0.2)


def recursion(rewards: list[float], values: list[float], gamma: float, lam: float, last: float) -> list[float]:
    """Schulman et al. 2015, equation 16, backwards over the tokens of one sequence."""
    found, after, value_after = [0.0] * len(rewards), 0.0, last
    for t in reversed(range(len(rewards))):
        after = rewards[t] + gamma * value_after - values[t] + gamma * lam * after
        found[t], value_after = after, values[t]
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(0, 5), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1))
def test_gae_of_targets_is_the_recursion_of_each_sequence(
    seed: int, sizes: list[int], gamma: float, lam: float
) -> None:
    """Targets of several sequences are mixed, as those of shared turns are, and keep the order within a sequence."""
    random = np.random.default_rng(seed)
    sequences = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rewards, values, last = (random.normal(size=size) for size in (sequences.size, sequences.size, len(sizes)))
    advantages, returns = gae_of_targets(
        torch.tensor(rewards), torch.tensor(values), torch.tensor(sequences), gamma, lam, torch.tensor(last)
    )
    for number in range(len(sizes)):
        own = np.flatnonzero(sequences == number)
        expected = recursion(rewards[own].tolist(), values[own].tolist(), gamma, lam, float(last[number]))
        np.testing.assert_allclose(advantages.numpy()[own], expected, atol=1e-9)
        np.testing.assert_allclose(returns.numpy()[own], np.array(expected) + values[own], atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(0, 6), st.floats(0, 1), st.floats(0, 1))
def test_observations_do_not_change_the_advantages_of_own_tokens(
    seed: int, tokens: int, observed: int, gamma: float, lam: float
) -> None:
    random = np.random.default_rng(seed)
    rewards, values = random.normal(size=tokens), random.normal(size=tokens)
    mask = random.permutation(np.repeat([True, False], [tokens, observed]))
    wide = random.normal(size=(2, mask.size))  # what is at observed tokens does not count
    wide[0, mask], wide[1, mask] = rewards, values
    found, returns = gae(*torch.tensor(wide)[:, None], torch.tensor(mask)[None], gamma, lam)
    alone, own_returns = gae(
        torch.tensor(rewards)[None], torch.tensor(values)[None], torch.ones(1, tokens, dtype=torch.bool), gamma, lam
    )
    assert torch.equal(found[0, mask], alone[0]) and torch.equal(returns[0, mask], own_returns[0])
    assert not found[0, ~mask].any() and not returns[0, ~mask].any()


def test_the_reward_is_at_the_last_own_token_and_the_penalty_at_each() -> None:
    rewards = torch.tensor([1.0, 5.0, -2.0])
    sequences = torch.tensor([2, 0, 0, 2, 2])  # the second sequence has no target
    assert token_rewards(rewards, sequences).tolist() == [0, 0, 1, 0, -2]
    penalties = torch.tensor([0.25, 0.5, -0.5, 0.0, 1.0])
    assert token_rewards(rewards, sequences, penalties).tolist() == [-0.25, -0.5, 1.5, 0, -3]
    nothing = torch.empty(0, dtype=torch.int64)
    assert token_rewards(rewards, nothing).tolist() == []
    assert gae_of_targets(torch.empty(0), torch.empty(0), nothing)[0].tolist() == []


def test_a_lambda_for_each_sequence() -> None:
    sequences = torch.tensor([0] * 40 + [1] * 3)
    lam = length_adaptive_lambda(sequences, alpha=0.05)
    assert lam.tolist() == pytest.approx([1 - 1 / (0.05 * 40), 0.0]), "never below 0"
    random = np.random.default_rng(3)
    rewards, values = random.normal(size=43), random.normal(size=43)
    found, _ = gae_of_targets(torch.tensor(rewards), torch.tensor(values), sequences, 1.0, lam)
    for number, part in enumerate((slice(0, 40), slice(40, 43))):
        expected = recursion(rewards[part].tolist(), values[part].tolist(), 1.0, float(lam[number]), 0.0)
        np.testing.assert_allclose(found.numpy()[part], expected, atol=1e-9)


def test_the_kl_coefficient_adapts() -> None:
    assert adapt_kl_coefficient(0.1, kl=6.0, target=6.0, sequences=256, horizon=10_000) == 0.1
    assert adapt_kl_coefficient(0.1, 6.6, 6.0, 256, 10_000) == pytest.approx(0.1 * (1 + 0.1 * 0.0256))
    assert adapt_kl_coefficient(0.1, 60.0, 6.0, 256, 10_000) == pytest.approx(0.1 * (1 + 0.2 * 0.0256)), "clipped"
    assert adapt_kl_coefficient(0.1, 0.0, 6.0, 256, 10_000) == pytest.approx(0.1 * (1 - 0.2 * 0.0256))


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns + 3, returns) == pytest.approx(1.0), "a shift does not count"
    assert explained_variance(torch.zeros(3), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) is None
