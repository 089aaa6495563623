"""Preference losses against the papers' formulas, written pair by pair with numbers instead of tensors."""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.algos.preference_losses import (
    PAIR_LOSSES,
    REFERENCE_FREE,
    SORTED,
    PairLogprobs,
    PreferenceSettings,
    apo_zero_unpaired,
    kto,
    kto_baseline,
    log1mexp,
    preference_loss,
)

SETTINGS = PreferenceSettings(beta=0.3, label_smoothing=0.1, simpo_gamma=0.4, alphapo_alpha=0.25)
E, B = SETTINGS.label_smoothing, SETTINGS.beta


def loss_of(*arguments: Any) -> Tensor:
    return preference_loss(*arguments)[0]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def some_pairs() -> PairLogprobs:
    return PairLogprobs(
        chosen=tensor(-12.0, -3.5, -20.0, -7.25).requires_grad_(),
        rejected=tensor(-9.0, -6.0, -31.0, -7.0).requires_grad_(),
        chosen_tokens=tensor(10, 3, 8, 5),
        rejected_tokens=tensor(7, 4, 16, 5),
        reference_chosen=tensor(-11.0, -4.0, -18.0, -9.0),
        reference_rejected=tensor(-9.5, -5.0, -33.0, -6.5),
        chosen_prompt=tensor(-30.0, -12.0, -8.0, -21.0).requires_grad_(),
        prompt_tokens=tensor(12, 5, 4, 9),
    )


