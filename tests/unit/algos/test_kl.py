"""KL estimates against the true divergence of small distributions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.algos.kl import KL_ESTIMATORS, k1, k2, k3, kl_divergence

logprob = st.floats(-30, 0)


def distributions(seed: int, classes: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, classes, generator=generator, dtype=torch.float64)
    policy, reference = torch.log_softmax(logits, -1)
    return policy, reference


def test_by_hand() -> None:
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert k1(policy, reference).item() == pytest.approx(math.log(2))
    assert k2(policy, reference).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(policy, reference).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("seed", range(5))
def test_expectations(seed: int) -> None:
    """k1 and k3 are unbiased: their mean under the policy is the divergence; k2 is near it for near distributions."""
    policy, reference = distributions(seed)
    true = (policy.exp() * (policy - reference)).sum()
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), true)
    near = torch.log_softmax(policy + 0.01 * reference, -1)
    small = (near.exp() * (near - policy)).sum()
    torch.testing.assert_close((near.exp() * k2(near, policy)).sum(), small, rtol=0.02, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_expected_gradients_on_policy(seed: int) -> None:
    """In the loss, on the policy's own tokens: k1 pushes nowhere, k2 down KL(p||q), k3 down KL(q||p)."""
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


def test_names_and_extremes() -> None:
    policy, reference = torch.tensor([0.0, -1e6], requires_grad=True), torch.tensor([-1e6, 0.0])
    for name in KL_ESTIMATORS:
        value = kl_divergence(policy, reference, name)
        assert torch.isfinite(value).all()
        assert torch.isfinite(torch.autograd.grad(value.sum(), policy)[0]).all()
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_divergence(policy, reference, "k4")
