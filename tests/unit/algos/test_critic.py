"""GAE against its definition as a sum, and the critic's loss by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.algos.critic import gae, value_loss


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