def s(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def smoothed(x: float) -> float:
    return -(1 - E) * math.log(s(x)) - E * math.log(s(-x))


def log_odds(mean: float) -> float:
    return math.log(math.exp(mean) / (1 - math.exp(mean)))


Formula = Callable[[float, float, float, float, float, float], float]
"""Of the log-probabilities of policy and reference, and the numbers of tokens, each chosen and rejected."""
FORMULAS: dict[str, Formula] = {
    "sigmoid": lambda c, r, rc, rr, n, m: smoothed(B * ((c - rc) - (r - rr))),
    "hinge": lambda c, r, rc, rr, n, m: max(0.0, 1 - B * ((c - rc) - (r - rr))),
    "ipo": lambda c, r, rc, rr, n, m: ((c - rc) / n - (r - rr) / m - 1 / (2 * B)) ** 2,
    "sigmoid_norm": lambda c, r, rc, rr, n, m: smoothed(B * ((c - rc) / n - (r - rr) / m)),
    "robust": lambda c, r, rc, rr, n, m: (
        (-(1 - E) * math.log(s(B * (c - rc - r + rr))) + E * math.log(s(-B * (c - rc - r + rr)))) / (1 - 2 * E)
    ),
    "exo_pair": lambda c, r, rc, rr, n, m: sum(
        s(x) * (math.log(s(x)) - math.log(p)) for x, p in ((B * (c - rc - r + rr), 1 - E), (-B * (c - rc - r + rr), E))
    ),
    "nca_pair": lambda c, r, rc, rr, n, m: (
        -math.log(s(B * (c - rc))) - 0.5 * math.log(s(-B * (c - rc))) - 0.5 * math.log(s(-B * (r - rr)))
    ),
    "bco_pair": lambda c, r, rc, rr, n, m: -math.log(s(B * (c - rc))) - math.log(s(-B * (r - rr))),
    "sppo_hard": lambda c, r, rc, rr, n, m: (c - rc - 1 / (2 * B)) ** 2 + (r - rr + 1 / (2 * B)) ** 2,
    "apo_zero": lambda c, r, rc, rr, n, m: 1 - s(B * (c - rc)) + s(B * (r - rr)),
    "apo_down": lambda c, r, rc, rr, n, m: s(B * (c - rc)) + 1 - s(B * (c - rc - r + rr)),
    "discopop": lambda c, r, rc, rr, n, m: (lambda z: (1 - s(z / 0.05)) * -math.log(s(z)) + s(z / 0.05) * math.exp(-z))(
        B * (c - rc - r + rr)
    ),
    "cpo_sigmoid": lambda c, r, rc, rr, n, m: smoothed(B * (c - r)),
    "cpo_hinge": lambda c, r, rc, rr, n, m: max(0.0, 1 - B * (c - r)),
    "cpo_ipo": lambda c, r, rc, rr, n, m: (c / n - r / m - 1 / (2 * B)) ** 2,
    "simpo": lambda c, r, rc, rr, n, m: smoothed(B * (c / n - r / m) - 0.4),
    "alphapo": lambda c, r, rc, rr, n, m: smoothed(
        B * ((1 - math.exp(c / n) ** -0.25) / 0.25 - (1 - math.exp(r / m) ** -0.25) / 0.25) - 0.4
    ),
    "odds_ratio": lambda c, r, rc, rr, n, m: -B * math.log(s(log_odds(c / n) - log_odds(r / m))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_pairwise_loss_is_the_papers(name: str) -> None:
    pairs = some_pairs()
    columns = [getattr(pairs, each.name) for each in fields(pairs)][:6]
    c, r, n, m, rc, rr = (column.tolist() for column in columns)
    expected = [FORMULAS[name](*row) for row in zip(c, r, rc, rr, n, m, strict=True)]
    assert PAIR_LOSSES[name](pairs, SETTINGS).tolist() == pytest.approx(expected, rel=1e-12)


def test_every_loss_has_a_formula() -> None:
    assert PAIR_LOSSES.keys() == FORMULAS.keys() | SORTED | {"sft", "nll"}


def test_likelihoods_are_means_over_tokens() -> None:
    pairs = some_pairs()
    assert loss_of(pairs, {"sft": 1.0}, SETTINGS).item() == pytest.approx((12 + 3.5 + 20 + 7.25) / 26)
    both = (12 + 3.5 + 20 + 7.25 + 30 + 12 + 8 + 21) / (26 + 30)
    assert loss_of(pairs, {"nll": 1.0}, SETTINGS).item() == pytest.approx(both)


def test_optimal_transport_compares_quantiles() -> None:
    gaps = sorted([-3.0, 2.5, 11.0, -0.25])
    reference = sorted([-1.5, 1.0, 15.0, -2.5])
    expected = sum(smoothed(B * (x - y)) for x, y in zip(gaps, reference, strict=True)) / 4
    assert loss_of(some_pairs(), {"aot": 1.0}, SETTINGS).item() == pytest.approx(expected)
    chosen, rejected = sorted([-1.0, 0.5, -2.0, 1.75]), sorted([0.5, -1.0, 2.0, -0.5])
    expected = sum(smoothed(B * (x - y)) for x, y in zip(chosen, rejected, strict=True)) / 4
    assert loss_of(some_pairs(), {"aot_unpaired": 1.0}, SETTINGS).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("divergence", "score"),
    [
        ("forward_kl", lambda h: 1 - math.exp(-h)),
        ("js_divergence", lambda h: math.log(2 * math.exp(h) / (math.exp(h) + 1))),
        ("alpha_divergence", lambda h: (math.exp(h) ** (0.5 - 1) - 1) / (0.5 - 1)),
    ],
)
def test_other_divergences_change_the_score(divergence: str, score: Callable[[float], float]) -> None:
    settings = replace(SETTINGS, divergence=divergence)  # type: ignore[arg-type]
    ratios = zip([-1.0, 0.5, -2.0, 1.75], [0.5, -1.0, 2.0, -0.5], strict=True)
    expected = [smoothed(B * (score(c) - score(r))) for c, r in ratios]
    assert PAIR_LOSSES["sigmoid"](some_pairs(), settings).tolist() == pytest.approx(expected)


def test_several_losses_are_summed_with_their_weights() -> None:
    """MPO (Wang et al. 2024): 0.8 DPO + 0.2 BCO + SFT."""
    pairs, mix = some_pairs(), {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0}
    parts = [factor * loss_of(pairs, {name: 1.0}, SETTINGS) for name, factor in mix.items()]
    assert loss_of(pairs, mix, SETTINGS).item() == pytest.approx(sum(part.item() for part in parts))
    each = preference_loss(pairs, mix, SETTINGS)[1]
    assert [factor * each[name] for name, factor in mix.items()] == parts, "each without its weight"


def test_pairs_can_be_weighted_but_for_what_is_sorted() -> None:
    pairs, weights = some_pairs(), tensor(0.5, 1.0, 0.0, 0.25)
    expected = (PAIR_LOSSES["sigmoid"](pairs, SETTINGS) * weights).sum()
    assert loss_of(pairs, {"sigmoid": 1.0}, SETTINGS, weights).item() == pytest.approx(expected.item())
    for name in SORTED:
        with pytest.raises(ValueError, match=f"{name} sorts the pairs"):
            loss_of(pairs, {name: 1.0}, SETTINGS, weights)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_references_are_needed_by_those_that_say_so(name: str) -> None:
    pairs = replace(some_pairs(), reference_chosen=None, reference_rejected=None)
    if name in REFERENCE_FREE:
        assert math.isfinite(loss_of(pairs, {name: 1.0}, SETTINGS).item())
    else:
        with pytest.raises(ValueError, match="needs log-probabilities of a reference"):
            loss_of(pairs, {name: 1.0}, SETTINGS)


@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_extreme_gaps_have_finite_values_and_gradients(name: str) -> None:
    pairs = some_pairs()
    chosen, rejected = tensor(-5000.0, -1e-9, -40.0, -1.0), tensor(-1e-9, -5000.0, -40.0, -1.0)
    given = replace(pairs, chosen=chosen.requires_grad_(), rejected=rejected.requires_grad_())
    loss = loss_of(given, {name: 1.0}, SETTINGS)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss) and torch.isfinite(chosen.grad).all(), chosen.grad  # type: ignore[arg-type]
    assert rejected.grad is None or torch.isfinite(rejected.grad).all()


def test_kto_counts_gains_and_losses_against_the_baseline() -> None:
    ratios, labels = tensor(0.5, -1.0, 2.0), torch.tensor([True, False, False])
    baseline = kto_baseline(tensor(0.75, -0.25, 0.1))
    assert baseline.item() == pytest.approx(0.2)
    expected = [1.5 * (1 - s(B * (0.5 - 0.2))), 1 - s(B * (0.2 - -1.0)), 1 - s(B * (0.2 - 2.0))]
    assert kto(ratios, labels, baseline, B, 1.5, 1.0).tolist() == pytest.approx(expected)
    assert kto_baseline(tensor(-3.0, 1.0)).item() == 0
    expected = [1 - s(B * 0.5), s(B * -1.0), s(B * 2.0)]
    assert apo_zero_unpaired(ratios, labels, B, 1.0, 1.0).tolist() == pytest.approx(expected)


def test_exo_needs_label_smoothing_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="label_smoothing above 0"):
        loss_of(some_pairs(), {"exo_pair": 1.0}, PreferenceSettings())
    with pytest.raises(ValueError, match="no preference loss 'dpo'"):
        loss_of(some_pairs(), {"dpo": 1.0}, PreferenceSettings())


@given(st.floats(-700.0, -1e-12))
def test_log1mexp_is_exact(value: float) -> None:
    expected = math.log(-math.expm1(value)) if value > -math.log(2) else math.log1p(-math.exp(value))
    assert log1mexp(tensor(value)).item() == pytest.approx(expected, rel=1e-13)
